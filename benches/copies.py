"""Copies of strided tensors on a CUDA device, compared with those of PyTorch and CuPy.

Every figure is a part of what a plain copy of 1 GiB moves in the same run, counting bytes read and written. *Limit* is
what the memory allows: it delivers whole sectors of 32 bytes, so that of every second float half is read in vain.

The *search* copies random layouts, checks each against PyTorch bit by bit, and compares the times.

    cargo xtask bench --copies
"""

from __future__ import annotations

import argparse
import html
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benches.reports import publish
from truebridge_conformance import host

#: The least part of the limit.
BAR = 0.9
#: The most that ours takes in the search, as a multiple of the faster of the others. Times of one copy differ by that.
NOISE = 1.1
#: Bytes of a tensor in the search: enough for the memory to be what is measured.
SEARCHED = (16 << 20, 64 << 20)
FRAMEWORKS = ("torch", "cupy")


@dataclass(frozen=True)
class Case:
    """A view to copy, and what a prototype of the kernels reached (None: it had no such kernel)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    view: Callable[[Any], Any]
    prototype: float | None = None
    limit: float = 1.0
    reversed: bool = False


def _permuted(*order: int) -> Callable[[Any], Any]:
    return lambda tensor: tensor.permute(order)


#: Prototype: measured on an H200 on 2026-11-21, before these kernels were written.
CASES = [
    Case("float32 16384² .t()", "float32", (16384, 16384), _permuted(1, 0), 0.92),
    Case("float16 16384² .t()", "float16", (16384, 16384), _permuted(1, 0), 0.87),
    Case("uint8 16384² .t()", "uint8", (16384, 16384), _permuted(1, 0), 0.78),
    Case("complex128 8192² .t()", "complex128", (8192, 8192), _permuted(1, 0)),
    Case("float32 NCHW (64,64,224,224) → NHWC", "float32", (64, 64, 224, 224), _permuted(0, 2, 3, 1), 0.97),
    Case("float16 NCHW (64,256,56,56) → NHWC", "float16", (64, 256, 56, 56), _permuted(0, 2, 3, 1), 0.92),
    Case("float32 NCHW (256,3,512,512) → NHWC", "float32", (256, 3, 512, 512), _permuted(0, 2, 3, 1)),
    Case("uint8 NHWC (256,512,512,3) → NCHW", "uint8", (256, 512, 512, 3), _permuted(0, 3, 1, 2), 0.70),
    Case("float32 NHWC (64,224,224,64) → NCHW", "float32", (64, 224, 224, 64), _permuted(0, 3, 1, 2)),
    Case("float16 (16,4096,32,128) swap 1, 2", "float16", (16, 4096, 32, 128), _permuted(0, 2, 1, 3)),
    Case("float32 16384² [:, ::2]", "float32", (16384, 16384), lambda tensor: tensor[:, ::2], None, 2 / 3),
    Case("float32 16384×16385 [:, :-1]", "float32", (16384, 16385), lambda tensor: tensor[:, :-1]),
    Case("float32 (64,64,64,32,32) reversed", "float32", (64, 64, 64, 32, 32), _permuted(4, 3, 2, 1, 0)),
    Case("float32 (1024,512,512) transpose 1, 2", "float32", (1024, 512, 512), _permuted(0, 2, 1), 0.98),
    Case("float32 (1<<24, 4) .t()", "float32", (1 << 24, 4), _permuted(1, 0)),
    Case("float32 (2048,2048,64) permute 1, 0, 2", "float32", (2048, 2048, 64), _permuted(1, 0, 2)),
    Case("CuPy float32 16384² [::-1, ::-1]", "float32", (16384, 16384), lambda array: array[::-1, ::-1], reversed=True),
]


@dataclass
class Row:
    """One case: parts of the plain copy."""

    case: str
    ours: float
    torch: float | None
    cupy: float | None
    prototype: float | None
    limit: float
    passed: bool


@dataclass
class Found:
    """A random layout: its times, in microseconds."""

    layout: str
    ours: float
    torch: float | None
    cupy: float
    exact: bool

    @property
    def ratio(self) -> float:
        """Ours as a multiple of the faster of the others."""
        return self.ours / min(time for time in (self.torch, self.cupy) if time is not None)


def main(argv: list[str]) -> int:
    """Measure, print tables, write ``bench_copies.json``, ``.md`` and ``.svg``. Return 0 when every bar is met."""
    options = _options(argv)
    if options.check:
        return check(options.check, options.seed)
    speed = plain()
    rows = [row for case in CASES for row in [measure(case, speed, options.repeats)] if row]
    found = list(search(options.search, options.seed))
    about = host.describe(*FRAMEWORKS)
    slower = [layout for layout in found if not layout.exact or layout.ratio > NOISE]
    data = {
        "host": about,
        "plain_copy_bytes_per_second": speed,
        "rows": [asdict(row) for row in rows],
        "search": {"seed": options.seed, "layouts": len(found), "slower": [asdict(layout) for layout in slower]},
    }
    publish(options.report, "bench_copies", markdown(about, speed, rows, found), data)
    with open(f"{options.report}/bench_copies.svg", "w", encoding="utf-8") as file:
        file.write(picture(rows))
    return 0 if all(row.passed for row in rows) and not slower else 1


def timed(call: Callable[[], Any], repeats: int, rounds: int = 5) -> float:
    """Return seconds of a call, only on the device, the median of rounds: work before it lets the host run ahead."""
    import torch

    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    # Cycles, at about 2 GHz: longer than the host takes.
    cycles = int(4e9 * (time.perf_counter() - started))
    times: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / repeats * 1e-3)
    return statistics.median(times)


def plain() -> float:
    """Return bytes per second, read and written, of a plain copy of 1 GiB."""
    import torch

    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    nbytes: int = 2 * source.numel()
    return nbytes / timed(lambda: target.copy_(source), 20)


def filled(dtype: str, shape: Sequence[int]) -> Any:
    """Return a compact tensor of random bytes."""
    import torch

    kind = getattr(torch, dtype)
    count = kind.itemsize
    for length in shape:
        count *= length
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device="cuda").view(kind).reshape(tuple(shape))


def same(one: Any, other: Any) -> bool:
    """Return whether two compact tensors have the same bytes."""
    import torch

    return bool(torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)))


def measure(case: Case, speed: float, repeats: int) -> Row | None:
    """Measure one case."""
    import cupy
    import torch

    import truebridge as tb

    tensor = filled(case.dtype, case.shape)
    source = case.view(tb.to_cupy(tensor)) if case.reversed else case.view(tensor)
    reference = tensor.flip(0, 1) if case.reversed else source.contiguous()
    out = torch.zeros(source.shape, dtype=tensor.dtype, device="cuda")
    nbytes = 2 * out.numel() * out.element_size()
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        ours = nbytes / timed(lambda: tb.copy(source, out=out), repeats) / speed
        exact = same(out, reference)
        del reference
        theirs = None if case.reversed else nbytes / timed(lambda: out.copy_(source), repeats) / speed
        array = source if case.reversed else tb.to_cupy(source)
        target = tb.to_cupy(out)
        cupys = nbytes / timed(lambda: cupy.copyto(target, array), repeats) / speed
    if not exact:
        raise RuntimeError(f"{case.name}: the copy differs")
    row = Row(case.name, ours, theirs, cupys, case.prototype, case.limit, ours >= BAR * case.limit)
    print(f"{case.name:42} ours {ours:4.0%}  torch {_part(theirs)}  CuPy {cupys:4.0%}", flush=True)
    return row


def check(count: int, seed: int) -> int:
    """Copy random layouts into memory that is as large as they need, compare, and return 1 if one differs.

    Run it under ``compute-sanitizer`` with PYTORCH_NO_CUDA_MEMORY_CACHING=1: no pool hides a stray access.
    """
    import cupy

    import truebridge as tb

    cupy.cuda.set_allocator(None)
    wrong = 0
    for dtype, shape, order, cuts, _ in layouts(count, seed, (1 << 10, 64 << 10)):
        memory = tb.to_cupy(filled(dtype, shape), copy=True)
        slices = tuple(slice(begin or None, None, step) for begin, step in cuts)
        array = memory[slices].transpose(order)
        out = cupy.zeros(array.shape, array.dtype)
        tb.copy(array, out=out)
        wrong += out.tobytes() != array.get().tobytes()
    print(f"{count} layouts, {wrong} wrong")
    return int(wrong > 0)


def layouts(count: int, seed: int, sizes: tuple[int, int] = SEARCHED) -> Any:
    """Yield random views: dtype, shape of the memory, and what to do with it (permutation, steps, broadcasts)."""
    rng = random.Random(seed)
    for _ in range(count):
        dtype = rng.choice(["uint8", "float16", "float32", "float64", "complex128"])
        itemsize = {"uint8": 1, "float16": 2, "float32": 4, "float64": 8, "complex128": 16}[dtype]
        ndim = rng.choice([1, 2, 2, 3, 3, 3, 4, 4, 5, 6])
        budget = rng.randrange(*sizes) // itemsize
        shape = []
        for left in range(ndim, 0, -1):
            most = max(1, round(budget ** (1 / left)))
            short = rng.random() < 0.3
            length = rng.choice([2, 3, 4, 5, 7, 8, 16]) if short else max(1, int(most * rng.uniform(0.5, 2)))
            if left == 1:
                length = max(1, budget)
            length = length // 8 * 8 if length >= 16 and rng.random() < 0.7 else length
            shape.append(length)
            budget = max(1, budget // length)
        rng.shuffle(shape)
        order = rng.sample(range(ndim), ndim)
        cuts = [rng.choice([(0, 1)] * 6 + [(0, 2), (1, 1), (3, 1), (0, -1)]) for _ in range(ndim)]
        yield dtype, tuple(shape), order, cuts, rng.random() < 0.1


def search(count: int, seed: int) -> Any:
    """Yield the times of random layouts."""
    import cupy
    import torch

    import truebridge as tb

    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
    for number, (dtype, shape, order, cuts, broadcast) in enumerate(layouts(count, seed)):
        memory = tb.to_cupy(filled(dtype, shape))
        slices = tuple(slice(begin or None, None, step) for begin, step in cuts)
        array = memory[slices].transpose(order)
        if array.size == 0:
            continue
        if broadcast and array.ndim > 1:
            array = cupy.broadcast_to(array[:1], array.shape)
        with stream:
            out = torch.zeros(array.shape, dtype=getattr(torch, dtype), device="cuda")
            target = tb.to_cupy(out)
            cupy.copyto(target, array)
            reference = out.clone()
            out.zero_()
            tb.copy(array, out=out)
            exact = same(out, reference)
            forwards = all(stride >= 0 for stride in array.strides)
            tensor = tb.to_torch(array) if forwards else None
            calls = [lambda array=array, out=out: tb.copy(array, out=out)]
            calls.append(lambda array=array, target=target: cupy.copyto(target, array))
            if tensor is not None:
                calls.append(lambda tensor=tensor, out=out: out.copy_(tensor))
            repeats = 3
            times = [1e6 * timed(call, repeats, 3) for call in calls]
            if times[0] > NOISE * min(times[1:]):
                times = [min(time, 1e6 * timed(call, 10, 5)) for time, call in zip(times, calls, strict=True)]
        name = f"{dtype} {shape} {slices} {order}{' broadcast' if broadcast else ''}"
        found = Found(name, times[0], times[2] if tensor is not None else None, times[1], exact)
        if not exact or found.ratio > NOISE:
            print(f"  {number}: {name}: {found.ratio:.2f}{'' if exact else ' WRONG'}", flush=True)
        yield found


def markdown(about: dict[str, Any], speed: float, rows: list[Row], found: list[Found]) -> str:
    """Return the report."""
    lines = [
        f"{host.heading(about)}\n",
        f"Plain copy: {speed / 1e12:.2f} TB/s read and written.\n",
        "| case | ours | torch | CuPy | prototype | limit | bar met |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        cells = [_part(row.torch), _part(row.cupy), _part(row.prototype), _part(row.limit)]
        lines.append(f"| {row.case} | {row.ours:.0%} | {' | '.join(cells)} | {'yes' if row.passed else 'no'} |")
    if found:
        ratios = sorted(layout.ratio for layout in found)
        wrong = sum(not layout.exact for layout in found)
        slower = sum(ratio > NOISE for ratio in ratios)
        lines += [
            "",
            f"Search: {len(found)} layouts, {wrong} wrong, {slower} more than {NOISE - 1:.0%} slower "
            f"than the faster of the others. Ours takes {ratios[len(ratios) // 2]:.2f} of their time in the median, "
            f"{ratios[len(ratios) // 10]:.2f} in the best tenth, {ratios[-1]:.2f} at worst.",
        ]
    return "\n".join(lines) + "\n"


def picture(rows: list[Row]) -> str:
    """Return bars per case, as SVG."""
    ways = [("ours", "#2f6fb7"), ("torch", "#e07b39"), ("cupy", "#8f8f8f")]
    left, width, line = 300, 480, 15

    def text(x: float, y: float, words: str, extra: str = "") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" {extra}>{html.escape(words)}</text>'

    parts = [text(left + 90 * k, 16, f"■ {name}", f'fill="{colour}"') for k, (name, colour) in enumerate(ways)]
    y = 30
    for row in rows:
        parts.append(text(left - 8, y + 1.6 * line, row.case, 'text-anchor="end"'))
        for name, colour in ways:
            part = getattr(row, name)
            if part is not None:
                size = f'width="{part * width:.0f}" height="{line - 3}"'
                parts.append(f'<rect x="{left}" y="{y}" {size} fill="{colour}"/>')
                parts.append(text(left + part * width + 4, y + line - 4, f"{part:.0%}"))
            y += line
        y += 8
    for part in (BAR, 1.0):
        at = left + part * width
        parts.append(f'<line x1="{at}" y1="24" x2="{at}" y2="{y}" stroke="#999" stroke-dasharray="3 3"/>')
    body = "\n".join(parts)
    font = 'font-family="sans-serif" font-size="12" fill="#666"'
    size = f'width="{left + width + 60}" height="{y + 10}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>\n{body}\n</svg>\n'


def _part(part: float | None) -> str:
    return "–" if part is None else f"{part:.0%}"


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench --copies", description=__doc__)
    parser.add_argument("--report", default="report", help="folder for the reports")
    parser.add_argument("--repeats", type=int, default=10, help="copies in a measurement")
    parser.add_argument("--search", type=int, default=2000, help="random layouts")
    parser.add_argument("--check", type=int, metavar="N", help="only check N small layouts, for compute-sanitizer")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)
