"""Copies of host memory, compared with those of NumPy and PyTorch.

Each case is a view of an array with other strides, copied to compact memory, in two ways: *into* memory that exists
(``truebridge.copy``, ``numpy.copyto``, ``Tensor.copy_``), and into *fresh* memory (the first into ``numpy.empty``,
``numpy.array(order="C")``, ``Tensor.contiguous``). The contenders take turns, and each round begins with another one:
none profits from what another leaves in the caches and in the allocator. A figure is the least of the rounds, and a
ratio is one of two such figures, because other processes only add to them.

All is measured with one thread, and again with as many as run at a time.

    cargo xtask bench --host-copies
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from benches.reports import page, publish
from benches.rounds import options
from truebridge_conformance import host

#: The most that ours takes, as a multiple of the others: what two runs of one copy differ by.
NOISE = 1.15
#: Copies of fewer bytes have no bar: there the cost of a call counts.
JUDGED = 1 << 20


@dataclass(frozen=True)
class Case:
    """A view to copy."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    view: Callable[[Any], Any]


def _permuted(*order: int) -> Callable[[Any], Any]:
    return lambda array: array.transpose(order)


_T = _permuted(1, 0)

#: The cases that are measured on a device as well, at a sixteenth of the size.
CASES = [
    Case("float32 4096² .t()", "float32", (4096, 4096), _T),
    Case("float16 4096² .t()", "float16", (4096, 4096), _T),
    Case("uint8 4096² .t()", "uint8", (4096, 4096), _T),
    Case("complex128 2048² .t()", "complex128", (2048, 2048), _T),
    Case("float32 NCHW (4,64,224,224) → NHWC", "float32", (4, 64, 224, 224), _permuted(0, 2, 3, 1)),
    Case("float16 NCHW (4,256,56,56) → NHWC", "float16", (4, 256, 56, 56), _permuted(0, 2, 3, 1)),
    Case("float32 NCHW (16,3,512,512) → NHWC", "float32", (16, 3, 512, 512), _permuted(0, 2, 3, 1)),
    Case("uint8 NHWC (16,512,512,3) → NCHW", "uint8", (16, 512, 512, 3), _permuted(0, 3, 1, 2)),
    Case("float32 NHWC (4,224,224,64) → NCHW", "float32", (4, 224, 224, 64), _permuted(0, 3, 1, 2)),
    Case("float16 (1,4096,32,128) swap 1, 2", "float16", (1, 4096, 32, 128), _permuted(0, 2, 1, 3)),
    Case("float32 4096² [:, ::2]", "float32", (4096, 4096), lambda array: array[:, ::2]),
    Case("float32 4096×4097 [:, :-1]", "float32", (4096, 4097), lambda array: array[:, :-1]),
    Case("float32 (32,32,32,32,16) reversed", "float32", (32, 32, 32, 32, 16), _permuted(4, 3, 2, 1, 0)),
    Case("float32 (64,512,512) transpose(1, 2)", "float32", (64, 512, 512), _permuted(0, 2, 1)),
    Case("float32 (1<<20,4) .t()", "float32", (1 << 20, 4), _T),
    Case("float32 (512,512,64) permute(1, 0, 2)", "float32", (512, 512, 64), _permuted(1, 0, 2)),
    Case("float32 4096² [::-1, ::-1]", "float32", (4096, 4096), lambda array: array[::-1, ::-1]),
    Case("uint8 NCHW (16,3,512,512) → NHWC", "uint8", (16, 3, 512, 512), _permuted(0, 2, 3, 1)),
    Case("float32 512² .t()", "float32", (512, 512), _T),
    Case("float64 4096² [:64].t()", "float64", (4096, 4096), lambda array: array[:64].T),
]


@dataclass
class Row:
    """One case: bytes read and written per second, and how long ours takes as a part of the others."""

    case: str
    memory: str
    threads: int
    nbytes: int
    #: GB/s.
    ours: float
    numpy: float
    #: ``None`` where PyTorch cannot hold the view: it has no negative strides.
    torch: float | None
    of_numpy: float
    of_torch: float | None
    passed: bool


def contenders(case: Case) -> dict[str, list[Callable[[], Any] | None]]:
    """Return the calls of ours, NumPy and PyTorch, after a look at what ours copies."""
    import numpy
    import torch

    import truebridge as tb

    count = int(numpy.prod(case.shape)) * numpy.dtype(case.dtype).itemsize
    values = numpy.random.default_rng(1).integers(0, 120, 1 << 20, dtype=numpy.uint8)
    source = case.view(numpy.resize(values, count).view(case.dtype).reshape(case.shape))
    target = numpy.full(source.shape, 1, case.dtype)
    tb.copy(source, out=target)
    if not numpy.array_equal(target, source):
        raise RuntimeError(f"{case.name}: a copy has other elements than the source")
    backwards = any(stride < 0 for stride in source.strides)
    tensor = None if backwards else torch.from_numpy(source)
    written = torch.from_numpy(target)

    def fresh() -> Any:
        memory = numpy.empty(source.shape, source.dtype)
        tb.copy(source, out=memory)
        return memory

    return {
        "into": [
            lambda: tb.copy(source, out=target),
            lambda: numpy.copyto(target, source),
            None if tensor is None else lambda: written.copy_(tensor),
        ],
        "fresh": [
            fresh,
            lambda: numpy.array(source, order="C", copy=True),
            None if tensor is None else lambda: tensor.contiguous(),
        ],
    }


def least(calls: Sequence[Callable[[], Any] | None], rounds: int) -> list[float | None]:
    """Return the seconds of the fastest call of each. They take turns; each round begins with another one."""
    best: list[float | None] = [None] * len(calls)
    for turn in range(rounds):
        for offset in range(len(calls)):
            number = (turn + offset) % len(calls)
            call = calls[number]
            if call is None:
                continue
            started = time.perf_counter()
            call()
            taken = time.perf_counter() - started
            so_far = best[number]
            best[number] = taken if so_far is None else min(so_far, taken)
    return best


@contextmanager
def confined(threads: int) -> Iterator[None]:
    """Confine this thread and those that it starts to so many processors, and PyTorch to so many threads."""
    import torch

    before, asked = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, set(sorted(before)[:threads]))
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(asked)


def measure(case: Case, threads: int, rounds: int) -> list[Row]:
    """Measure one case, into memory that exists and into fresh memory."""
    import numpy

    source = case.view(numpy.empty(case.shape, case.dtype))
    rows = []
    with confined(threads):
        for memory, calls in contenders(case).items():
            ours, of_numpy, of_torch = least(calls, rounds)
            if ours is None or of_numpy is None:
                raise RuntimeError("ours and NumPy copy every case")
            gigabytes = 2 * source.nbytes / 1e9
            ratios = (ours / of_numpy, None if of_torch is None else ours / of_torch)
            slower = any(ratio is not None and ratio > NOISE for ratio in ratios)
            rows.append(
                Row(
                    case=case.name,
                    memory=memory,
                    threads=threads,
                    nbytes=source.nbytes,
                    ours=gigabytes / ours,
                    numpy=gigabytes / of_numpy,
                    torch=None if of_torch is None else gigabytes / of_torch,
                    of_numpy=ratios[0],
                    of_torch=ratios[1],
                    passed=not slower or source.nbytes < JUDGED,
                )
            )
    return rows


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench_host_copies.json`` and ``.md``. Return 0 when every bar is met."""
    only = {"metavar": "TEXT", "help": "measure only the cases with this text in their name"}
    given = options(argv, "host-copies", __doc__, 15, only=only)
    cases = [case for case in CASES if not given.only or given.only in case.name]
    counts = sorted({1, len(os.sched_getaffinity(0))})
    rows = [row for threads in counts for case in cases for row in measure(case, threads, given.rounds)]
    about = host.describe("numpy", "torch")
    publish(given.report, "bench_host_copies", markdown(about, rows), {"host": about, "rows": [*map(asdict, rows)]})
    missed = sum(not row.passed for row in rows)
    print(f"{len(rows) - missed} passed, {missed} failed")
    return 1 if missed else 0


def markdown(about: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the report."""

    def line(row: Row) -> str:
        of_torch = "–" if row.torch is None else f"{row.torch:.1f}"
        ratio = "–" if row.of_torch is None else f"{row.of_torch:.2f}"
        figures = f"{row.ours:.1f} | {row.numpy:.1f} | {of_torch} | {row.of_numpy:.2f} | {ratio}"
        return f"{row.case} | {row.memory} | {row.threads} | {figures} | {'met' if row.passed else 'MISSED'}"

    what = "Copies of host memory; GB/s are bytes read and written, ratios are times."
    head = "case|memory|:threads|:ours, GB/s|:NumPy|:torch|:ours / NumPy|:ours / torch|"
    return page(about, what, head, map(line, rows))
