"""Copies of many tensors in one call, beside a plain copy of as many bytes.

Two lists of tensors: *equal* pieces, slices of one buffer that are copied to slices of another in random order, and the
*weights* of a model of 7 billion parameters (32 layers, bfloat16), each a tensor of its own. Six ways take turns:

- *ours*: ``tb.copy(sources, out=targets)``.
- *prepared*: a call of ``tb.copier(sources, out=targets)``.
- *unchecked*: the same with ``check=False``.
- *one by one*: ``tb.copy(source, out=target)`` for each.
- *foreach*: ``torch._foreach_copy_``.
- *plain*: one ``Tensor.copy_`` of as many bytes. The bars compare with this one.

A *device* figure ends when the elements are there. A *call* figure is the time of the host, for one piece; on the host
both are one. Every result is compared bit by bit.

Beside a device, 2,000 tensors of 4 to 64 KiB also go *up* from the host and *down* to it. There *plain* is one copy of
as many bytes from or to pinned memory, and *loop* one ``Tensor.copy_`` for each tensor.

    cargo xtask bench --pieces
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
#: Shapes of a layer's weights and of the others, in a model of this width.
WIDTH, HIDDEN, WORDS, LAYERS = 4096, 11008, 32000, 32


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


Lists = tuple[list[Any], list[Any], Any, Any]


def equal(device: str, count: int, nbytes: int) -> Lists:
    """Return slices of one buffer and of another, in random order, and both buffers."""
    import torch

    source = torch.randint(0, 256, (count * nbytes,), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    order = list(range(count))
    random.Random(1).shuffle(order)
    slices = target.split(nbytes)
    return list(source.split(nbytes)), [slices[place] for place in order], source, target


def weights(device: str, width: int, hidden: int, words: int, layers: int) -> Lists:
    """Return the weights of a model, those of another one, and two buffers of as many bytes."""
    import torch

    square, up, down = (width, width), (hidden, width), (width, hidden)
    layer = [square, square, square, square, up, up, down, (width,), (width,)]
    shapes = [(words, width), *layer * layers, (width,), (words, width)]
    kind = torch.bfloat16

    def model() -> list[Any]:
        return [torch.empty(shape, dtype=kind, device=device) for shape in shapes]

    sources, targets = model(), model()
    for tensor in sources:
        tensor.view(torch.int16).random_(-(1 << 14), 1 << 14)
    nbytes = sum(2 * tensor.numel() for tensor in sources)
    buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    return sources, targets, buffers[0], buffers[1]


def same(one: Any, other: Any) -> bool:
    """Return whether two tensors have the same bytes."""
    import torch

    return bool(torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)))


def measure(pieces: str, lists: Lists, device: str, rounds: int) -> list[Row]:
    """Measure every way of copying one list."""
    import torch

    import truebridge as tb

    sources, targets, source, target = lists
    count, nbytes = len(sources), sum(tensor.numel() * tensor.element_size() for tensor in sources)
    wait: Callable[[], Any] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None

    def one_by_one() -> None:
        for one, other in zip(sources, targets, strict=True):
            tb.copy(one, out=other)

    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: target.copy_(source),
        "ours": lambda: tb.copy(sources, out=targets),
        "prepared": tb.copier(sources, out=targets),
        "unchecked": tb.copier(sources, out=targets, check=False),
        "one by one": one_by_one,
        "foreach": lambda: torch._foreach_copy_(targets, sources),
    }
    for way in ("ours", "prepared", "unchecked"):
        for tensor in targets:
            tensor.zero_()
        ways[way]()
        if not all(same(one, other) for one, other in zip(sources, targets, strict=True)):
            raise RuntimeError(f"{pieces}, {way}: a copy has other elements than the source")
    calls, seconds = timed(ways, wait, rounds)
    on_device = {way: device_time(call, rounds) for way, call in ways.items()} if device.startswith("cuda") else seconds
    parts = {way: on_device["plain"] / on_device[way] for way in ways}
    return [Row(pieces, way, count, nbytes, seconds[way], 1e6 * calls[way] / count, parts[way]) for way in ways]


def timed(ways: dict[str, Callable[[], Any]], wait: Callable[[], Any], rounds: int) -> tuple[dict[str, float], ...]:
    """Return seconds of the host in each call, and seconds until the elements are there. All ways take turns."""
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
    """Measure every way of moving small tensors between the host and the device, in one direction."""
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
        if not all(same(one.to(there), other) for one, other in zip(sources, targets, strict=True)):
            raise RuntimeError(f"{direction}, {way}: a copy has other elements than the source")
    calls, seconds = timed(ways, torch.cuda.synchronize if device.startswith("cuda") else lambda: None, rounds)
    parts = {way: seconds["plain"] / seconds[way] for way in ways}
    return [Row(direction, way, count, sum(sizes), seconds[way], 1e6 * calls[way] / count, parts[way]) for way in ways]


def device_time(call: Callable[[], Any], rounds: int) -> float:
    """Return seconds of a call on the device alone: work before it lets the host run ahead."""
    import torch

    times: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        # Cycles, at about 2 GHz: longer than the host takes.
        torch.cuda._sleep(int(4e9 * (time.perf_counter() - started)))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench_pieces.json`` and ``.md``. Return 0 when every bar is met."""
    given = options(
        argv,
        "pieces",
        __doc__,
        10,
        device={"default": "cuda:0", "help": "where the tensors are (default: %(default)s)"},
        count={"type": int, "default": COUNT, "help": "equal pieces (default: %(default)s)"},
        nbytes={"type": int, "default": NBYTES, "help": "bytes of each (default: %(default)s)"},
        width={"type": int, "default": WIDTH, "help": "width of the model (default: %(default)s)"},
    )
    rows = measure("equal", equal(given.device, given.count, given.nbytes), given.device, given.rounds)
    shapes = (given.width, given.width * HIDDEN // WIDTH, given.width * WORDS // WIDTH, LAYERS)
    rows += measure("weights", weights(given.device, *shapes), given.device, given.rounds)
    verdicts = []
    for direction in ("up", "down") if given.device.startswith("cuda") else ():
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
    table = page(about, f"Copies of many pieces on {given.device}.", HEAD, map(line, rows), verdicts)
    return conclude(given.report, "bench_pieces", table, {**about, "device": given.device}, rows, verdicts)


HEAD = "pieces|way|:count|:MiB|:ms|:GB/s|:µs of the host for a piece|:of a plain copy"


def line(row: Row) -> str:
    """Return a row of the table."""
    sizes = f"{row.count:,} | {row.nbytes / (1 << 20):,.0f}"
    speed = f"{1e3 * row.seconds:,.2f} | {2 * row.nbytes / row.seconds / 1e9:,.0f}"
    return f"{row.pieces} | {row.way} | {sizes} | {speed} | {row.call:.3f} | {row.part:.0%}"
