"""What a run of a session of TensorFlow 1.15 costs on a tensor of PyTorch: in place, and through the host.

``y = two * x + one``, float32, all of one shape: without broadcasting it takes two kernels and no more. Three ways to
run it take turns in one process:

- *ours*: ``Session.run({"x": x, ...}, "torch")`` of ``tensor_bridge.tensorflow1``, from a tensor of PyTorch to one of
  PyTorch. ``two`` and ``one`` are tensors of PyTorch as well, which stay fed.
- *host*: what feeding through the host comes to without the Python of 1.15, which can only add to it. ``x.cpu()`` is
  fed for a placeholder, from where it is on the host, and what is fetched is copied to a tensor on the device. ``two``
  and ``one`` are variables of TensorFlow's.
- *bare*: the same on three variables. Nothing is fed and nothing is fetched: ``y`` is a target, computed and dropped.
  The C function is called with arguments that were made beforehand.

A run ends when the device has done its work, which is TensorFlow's own rule. So what *ours* takes longer than *bare* is
what the bridge adds, with three inputs and an output, in Python.

    python -m tensor_bridge_conformance.bench_sessions --device cuda:0 --report out
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_void_p
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tensor_bridge_conformance import host
from tensor_bridge_conformance.sessions import FLOAT, Buffer, Library, Output, Pointer

MIB = 1 << 20
#: MiB of a tensor: 1 MiB to 1 GiB.
SIZES = [1, 4, 16, 64, 256, 1024]
#: Rounds that warm everything up, and do not count.
WARM_UP = 3
#: Seconds that a batch of runs is to take, and the most runs in one.
BATCH, MOST = 0.02, 200

#: On a device: how many times faster than through the host, at how many MiB.
FASTER, AT = 20, 64
#: On a device: the most that a run may take longer than a bare one, at any size, in nanoseconds.
OVERHEAD = 50_000

#: ``ConfigProto``: memory of the GPU as it is needed, operations where there are kernels for them; and no GPU at all
#: (``gpu_options.allow_growth``, ``allow_soft_placement``; ``device_count``).
CONFIG = bytes([0x32, 2, 0x20, 1, 0x38, 1])
NO_GPU = b"\x0a\x07\x0a\x03GPU\x10\x00"

_FRAMEWORKS = [
    {"name": "torch", "module": "torch", "distributions": ["torch"]},
    {"name": "numpy", "module": "numpy", "distributions": ["numpy"]},
]

#: Leaves memory to whoever has it.
Leave = ctypes.CFUNCTYPE(None, c_void_p, c_size_t, c_void_p)

#: What functions take, beyond those that the suite uses.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "TF_SetAttrShape": (None, [c_void_p, c_char_p, POINTER(c_int64), c_int]),
    "TF_SetAttrString": (None, [c_void_p, c_char_p, c_char_p, c_size_t]),
    "TF_NewTensor": (c_void_p, [c_int, POINTER(c_int64), c_int, c_void_p, c_size_t, Leave, c_void_p]),
    "TF_GraphToGraphDef": (None, [c_void_p, POINTER(Buffer), c_void_p]),
    "TF_SessionRun": (
        None,
        [
            *(c_void_p, c_void_p),
            *(POINTER(Output), POINTER(c_void_p), c_int),
            *(POINTER(Output), POINTER(c_void_p), c_int),
            *(POINTER(c_void_p), c_int, c_void_p, c_void_p),
        ],
    ),
}


@dataclass
class Row:
    """One size: medians of nanoseconds over the rounds, and medians of what was compared within a round."""

    device: str
    mib: float
    ours: float
    host: float
    bare: float
    #: How many times faster than through the host.
    faster: float
    #: What a run takes longer than a bare one, in nanoseconds.
    overhead: float


@dataclass
class Verdict:
    """A bar, and what was measured."""

    what: str
    measured: float
    bar: float
    passed: bool


class Graph:
    """A graph that is built with TensorFlow's own functions, and a session for it. It stays until the process ends."""

    def __init__(self, folder: Path, config: bytes) -> None:
        """An empty one, in the TensorFlow that is loaded from this folder."""
        self.library = Library.of(folder)
        mine = ctypes.CDLL(str(folder / "python/_pywrap_tensorflow_internal.so"), os.RTLD_NOLOAD | os.RTLD_LOCAL)
        self.functions = {name: getattr(mine, name) for name in FUNCTIONS}
        for name, (result, arguments) in FUNCTIONS.items():
            self.functions[name].restype, self.functions[name].argtypes = result, arguments
        self.graph, self.status = self.library.TF_NewGraph(), self.library.TF_NewStatus()
        options = self.library.TF_NewSessionOptions()
        self.library.TF_SetConfig(options, config, len(config))
        self.session = self.library.TF_NewSession(self.graph, options)
        self.library.TF_DeleteSessionOptions(options)

    def add(self, operation: str, name: str, inputs: Sequence[Output] = (), **attributes: Any) -> Output:
        """Add an operation, and give its first output. Attributes are types, shapes and strings."""
        new = self.library.TF_NewOperation(self.graph, operation.encode(), name.encode())
        for each in inputs:
            self.library.TF_AddInput(new, each)
        for attribute, value in attributes.items():
            if isinstance(value, int):
                self.library.TF_SetAttrType(new, attribute.encode(), value)
            elif isinstance(value, str):
                self.functions["TF_SetAttrString"](new, attribute.encode(), value.encode(), len(value))
            else:
                self.functions["TF_SetAttrShape"](new, attribute.encode(), (c_int64 * len(value))(*value), len(value))
        return Output(self.library.TF_FinishOperation(new), 0)

    def line(self, inputs: Mapping[str, Output]) -> Output:
        """The product and the sum."""
        product = self.add("Mul", "product", [inputs["two"], inputs["x"]])
        return self.add("Add", "y", [product, inputs["one"]])

    def placeholder(self, name: str, shape: Sequence[int]) -> Output:
        """What has to be fed."""
        return self.add("Placeholder", name, dtype=FLOAT, shape=shape)

    def variable(self, name: str, array: Any) -> Output:
        """A tensor of TensorFlow's own with these values."""
        handle = self.add("VarHandleOp", name, dtype=FLOAT, shape=array.shape, shared_name=f"{name}_{self.graph}")
        value = self.placeholder(f"{name}/value", array.shape)
        assign = self.add("AssignVariableOp", f"{name}/assign", [handle, value], dtype=FLOAT)
        tensor = self.tensor(array)
        self.run(feeds={0: (value, tensor)}, targets=[assign])()
        self.library.TF_DeleteTensor(tensor)
        return self.add("ReadVariableOp", f"{name}/read", [handle], dtype=FLOAT)

    def tensor(self, array: Any) -> Pointer:
        """A tensor over an array, which has to stay."""
        shape = (c_int64 * array.ndim)(*array.shape)
        made = self.functions["TF_NewTensor"](FLOAT, shape, array.ndim, array.ctypes.data, array.nbytes, _LEAVE, None)
        return Pointer(made)

    def run(
        self,
        feeds: Mapping[int, tuple[Output, Pointer]] | None = None,
        fetches: Sequence[Output] = (),
        targets: Sequence[Output] = (),
    ) -> Callable[[], list[int]]:
        """A run, to be called any number of times, which gives the tensors fetched: they are the caller's."""
        places, tensors = zip(*feeds.values(), strict=True) if feeds else ((), ())
        fetched = (Pointer * len(fetches))()
        arguments = (
            *(self.session, None),
            *((Output * len(places))(*places), (Pointer * len(places))(*tensors), len(places)),
            *((Output * len(fetches))(*fetches), fetched, len(fetches)),
            *((Pointer * len(targets))(*(target.oper for target in targets)), len(targets), None, self.status),
        )
        function, code, status = self.functions["TF_SessionRun"], self.library.TF_GetCode, self.status

        def call() -> list[int]:
            function(*arguments)
            if code(status):
                raise RuntimeError(self.library.TF_Message(status).decode(errors="replace"))
            return list(fetched)

        return call

    def serialised(self) -> bytes:
        """The ``GraphDef``."""
        buffer = Buffer()
        self.functions["TF_GraphToGraphDef"](self.graph, ctypes.byref(buffer), self.status)
        if self.library.TF_GetCode(self.status):
            raise RuntimeError(self.library.TF_Message(self.status).decode(errors="replace"))
        return ctypes.string_at(buffer.data, buffer.length)


_LEAVE = Leave(lambda *_: None)


class Setting:
    """The three ways for tensors of one size."""

    def __init__(self, folder: Path, device: str, nbytes: int) -> None:
        """Make the tensors, the graphs and the sessions, and see that all three give the same."""
        import torch

        import tensor_bridge as tb

        self.torch, self.device = torch, torch.device(device)
        shape = (max(nbytes // (4 * 256), 1), 256)
        on_host = {"x": torch.rand(shape), "two": torch.full(shape, 2.0), "one": torch.full(shape, 1.0)}
        self.x, two, one = (tensor.to(device) for tensor in on_host.values())
        config = CONFIG if self.device.type == "cuda" else CONFIG + NO_GPU

        graph = Graph(folder, config)
        graph.line({name: graph.placeholder(name, shape) for name in on_host})
        inputs = {name: ("float32", shape) for name in on_host}
        self.session = tb.tensorflow1.Session(graph.serialised(), inputs, ["y"], config=config)
        # They stay fed as long as these live.
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
                raise RuntimeError("a run has given wrong numbers")

    def ours(self) -> Any:
        """In place."""
        return self.session.run({"x": self.x, **self.others}, "torch")[0]

    def host(self) -> Any:
        """Through the host."""
        array = self.x.cpu().numpy()
        fed = self.placed.tensor(array)
        (fetched,) = self.placed.run({0: (self.place, fed)}, [self.result])()
        self.placed.library.TF_DeleteTensor(fed)
        return self.taken(self.placed, fetched)

    def taken(self, graph: Graph, fetched: int) -> Any:
        """A copy on the device of what was fetched, which is deleted."""
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
        """Nanoseconds per call, with the garbage collector out of the way. A call includes dropping what it gave."""
        self.settle()
        gc.disable()
        try:
            started = time.perf_counter_ns()
            for _ in range(calls):
                call()
            self.settle()
            return (time.perf_counter_ns() - started) / calls
        finally:
            gc.enable()


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench_sessions.json`` and ``.md``. Gives 0 when every bar is met."""
    options = _options(argv)
    import torch

    from tensor_bridge import _core

    # Its threads would go on waiting for work while TensorFlow's compute.
    torch.set_num_threads(1)
    version, folder = _core.tensorflow1_open(None)
    sizes = [float(size) for size in options.sizes.split(",")] if options.sizes else SIZES
    rows = measure(Path(folder), options.device, sizes, options.rounds)
    verdicts = judge(rows)
    about = host.describe(_FRAMEWORKS)
    about["versions"]["tensorflow1"] = version
    table = markdown(about, rows, verdicts)
    print(table)
    report = Path(options.report)
    report.mkdir(parents=True, exist_ok=True)
    data = {
        "schema": 1,
        "host": about,
        "rows": [asdict(row) for row in rows],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    (report / "bench_sessions.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    (report / "bench_sessions.md").write_text(table, encoding="utf-8")
    missed = sum(not verdict.passed for verdict in verdicts)
    print(f"{len(verdicts) - missed} passed, {missed} failed")
    return 1 if missed else 0


def _options(argv: list[str]) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench_sessions", description=__doc__, formatter_class=formatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0, as PyTorch names it (default: cpu)")
    parser.add_argument("--sizes", metavar="MIB,...", help="MiB of the tensors (default: 1 to 1024)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds per size (default: 20)")
    parser.add_argument("--report", default="conformance-report", metavar="DIR", help="where to write the report")
    return parser.parse_args(argv)


def measure(folder: Path, device: str, sizes: Sequence[float], rounds: int) -> list[Row]:
    """All sizes and ways take turns in every round."""
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
    """The bars are for devices: on a host nothing is copied in any way, and a run takes as long as memory is slow."""
    rows = [row for row in rows if row.device.startswith("cuda")]
    verdicts = [
        Verdict(f"times faster at {AT} MiB", row.faster, FASTER, row.faster >= FASTER) for row in rows if row.mib == AT
    ]
    if rows:
        worst = max(row.overhead for row in rows)
        verdicts.append(Verdict("overhead at any size, ns", worst, OVERHEAD, worst <= OVERHEAD))
    return verdicts


def markdown(about: dict[str, Any], rows: Sequence[Row], verdicts: Sequence[Verdict]) -> str:
    """The report in words."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    where = "; ".join([*about["gpus"], about["cpu"]])
    lines = [f"{where}; Python {about['python']}; {versions}; {about['date']}", ""]
    lines += ["y = two * x + one in a session of TensorFlow 1.15, x from PyTorch, float32", ""]
    lines += ["| device | size, MiB | ours, µs | host, µs | bare, µs | times faster | overhead, µs |"]
    lines += ["|---|--:|--:|--:|--:|--:|--:|"]
    for row in rows:
        times = " | ".join(f"{figure / 1000:,.1f}" for figure in (row.ours, row.host, row.bare))
        lines.append(f"| {row.device} | {row.mib:g} | {times} | {row.faster:.2f} | {row.overhead / 1000:,.1f} |")
    if verdicts:
        lines += ["", "| what | measured | bar | verdict |", "|---|--:|--:|---|"]
    for verdict in verdicts:
        word = "met" if verdict.passed else "MISSED"
        lines.append(f"| {verdict.what} | {verdict.measured:,.1f} | {verdict.bar:,.0f} | {word} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
