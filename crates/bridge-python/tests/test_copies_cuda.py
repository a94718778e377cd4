"""Copies and casts of single tensors on a CUDA device, and which kernels make them.

Properties of the suite judge values, the order of the streams and refusals: ``copy``, ``elements``, ``targets``,
``torn``, ``release_order`` and ``huge``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import memory
import truebridge as tb

torch: Any = pytest.importorskip("torch")
cupy: Any = pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from casting import CASTS, DTYPES, numbers, same  # noqa: E402
from devices import work  # noqa: E402

#: Cycles of a kernel of some milliseconds.
LATE = 10_000_000
ROUNDS = 50
NAMES = ["uint8", "float16", "float32", "float64", "complex128"]
LENGTHS = [1, 2, 3, 4, 15, 16, 17, 31, 32, 33, 63, 65, 129]


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
    if not pytest.importorskip("tensorflow").config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow has no GPU")
    nchw = torch.randn(8, 3, 64, 65, device="cuda")
    found = work(lambda: tb.to_tensorflow(nchw, permute=(0, 2, 3, 1)))
    assert len(found) == 1 and "mem" not in found[0].lower(), found


def test_deferred_operations_are_part_of_the_kernel() -> None:
    z = torch.randn(33, 65, dtype=torch.complex64, device="cuda")
    for pending in (z.conj(), z.conj().imag, z.t().conj()):
        plan = tb.plan(pending, "cupy")
        assert plan.copied_by == "kernels"
        np.testing.assert_array_equal(tb.to_cupy(pending).get(), pending.resolve_conj().resolve_neg().cpu().numpy())


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


@pytest.mark.parametrize("rows", [2, 3])
def test_elements_that_lie_gigabytes_apart_are_written(rows: int) -> None:
    """The property ``far`` reads such elements."""
    if torch.cuda.mem_get_info()[0] < rows * (1 << 31) + (1 << 30):
        pytest.skip("the device has too little free memory")
    stride = (1 << 31) + 4096
    base = torch.zeros((rows - 1) * stride + 70, dtype=torch.uint8, device="cuda")
    far = base.as_strided((rows, 70), (stride, 1))
    expected = torch.arange(rows * 70, device="cuda").to(torch.uint8).reshape(rows, 70)
    tb.copy(cupy.asarray(expected), out=far)
    assert torch.equal(far, expected)


def test_an_operation_that_a_target_in_another_memory_defers_is_done() -> None:
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


def test_elements_at_any_address_are_cast() -> None:
    source = np.linspace(-5, 5, 1000, dtype=np.float32)
    for shift in (1, 2, 4):
        memory = cupy.zeros(4 * 1000 + shift, cupy.uint8)
        memory[shift:] = cupy.asarray(source.view(np.uint8))
        strange = cupy.ndarray(1000, cupy.float32, memory.data + shift)
        target = torch.zeros(1000, dtype=torch.float16, device="cuda")
        tb.copy(strange, out=target, dtype="float16")
        same(target.cpu(), torch.from_numpy(source).half())


def test_a_tree_of_casts_is_one_kernel_whatever_its_dtypes_and_strides() -> None:
    names = ["float32", "float16", "float64", "float8_e5m2"]
    sources = [torch.rand(20, 100 + index, device="cuda").to(DTYPES[names[index % 4]]) for index in range(100)]
    sources = [source.t() if index % 3 == 0 else source for index, source in enumerate(sources)]
    targets = [torch.zeros(source.shape, dtype=torch.bfloat16, device="cuda") for source in sources]
    found = work(lambda: tb.copy(sources, out=targets, dtype="bfloat16"))
    assert len([name for name in found if "cast" in name]) == 1 and len(found) == 2, found
    for source, target in zip(sources, targets, strict=True):
        same(target, source.to(torch.bfloat16))
