"""Copies of many tensors in one call, compared with a plain copy of as many bytes.

Four lists of tensors (``benches/lists.py``):

- *equal* pieces, slices of one buffer that are copied to slices of another in random order;
- the same *of another process*, which a ticket brings here;
- the *weights* of a dense model of 7 billion parameters (32 layers, bfloat16), each a separate tensor;
- *shards* of a mixture of experts: from four by rows to two by rows or by columns.

These paths take turns:

- *ours*: ``tb.copy(sources, out=targets)``.
- *prepared*: a call of ``tb.copier(sources, out=targets)``.
- *unchecked*: the same with ``check=False``.
- *one by one*: ``tb.copy(source, out=target)`` for each.
- *foreach*: ``torch._foreach_copy_``.
- *select*: ``torch.index_select``, for equal pieces on one device.
- *batch*: the driver's ``cuMemcpyBatchAsync``, for pieces without gaps.
- *plain*: one ``Tensor.copy_`` of as many bytes. The bars compare with this one.

With ``--to`` the targets are on another GPU. A *device* figure ends when the elements are there. A *call* figure is the
time of the host, for one piece; on the host both are one. Every result is compared bit by bit.

Beside a device, 2,000 tensors of 4 to 64 KiB also go *up* from the host and *down* to it. There *plain* is one copy of
as many bytes from or to pinned memory, and *loop* one ``Tensor.copy_`` for each tensor.

    cargo xtask bench --pieces
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benches import lists as made
from benches.lists import Lists
from benches.reports import Verdict, conclude, page
from benches.rounds import options
from truebridge_conformance import host

#: The least part of a plain copy's speed, the most microseconds of the host for a piece, and for a prepared copy.
PART, CALL, PREPARED = 0.9, 1.0, 30.0
#: The least speed between the host and a device, as a multiple of the loop's.
LOOP = 1.0
#: The tensors between the host and a device, and the bytes of the shortest and of the longest.
SMALL, SHORTEST, LONGEST = 2_000, 4 << 10, 64 << 10
#: The pieces of the first list.
COUNT, NBYTES = 112_000, 44_000
#: The most bytes that are compared at once.
TOGETHER = 1 << 28
#: The width of both models.
WIDTH = 4096


@dataclass
class Row:
    """One list and one way: medians over the rounds."""

    pieces: str
    way: str
    count: int
    nbytes: int
    #: Seconds until the elements are there.
    seconds: float
    #: Microseconds of the host for a piece.
    call: float
    #: Speed as a part of the plain copy's.
    part: float


def same(sources: Sequence[Any], targets: Sequence[Any]) -> bool:
    """Return whether the tensors have the same bytes, pair for pair."""
    import torch

    def together(tensors: Sequence[Any]) -> Any:
        return torch.cat([tensor.reshape(-1) for tensor in tensors]).view(torch.uint8)

    step = max(1, TOGETHER // max(tensor.nbytes for tensor in sources))
    for start in range(0, len(sources), step):
        one, other = (together(side[start : start + step]) for side in (sources, targets))
        if not torch.equal(one.to(other.device), other):
            return False
    return True


def measure(pieces: str, lists: Lists, rounds: int) -> list[Row]:
    """Measure every method of copying one list."""
    import torch

    import truebridge as tb

    sources, targets, source, target = lists.sources, lists.targets, lists.source, lists.target
    count, nbytes = len(sources), sum(tensor.numel() * tensor.element_size() for tensor in sources)
    devices = {side.device for side in (source, target) if side.is_cuda}

    def one_by_one() -> None:
        for one, other in zip(sources, targets, strict=True):
            tb.copy(one, out=other)

    ways: dict[str, Callable[[], Any] | None] = {
        "plain": lambda: target.copy_(source),
        "ours": lambda: tb.copy(sources, out=targets),
        "prepared": tb.copier(sources, out=targets),
        "unchecked": tb.copier(sources, out=targets, check=False),
        "one by one": one_by_one,
        "foreach": lambda: torch._foreach_copy_(targets, sources),
        "select": made.selected(lists) if pieces == "equal" and source.device == target.device else None,
        "batch": made.batched(lists) if devices else None,
    }
    kept = {way: call for way, call in ways.items() if call is not None}
    for way, call in kept.items():
        if way == "plain":
            continue
        for tensor in targets:
            tensor.zero_()
        call()
        if not same(sources, targets):
            raise RuntimeError(f"{pieces}, {way}: a copy has other elements than the source")
    calls, seconds = timed(kept, lambda: [torch.cuda.synchronize(device) for device in devices], rounds)
    on_device = {way: device_time(call, devices, rounds) for way, call in kept.items()} if devices else seconds
    parts = {way: on_device["plain"] / on_device[way] for way in kept}
    return [Row(pieces, way, count, nbytes, seconds[way], 1e6 * calls[way] / count, parts[way]) for way in kept]


def timed(ways: dict[str, Callable[[], Any]], wait: Callable[[], Any], rounds: int) -> tuple[dict[str, float], ...]:
    """Return seconds of the host in each call, and seconds until the elements are there. All paths take turns."""
    calls: dict[str, list[float]] = {way: [] for way in ways}
    whole: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, call in ways.items():
            wait()
            started = time.perf_counter()
            call()
            called = time.perf_counter() - started
            wait()
            # The first round warms up.
            if turn:
                calls[way].append(called)
                whole[way].append(time.perf_counter() - started)
    return tuple({way: statistics.median(times) for way, times in taken.items()} for taken in (calls, whole))


def between(direction: str, device: str, count: int, rounds: int) -> list[Row]:
    """Measure every method of moving small tensors between the host and the device, in one direction."""
    import torch

    import truebridge as tb

    here, there = ("cpu", device) if direction == "up" else (device, "cpu")
    sizes = [random.Random(index).randrange(SHORTEST, LONGEST + 1) for index in range(count)]
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8, device=here) for size in sizes]
    targets = [torch.zeros(size, dtype=torch.uint8, device=there) for size in sizes]
    pinned = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=device.startswith("cuda"))
    buffers = [pinned, torch.zeros(sum(sizes), dtype=torch.uint8, device=device)]
    source, target = buffers if direction == "up" else buffers[::-1]

    def loop() -> None:
        for one, other in zip(sources, targets, strict=True):
            other.copy_(one)

    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: target.copy_(source, non_blocking=True),
        "ours": lambda: tb.copy(sources, out=targets),
        "prepared": tb.copier(sources, out=targets),
        "loop": loop,
    }
    for way in ("ours", "prepared"):
        for tensor in targets:
            tensor.zero_()
        ways[way]()
        if not same(sources, targets):
            raise RuntimeError(f"{direction}, {way}: a copy has other elements than the source")
    calls, seconds = timed(ways, torch.cuda.synchronize if device.startswith("cuda") else lambda: None, rounds)
    parts = {way: seconds["plain"] / seconds[way] for way in ways}
    return [Row(direction, way, count, sum(sizes), seconds[way], 1e6 * calls[way] / count, parts[way]) for way in ways]


def device_time(call: Callable[[], Any], devices: set[Any], rounds: int) -> float:
    """Return seconds of a call, only on the devices: work before it lets the host run ahead."""
    import torch

    first, *others = sorted(devices, key=str)

    def meet() -> None:
        """Make the streams of all devices wait for one another."""
        one = torch.cuda.current_stream(first)
        for other in map(torch.cuda.current_stream, others):
            one.wait_stream(other)
            other.wait_stream(one)

    times: list[float] = []
    with torch.cuda.device(first):
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started = time.perf_counter()
            call()
            meet()
            torch.cuda.synchronize()
            # Cycles, at about 2 GHz: longer than the host takes.
            torch.cuda._sleep(int(4e9 * (time.perf_counter() - started)))
            begin.record()
            meet()
            call()
            meet()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def measured(given: argparse.Namespace) -> list[Row]:
    """Measure the lists, one after another: each takes tens of gigabytes."""
    here, to, rounds = given.device, given.to or given.device, given.rounds
    rows = measure("equal", made.equal(here, to, given.count, given.nbytes), rounds)
    with made.elsewhere(here, to, given.count, given.nbytes) as lists:
        rows += measure("of another process", lists, rounds)
        del lists
    rows += measure("weights", made.weights(here, to, given.width), rounds)
    return rows + measure("shards", made.shards(here, to, given.width), rounds)


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench_pieces.json`` and ``.md``. Return 0 when every bar is met."""
    given = options(
        argv,
        "pieces",
        __doc__,
        10,
        device={"default": "cuda:0", "help": "where the sources are (default: %(default)s)"},
        to={"help": "where the targets are (default: where the sources are)"},
        count={"type": int, "default": COUNT, "help": "equal pieces (default: %(default)s)"},
        nbytes={"type": int, "default": NBYTES, "help": "bytes of each (default: %(default)s)"},
        width={"type": int, "default": WIDTH, "help": "width of the models (default: %(default)s)"},
    )
    rows = measured(given)
    verdicts = []
    for direction in ("up", "down") if given.device.startswith("cuda") and not given.to else ():
        moved = between(direction, given.device, SMALL, given.rounds)
        taken = {row.way: row.seconds for row in moved}
        times = taken["loop"] / taken["ours"]
        verdicts.append(Verdict.at_least(f"{direction}: speed, as a multiple of the loop's", times, LOOP))
        rows += moved
    for row in rows:
        if row.pieces in ("up", "down"):
            continue
        if row.way == "ours":
            verdicts.append(Verdict.at_most(f"{row.pieces}: µs of the host for a piece", row.call, CALL))
        if row.way in ("ours", "prepared"):
            verdicts.append(Verdict.at_least(f"{row.pieces}, {row.way}: part of a plain copy", row.part, PART))
        if (row.pieces, row.way) in (("equal", "unchecked"), ("weights", "prepared")):
            in_all = row.call * row.count
            verdicts.append(Verdict.at_most(f"{row.pieces}, {row.way}: µs of the host in all", in_all, PREPARED))
    about = host.describe("torch")
    where = f"on {given.device}" if given.to in (None, given.device) else f"from {given.device} to {given.to}"
    table = page(about, f"Copies of many pieces {where}.", HEAD, map(line, rows), verdicts)
    return conclude(
        given.report,
        "bench_pieces",
        table,
        {**about, "device": given.device, "to": given.to or given.device},
        rows,
        verdicts,
    )


HEAD = "pieces|way|:count|:MiB|:ms|:GB/s|:µs of the host for a piece|:of a plain copy"


def line(row: Row) -> str:
    """Return a row of the table."""
    sizes = f"{row.count:,} | {row.nbytes / (1 << 20):,.0f}"
    speed = f"{1e3 * row.seconds:,.2f} | {2 * row.nbytes / row.seconds / 1e9:,.0f}"
    return f"{row.pieces} | {row.way} | {sizes} | {speed} | {row.call:.3f} | {row.part:.0%}"
