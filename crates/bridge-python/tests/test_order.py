"""The order of elements and the permutation of dimensions, on the way from one framework into another."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")

ORDERS = {"C": "C_CONTIGUOUS", "F": "F_CONTIGUOUS"}


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("source", ["torch", "numpy"])
@pytest.mark.parametrize("target", ["torch", "numpy"])
def test_an_order_is_in_place_where_the_tensor_has_it(source: str, target: str, order: str) -> None:
    for array in (numbers(3, 4, 5), numbers(3, 4, 5).T, numbers(3, 4, 10)[:, :, ::2]):
        x = tb.convert(array, source)
        y = tb.convert(x, target, order=order)
        plan = tb.plan(x, target, order=order)
        seen = tb.to_numpy(y)
        assert seen.flags[ORDERS[order]]
        np.testing.assert_array_equal(seen, array)
        assert plan.zero_copy == array.flags[ORDERS[order]] == (seen.ctypes.data == array.ctypes.data)
        assert plan.zero_copy or plan.reason == "another order than the requested one"
        assert tb.plan(x, target, order=order, copy=True).nbytes == array.nbytes
        if not plan.zero_copy:
            with pytest.raises(tb.BridgeBufferError, match="copy=None"):
                tb.convert(x, target, order=order, copy=False)


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
def test_a_permutation_is_a_view_where_the_target_takes_it(axes: tuple[int, ...]) -> None:
    array = numbers(3, 4, 5)
    tensor = tb.to_torch(array, permute=axes, copy=False)
    assert tensor.data_ptr() == array.ctypes.data
    np.testing.assert_array_equal(tensor.numpy(), array.transpose(axes))
    back = tb.to_numpy(torch.from_numpy(array), permute=[axis - 3 for axis in axes], copy=False)
    np.testing.assert_array_equal(back, array.transpose(axes))
    assert back.ctypes.data == array.ctypes.data
    compact = tb.to_torch(array, permute=axes, order="C")
    assert compact.is_contiguous()
    np.testing.assert_array_equal(compact.numpy(), array.transpose(axes))


def test_a_permutation_and_a_deferred_operation_are_one_copy() -> None:
    z = torch.randn(2, 3, 4, dtype=torch.complex64)
    for pending in (z.conj(), z.conj().imag):
        array = tb.to_numpy(pending, permute=(2, 0, 1), order="C")
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, pending.resolve_conj().resolve_neg().permute(2, 0, 1).numpy())


def test_tensors_without_elements_and_without_dimensions() -> None:
    for order in ORDERS:
        assert tb.to_torch(np.float32(3) * np.ones(()), order=order, permute=()).item() == 3
        assert tb.to_torch(np.ones((2, 0, 3)), order=order, permute=(2, 0, 1)).shape == (3, 2, 0)


def test_tensorflow_takes_row_major_tensors_only() -> None:
    pytest.importorskip("tensorflow")
    nchw = torch.arange(120.0).reshape(2, 3, 4, 5)
    nhwc = tb.to_tensorflow(nchw, permute=(0, 2, 3, 1))
    np.testing.assert_array_equal(nhwc.numpy(), nchw.permute(0, 2, 3, 1).numpy())
    assert tb.plan(nchw, "tensorflow", permute=(0, 2, 3, 1)).nbytes == 480
    # A permuted view that is compact crosses in place.
    assert tb.plan(nchw.permute(0, 2, 3, 1), "tensorflow", permute=(0, 3, 1, 2)).zero_copy
    for call in (tb.convert, tb.plan):
        with pytest.raises(tb.BridgeValueError, match="row-major tensors only.*permute="):
            call(nchw, "tensorflow", order="F")
    assert tb.to_tensorflow(torch.ones(3), order="F").shape == (3,)
    back = tb.to_torch(nhwc, permute=(0, 3, 1, 2))
    assert torch.equal(back, nchw)
    assert back.data_ptr() == tb.to_numpy(nhwc).ctypes.data


class Long:
    """Axes that say that they take more memory than there is."""

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, index: int) -> int:
        return [0][index]


REFUSED = {
    "an order": ({"order": "A"}, "is not an order"),
    "an order that is not a str": ({"order": 1}, "an order is a str"),
    "a way that is none": ({"via": "disk"}, 'pass "host"'),
    "a via that is not a str": ({"via": 1}, "via is a str"),
    "a way of copies without copies": ({"via": "host", "copy": False}, "leave copy=False or via"),
    "too few axes": ({"permute": (0,)}, "pass 2 different axes"),
    "an axis twice": ({"permute": (0, -2)}, "pass 2 different axes"),
    "an axis too large": ({"permute": (0, 2)}, "pass 2 different axes"),
    "axes that no tensor has": ({"permute": (0, 2**62)}, "at most 64"),
    "axes that are not numbers": ({"permute": "01"}, "tuple of axes"),
    "an axis that does not fit": ({"permute": (0, 2**70)}, "tuple of axes"),
    "no tuple": ({"permute": 1}, "tuple of axes"),
    "axes without an order": ({"permute": {0, 1}}, "tuple of axes"),
    "axes by name": ({"permute": {0: 0, 1: 1}}, "tuple of axes"),
    "very many axes": ({"permute": range(10**9)}, "and more names dimensions"),
    "a length that is a lie": ({"permute": Long()}, "pass 2 different axes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_order_and_no_permutation_is_refused(case: str) -> None:
    keywords, words = REFUSED[case]
    for call in (tb.convert, tb.plan):
        with pytest.raises(tb.BridgeValueError, match=words) as caught:
            call(np.ones((2, 3)), "torch", **keywords)  # type: ignore[operator]
        assert caught.value.kind == "argument"
