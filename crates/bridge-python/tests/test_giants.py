"""Lengths beyond 32 bits. Broadcast tensors have them, and take no memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import truebridge as tb

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
