"""Capsules: what follows DLPack's rules crosses, what breaks them is refused, and the deleter runs exactly once."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import numpy as np
import pytest

import truebridge as tb
from capsules import CPU, CUDA, Producer, new_capsule

LAYOUTS = [False, True]


@pytest.mark.parametrize("legacy", LAYOUTS)
def test_a_good_capsule_crosses_in_place_and_is_deleted_with_the_last_view(legacy: bool) -> None:
    producer = Producer(legacy=legacy)
    array = tb.to_numpy(producer.capsule())
    assert array.ctypes.data == ctypes.addressof(producer.data)
    part = array[2:4]
    del array
    gc.collect()
    assert producer.deleted == 0
    assert part.tolist() == [2, 3]
    del part
    assert producer.deleted == 1


@pytest.mark.parametrize("legacy", LAYOUTS)
def test_no_deleter_is_no_fault(legacy: bool) -> None:
    producer = Producer(legacy=legacy, deleter=False)
    array = tb.to_numpy(producer.capsule())
    assert array.sum() == 28
    del array
    assert producer.deleted == 0


@pytest.mark.parametrize("legacy", LAYOUTS)
def test_strides_may_be_null_before_dlpack_1_2(legacy: bool) -> None:
    producer = Producer(legacy=legacy)
    producer.tensor.ndim = 2
    producer.shape[0], producer.shape[1] = 4, 2
    producer.tensor.strides = None
    assert tb.to_numpy(producer.capsule()).strides == (8, 4)
    gc.collect()
    assert producer.deleted == 1


def test_what_an_unversioned_capsule_does_not_say_numpy_takes_as_read_only() -> None:
    torch = pytest.importorskip("torch")
    producer = Producer(legacy=True)
    array = tb.to_numpy(producer.capsule())
    assert not array.flags.writeable
    assert np.from_dlpack(Legacy(producer)).flags.writeable == array.flags.writeable
    tensor = tb.to_torch(producer.capsule())
    tensor[0] = 7
    assert array[0] == 7
    assert isinstance(tensor, torch.Tensor)


class Legacy:
    """A producer of unversioned capsules."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0)

    def __dlpack__(self, **arguments: object) -> object:
        return self.producer.capsule()


def test_the_read_only_flag_is_kept() -> None:
    producer = Producer()
    producer.managed.flags = 1
    array = tb.to_numpy(producer.capsule())
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_negative_strides_and_offsets_are_kept() -> None:
    producer = Producer()
    producer.shape[0], producer.strides[0] = 4, -2
    producer.tensor.byte_offset = 7 * 4
    assert tb.to_numpy(producer.capsule()).tolist() == [7, 5, 3, 1]


def test_a_capsule_is_used_up_once() -> None:
    producer = Producer()
    capsule = producer.capsule()
    first = tb.to_numpy(capsule)
    with pytest.raises(tb.BridgeBufferError, match="consumed before") as caught:
        tb.to_numpy(capsule)
    assert caught.value.kind == "consumed"
    assert producer.deleted == 0
    del first
    assert producer.deleted == 1


def test_other_capsules_are_no_tensors() -> None:
    pytest.importorskip("torch")
    with pytest.raises(tb.BridgeTypeError):
        tb.to_torch(new_capsule(ctypes.addressof(ctypes.c_int(1)), b"something", None))


def test_a_look_does_not_use_the_capsule_up() -> None:
    capsule = Producer().capsule()
    with pytest.raises(tb.BridgeValueError, match="consumes"):
        tb.plan(capsule, "numpy")
    assert tb.to_numpy(capsule).shape == (8,)


Spoil = Callable[[Producer], object]

HOSTILE: dict[str, tuple[Spoil, type[Exception], str]] = {
    "major version 2": (lambda p: setattr(p.managed, "major", 2), BufferError, "version"),
    "null strides of 1.2": (
        lambda p: (setattr(p.managed, "minor", 2), setattr(p.tensor, "strides", None)),
        BufferError,
        "strides",
    ),
    "null shape": (lambda p: setattr(p.tensor, "shape", None), BufferError, "shape"),
    "null data": (lambda p: setattr(p.tensor, "data", None), BufferError, "null"),
    "negative ndim": (lambda p: setattr(p.tensor, "ndim", -1), BufferError, "ndim"),
    "wild ndim": (lambda p: setattr(p.tensor, "ndim", 1 << 30), BufferError, "dimensions"),
    "negative length": (lambda p: p.shape.__setitem__(0, -8), BufferError, "negative"),
    "overflowing shape": (
        lambda p: (setattr(p.tensor, "ndim", 2), p.shape.__setitem__(0, 1 << 40), p.shape.__setitem__(1, 1 << 40)),
        (BufferError, ValueError),  # type: ignore[dict-item]
        "overflow",
    ),
    "overflowing bytes": (lambda p: p.shape.__setitem__(0, 1 << 62), (BufferError, ValueError), "overflow"),  # type: ignore[dict-item]
    "overflowing strides": (lambda p: p.strides.__setitem__(0, 1 << 62), ValueError, "strides"),
    "least stride": (lambda p: p.strides.__setitem__(0, -(1 << 63)), ValueError, "strides"),
    "strides below address 0": (lambda p: p.strides.__setitem__(0, -(1 << 58)), BufferError, "address space"),
    "byte offset beyond the address space": (
        lambda p: setattr(p.tensor, "byte_offset", (1 << 64) - 1),
        BufferError,
        "byte_offset",
    ),
    "no bits": (lambda p: setattr(p.tensor, "bits", 0), BufferError, "bit"),
    "no lanes": (lambda p: setattr(p.tensor, "lanes", 0), BufferError, "lane"),
    "vector elements": (lambda p: setattr(p.tensor, "lanes", 4), TypeError, "lanes"),
    "packed elements": (lambda p: setattr(p.tensor, "bits", 4), TypeError, "whole bytes"),
    "unknown dtype": (lambda p: setattr(p.tensor, "code", 200), TypeError, "dtype"),
    "unknown device": (lambda p: setattr(p.tensor, "device_type", 99), ValueError, "does not have"),
    "negative device number": (
        lambda p: (setattr(p.tensor, "device_type", 2), setattr(p.tensor, "device_id", -3)),
        BufferError,
        "negative",
    ),
}


@pytest.mark.parametrize("target", ["numpy", "torch"])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_capsules_are_refused_and_given_back(case: str, target: str) -> None:
    pytest.importorskip(target)
    spoil, builtin, words = HOSTILE[case]
    producer = Producer()
    spoil(producer)
    with pytest.raises(tb.BridgeError, match=words) as caught:
        tb.convert(producer.capsule(), target)
    assert isinstance(caught.value, builtin)
    assert producer.deleted == 1


def test_a_capsule_that_lies_about_a_cuda_device() -> None:
    """Host memory is said to be on a GPU: without a driver that is missing, and with one it knows better."""
    producer = Producer()
    producer.tensor.device_type = CUDA
    with pytest.raises((tb.BridgeImportError, tb.BridgeBufferError)) as caught:
        tb.to_numpy(producer.capsule())
    assert caught.value.kind in ("missing", "protocol")
    assert producer.deleted == 1


class Foreign:
    """A producer that this package knows nothing of."""

    def __init__(self, array: np.ndarray, *, old: bool = False) -> None:
        self.array, self.old = array, old

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **arguments: object) -> object:
        if self.old and arguments:
            raise TypeError("unexpected keyword")
        return self.array.__dlpack__(**arguments)


@pytest.mark.parametrize("old", [False, True])
def test_any_producer_can_lend(old: bool) -> None:
    pytest.importorskip("torch")
    array = np.arange(6.0).reshape(2, 3).T
    tensor = tb.to_torch(Foreign(array, old=old))
    assert tensor.data_ptr() == array.ctypes.data
    assert tensor.stride() == (1, 3)


def test_a_producer_makes_its_copies_itself() -> None:
    pytest.importorskip("torch")
    array = np.arange(6.0)[::-1]
    with pytest.raises(tb.BridgeBufferError, match="negative strides"):
        tb.to_torch(Foreign(array), copy=False)
    tensor = tb.to_torch(Foreign(array))
    assert tensor.tolist() == [5, 4, 3, 2, 1, 0]


def test_what_a_producer_raises_is_told() -> None:
    class Broken:
        def __dlpack_device__(self) -> tuple[int, int]:
            raise LookupError("lost")

        def __dlpack__(self) -> object:
            raise AssertionError("never reached")

    with pytest.raises(tb.BridgeRuntimeError, match="lost") as caught:
        tb.to_numpy(Broken())
    assert isinstance(caught.value.__cause__, LookupError)
