"""Speed of tensors to another process, compared with PyTorch's own method and with memory of the host.

A tensor of PyTorch on a CUDA device is shared here and opened there. Each side times its own call, and the sum counts:
what carries the ticket is the caller's. Three paths take turns:

- *ours*: ``tb.share`` here, ``tb.open`` there. *first* is the first ticket that the other process opens, *cached* one
  of a block that it has open already.
- *torch*: what ``torch.multiprocessing`` pickles here and loads there, likewise.
- *host*: a copy to shared memory of the host here, and one to the device there.

    python bench.py --processes --report out
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benches.reports import Verdict, conclude, page
from benches.rounds import options
from truebridge_conformance import host
from truebridge_conformance.others import Other

MIB = 1 << 20
#: MiB of a tensor.
SIZES = (64, 256)
#: Tensors of a model, and elements of each.
MODEL, ELEMENTS = 300, 16384

#: Processes that open a first ticket.
FIRST = 5

#: The bars: microseconds of a cached ticket and of a model, and how many times faster than the other paths.
CACHED, OF_A_MODEL, THAN_TORCH, THAN_HOST = 50.0, 2000.0, 5.0, 100.0

#: What the other process knows.
OPENS = """
import pickle, time, torch
torch.cuda.init(); torch.zeros(1, device="cuda")
kept = {}
def opened(way, ticket, keep):
    start = time.perf_counter_ns()
    y = way(ticket)
    taken = time.perf_counter_ns() - start
    if keep:
        kept[keep] = y
    return taken
def ours(text):
    return tb.open(text, "torch")
def torch_(payload):
    return pickle.loads(payload)
def host(place):
    path, nbytes = place
    if path not in kept:
        kept[path] = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    there = kept[path].cuda()
    torch.cuda.synchronize()
    return there
"""


@dataclass
class Row:
    """One path and size: the medians of both sides, in microseconds."""

    what: str
    way: str
    share: float
    open: float


class Ways:
    """The three paths out of this process."""

    def __init__(self, folder: str) -> None:
        """Look up what they need. ``folder`` is in memory."""
        from multiprocessing.reduction import ForkingPickler

        import torch
        import torch.multiprocessing  # registers the way of tensors

        import truebridge as tb

        self.torch, self.tb, self.pickler = torch, tb, ForkingPickler
        self.folder = folder
        self.shared: dict[int, Any] = {}

    def ours(self, x: Any) -> Any:
        """Return the text of a ticket."""
        return self.tb.share(x, expires=5).text

    def torch_(self, x: Any) -> Any:
        """Return what PyTorch pickles."""
        return bytes(self.pickler.dumps(x))

    def host(self, x: Any) -> Any:
        """Return the path and the length of memory of the host."""
        path, nbytes = os.path.join(self.folder, str(x.nbytes)), x.nbytes
        if nbytes not in self.shared:
            self.shared[nbytes] = self.torch.from_file(path, shared=True, size=nbytes, dtype=self.torch.uint8)
        self.shared[nbytes].copy_(x)
        return (path, nbytes)

    def once(self, other: Other, way: str, x: Any, keep: str = "") -> tuple[float, float]:
        """Return microseconds of both sides."""
        share: Callable[[Any], Any] = getattr(self, way)
        start = time.perf_counter_ns()
        ticket = share(x)
        shared = time.perf_counter_ns() - start
        return shared / 1000, int(other(f"opened({way}, {ticket!r}, {keep!r})")) / 1000


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench_processes.json`` and ``.md``. Return 0 when every bar is met."""
    given = options(argv, "processes", __doc__, 200)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.environ["TRUEBRIDGE_IPC"] = folder
        rows = measure(folder, given.rounds)
    verdicts = judge(rows)
    about = host.describe("torch")
    return conclude(given.report, "bench_processes", markdown(about, rows, verdicts), about, rows, verdicts)


def measure(folder: str, rounds: int) -> list[Row]:
    """Measure. The paths take turns in every round."""
    ways = Ways(folder)
    rows = []

    def row(what: str, way: str, figures: Sequence[tuple[float, float]]) -> None:
        shared, opened = (statistics.median(side) for side in zip(*figures, strict=True))
        rows.append(Row(what, way, shared, opened))

    x = ways.torch.randint(0, 256, (SIZES[0] * MIB,), dtype=ways.torch.uint8, device="cuda")
    ways.torch.cuda.synchronize()
    for way in ("ours", "torch_"):
        row(f"{SIZES[0]} MiB, first", way, [_in_a_new_process(ways, way, x) for _ in range(FIRST)])
    other = Other()
    try:
        other.define(OPENS)
        for size in SIZES:
            x = ways.torch.randint(0, 256, (size * MIB,), dtype=ways.torch.uint8, device="cuda")
            ways.torch.cuda.synchronize()
            taken: dict[str, list[tuple[float, float]]] = {"ours": [], "torch_": [], "host": []}
            for way in taken:
                ways.once(other, way, x, keep=f"{way} {size}")
            for turn in range(rounds):
                for way, figures in taken.items():
                    # The host's way takes its time.
                    if way != "host" or turn < rounds // 20:
                        figures.append(ways.once(other, way, x))
            for way, figures in taken.items():
                row(f"{size} MiB, cached", way, figures)
        model = {f"layer {i}": ways.torch.rand(ELEMENTS, device="cuda") for i in range(MODEL)}
        ways.torch.cuda.synchronize()
        ways.once(other, "ours", model, keep="model")
        row(f"{MODEL} tensors", "ours", [ways.once(other, "ours", model) for _ in range(rounds // 10)])
    finally:
        other.kill()
    return rows


def _in_a_new_process(ways: Ways, way: str, x: Any) -> tuple[float, float]:
    other = Other()
    try:
        other.define(OPENS)
        return ways.once(other, way, x)
    finally:
        other.kill()


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Compare with the bars."""
    both = {(row.what, row.way): row.share + row.open for row in rows}
    small, large = (f"{size} MiB, cached" for size in SIZES)
    ours, model = both[small, "ours"], both[f"{MODEL} tensors", "ours"]
    faster = both[small, "torch_"] / ours
    than_host = both[large, "host"] / both[large, "ours"]
    return [
        Verdict.at_most(f"{small}: at most, µs", ours, CACHED),
        Verdict.at_least(f"{small}: times faster than torch's, at least", faster, THAN_TORCH),
        Verdict.at_least(f"{large}: times faster than the host's, at least", than_host, THAN_HOST),
        Verdict.at_most(f"{MODEL} tensors in one ticket: at most, µs", model, OF_A_MODEL),
    ]


def markdown(about: dict[str, Any], rows: Sequence[Row], verdicts: Sequence[Verdict]) -> str:
    """Return the report."""

    def line(row: Row) -> str:
        figures = " | ".join(f"{figure:,.1f}" for figure in (row.share, row.open, row.share + row.open))
        return f"{row.what} | {row.way.rstrip('_')} | {figures}"

    what = "Tensors of PyTorch on a CUDA device, to another process. Medians."
    return page(about, what, "what|way|:share, µs|:open, µs|:both, µs", map(line, rows), verdicts)
