"""The keyword ``device`` where nothing can be moved: in place on the host, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")


def test_a_tensor_that_is_there_is_taken_in_place() -> None:
    array = np.arange(16.0)
    for copy in (None, False):
        assert tb.to_torch(array, device="cpu", copy=copy).data_ptr() == array.ctypes.data
    assert tb.plan(array, "torch", device="cpu").zero_copy


@pytest.mark.parametrize("device", ["cpu:3", (1, 3), torch.device("cpu", 3)])
def test_there_is_one_host_whatever_its_number(device: Any) -> None:
    array = np.arange(16.0)
    assert tb.to_torch(array, device=device, copy=False).data_ptr() == array.ctypes.data
    plan = tb.plan(array, "torch", device=device)
    assert (plan.zero_copy, plan.device) == (True, "cpu")


def test_a_copy_on_the_same_device_is_no_move() -> None:
    array = np.arange(16.0)
    assert tb.plan(array, "torch", device="cpu", copy=True).reason == "asked for"
    assert tb.to_torch(array, device="cpu", copy=True).data_ptr() != array.ctypes.data


@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", (13, 0), (10, 0)])
def test_a_target_without_such_a_device_refuses_the_move(device: Any, copy: bool | None) -> None:
    for call in (tb.convert, tb.plan):
        with pytest.raises(tb.BridgeValueError, match="numpy has only cpu") as caught:
            call(torch.ones(3), "numpy", device=device, copy=copy)
        assert caught.value.kind == "device"


def test_an_error_leaves_the_source_as_it_was() -> None:
    array = np.arange(16.0)
    with pytest.raises(tb.BridgeError):
        tb.to_numpy(array, device="cuda:0")
    assert array.tolist() == list(range(16))
    assert tb.to_torch(array, copy=False).data_ptr() == array.ctypes.data


def test_what_is_on_the_host_crosses_through_the_host_as_ever() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert tb.to_torch(array, via="host").data_ptr() == array.ctypes.data
    tree = tb.convert_numpy_to_pytorch({"x": array, "step": 7}, via="host", permute=(1, 0))
    assert tree["x"].data_ptr() == array.ctypes.data and tree["x"].shape == (3, 2) and tree["step"] == 7
    assert tb.plan(array, "torch", via="host") == tb.plan(array, "torch")
    with pytest.raises(tb.BridgeValueError, match="consumes it"):
        tb.to_torch(array.__dlpack__(), via="host")
