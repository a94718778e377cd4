"""Copies of strided tensors on a CUDA device, compared with those of PyTorch and CuPy.

Every figure is a part of what a plain copy of 1 GiB moves in the same run, counting bytes read and written. *Limit* is
what the memory allows: it delivers whole sectors of 32 bytes, so that of every second float half is read in vain.

The *search* copies random layouts, checks each against PyTorch bit by bit, and compares the times. Its seed is another
one in each run; with ``--check`` there are five fixed ones.

    cargo xtask bench --copies
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benches.reports import publish
from truebridge_conformance import host

#: The least part of the limit.
BAR = 0.9
#: The most that ours takes in the search as a multiple of the faster of the others, and the part of layouts that may
#: take longer; times of one copy differ by the first.
NOISE, SLOWER = 1.1, 3e-3
FAR, FARTHER = 1.3, 4e-4
#: Bytes of a tensor in the search, and of a large one: enough for the memory to be what is measured.
SEARCHED, LARGE = (1 << 20, 1 << 30), 64 << 20
#: The least parts of a plain copy, in the median and the 5th percentile of the large ones.
MEDIAN, FIFTH = 0.92, 0.70
#: The seeds of ``--check``.
SEEDS = (1, 2, 3, 4, 5)
#: Lengths of dimensions: images, heads, powers of two, and odd ones.
SHORT = (2, 3, 4, 5, 7, 8, 16, 24, 31, 32, 33, 64, 65, 96, 100, 127, 128, 192, 224, 255, 256, 257)
LENGTHS = (*SHORT, 384, 512, 513, 768, 1000, 1024, 1025, 1280, 2048, 2049, 4096, 4099)
ITEMSIZES = {"uint8": 1, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4, "float64": 8, "complex128": 16}
FRAMEWORKS = ("torch", "cupy")


@dataclass(frozen=True)
class Case:
    """A view to copy."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    view: Callable[[Any], Any]
    limit: float = 1.0
    reversed: bool = False


def _permuted(*order: int) -> Callable[[Any], Any]:
    return lambda tensor: tensor.permute(order)


CASES = [
    Case("float32 16384² .t()", "float32", (16384, 16384), _permuted(1, 0)),
    Case("float16 16384² .t()", "float16", (16384, 16384), _permuted(1, 0)),
    Case("uint8 16384² .t()", "uint8", (16384, 16384), _permuted(1, 0)),
    Case("complex128 8192² .t()", "complex128", (8192, 8192), _permuted(1, 0)),
    Case("float32 NCHW (64,64,224,224) → NHWC", "float32", (64, 64, 224, 224), _permuted(0, 2, 3, 1)),
    Case("float16 NCHW (64,256,56,56) → NHWC", "float16", (64, 256, 56, 56), _permuted(0, 2, 3, 1)),
    Case("float32 NCHW (256,3,512,512) → NHWC", "float32", (256, 3, 512, 512), _permuted(0, 2, 3, 1)),
    Case("uint8 NHWC (256,512,512,3) → NCHW", "uint8", (256, 512, 512, 3), _permuted(0, 3, 1, 2)),
    Case("float32 NHWC (64,224,224,64) → NCHW", "float32", (64, 224, 224, 64), _permuted(0, 3, 1, 2)),
    Case("float16 (16,4096,32,128) swap 1, 2", "float16", (16, 4096, 32, 128), _permuted(0, 2, 1, 3)),
    Case("float32 16384² [:, ::2]", "float32", (16384, 16384), lambda tensor: tensor[:, ::2], 2 / 3),
    Case("float32 16384×16385 [:, :-1]", "float32", (16384, 16385), lambda tensor: tensor[:, :-1]),
    Case("float32 (64,64,64,32,32) reversed", "float32", (64, 64, 64, 32, 32), _permuted(4, 3, 2, 1, 0)),
    Case("float32 (1024,512,512) transpose 1, 2", "float32", (1024, 512, 512), _permuted(0, 2, 1)),
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
    limit: float
    passed: bool


@dataclass(frozen=True)
class Layout:
    """A view of compact memory, and the order of a target's dimensions."""

    dtype: str
    shape: tuple[int, ...]
    gaps: tuple[int, ...]
    steps: tuple[int, ...]
    order: tuple[int, ...]
    target: tuple[int, ...]

    @property
    def memory(self) -> tuple[int, ...]:
        """The shape of the memory, with the gaps."""
        return tuple(length * step + gap for length, step, gap in zip(self.shape, self.steps, self.gaps, strict=True))

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a tensor of this shape."""
        return math.prod(shape) * ITEMSIZES[self.dtype]

    def view(self, memory: Any) -> Any:
        """Return the view of a tensor with the shape of the memory."""
        ends = zip(self.shape, self.steps, strict=True)
        return memory[tuple(slice(0, length * step, step) for length, step in ends)].permute(self.order)

    def out(self, memory: Any) -> Any:
        """Return a target over flat memory that is as large."""
        shape = [self.shape[place] for place in self.order]
        back = [self.target.index(place) for place in range(len(shape))]
        return memory.view([shape[place] for place in self.target]).permute(back)


@dataclass
class Found:
    """A random layout: its times, in microseconds."""

    layout: Layout
    ours: float
    torch: float
    cupy: float | None
    exact: bool

    @property
    def ratio(self) -> float:
        """Ours as a multiple of the faster of the others."""
        return self.ours / min(time for time in (self.torch, self.cupy) if time is not None)

    def part(self, speed: float) -> float:
        """Return the part of a plain copy."""
        return 2e6 * self.layout.nbytes(self.layout.shape) / self.ours / speed

    def text(self) -> str:
        """Return the ratio, the times and the layout."""
        one = self.layout
        cupy = "" if self.cupy is None else f", CuPy {self.cupy:.0f}"
        where = f"{one.dtype} {one.shape} gaps {one.gaps} steps {one.steps} permute {one.order} into {one.target}"
        return f"{self.ratio:.2f}: {self.ours:.0f} us, PyTorch {self.torch:.0f}{cupy}: {where}"


@dataclass
class Search:
    """What a search found, and whether it is good enough."""

    seeds: list[int]
    layouts: int
    wrong: int
    slower: int
    far: int
    ratios: dict[int, float]
    parts: dict[int, float]
    worst: list[str]
    passed: bool

    @classmethod
    def of(cls, seeds: Sequence[int], found: Sequence[Found], speed: float) -> Search:
        """Summarize: percentiles of ratios, and of the parts of a plain copy that large tensors reach."""
        ratios = sorted(one.ratio for one in found)
        parts = sorted(one.part(speed) for one in found if one.layout.nbytes(one.layout.shape) > LARGE)
        wrong, count = sum(not one.exact for one in found), len(found)
        slower, far = (sum(ratio > bar for ratio in ratios) for bar in (NOISE, FAR))
        passed = not wrong and slower <= SLOWER * count and far <= FARTHER * count
        passed = passed and _percentile(parts, 50) >= MEDIAN and _percentile(parts, 5) >= FIFTH
        return cls(
            seeds=list(seeds),
            layouts=count,
            wrong=wrong,
            slower=slower,
            far=far,
            ratios={percent: _percentile(ratios, percent) for percent in (10, 50, 90, 99, 100)},
            parts={percent: _percentile(parts, percent) for percent in (0, 5, 25, 50, 75)},
            worst=[one.text() for one in sorted(found, key=lambda one: -one.ratio)[:10]],
            passed=passed,
        )


def _percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] if ordered else math.nan


def main(argv: list[str]) -> int:
    """Measure, print tables, write ``bench_copies.json`` and ``.md``. Return 0 when every bar is met."""
    options = _options(argv)
    speed = plain()
    rows = [row for case in CASES for row in [measure(case, speed, options.repeats)] if row]
    seeds = SEEDS if options.check else [random.randrange(1 << 32) if options.seed is None else options.seed]
    found = Search.of(seeds, [one for seed in seeds for one in search(options.search, seed)], speed)
    print("\n".join(sentences(found)), flush=True)
    about = host.describe(*FRAMEWORKS)
    data = {
        "host": about,
        "plain_copy_bytes_per_second": speed,
        "rows": [asdict(row) for row in rows],
        "search": asdict(found),
    }
    publish(options.report, "bench_copies", markdown(about, speed, rows, found), data)
    return 0 if all(row.passed for row in rows) and found.passed else 1


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
    row = Row(case.name, ours, theirs, cupys, case.limit, ours >= BAR * case.limit)
    print(f"{case.name:42} ours {ours:4.0%}  torch {_part(theirs)}  CuPy {cupys:4.0%}", flush=True)
    return row


def layouts(count: int, seed: int) -> Iterator[Layout]:
    """Yield random layouts of SEARCHED bytes: two to six dimensions, some with gaps or steps, in any order."""
    rng = random.Random(seed)
    while count:
        ndim = rng.randint(2, 6)
        order = tuple(rng.sample(range(ndim), ndim))
        layout = Layout(
            rng.choice(tuple(ITEMSIZES)),
            tuple(rng.choice(LENGTHS) for _ in order),
            tuple(rng.choice((0, 0, 0, 1, 8)) for _ in order),
            tuple(2 if rng.random() < 0.1 else 1 for _ in order),
            order,
            tuple(rng.sample(range(ndim), ndim)) if rng.random() < 0.3 else tuple(range(ndim)),
        )
        least, most = SEARCHED
        if least <= layout.nbytes(layout.shape) <= most and layout.nbytes(layout.memory) <= 4 * most:
            count -= 1
            yield layout


def search(count: int, seed: int) -> Iterator[Found]:
    """Yield the times of random layouts."""
    import cupy
    import torch

    import truebridge as tb

    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
    memory, room = filled("uint8", (4 * SEARCHED[1],)), torch.empty(SEARCHED[1], dtype=torch.uint8, device="cuda")
    for layout in layouts(count, seed):
        dtype = getattr(torch, layout.dtype)
        source = layout.view(memory[: layout.nbytes(layout.memory)].view(dtype).view(layout.memory))
        out = layout.out(room[: layout.nbytes(layout.shape)].view(dtype))
        calls: list[Callable[[], Any]] = [tb.copier(source, out=out), partial(out.copy_, source)]
        with stream:
            if layout.dtype != "bfloat16":
                calls.append(partial(cupy.copyto, tb.to_cupy(out), tb.to_cupy(source)))
            times = [1e6 * timed(call, 3, 3) for call in calls]
            if times[0] > NOISE * min(times[1:]):
                times = [min(time, 1e6 * timed(call, 10, 5)) for time, call in zip(times, calls, strict=True)]
        room.zero_()
        calls[0]()
        exact = same(out.contiguous(), source.contiguous())
        yield Found(layout, times[0], times[1], times[2] if len(times) > 2 else None, exact)


def sentences(found: Search) -> list[str]:
    """Return what the search found, the ten worst last."""
    ratios, parts = found.ratios, found.parts
    return [
        f"Search: {found.layouts} random layouts (seeds {', '.join(map(str, found.seeds))}), {found.wrong} wrong, "
        f"{found.slower} over {NOISE} times the faster of the others, {found.far} over {FAR} times. Ours takes "
        f"{ratios[50]:.2f} of their time in the median, {ratios[10]:.2f} in the best tenth, {ratios[99]:.2f} in the "
        f"99th percentile, {ratios[100]:.2f} at worst. Tensors over {LARGE >> 20} MiB reach {parts[50]:.0%} of a plain "
        f"copy in the median, {parts[5]:.0%} in the 5th percentile, {parts[0]:.0%} at least. Bars met: "
        f"{'yes' if found.passed else 'no'}. The worst, by the multiple:",
        "",
        *(f"- {one}" for one in found.worst),
    ]


def markdown(about: dict[str, Any], speed: float, rows: list[Row], found: Search) -> str:
    """Return the report."""
    lines = [
        f"{host.heading(about)}\n",
        f"Plain copy: {speed / 1e12:.2f} TB/s read and written.\n",
        "| case | ours | torch | CuPy | limit | bar met |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        cells = [_part(row.torch), _part(row.cupy), _part(row.limit)]
        lines.append(f"| {row.case} | {row.ours:.0%} | {' | '.join(cells)} | {'yes' if row.passed else 'no'} |")
    return "\n".join([*lines, "", *sentences(found)]) + "\n"


def _part(part: float | None) -> str:
    return "–" if part is None else f"{part:.0%}"


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench --copies", description=__doc__)
    parser.add_argument("--report", default="report", help="folder for the reports")
    parser.add_argument("--repeats", type=int, default=10, help="copies in a measurement")
    parser.add_argument("--search", type=int, default=1000, help="random layouts of a seed")
    parser.add_argument("--seed", type=int, help="instead of the random seed of the run")
    parser.add_argument("--check", action="store_true", help="five fixed seeds")
    return parser.parse_args(argv)
