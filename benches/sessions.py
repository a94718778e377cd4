"""Cost of a run of a session of TensorFlow 1.15 on a tensor of PyTorch: in place, and through the host.

``y = two * x + one``, float32, all of one shape: without broadcasting it takes two kernels and no more. Three paths to
run it take turns in one process:

- *ours*: ``Session.run({"x": x, ...}, "torch")`` of ``truebridge.tensorflow.v1``, from a tensor of PyTorch to one of
  PyTorch. ``two`` and ``one`` are tensors of PyTorch as well, which stay fed.
- *host*: the least cost of feeding through the host: the Python of 1.15 can only add to it. ``x.cpu()`` is fed for a
  placeholder in place, and the result is copied from the host to a tensor on the device. ``two`` and ``one`` are
  variables of TensorFlow.
- *bare*: the same on three variables. Nothing is fed or fetched: ``y`` is a target, computed and dropped. The C
  function is called with arguments that were made beforehand.

A run ends when the device has done its work: that is TensorFlow's own rule. So *ours* less *bare* is what the bridge
adds, with three inputs and an output, in Python.

    python bench.py --sessions --device cuda:0 --report out
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.graphs import Graph
from benches.reports import Verdict, conclude, page
from benches.rounds import options, per_call, sizes
from truebridge_conformance import host

MIB = 1 << 20
#: MiB of a tensor: 1 MiB to 1 GiB.
SIZES = [1, 4, 16, 64, 256, 1024]
#: Rounds that warm caches and pools up, and do not count.
WARM_UP = 3
#: Seconds of a batch of runs, and the most runs in one.
BATCH, MOST = 0.02, 200

#: On a device: how many times faster than through the host, at how many MiB.
FASTER, AT = 20, 64
#: On a device: the most that a run takes longer than a bare one, at any size, in nanoseconds.
OVERHEAD = 50_000

#: ``ConfigProto``: memory of the GPU as it is needed, operations where there are kernels for them; and no GPU at all
#: (``gpu_options.allow_growth``, ``allow_soft_placement``; ``device_count``).
CONFIG = bytes([0x32, 2, 0x20, 1, 0x38, 1])
NO_GPU = b"\x0a\x07\x0a\x03GPU\x10\x00"


@dataclass
class Row:
    """One size: medians over the rounds in nanoseconds, and medians of the comparisons within a round."""

    device: str
    mib: float
    ours: float
    host: float
    bare: float
    #: How many times faster than through the host.
    faster: float
    #: Time that a run takes longer than a bare one, in nanoseconds.
    overhead: float


class Setting:
    """The three paths for tensors of one size."""

    def __init__(self, folder: Path, device: str, nbytes: int) -> None:
        """Make the tensors, the graphs and the sessions, and check that all three return the same."""
        import torch

        import truebridge as tb

        self.torch, self.device = torch, torch.device(device)
        shape = (max(nbytes // (4 * 256), 1), 256)
        on_host = {"x": torch.rand(shape), "two": torch.full(shape, 2.0), "one": torch.full(shape, 1.0)}
        self.x, two, one = (tensor.to(device) for tensor in on_host.values())
        config = CONFIG if self.device.type == "cuda" else CONFIG + NO_GPU

        graph = Graph(folder, config)
        graph.line({name: graph.placeholder(name, shape) for name in on_host})
        inputs = {name: ("float32", shape) for name in on_host}
        self.session = tb.tensorflow.v1.Session(graph.serialised(), inputs, ["y"], config=config)
        # They stay fed as long as these objects live.
        self.others = {"two": tb.convert(two, "tensorflow1"), "one": tb.convert(one, "tensorflow1")}

        self.graph = Graph(folder, config)
        values = {name: tensor.numpy() for name, tensor in on_host.items()}
        variables = {name: self.graph.variable(name, array) for name, array in values.items()}
        y = self.graph.line(variables)
        self.bare = self.graph.run(targets=[y])
        self.placed = Graph(folder, config)
        others = {name: self.placed.variable(name, values[name]) for name in ("two", "one")}
        self.place = self.placed.placeholder("x", shape)
        self.result = self.placed.line({"x": self.place, **others})

        expected = 2 * self.x + 1
        (bare,) = self.graph.run(fetches=[y])()
        for given in (self.ours(), self.host(), self.taken(self.graph, bare)):
            if given.device != self.x.device or not torch.equal(given, expected):
                raise RuntimeError("a run returned wrong numbers")

    def ours(self) -> Any:
        """Run in place."""
        return self.session.run({"x": self.x, **self.others}, "torch")[0]

    def host(self) -> Any:
        """Run through the host."""
        array = self.x.cpu().numpy()
        fed = self.placed.tensor(array)
        (fetched,) = self.placed.run({0: (self.place, fed)}, [self.result])()
        self.placed.library.TF_DeleteTensor(fed)
        return self.taken(self.placed, fetched)

    def taken(self, graph: Graph, fetched: int) -> Any:
        """Return a copy on the device of a fetched tensor, which is deleted."""
        import numpy

        data = (ctypes.c_float * self.x.numel()).from_address(graph.library.TF_TensorData(fetched))
        array = numpy.frombuffer(data, numpy.float32).reshape(self.x.shape)
        tensor = self.torch.from_numpy(array).to(self.device, copy=True)
        graph.library.TF_DeleteTensor(fetched)
        return tensor

    def settle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)

    def batch(self, call: Callable[[], Any], calls: int) -> float:
        """Return nanoseconds per call. A call includes dropping its result."""
        return per_call(call, calls, self.settle, self.settle)


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench_sessions.json`` and ``.md``. Return 0 when every bar is met."""
    device = {"default": "cpu", "help": "cpu or cuda:0, as PyTorch names it (default: cpu)"}
    given = options(argv, "sessions", __doc__, 20, device=device, sizes=sizes(SIZES, "the tensors"))
    import torch

    from truebridge import _core

    # Idle threads of PyTorch would spin while those of TensorFlow compute.
    torch.set_num_threads(1)
    version, folder = _core.tensorflow1_open(None)
    rows = measure(Path(folder), given.device, given.sizes, given.rounds)
    verdicts = judge(rows)
    about = host.describe("torch", "numpy")
    about["versions"]["tensorflow1"] = version
    return conclude(given.report, "bench_sessions", markdown(about, rows, verdicts), about, rows, verdicts)


def measure(folder: Path, device: str, sizes: Sequence[float], rounds: int) -> list[Row]:
    """Measure. All sizes and paths take turns in every round."""
    settings = [Setting(folder, device, int(size * MIB)) for size in sizes]
    ways = [[setting.ours, setting.host, setting.bare] for setting in settings]
    calls: list[list[int]] = []
    for setting, row in zip(settings, ways, strict=True):
        first = [min(setting.batch(way, 1) for _ in range(WARM_UP)) for way in row]
        calls.append([max(1, min(MOST, int(BATCH * 1e9 / taken))) for taken in first])
    taken: list[list[tuple[float, ...]]] = [[] for _ in settings]
    for _ in range(rounds + WARM_UP):
        for number, setting in enumerate(settings):
            turn = zip(ways[number], calls[number], strict=True)
            taken[number].append(tuple(setting.batch(way, count) for way, count in turn))
    rows = []
    for number, size in enumerate(sizes):
        counted = taken[number][WARM_UP:]
        ours, through, bare = (statistics.median(figures) for figures in zip(*counted, strict=True))
        faster = statistics.median(h / o for o, h, _ in counted)
        overhead = statistics.median(o - b for o, _, b in counted)
        rows.append(Row(device, size, ours, through, bare, faster, overhead))
    return rows


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Compare with the bars, on devices only: on a host no method copies, and only memory bounds a run."""
    rows = [row for row in rows if row.device.startswith("cuda")]
    verdicts = [Verdict.at_least(f"times faster at {AT} MiB", row.faster, FASTER) for row in rows if row.mib == AT]
    if rows:
        worst = max(row.overhead for row in rows)
        verdicts.append(Verdict.at_most("overhead at any size, ns", worst, OVERHEAD))
    return verdicts


def markdown(about: dict[str, Any], rows: Sequence[Row], verdicts: Sequence[Verdict]) -> str:
    """Return the report."""

    def line(row: Row) -> str:
        times = " | ".join(f"{figure / 1000:,.1f}" for figure in (row.ours, row.host, row.bare))
        return f"{row.device} | {row.mib:g} | {times} | {row.faster:.2f} | {row.overhead / 1000:,.1f}"

    what = "y = two * x + one in a session of TensorFlow 1.15, x from PyTorch, float32"
    head = "device|:size, MiB|:ours, µs|:host, µs|:bare, µs|:times faster|:overhead, µs"
    return page(about, what, head, map(line, rows), verdicts)
