"""Copies on a CUDA device: into the target's own memory, into tensors that exist, and in the order of the streams."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import memory
import truebridge as tb
from casting import CASTS, DTYPES, cast, numbers, pair, same  # noqa: E402

torch: Any = pytest.importorskip("torch")

cupy: Any = pytest.importorskip("cupy")


if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

#: Cycles of a kernel of some milliseconds.
LATE = 10_000_000
ROUNDS = 50
NAMES = ["uint8", "float16", "float32", "float64", "complex128"]
LENGTHS = [1, 2, 3, 4, 15, 16, 17, 31, 32, 33, 63, 65, 129]


def tensorflow() -> Any:
    tf = pytest.importorskip("tensorflow")
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow has no GPU")
    return tf


def view(random: np.random.Generator, array: Any) -> Any:
    """Return a random view of an array of NumPy or CuPy."""
    steps = [int(step) for step in random.choice([-2, -1, 1, 1, 2, 3], array.ndim)]
    sliced = array[tuple(slice(int(random.integers(0, 2)), None, step) for step in steps)]
    return sliced.transpose([int(axis) for axis in random.permutation(array.ndim)])


def twins(seed: int) -> tuple[Any, np.ndarray]:
    """Return the same random view as an array of CuPy and of NumPy."""
    random = np.random.default_rng(seed)
    shape = [int(length) + 1 for length in random.choice(LENGTHS, int(random.integers(1, 5)))]
    while np.prod(shape) > 1 << 20:
        shape[int(np.argmax(shape))] = 4
    dtype = NAMES[seed % len(NAMES)]
    host = random.integers(0, 100, shape).astype(dtype)
    return view(np.random.default_rng(seed), cupy.asarray(host)), view(np.random.default_rng(seed), host)


@pytest.mark.parametrize("seed", range(100))
def test_any_layout_is_copied_as_the_frameworks_copy_it(seed: int) -> None:
    array, expected = twins(seed)
    for order in ("C", "F"):
        copy = tb.to_torch(array, copy=True, order=order)
        np.testing.assert_array_equal(copy.cpu().numpy(), expected)
        viewed = tb.to_cupy(array, copy=True, order=order)
        np.testing.assert_array_equal(viewed.get(), expected)
        assert viewed.flags.c_contiguous if order == "C" else viewed.flags.f_contiguous
        assert viewed.data.ptr != array.data.ptr or not array.size
    plan = tb.plan(array, "torch", copy=True)
    assert plan.copied_by == "kernels"


@pytest.mark.parametrize("seed", range(20))
def test_tensorflow_takes_any_layout(seed: int) -> None:
    tensorflow()
    array, expected = twins(seed)
    np.testing.assert_array_equal(tb.to_tensorflow(array).numpy(), expected)


@pytest.mark.parametrize("seed", range(50))
def test_any_layout_is_copied_into_any_slice(seed: int) -> None:
    array, expected = twins(seed)
    for module in (torch, cupy):
        shape = [2 * length + 1 for length in expected.shape]
        base = module.zeros(
            tuple(shape), dtype=getattr(module, expected.dtype.name), **({"device": "cuda"} if module is torch else {})
        )
        part = base[tuple(slice(1, 1 + 2 * length, 2) for length in expected.shape)]
        assert tb.copy(array, out=part) is part
        whole = np.zeros(shape, expected.dtype)
        whole[tuple(slice(1, 1 + 2 * length, 2) for length in expected.shape)] = expected
        np.testing.assert_array_equal(cupy.asarray(base).get(), whole)


def test_a_copy_is_a_tensor_of_the_target_and_no_view() -> None:
    before = memory.views()
    copy = tb.to_torch(cupy.arange(12.0).reshape(3, 4), copy=True)
    assert memory.views() == before
    copy.resize_(100)


def test_a_permuted_tensor_for_tensorflow_is_one_kernel() -> None:
    tensorflow()
    nchw = torch.randn(8, 3, 64, 65, device="cuda")
    tb.to_tensorflow(nchw, permute=(0, 2, 3, 1))
    torch.cuda.synchronize()
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        nhwc = tb.to_tensorflow(nchw, permute=(0, 2, 3, 1))
        torch.cuda.synchronize()
    work = [event.name for event in profiled.events() if event.device_type.name == "CUDA"]
    assert len([name for name in work if "mem" not in name.lower()]) == 1, work
    assert not [name for name in work if "mem" in name.lower()], work
    np.testing.assert_array_equal(nhwc.numpy(), nchw.permute(0, 2, 3, 1).cpu().numpy())


def test_deferred_operations_are_part_of_the_kernel() -> None:
    z = torch.randn(33, 65, dtype=torch.complex64, device="cuda")
    for pending in (z.conj(), z.conj().imag, z.t().conj()):
        plan = tb.plan(pending, "cupy")
        assert plan.copied_by == "kernels"
        np.testing.assert_array_equal(tb.to_cupy(pending).get(), pending.resolve_conj().resolve_neg().cpu().numpy())


@pytest.mark.parametrize("into", [False, True])
def test_a_copy_waits_for_the_producer(into: bool) -> None:
    writer = torch.cuda.Stream()
    source = torch.zeros(257, 129, device="cuda")
    target = cupy.zeros((129, 257), np.float32)
    # The first calls load kernels, which may wait for the device.
    assert bool((tb.copy(tb.to_cupy(source.t(), copy=True), out=target) == 0).all())
    late = 0
    for i in range(1, ROUNDS + 1):
        reader = cupy.cuda.Stream(non_blocking=True)
        with torch.cuda.stream(writer):
            torch.cuda._sleep(LATE)
            source.fill_(i)
            with reader:
                copy = tb.copy(source.t(), out=target) if into else tb.to_cupy(source.t(), copy=True)
                seen = (copy == i).all()
        late += not writer.query()
        reader.synchronize()
        assert bool(seen), f"round {i}"
        torch.cuda.synchronize()
    assert late, "the kernel before the write is too short for this test"


@pytest.mark.parametrize("into", [False, True])
def test_the_source_is_not_reused_before_it_has_been_copied(into: bool) -> None:
    reader = cupy.cuda.Stream(non_blocking=True)
    target = cupy.zeros((512, 512), np.float32)
    late = torch.cuda.ExternalStream(reader.ptr)
    for i in range(1, ROUNDS + 1):
        source = torch.full((512, 512), float(i), device="cuda")
        with reader:
            with torch.cuda.stream(late):
                torch.cuda._sleep(LATE)
            copy = tb.copy(source.t(), out=target) if into else tb.to_cupy(source.t(), copy=True)
        del source
        gc.collect(0)
        # PyTorch reuses the block at once, in its own stream.
        garbage = [torch.full((512, 512), -1.0, device="cuda") for _ in range(3)]
        reader.synchronize()
        assert bool((copy == i).all()), f"round {i}"
        del garbage


def test_a_target_that_is_a_view_is_written_before_its_owner_reuses_it() -> None:
    reader = torch.cuda.Stream()
    for i in range(ROUNDS):
        owned = cupy.zeros(1 << 18, np.float32)
        with torch.cuda.stream(reader):
            target = tb.to_torch(owned)
            torch.cuda._sleep(LATE)
            tb.copy(torch.ones(1 << 18, device="cuda"), out=target)
        del owned, target
        # CuPy reuses the block in its own stream, which waits for the write.
        reused = cupy.full(1 << 18, 2.0, np.float32)
        torch.cuda.synchronize()
        assert bool((reused == 2).all()), f"round {i}"


def test_autograd_notices_the_write() -> None:
    weight = torch.ones(3, device="cuda", requires_grad=True)
    saved = torch.full((3,), 2.0, device="cuda")
    result = (weight * saved).sum()
    tb.copy(cupy.zeros(3, np.float32), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_what_cannot_be_copied_is_refused() -> None:
    array = cupy.zeros((2, 3), np.float32)
    for out, words in [
        (array, "share memory"),
        (tb.to_torch(array), "share memory"),
        (cupy.broadcast_to(cupy.zeros((1, 3), np.float32), (2, 3)), "two elements at one address"),
        (torch.zeros(2, 3, dtype=torch.float64, device="cuda"), "cast the source first"),
        (torch.zeros(3, 2, device="cuda"), "reshape or slice"),
        (torch.zeros(2, 3, device="cuda", requires_grad=True), "detach"),
    ]:
        with pytest.raises(tb.BridgeError, match=words):
            tb.copy(array, out=out)
    tf = tensorflow()
    with tf.device("GPU:0"), pytest.raises(tb.BridgeError, match="cannot be overwritten"):
        tb.copy(array, out=tf.zeros((2, 3)))


@pytest.mark.parametrize("rows", [2, 3])
def test_elements_that_lie_gigabytes_apart_are_copied(rows: int) -> None:
    if torch.cuda.mem_get_info()[0] < rows * (1 << 31) + (1 << 30):
        pytest.skip("the device has too little free memory")
    stride = (1 << 31) + 4096
    base = torch.empty((rows - 1) * stride + 70, dtype=torch.uint8, device="cuda")
    far = base.as_strided((rows, 70), (stride, 1))
    expected = torch.arange(rows * 70, device="cuda").to(torch.uint8).reshape(rows, 70)
    far.copy_(expected)
    for source, wanted in ((far, expected), (far.t(), expected.t())):
        assert bool((tb.to_cupy(source, copy=True) == cupy.asarray(wanted.contiguous())).all())
    far.zero_()
    tb.copy(cupy.asarray(expected), out=far)
    assert torch.equal(far, expected)


def test_more_than_two_to_the_31_elements_are_copied() -> None:
    count = (1 << 31) + 4097
    if torch.cuda.mem_get_info()[0] < 3 * count:
        pytest.skip("the device has too little free memory")
    source = torch.empty(count, dtype=torch.uint8, device="cuda").random_(0, 251)
    for viewed in (source.view(-1), source[: count - 1].view(2, -1).t()):
        copy = tb.to_cupy(viewed, copy=True)
        assert torch.equal(tb.to_torch(copy), viewed)
        del copy


def test_copies_in_a_graph() -> None:
    source = torch.rand(64, 65, device="cuda")
    target = torch.zeros(65, 64, device="cuda")
    tb.copy(source.t(), out=target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tb.copy(source.t(), out=target)
    source.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(target, source.t())


def test_a_target_in_another_memory_is_moved_to() -> None:
    host = np.zeros((65, 33), np.float32)
    source = torch.rand(33, 65, device="cuda")
    assert tb.copy(source.t(), out=host) is host
    np.testing.assert_array_equal(host, source.t().cpu().numpy())
    for target in (torch.zeros(4, 65, 33, device="cuda"), cupy.zeros((4, 65, 33), np.float32)):
        tb.copy(host, out=target[2])
        np.testing.assert_array_equal(cupy.asarray(target[2]).get(), host)
        assert not bool(target[1].any())
    z = torch.randn(7, dtype=torch.complex64, device="cuda")
    into = torch.zeros(7, dtype=torch.complex64).conj()
    tb.copy(z, out=into)
    assert torch.equal(into, z.cpu())


# ``tb.copy`` and ``tb.copier`` with ``dtype=``, on a CUDA device: PyTorch's casts on the device judge the values.


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
    # Other tensors between them, which are copied.
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
