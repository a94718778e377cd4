"""``tb.copy`` of many tensors on a CUDA device: values, the order of the streams, and what is released when.

Every target has as much memory as it needs, so that compute-sanitizer, with PYTORCH_NO_CUDA_MEMORY_CACHING=1, finds a
stray access.
"""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")

cupy: Any = pytest.importorskip("cupy")


if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

#: Cycles of a kernel of some milliseconds.
LATE = 10_000_000
ROUNDS = 30
DTYPES = ["uint8", "float16", "float32", "float64", "complex128"]


def numbers(random: np.random.Generator, *shape: int, dtype: str = "float32") -> Any:
    """Return random numbers on the device."""
    return torch.from_numpy(random.integers(0, 100, shape).astype(dtype)).cuda()


def piece(random: np.random.Generator) -> tuple[Any, Any]:
    """Return a source and a target of one shape, on the device: contiguous, rows, or anything else."""
    dtype = DTYPES[int(random.integers(len(DTYPES)))]
    kind, rows, row = int(random.integers(5)), int(random.integers(1, 40)), int(random.integers(1, 3000))
    skip = int(random.integers(0, 5))
    if kind == 0:
        # One run, at any address that the itemsize divides.
        return numbers(random, skip + row, dtype=dtype)[skip:], numbers(random, 7 + row, dtype=dtype)[7:]
    if kind == 1:
        return numbers(random, rows, row + skip, dtype=dtype)[:, skip:], numbers(random, rows, row, dtype=dtype)
    if kind == 2:
        target = numbers(random, rows, row + skip + 1, dtype=dtype)[:, 1 : row + 1]
        return numbers(random, 1, row, dtype=dtype), target
    if kind == 3:
        source = numbers(random, row % 97 + 1, rows, dtype=dtype).t()
        return source, numbers(random, rows, row % 97 + 1, dtype=dtype)
    source = numbers(random, 3, rows, 2, row % 500 + 1, dtype=dtype)[:, :, 1]
    return source, numbers(random, rows, 3, row % 500 + 1, dtype=dtype).transpose(0, 1)


def checked(pairs: list[tuple[Any, Any]]) -> None:
    """Copy all together, and compare bit by bit with PyTorch's copies."""
    expected = [target.clone().copy_(source) for source, target in pairs]
    sources, targets = ([pair[side] for pair in pairs] for side in range(2))
    tb.copy(sources, out=targets)
    for index, (target, wanted) in enumerate(zip(targets, expected, strict=True)):
        same = target.contiguous().flatten().view(torch.uint8), wanted.contiguous().flatten().view(torch.uint8)
        assert torch.equal(*same), (index, target.shape, target.stride(), pairs[index][0].stride(), target.dtype)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 300])
@pytest.mark.parametrize("seed", range(10))
def test_any_pieces_are_copied_as_pytorch_copies_them(seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    checked([piece(random) for _ in range(count)])


def test_slices_of_two_buffers_in_random_order() -> None:
    random = np.random.default_rng(5)
    source = torch.randint(0, 256, (3000 * 1001,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    places, order = random.permutation(3000), random.permutation(3000)
    sources = [source[1001 * place : 1001 * (place + 1)] for place in places]
    targets = [target[1001 * place : 1001 * (place + 1)] for place in order]
    tb.copy(sources, out=targets)
    expected = torch.empty_like(source)
    rows = torch.from_numpy(order).cuda(), torch.from_numpy(places).cuda()
    expected.view(3000, 1001)[rows[0]] = source.view(3000, 1001)[rows[1]]
    assert torch.equal(target, expected)


@pytest.mark.parametrize("seed", range(10))
def test_pieces_whose_addresses_and_lengths_16_divides(seed: int) -> None:
    random = np.random.default_rng([seed, 16])

    def rows(count: int, row: int) -> Any:
        """Return rows of so many times 16 bytes, with gaps and at any multiple of 16."""
        skip, gap = (int(random.integers(0, 4)) * 16 for _ in range(2))
        whole = numbers(random, count, row * 16 + skip + gap, dtype="uint8")
        return whole[:, skip : skip + row * 16]

    # A block copies 4,096 vectors of 16 bytes, 1,024 at a time.
    lengths = [1, 2, 255, 256, 257, 1023, 1024, 1025, 2750, 4095, 4096, 4097, 9001]
    shapes = [(int(random.integers(1, 40)) if row < 300 else 1, row) for row in random.permutation(lengths * 3)]
    checked([(rows(count, int(row)), rows(count, int(row))) for count, row in shapes])


def test_nothing_beside_the_targets_is_written() -> None:
    whole = torch.full((64, 1000), 7, dtype=torch.uint8, device="cuda")
    targets = [whole[row, 3 + row : 900 - row] for row in range(0, 64, 2)]
    tb.copy([torch.zeros(target.shape[0], dtype=torch.uint8, device="cuda") for target in targets], out=targets)
    expected = torch.full_like(whole, 7)
    for row in range(0, 64, 2):
        expected[row, 3 + row : 900 - row] = 0
    assert torch.equal(whole, expected)


def test_large_pieces_beside_small_ones() -> None:
    random = np.random.default_rng(3)
    lengths = [1, 15, 16, 17, 65535, 65536, 65537, 100_000_001, 3, 1 << 24]
    checked([(numbers(random, length, dtype="uint8"), numbers(random, length, dtype="uint8")) for length in lengths])


def test_pending_operations_are_applied() -> None:
    sources = [torch.randn(33, 65, dtype=torch.complex64, device="cuda").conj() for _ in range(10)]
    sources += [torch.randn(100, dtype=torch.complex64, device="cuda") for _ in range(10)]
    checked([(source, torch.zeros(source.shape, dtype=source.dtype, device="cuda")) for source in sources])


def test_it_is_one_kernel() -> None:
    sources = [torch.rand(1000 + index, device="cuda") for index in range(100)]
    targets = [torch.zeros_like(source) for source in sources]
    tb.copy(sources, out=targets)
    torch.cuda.synchronize()
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        tb.copy(sources, out=targets)
        torch.cuda.synchronize()
    work = [event.name for event in profiled.events() if event.device_type.name == "CUDA"]
    assert [name for name in work if "pieces" in name] and len(work) == 2, work


@pytest.mark.parametrize(("count", "calls"), [(100, 100), (20_000, 1)])
def test_the_host_does_not_wait(count: int, calls: int) -> None:
    source = torch.rand(count * 1000, device="cuda")
    target = torch.zeros_like(source)
    sources, targets = source.split(1000), target.split(1000)
    # The memory of the table is in the driver's pool, and the frameworks' calls are warm.
    tb.copy(sources, out=targets)
    torch.cuda.synchronize()
    target.zero_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200 * LATE)
        for _ in range(calls):
            tb.copy(sources, out=targets)
        assert not stream.query(), "the host has waited"
    torch.cuda.synchronize()
    assert torch.equal(source, target)


def test_a_copy_waits_for_the_producer() -> None:
    writer = torch.cuda.Stream()
    sources = [torch.zeros(257 + index, device="cuda") for index in range(50)]
    targets = [cupy.zeros(257 + index, np.float32) for index in range(50)]
    tb.copy(sources, out=targets)
    torch.cuda.synchronize()
    late = 0
    for i in range(1, ROUNDS + 1):
        reader = cupy.cuda.Stream(non_blocking=True)
        with torch.cuda.stream(writer):
            torch.cuda._sleep(5 * LATE)
            for source in sources:
                source.fill_(i)
            with reader:
                tb.copy(sources, out=targets)
                seen = [(target == i).all() for target in targets]
        late += not writer.query()
        reader.synchronize()
        assert all(bool(one) for one in seen), f"round {i}"
        torch.cuda.synchronize()
    assert late, "the kernel before the write is too short for this test"


def test_the_sources_and_the_table_are_not_reused_before_the_copy() -> None:
    reader = cupy.cuda.Stream(non_blocking=True)
    late = torch.cuda.ExternalStream(reader.ptr)
    targets = [cupy.zeros(1 << 14, np.float32) for _ in range(40)]
    for i in range(1, ROUNDS + 1):
        sources = [torch.full((1 << 14,), float(i), device="cuda") for _ in range(40)]
        with reader:
            with torch.cuda.stream(late):
                torch.cuda._sleep(LATE)
            tb.copy(sources, out=targets)
            # Two more tables, before the first is used.
            other = [cupy.zeros(100, np.float32) for _ in range(20)]
            for value in (1, 2):
                tb.copy([torch.full((100,), float(value), device="cuda") for _ in range(20)], out=other)
        del sources
        gc.collect(0)
        # PyTorch reuses the blocks at once, in its own stream.
        garbage = [torch.full((1 << 14,), -1.0, device="cuda") for _ in range(60)]
        reader.synchronize()
        assert all(bool((target == i).all()) for target in targets), f"round {i}"
        assert all(bool((target == 2).all()) for target in other), f"round {i}"
        del garbage


def test_copies_in_a_graph() -> None:
    sources = [torch.rand(100 + index, device="cuda") for index in range(20)]
    targets = [torch.zeros_like(source) for source in sources]
    tb.copy(sources, out=targets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tb.copy(sources, out=targets)
    for source in sources:
        source.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip(sources, targets, strict=True))


def test_one_call_fills_memory_of_both_kinds() -> None:
    sources = {"a": torch.rand(100, device="cuda"), "b": np.ones(50, np.float32), "c": torch.rand(7, 9, device="cuda")}
    targets = {"a": np.zeros(100, np.float32), "b": torch.zeros(50, device="cuda"), "c": cupy.zeros((7, 9), np.float32)}
    tb.copy(sources, out=targets)
    np.testing.assert_array_equal(targets["a"], sources["a"].cpu().numpy())
    np.testing.assert_array_equal(targets["b"].cpu().numpy(), sources["b"])
    np.testing.assert_array_equal(targets["c"].get(), sources["c"].cpu().numpy())


def test_overlapping_targets_are_refused_before_anything_is_written() -> None:
    whole = torch.zeros(1000, device="cuda")
    targets = [whole[100 * index : 100 * index + 100 + (index == 5)] for index in range(10)]
    with pytest.raises(tb.BridgeError, match=r"tree\[6\] and tree\[5\]: the two targets share memory"):
        tb.copy([torch.ones(target.shape[0], device="cuda") for target in targets], out=targets)
    assert not bool(whole.any())


def test_nothing_is_left_of_ten_thousand_pieces() -> None:
    before = tb.stats()
    sources = list(torch.rand(10_000, 64, device="cuda").unbind())
    targets = list(torch.zeros(10_000, 64, device="cuda").unbind())
    tb.copy(sources, out=targets)
    free = torch.cuda.mem_get_info()[0]
    for _ in range(20):
        tb.copy(sources, out=targets)
    torch.cuda.synchronize()
    after = tb.stats()
    assert after["leased"] - after["released"] == before["leased"] - before["released"]
    assert after["leaked"] == before["leaked"]
    assert torch.cuda.mem_get_info()[0] >= free - (8 << 20)
    assert all(torch.equal(*pair) for pair in zip(sources[::100], targets[::100], strict=True))


def test_a_copier_launches_again_in_any_stream() -> None:
    sources = [torch.zeros(100 + index, device="cuda") for index in range(50)]
    targets = [torch.zeros_like(source) for source in sources]
    update = tb.copier(sources, out=targets)
    for value in range(1, 11):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE)
            for source in sources:
                source.fill_(value)
            update()
        stream.synchronize()
        assert all(bool((target == value).all()) for target in targets)


def test_a_copier_that_is_dropped_keeps_its_table_until_it_has_run() -> None:
    sources = [torch.full((1000,), 5.0, device="cuda") for _ in range(50)]
    targets = [torch.zeros_like(source) for source in sources]
    for _ in range(ROUNDS):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE)
            tb.copier(sources, out=targets)()
        # What is freed is used again at once.
        garbage = [tb.copier(targets[:10], out=[torch.zeros_like(target) for target in targets[:10]]) for _ in range(3)]
        stream.synchronize()
        assert all(bool((target == 5).all()) for target in targets)
        for target in targets:
            target.zero_()
        torch.cuda.synchronize()
        del garbage


def test_a_copier_is_one_launch_of_a_graph() -> None:
    sources = [torch.rand(1000 + index, device="cuda") for index in range(100)]
    targets = [torch.zeros_like(source) for source in sources]
    update = tb.copier(sources, out=targets)
    update()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
        with pytest.raises(tb.BridgeError, match="before the capture") as error:
            tb.copier(sources, out=targets)
    assert error.value.kind == "captured"
    del update
    gc.collect()
    other = tb.copier(targets, out=[torch.zeros_like(target) for target in targets])
    for value in range(1, 4):
        for source in sources:
            source.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert all(bool((target == value).all()) for target in targets)
    other()


@pytest.mark.parametrize("check", [True, False])
def test_each_side_of_a_copier_waits_for_the_other(check: bool) -> None:
    """Sources are written to in one stream, and targets read in another, right before and right after each call."""
    sources = [torch.zeros(20_000 + index, device="cuda") for index in range(40)]
    targets = [cupy.zeros(source.numel(), cupy.float32) for source in sources]
    update = tb.copier(sources, out=targets, check=check)
    writer, reader = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    for value in range(1, 1 + ROUNDS):
        with torch.cuda.stream(writer), reader:
            if value % 2:
                torch.cuda._sleep(LATE)
            torch._foreach_zero_(sources)
            torch._foreach_add_(sources, value)
            update()
            # The next step of the trainer, before the copies have run.
            torch._foreach_zero_(sources)
            seen = [target.copy() for target in targets]
        reader.synchronize()
        assert all(bool((copy == value).all()) for copy in seen)
    torch.cuda.synchronize()


def test_the_memory_of_a_copier_is_returned_after_its_copies() -> None:
    before = tb.stats()
    for value in range(1, 1 + ROUNDS):
        sources = [torch.full((50_000,), float(value), device="cuda") for _ in range(20)]
        targets = [cupy.zeros(50_000, cupy.float32) for _ in sources]
        torch.cuda.synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            tb.copier(sources, out=targets)  # one that is never called
            update = tb.copier(sources, out=targets)
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                torch.cuda._sleep(LATE)
            update()
        del update, sources
        # PyTorch takes the memory of the sources again at once, in its own stream.
        garbage = [torch.full((50_000,), -1.0, device="cuda") for _ in range(40)]
        stream.synchronize()
        assert all(bool((target == value).all()) for target in targets)
        del garbage
    gc.collect()
    torch.cuda.synchronize()
    after = tb.stats()
    assert after["leaked"] == before["leaked"]
    assert after["leased"] - after["released"] == before["leased"] - before["released"]


def test_a_copier_of_a_view_makes_the_owner_wait() -> None:
    """CuPy's memory, seen by PyTorch, is read by the copier in PyTorch's stream: CuPy reuses it after that."""
    for value in range(1, 1 + ROUNDS):
        owned = [cupy.full(50_000, value, cupy.float32) for _ in range(20)]
        cupy.cuda.Device().synchronize()
        views = [tb.to_torch(array) for array in owned]
        targets = [torch.zeros(50_000, device="cuda") for _ in owned]
        update = tb.copier(views, out=targets)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE)
            update()
        del owned, views, update
        garbage = [cupy.full(50_000, -1, cupy.float32) for _ in range(40)]
        stream.synchronize()
        assert all(bool((target == value).all()) for target in targets)
        del garbage


# ``tb.copy`` of many tensors from one CUDA device to another: values, and the order of the streams.


two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


def shape_of(draw: random.Random) -> list[int]:
    """Return the shape of a small tensor, or of one that is worth a separate copy."""
    return draw.choice(
        [[], [1], [draw.choice([5, 70_000, 3_000_000])], [37, draw.choice([3, 4_000])], [draw.choice([5, 300]), 7, 900]]
    )


def strided(draw: random.Random, shape: list[int], dtype: Any, device: str) -> Any:
    """Return a view with gaps, its dimensions in any order."""
    order = draw.sample(range(len(shape)), len(shape))
    base = torch.zeros([shape[d] + draw.choice([0, 0, 1, 3]) for d in order], dtype=dtype, device=device)
    for at, d in enumerate(order):
        base = base.narrow(at, 0, shape[d])
    return base.permute([order.index(d) for d in range(len(shape))])


@two_devices
@pytest.mark.parametrize("seed", range(20))
def test_many_pieces_in_any_streams(seed: int) -> None:
    """More than a block of them, written late and overwritten at once."""
    draw = random.Random(seed)
    here, there = draw.sample([0, 1], 2)
    first, second = (draw.choice([torch.cuda.default_stream(d), torch.cuda.Stream(d)]) for d in (here, there))
    sources, targets = [], []
    for _ in range(draw.choice([1, 9, 40, 200])):
        shape, dtype = shape_of(draw), draw.choice([torch.uint8, torch.float16, torch.float64])
        sources.append(strided(draw, shape, dtype, f"cuda:{here}"))
        targets.append(strided(draw, shape, dtype, f"cuda:{there}"))
    for device in (here, there):
        torch.cuda.synchronize(device)
    for value in range(1, 4):
        with torch.cuda.stream(first), torch.cuda.stream(second):
            with torch.cuda.stream(first):
                torch.cuda._sleep(draw.choice([0, 2_000_000]))
                for source in sources:
                    source.fill_(value)
            tb.copy(sources, out=targets)
            with torch.cuda.stream(first):
                for source in sources:
                    source.zero_()
            with torch.cuda.stream(second):
                wrong = sum(int((target != value).sum()) for target in targets)
        assert wrong == 0
