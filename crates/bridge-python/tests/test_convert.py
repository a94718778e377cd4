"""torch ↔ NumPy on the host: in place where it can be, copied where it must be, refused where it would be wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import memory
import truebridge as tb

torch: Any = pytest.importorskip("torch")

DTYPES = tb.profile("torch")["dtypes"]


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_crosses_in_place_or_is_refused_by_name(name: str) -> None:
    tensor = torch.zeros(6, dtype=torch.uint8).repeat(16).view(getattr(torch, name))
    if name in tb.profile("numpy")["dtypes"]:
        array = tb.to_numpy(tensor)
        assert array.dtype.name == name
        assert array.ctypes.data == tensor.data_ptr()
        back = tb.to_torch(array)
        assert back.dtype == tensor.dtype
        assert back.data_ptr() == tensor.data_ptr()
    else:
        with pytest.raises(tb.BridgeTypeError, match=name):
            tb.to_numpy(tensor)


def test_numpy_lacks_at_most_complex32_and_packed_float4() -> None:
    """Older versions of ml_dtypes, which brings the others, do not have it."""
    assert set(DTYPES) - set(tb.profile("numpy")["dtypes"]) <= {"complex32", "float4_e2m1fn_x2"}


VIEWS = {
    "whole": lambda x: x,
    "0-d": lambda x: x[1, 2, 3],
    "zero-size": lambda x: x[:, 1:1],
    "offset": lambda x: x[1:, 2:],
    "steps": lambda x: x[::2, :, ::3],
    "transposed": lambda x: x.T if isinstance(x, np.ndarray) else x.permute(2, 1, 0),
    "size-1": lambda x: x[1:2, :, 3:4],
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_torch_cross_in_place(view: str) -> None:
    tensor = VIEWS[view](torch.arange(60.0).reshape(3, 4, 5))
    array = tb.to_numpy(tensor, copy=False)
    assert array.shape == tuple(tensor.shape)
    assert array.tolist() == tensor.tolist()
    if array.size:
        assert array.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_numpy_cross_in_place(view: str) -> None:
    array = VIEWS[view](np.arange(60.0).reshape(3, 4, 5))
    tensor = tb.to_torch(np.asarray(array), copy=False)
    assert tuple(tensor.shape) == array.shape
    assert tensor.tolist() == array.tolist()


def test_broadcast_views_keep_their_stride_of_zero() -> None:
    array = tb.to_numpy(torch.arange(3).expand(4, 3))
    assert array.strides == (0, 8)
    assert array.tolist() == [[0, 1, 2]] * 4


def test_writes_are_seen_on_both_sides() -> None:
    tensor = torch.zeros(4)
    array = tb.to_numpy(tensor)
    array[1] = 5
    tensor[2] = 7
    assert tensor.tolist() == array.tolist() == [0, 5, 7, 0]


@pytest.mark.parametrize("target", ["numpy", "torch"])
@pytest.mark.parametrize("source", ["numpy", "torch", "backwards"])
def test_a_copy_is_memory_of_the_target(source: str, target: str) -> None:
    array = np.arange(300.0)
    x = {"numpy": array, "torch": torch.from_numpy(array), "backwards": array[::-1]}[source]
    before = memory.views()
    copy = tb.convert(x, target, copy=True)
    assert memory.views() == before, "the copy is a view of a copy"
    assert copy.tolist() == x.tolist()


def test_copy_is_as_in_the_array_api() -> None:
    array = np.arange(4.0)
    assert tb.to_torch(array, copy=None).data_ptr() == array.ctypes.data
    assert tb.to_torch(array, copy=False).data_ptr() == array.ctypes.data
    assert tb.to_torch(array, copy=True).data_ptr() != array.ctypes.data
    assert tb.to_torch(array[::-1]).tolist() == [3, 2, 1, 0]
    with pytest.raises(tb.BridgeBufferError, match="negative strides.*copy=None") as caught:
        tb.to_torch(array[::-1], copy=False)
    assert caught.value.kind == "copy_needed"


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_pending_conjugation_and_negation_are_done(name: str) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j], dtype=getattr(torch, name))
    assert tb.to_numpy(z.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert tb.to_numpy(z.conj().imag).tolist() == [-2, 4]
    assert tb.plan(z.conj().imag, "numpy").reason == "a pending negation"
    both = torch._neg_view(z.conj())
    assert tb.to_numpy(both).tolist() == tb.to_torch(both, copy=True).tolist() == [-1 + 2j, -3 - 4j]
    for pending in (z.conj(), z.conj().imag, both):
        with pytest.raises(tb.BridgeBufferError, match="pending"):
            tb.to_numpy(pending, copy=False)


def test_read_only_is_kept_or_refused() -> None:
    array = np.arange(4.0)
    array.flags.writeable = False
    assert not tb.to_numpy(array).flags.writeable
    with pytest.raises(tb.BridgeBufferError, match="read-only.*copy=True"):
        tb.to_torch(array)
    tensor = tb.to_torch(array, copy=True)
    tensor[0] = 9
    assert array[0] == 0
    # A copy that is made anyway is writable.
    assert tb.to_torch(array[::-1]).tolist() == [3, 2, 1, 0]


def test_unaligned_arrays_are_copied() -> None:
    array = np.frombuffer(bytearray(41), np.uint8)[1:].view(np.float32)
    assert tb.plan(array, "torch").reason == "an unaligned address"
    assert tb.to_torch(array).shape == (10,)


def test_convert_and_plan_name_the_target() -> None:
    tensor = torch.ones(3)
    assert isinstance(tb.convert(tensor, "numpy"), np.ndarray)
    plan = tb.plan(tensor, "numpy")
    assert (plan.zero_copy, plan.reason, plan.nbytes, plan.device) == (True, None, 0, "cpu")
    assert plan.copied_by is None
    assert repr(plan) == "<Plan: zero copy on cpu>"
    plan = tb.plan(np.ones(3)[::-1], "torch")
    assert (plan.zero_copy, plan.reason, plan.nbytes) == (False, "negative strides", 24)
    assert plan.copied_by == "host"
    assert repr(plan) == "<Plan: copy of 24 bytes on cpu by host because of negative strides>"


def test_to_the_same_framework() -> None:
    tensor, array = torch.ones(3), np.ones(3)
    assert tb.to_torch(tensor).data_ptr() == tensor.data_ptr()
    assert tb.to_numpy(array).ctypes.data == array.ctypes.data


def test_parameters_and_subclasses() -> None:
    class Named(torch.Tensor):
        pass

    assert tb.to_numpy(torch.ones(2).as_subclass(Named)).tolist() == [1, 1]
    assert tb.to_numpy(torch.nn.Parameter(torch.ones(2), requires_grad=False)).tolist() == [1, 1]
    assert tb.to_torch(np.ones((2, 2)).view(np.matrix)).tolist() == [[1, 1], [1, 1]]
