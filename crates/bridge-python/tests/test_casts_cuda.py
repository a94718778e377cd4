"""``tb.copy`` and ``tb.copier`` with ``dtype=``, on a CUDA device: PyTorch's casts on the device judge the values."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from casting import CASTS, DTYPES, cast, numbers, pair, same  # noqa: E402

#: Cycles of a kernel of some milliseconds.
LATE = 10_000_000


@pytest.mark.parametrize(("source", "to"), CASTS)
def test_every_number_is_cast_as_pytorch_casts_it(source: str, to: str) -> None:
    values = numbers(source, np.random.default_rng(1)).cuda()
    # In vectors, and, one element further, one by one.
    for first in (0, 1):
        target = torch.zeros(values.shape, dtype=DTYPES[to], device="cuda")[first:]
        tb.copy(values[first:], out=target, dtype=to)
        same(target, values[first:].to(DTYPES[to]))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100])
@pytest.mark.parametrize("seed", range(6))
def test_any_trees_are_cast(seed: int, count: int) -> None:
    random = np.random.default_rng([seed, count])
    to = list(DTYPES)[seed]
    pairs = [pair(random, to, "cuda") for _ in range(count)]
    # Others beside them, which are copied.
    integers = torch.randint(0, 100, (33, 65), device="cuda"), torch.zeros(33, 65, dtype=torch.int64, device="cuda")
    both = [*pairs, integers]
    tb.copy([source for source, _ in both], out=[target for _, target in both], dtype=to)
    for source, target in pairs:
        same(target, cast(source, target))
    assert torch.equal(*integers)


def test_nothing_beside_the_targets_is_written() -> None:
    whole = torch.full((64, 1000), 7, dtype=torch.bfloat16, device="cuda")
    targets = [whole[row, 3 + row : 900 - row] for row in range(0, 64, 2)]
    tb.copy([torch.zeros(target.shape[0], device="cuda") for target in targets], out=targets, dtype="bfloat16")
    expected = torch.full_like(whole, 7)
    for row in range(0, 64, 2):
        expected[row, 3 + row : 900 - row] = 0
    assert torch.equal(whole, expected)


def test_elements_at_any_address_are_cast() -> None:
    cupy: Any = pytest.importorskip("cupy")
    source = np.linspace(-5, 5, 1000, dtype=np.float32)
    for shift in (1, 2, 4):
        memory = cupy.zeros(4 * 1000 + shift, cupy.uint8)
        memory[shift:] = cupy.asarray(source.view(np.uint8))
        strange = cupy.ndarray(1000, cupy.float32, memory.data + shift)
        target = torch.zeros(1000, dtype=torch.float16, device="cuda")
        tb.copy(strange, out=target, dtype="float16")
        same(target.cpu(), torch.from_numpy(source).half())


def test_large_pieces_beside_small_ones() -> None:
    lengths = [1, 15, 16, 17, 16383, 16384, 16385, 50_000_001, 3, 1 << 24]
    sources = [torch.randn(length, device="cuda") for length in lengths]
    targets = [torch.zeros(length, dtype=torch.bfloat16, device="cuda") for length in lengths]
    tb.copy(sources, out=targets, dtype="bfloat16")
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source.bfloat16())


def test_a_tree_of_casts_is_one_kernel_whatever_its_dtypes_and_strides() -> None:
    from torch.profiler import ProfilerActivity, profile

    names = ["float32", "float16", "float64", "float8_e5m2"]
    sources = [torch.rand(20, 100 + index, device="cuda").to(DTYPES[names[index % 4]]) for index in range(100)]
    sources = [source.t() if index % 3 == 0 else source for index, source in enumerate(sources)]
    targets = [torch.zeros(source.shape, dtype=torch.bfloat16, device="cuda") for source in sources]
    tb.copy(sources, out=targets, dtype="bfloat16")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        tb.copy(sources, out=targets, dtype="bfloat16")
        torch.cuda.synchronize()
    work = [event.name for event in profiled.events() if event.device_type.name == "CUDA"]
    assert len([name for name in work if "cast" in name]) == 1 and len(work) == 2, work
    for source, target in zip(sources, targets, strict=True):
        same(target, source.to(torch.bfloat16))


def test_a_cast_waits_for_the_producer() -> None:
    writer = torch.cuda.Stream()
    source, target = torch.zeros(5000, device="cuda"), torch.zeros(5000, dtype=torch.float16, device="cuda")
    torch.cuda.synchronize()
    for value in range(1, 11):
        with torch.cuda.stream(writer):
            torch.cuda._sleep(LATE)
            source.fill_(value)
            tb.copy(source, out=target, dtype="float16")
            seen = target.clone()
        writer.synchronize()
        assert bool((seen == value).all())


@pytest.mark.parametrize("count", [1, 100])
def test_a_copier_of_casts_is_captured(count: int) -> None:
    sources = [torch.rand(1000 + index, device="cuda") for index in range(count)]
    sources.append(torch.arange(1000, device="cuda"))
    targets = [torch.zeros_like(source, dtype=torch.float8_e4m3fn) for source in sources[:-1]]
    targets.append(torch.zeros_like(sources[-1]))
    update = tb.copier(sources, out=targets, dtype="float8_e4m3fn")
    update()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
    del update
    gc.collect()
    for value in range(1, 4):
        for source in sources:
            source.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert all(bool((target.float() == value).all()) for target in targets)


def test_a_copy_is_captured_too() -> None:
    sources = [torch.rand(1000 + index, device="cuda") for index in range(10)]
    targets = [torch.zeros_like(source, dtype=torch.bfloat16) for source in sources]
    tb.copy(sources, out=targets, dtype="bfloat16")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tb.copy(sources, out=targets, dtype="bfloat16")
    for source in sources:
        source.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool((target == 3).all()) for target in targets)
