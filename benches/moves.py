"""Speed of moves between the host and a CUDA device, compared with the frameworks' own.

Five paths take turns in one process, each with bytes of PyTorch:

- *ours*: ``tb.copy(x, out=y)`` into memory that is there, on the host pageable.
- *fresh*: ``tb.to_torch(x, device=...)``. The result is fresh memory. On the host the system clears every page of it at
  its first use and takes it back at the end: that counts.
- *pinned, ours*: ``tb.copy(x, out=y)`` between the device and memory that is pinned already.
- *pinned*: ``copy_(x, non_blocking=True)`` between the same two, and a wait. This is only ``cuMemcpyAsync``, the most
  that the link does.
- *pageable*: ``x.cpu()`` and ``x.cuda()``.

The bars: *fresh* against *pageable*, *pinned, ours* against *pinned*, and of large ones *ours* against *pinned*.

A move ends when the elements are there: every way waits for its stream.

    python bench.py --moves --report out
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benches.reports import Verdict, amount, conclude, page
from benches.rounds import options, per_call, sizes
from truebridge_conformance import host

MIB = 1 << 20
#: MiB of a tensor: 4 bytes to 1 GiB.
SIZES = [4 / MIB, 4096 / MIB, 0.0625, 1, 4, 64, 1024]
#: Rounds that warm caches and pools up, and do not count.
WARM_UP = 3
#: Seconds of a batch of moves, and the most moves in one.
BATCH, MOST = 0.02, 200

#: The least part of the pinned copy's speed, and from how many MiB on.
PART, FROM = 0.9, 256
#: The most times that a move takes of the framework's.
TIMES = 1.03


@dataclass
class Row:
    """One direction and size: medians over the rounds in nanoseconds, and the median of a part within a round."""

    direction: str
    size: str
    mib: float
    ours: float
    fresh: float
    pinned_ours: float
    pinned: float
    pageable: float
    #: The speed of ours, as a part of the pinned copy's.
    part: float
    #: How many times as long as the framework's own moves ours take, of pageable and of pinned memory.
    times: float
    pinned_times: float


class Setting:
    """The five paths for tensors of one size, in one direction."""

    def __init__(self, direction: str, nbytes: int) -> None:
        """Make the tensors, and check that ours moves their bytes."""
        import torch

        import truebridge as tb

        self.torch, self.tb = torch, tb
        self.source, self.target = ("cuda:0", "cpu") if direction == "down" else ("cpu", "cuda:0")
        self.tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).to(self.source)
        sides = [torch.empty(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")]
        sides[0] = sides[0].pin_memory()
        self.fixed = sides if direction == "up" else sides[::-1]
        self.there = torch.zeros(nbytes, dtype=torch.uint8, device=self.target)
        for moved in (self.ours(), self.fresh()):
            if not torch.equal(moved.to(self.source), self.tensor):
                raise RuntimeError("a move returned wrong bytes")

    def ours(self) -> Any:
        """Move by this package, into memory that is there."""
        return self.tb.copy(self.tensor, out=self.there)

    def fresh(self) -> Any:
        """Move by this package, into fresh memory."""
        return self.tb.to_torch(self.tensor, device=self.target)

    def pinned_ours(self) -> Any:
        """Copy by this package between memory that is there, pinned on the host."""
        return self.tb.copy(self.fixed[0], out=self.fixed[1])

    def pinned(self) -> Any:
        """Copy between memory that is there, pinned on the host."""
        return self.fixed[1].copy_(self.fixed[0], non_blocking=True)

    def pageable(self) -> Any:
        """Move by the framework."""
        return self.tensor.to(self.target)

    def batch(self, call: Callable[[], Any], calls: int) -> float:
        """Return nanoseconds per call. A call includes its wait and its drop."""

        def waited() -> None:
            call()
            self.torch.cuda.current_stream().synchronize()

        return per_call(waited, calls, self.torch.cuda.synchronize)


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench_moves.json`` and ``.md``. Return 0 when every bar is met."""
    given = options(argv, "moves", __doc__, 20, sizes=sizes(SIZES, "the tensors"))
    rows = measure(given.sizes, given.rounds)
    verdicts = judge(rows)
    about = host.describe("torch")
    return conclude(given.report, "bench_moves", markdown(about, rows, verdicts), about, rows, verdicts)


def measure(sizes: Sequence[float], rounds: int) -> list[Row]:
    """Measure. All paths of a size take turns in every round."""
    rows = []
    for direction in ("down", "up"):
        for size in sizes:
            setting = Setting(direction, round(size * MIB))
            ways = [setting.ours, setting.fresh, setting.pinned_ours, setting.pinned, setting.pageable]
            first = [min(setting.batch(way, 1) for _ in range(WARM_UP)) for way in ways]
            calls = [max(1, min(MOST, int(BATCH * 1e9 / taken))) for taken in first]
            turns = [[setting.batch(way, count) for way, count in zip(ways, calls, strict=True)] for _ in range(rounds)]
            medians = (statistics.median(figures) for figures in zip(*turns, strict=True))
            compared = [(3, 0), (1, 4), (2, 3)]
            parts = (statistics.median(turn[one] / turn[other] for turn in turns) for one, other in compared)
            rows.append(Row(direction, amount(round(size * MIB)), size, *medians, *parts))
    return rows


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Compare with the bar."""
    large = [row for row in rows if row.mib >= FROM]
    what = "{0.direction}, {1}: {2}"
    verdicts = [Verdict.at_least(what.format(row, row.size, "part of the link"), row.part, PART) for row in large]
    for row in rows:
        for memory, times in (("pageable", row.times), ("pinned", row.pinned_times)):
            verdicts.append(Verdict.at_most(what.format(row, row.size, f"times PyTorch, {memory}"), times, TIMES))
    return verdicts


def markdown(about: dict[str, Any], rows: Sequence[Row], verdicts: Sequence[Verdict]) -> str:
    """Return the report."""

    def speed(row: Row, taken: float) -> str:
        return f"{row.mib * MIB / taken:.1f}"

    def line(row: Row) -> str:
        figures = (row.ours, row.fresh, row.pinned_ours, row.pinned, row.pageable)
        taken = " | ".join(f"{ns / 1000:,.1f}" for ns in figures)
        parts = f"{speed(row, row.ours)} | {row.part:.2f} | {row.times:.2f} | {row.pinned_times:.2f}"
        return f"{row.direction} | {row.size} | {taken} | {parts}"

    what = "Moves of bytes of PyTorch; *down* is to the host. Microseconds, and of ours the speed in GB/s."
    head = (
        "direction|:size|:ours|:fresh|:pinned, ours|:pinned|:pageable|:ours, GB/s|:part of pinned"
        "|:fresh ÷ pageable|:pinned, ours ÷ pinned"
    )
    return page(about, what, head, map(line, rows), verdicts)
