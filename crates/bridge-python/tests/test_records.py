"""Fields of records, whose strides are not a whole number of elements: NumPy packs them, and so they are copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import truebridge as tb


def records() -> Any:
    """Return an array of records of 9 bytes."""
    array = np.zeros((3, 4), [("flag", "i1"), ("value", "f4"), ("count", "<i4")])
    array["value"] = np.arange(12, dtype="f4").reshape(3, 4)
    array["count"] = -np.arange(12).reshape(3, 4)
    return array


#: Views that no framework but NumPy has.
VIEWS: dict[str, Any] = {
    "a field": lambda: records()["value"],
    "a field after another": lambda: records()["count"],
    "a reversed field": lambda: records()["value"][::-1, ::2],
    "a transposed field": lambda: records()["count"].T,
    "a broadcast field": lambda: np.broadcast_to(records()["value"], (2, 3, 4)),
    "a field of one record": lambda: records()["value"][1:2],
    "overlapping elements": lambda: np.ndarray((5,), "f4", records().tobytes(), 1, (1,)),
}


@pytest.mark.parametrize("target", ["numpy", "torch", "tensorflow", "jax"])
@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.parametrize("name", VIEWS)
def test_a_field_is_copied(name: str, copy: bool | None, target: Any) -> None:
    pytest.importorskip(target)
    view = VIEWS[name]()
    plan = tb.plan(view, target, copy=copy)
    assert (plan.reason, plan.copied_by) == ("strides that are not a whole number of elements", "producer")
    result = tb.convert(view, target, copy=copy)
    np.testing.assert_array_equal(np.asarray(result), view)
    with pytest.raises(tb.BridgeError, match="because of strides that are not a whole number of elements"):
        tb.convert(view, target, copy=False)


def test_orders_and_permutations_are_those_asked_for() -> None:
    field = records()["value"]
    columns = tb.to_numpy(field, order="F")
    assert columns.flags.f_contiguous
    np.testing.assert_array_equal(columns, field)
    np.testing.assert_array_equal(tb.to_numpy(field, permute=(1, 0)), field.T)


def test_whole_strides_are_still_in_place() -> None:
    whole = np.zeros(3, [("a", "f4"), ("b", "f4")])
    tb.to_numpy(whole["b"], copy=False)[:] = 7
    assert whole["b"].tolist() == [7, 7, 7] and whole["a"].tolist() == [0, 0, 0]


def test_a_field_is_shared_and_saved(tmp_path: Path) -> None:
    field = records()["value"]
    np.testing.assert_array_equal(tb.open(tb.share(field), "numpy"), field)
    tb.save(tmp_path / "x.npy", field)
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), field)


def test_no_consumer_of_a_protocol_reads_other_elements() -> None:
    field = records()["value"]
    loan = tb.lend(field)
    np.testing.assert_array_equal(np.from_dlpack(loan), field)


def test_a_field_is_a_source_and_not_a_target_of_copy() -> None:
    array = records()
    before = array.tobytes()
    with pytest.raises(tb.BridgeLayoutError, match="of the target are not a whole number of elements"):
        tb.copy(np.ones((3, 4), "f4"), out=array["value"])
    assert array.tobytes() == before
    out = np.zeros((3, 4), "f4")
    np.testing.assert_array_equal(tb.copy(array["value"], out=out), array["value"])


# Lengths beyond 32 bits. Broadcast tensors have them, and take no memory.


#: Where 32 bits are taken for all, it becomes 5 or 0.
LENGTHS = [2**32 + 5, 2**33]


def broadcast(length: int) -> Any:
    return np.lib.stride_tricks.as_strided(np.ones(1, dtype=np.float32), (length, 3), (0, 0))


class Speaks:
    """Has nothing but the two methods of the protocol."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.tensor.__dlpack_device__()
        return device


@pytest.mark.parametrize("length", LENGTHS)
def test_torch_to_numpy(length: int) -> None:
    source = torch.ones(1).expand(length, 3)
    view = tb.to_numpy(source)
    assert (view.shape, view.strides) == ((length, 3), (0, 0))
    assert view[length - 1, 2] == 1 and view.ctypes.data == source.data_ptr()


@pytest.mark.parametrize("length", LENGTHS)
def test_numpy_to_torch_and_back(length: int) -> None:
    source = broadcast(length)
    view = tb.to_torch(source)
    assert (tuple(view.shape), view.stride()) == ((length, 3), (0, 0))
    assert view[length - 1, 2].item() == 1 and view.data_ptr() == source.ctypes.data
    assert tb.to_numpy(view).shape == (length, 3)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_capsule_keeps_its_lengths(length: int) -> None:
    for view in (tb.to_torch(Speaks(broadcast(length))), tb.to_numpy(Speaks(broadcast(length)))):
        assert tuple(view.shape) == (length, 3)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_plan_counts_the_bytes_of_all(length: int) -> None:
    assert tb.plan(broadcast(length)[:, ::-1], "torch").reason is None
    copy = tb.plan(broadcast(length), "torch", copy=True)
    assert f"{length * 12}" in repr(copy)


def test_without_elements() -> None:
    source = np.empty((2**33, 0, 3), dtype=np.uint8)
    assert tuple(tb.to_torch(source).shape) == source.shape
    assert tb.to_numpy(tb.to_torch(source)).shape == source.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("length", LENGTHS)
def test_torch_to_cupy_and_back(length: int) -> None:
    source = torch.ones(1, device="cuda").expand(length, 3)
    view = tb.to_cupy(source)
    assert (view.shape, view.strides, view.data.ptr) == ((length, 3), (0, 0), source.data_ptr())
    back = tb.to_torch(view)
    assert (tuple(back.shape), back.stride()) == ((length, 3), (0, 0))
