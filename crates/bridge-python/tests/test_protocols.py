"""Producers known only by a protocol: old and new forms of ``__dlpack__``, and the array interfaces."""

from __future__ import annotations

import ctypes
import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from capsules import CPU, CUDA, Producer, with_current_stream

torch: Any = pytest.importorskip("torch")


class Base:
    """A producer over an array; subclasses know more or fewer arguments."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0)


class Ancient(Base):
    def __dlpack__(self, stream: object = None) -> object:
        return self.array.__dlpack__(stream=stream)


class WithoutCopy(Base):
    def __dlpack__(self, *, stream: object = None, max_version: object = None) -> object:
        return self.array.__dlpack__(stream=stream, max_version=max_version)


class IgnoresCopy(Base):
    def __dlpack__(self, *, stream: object = None, max_version: object = None, **_: object) -> object:
        return self.array.__dlpack__(stream=stream, max_version=max_version)


class RefusesCopy(Base):
    def __dlpack__(self, *, copy: bool | None = None, **arguments: Any) -> object:
        if copy:
            raise BufferError("no copies here")
        return self.array.__dlpack__(**arguments)


class Copies(Base):
    def __dlpack__(self, **arguments: Any) -> object:
        return self.array.__dlpack__(**arguments)


PRODUCERS = [Ancient, WithoutCopy, IgnoresCopy, RefusesCopy, Copies]


@pytest.mark.parametrize("target", ["numpy", "torch"])
@pytest.mark.parametrize("kind", PRODUCERS)
def test_a_copy_is_a_copy_whatever_the_producer_knows(kind: type[Base], target: str) -> None:
    array = np.arange(6.0)
    result = tb.convert(kind(array), target, copy=True)
    array[:] = -1
    assert result.tolist() == [0, 1, 2, 3, 4, 5]
    result[0] = 9
    assert array[0] == -1


@pytest.mark.parametrize("kind", PRODUCERS)
def test_a_copy_that_is_needed_is_made_whatever_the_producer_knows(kind: type[Base]) -> None:
    array = np.arange(6.0)[::-1]
    assert tb.plan(kind(array), "torch").reason == "negative strides"
    assert tb.to_torch(kind(array)).tolist() == [5, 4, 3, 2, 1, 0]
    with pytest.raises(tb.BridgeBufferError, match="negative strides"):
        tb.to_torch(kind(array), copy=False)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_a_bare_capsule_is_copied(target: str, legacy: bool) -> None:
    producer = Producer(legacy=legacy)
    result = tb.convert(producer.capsule(), target, copy=True)
    assert producer.deleted == 1
    ctypes.memset(producer.data, 0, 32)
    assert result.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


class KeepsLess(Ancient):
    """As a value of ONNX Runtime, whose capsule does not keep the NumPy array that the value is over."""

    __module__ = "onnxruntime.capi"


class Extended(KeepsLess):
    """A class of the user's."""


@pytest.mark.parametrize("producers", [KeepsLess, Extended])
@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_a_producer_whose_capsule_keeps_less_is_kept(target: str, producers: type[KeepsLess]) -> None:
    producer = producers(np.arange(4.0))
    kept = weakref.ref(producer)
    view = tb.convert(producer, target)
    del producer
    gc.collect()
    assert kept() is not None and view.tolist() == [0, 1, 2, 3]
    del view
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_a_producer_that_has_its_view_as_an_attribute_is_collected(target: str) -> None:
    producer: Any = Ancient(np.arange(4.0))
    producer.view = tb.convert(producer, target)
    gone = weakref.ref(producer)
    del producer
    gc.collect()
    assert gone() is None


def test_a_view_of_a_value_of_onnx_runtime_outlives_it() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    for number in range(20):
        value = onnxruntime.OrtValue.ortvalue_from_numpy(np.full(256, number, "float32"))
        view = tb.to_torch(value)
        del value
        gc.collect()
        # What is freed is used again by one of these.
        others = [onnxruntime.OrtValue.ortvalue_from_numpy(np.full(256, -1.0, "float32")) for _ in range(20)]
        assert view.tolist() == [number] * 256 and len(others) == 20


def test_a_producer_may_lack_the_device() -> None:
    class NoDevice:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, *, stream: object = None, max_version: object = None, copy: object = None) -> object:
            assert stream is None
            return self.array.__dlpack__(max_version=max_version, copy=copy)

    array = np.arange(4.0)
    assert tb.to_torch(NoDevice(array)).data_ptr() == array.ctypes.data
    assert tb.to_torch(NoDevice(array), copy=True).data_ptr() != array.ctypes.data


def test_a_refusal_is_a_buffer_error() -> None:
    class Refuses(Base):
        def __dlpack__(self, **_: object) -> object:
            raise BufferError("the memory is not mine to export")

    with pytest.raises(BufferError, match="not mine to export") as caught:
        tb.to_numpy(Refuses(np.ones(1)))
    assert (type(caught.value), getattr(caught.value, "kind", None)) == (tb.BridgeBufferError, "refused")
    assert type(caught.value.__cause__) is BufferError


def test_an_unaligned_producer_reaches_tensorflow() -> None:
    """Of 16-byte aligned memory TensorFlow gets a copy, also where the producer's own copy is no better aligned."""
    pytest.importorskip("tensorflow")
    memory = np.zeros(1 << 12, np.uint8)
    start = -memory.ctypes.data % 64 + 16
    array = memory[start : start + 256].view(np.float64)
    array[:] = np.arange(32)

    class Aligned16(Base):
        def __dlpack__(self, *, copy: bool | None = None, **arguments: Any) -> object:
            assert self.array.ctypes.data % 64 == 16
            if not copy:
                return self.array.__dlpack__(**arguments)
            other = memory[start + 512 : start + 768].view(np.float64)
            other[:] = self.array
            return other.__dlpack__(**arguments)

    assert tb.plan(Aligned16(array), "tensorflow").reason == "an unaligned address"
    assert tb.to_tensorflow(Aligned16(array)).numpy().tolist() == list(range(32))


def test_what_programs_catch_stays_what_it_is() -> None:
    class Raises(Base):
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def __dlpack__(self, **_: object) -> object:
            raise self.error

    cupy_error: Any = type("OutOfMemoryError", (Exception,), {"__module__": "cupy.cuda.memory"})
    errors = [torch.OutOfMemoryError("full"), RecursionError("deep"), cupy_error("full")]
    for error in errors:
        for copy in (None, True):
            with pytest.raises(type(error)) as caught:
                tb.to_numpy(Raises(error), copy=copy)
            assert caught.value is error
    lookalike: Any = type("OutOfMemoryError", (Exception,), {"__module__": "mine"})
    with pytest.raises(tb.BridgeRuntimeError, match=r"mine\.OutOfMemoryError: full"):
        tb.to_numpy(Raises(lookalike("full")))


def test_a_full_memory_of_tensorflow_stays_what_it_is() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    error = tensorflow.errors.ResourceExhaustedError(None, None, "full")

    class Raises(Base):
        def __dlpack__(self, **_: object) -> object:
            raise error

    with pytest.raises(tensorflow.errors.ResourceExhaustedError) as caught:
        tb.to_numpy(Raises(np.ones(1)))
    assert caught.value is error


class Interface:
    """An object with only ``__array_interface__``."""

    def __init__(self, array: np.ndarray, **changes: object) -> None:
        self.array, self.changes = array, changes

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {**self.array.__array_interface__, **self.changes}


@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_an_array_interface_is_enough(target: str) -> None:
    array = np.arange(12.0).reshape(3, 4).T
    producer = Interface(array)
    alive = weakref.ref(producer)
    view = tb.convert(producer, target)
    del producer
    gc.collect()
    assert alive() is not None
    assert view.tolist() == array.tolist()
    assert (view.ctypes.data if target == "numpy" else view.data_ptr()) == array.ctypes.data
    del view
    gc.collect()
    assert alive() is None


def test_an_array_interface_is_screened() -> None:
    array = np.arange(6.0)
    frozen = Interface(array, data=(array.ctypes.data, True))
    assert not tb.to_numpy(frozen).flags.writeable
    with pytest.raises(tb.BridgeBufferError, match="read-only"):
        tb.to_torch(frozen)
    assert tb.to_torch(frozen, copy=True).tolist() == array.tolist()
    assert tb.to_torch(Interface(array, shape=(3,), strides=(-8,), data=(array.ctypes.data + 16, False))).tolist() == [
        2,
        1,
        0,
    ]
    empty = Interface(array, shape=(0,), strides=None, data=(0, False))
    assert tb.to_torch(empty).shape == (0,)
    buffer = Interface(array, data=bytes(range(8)), typestr="|u1", shape=(4,), strides=None, offset=2)
    assert tb.to_numpy(buffer).tolist() == [2, 3, 4, 5]
    for changes, builtin, words in [
        ({"typestr": ">f8"}, TypeError, "byte order"),
        ({"typestr": "<M8[D]"}, TypeError, "counterpart"),
        ({"mask": array}, TypeError, "mask"),
        ({"data": (0, False)}, RuntimeError, "NULL"),
        ({"strides": (1 << 62,)}, ValueError, "strides"),
        ({"shape": (1 << 62,)}, RuntimeError, "too big"),
        ({"shape": "many"}, RuntimeError, "TypeError"),
        ({"typestr": None}, RuntimeError, "typestr"),
    ]:
        for target in ("numpy", "torch"):
            with pytest.raises(tb.BridgeError, match=words) as caught:
                tb.convert(Interface(array, **changes), target)  # type: ignore[arg-type]
            assert isinstance(caught.value, builtin), changes  # type: ignore[arg-type]


def test_an_array_interface_lies_in_its_buffer() -> None:
    """NumPy reads beyond it."""

    class Buffer:
        def __init__(self, **interface: Any) -> None:
            self.__array_interface__ = {"version": 3, "typestr": "<f8", "data": bytearray(64), **interface}

    assert tb.to_numpy(Buffer(shape=(3,), strides=(16,), offset=24)).tolist() == [0, 0, 0]
    assert tb.to_numpy(Buffer(shape=(8,), strides=(-8,), offset=56)).shape == (8,)
    assert tb.to_numpy(Buffer(shape=(0, 1000))).shape == (0, 1000)
    for interface in (
        {"shape": (9,)},
        {"shape": (8,), "offset": 8},
        {"shape": (2,), "offset": 1 << 40},
        {"shape": (5,), "strides": (16,)},
        {"shape": (8,), "strides": (-8,), "offset": 48},
    ):
        for call in (tb.to_numpy, lambda x: tb.to_numpy(x, copy=True), lambda x: tb.plan(x, "torch")):
            with pytest.raises(tb.BridgeError):
                call(Buffer(**interface))


def test_an_array_interface_without_data_is_over_the_buffer_of_its_object() -> None:
    class Buffer(bytearray):
        __array_interface__: Any = {"version": 3, "typestr": "|u1", "shape": (4,), "data": None, "offset": 2}

    producer = Buffer(range(8))
    for target in ("numpy", "torch"):
        view = tb.convert(producer, target)  # type: ignore[arg-type]
        assert view.tolist() == [2, 3, 4, 5]
        view[0] = 9
        assert producer[2] == 9
        view[0] = 2
        del view
        gc.collect()
        producer.append(0)
        del producer[-1]
    Buffer.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (4,), "offset": 5}
    with pytest.raises(tb.BridgeError, match="beyond its buffer") as caught:
        tb.to_numpy(producer)
    assert caught.value.kind == "protocol"

    class NoBuffer:
        __array_interface__ = Buffer.__array_interface__

    with pytest.raises(tb.BridgeError, match=r"NoBuffer has no buffer") as caught:
        tb.to_numpy(NoBuffer())
    assert caught.value.kind == "protocol"


def test_dlpack_goes_before_the_interfaces() -> None:
    class Both(Copies):
        @property
        def __array_interface__(self) -> dict[str, object]:
            raise AssertionError("never reached")

        __cuda_array_interface__ = __array_interface__

    array = np.arange(3.0)
    assert tb.to_torch(Both(array)).data_ptr() == array.ctypes.data


class CudaInterface:
    """An object with only ``__cuda_array_interface__``, over memory that is on no device."""

    def __init__(self, **changes: object) -> None:
        self.array = np.ones((2, 3), np.float32)
        self.changes = changes

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        interface = self.array.__array_interface__
        return {
            **{name: interface[name] for name in ("shape", "strides", "typestr", "data", "version")},
            **self.changes,
        }


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"typestr": ">f4"}, "dtype", "typestr"),
        ({"typestr": "|V4"}, "dtype", "typestr"),
        ({"typestr": "<f16"}, "dtype", "typestr"),
        ({"typestr": "ß" * 100_000}, "dtype", "typestr"),
        ({"typestr": 4}, "framework", "TypeError"),
        ({"mask": np.ones(3)}, "not_a_tensor", "mask"),
        ({"shape": None}, "protocol", "no shape"),
        ({"shape": [2, 3]}, "framework", "TypeError"),
        ({"shape": (-2, 3)}, "layout", "negative"),
        ({"shape": (1,) * 100}, "layout", "dimensions"),
        ({"shape": (1 << 40, 1 << 40)}, "layout", "overflow"),
        ({"strides": ((1 << 63) - 4, 4)}, "layout", "strides"),
        ({"strides": (6, 4)}, "layout", "not a whole number"),
        ({"strides": (4,)}, "layout", "differ in length"),
        ({"data": None}, "protocol", "no data"),
        ({"data": (None, False)}, "protocol", "no data"),
        # Without elements the address is not used: what is refused is the device, where there is none.
        ({"shape": (0, 3), "strides": None, "data": None}, "device|missing", "cuda|libcuda"),
        ({"shape": (0, 3), "strides": None, "data": (None, False)}, "device|missing", "cuda|libcuda"),
        ({"shape": (0, 3), "strides": None, "data": (0, False)}, "device|missing", "cuda|libcuda"),
        ({"data": (-1, False)}, "framework", "OverflowError"),
        ({"data": (1 << 64, False)}, "framework", "OverflowError"),
        ({"stream": 0, "version": 3}, "protocol", "stream 0"),
        ({}, "protocol", "has no memory|libcuda"),
    ],
)
def test_a_cuda_array_interface_is_screened(changes: dict[str, object], kind: str, words: str) -> None:
    with pytest.raises(tb.BridgeError, match=words) as caught:
        tb.to_torch(CudaInterface(**changes))
    # Without a driver there is no memory on a device at all.
    assert caught.value.kind in ({kind, "missing"} if not changes else kind.split("|"))
    assert len(str(caught.value)) < 1000


def test_strides_of_0_that_an_interface_leaves_out_are_noticed() -> None:
    class Broadcast(CudaInterface):
        strides = (0, 4)

    with pytest.raises(tb.BridgeError, match="some of 0") as caught:
        tb.to_torch(Broadcast(strides=None))
    assert caught.value.kind == "layout"


def test_a_subclass_of_ndarray_with_a_dlpack_of_its_own_is_taken_by_that() -> None:
    class Unversioned(np.ndarray):
        def __dlpack__(self, stream: object = None) -> object:
            return super().__dlpack__(stream=None)

    array = np.arange(5)
    assert tb.to_numpy(array).flags.writeable
    view = tb.to_numpy(array.view(Unversioned))
    assert view.ctypes.data == array.ctypes.data and not view.flags.writeable


@pytest.mark.parametrize("handle", [0, 1])
def test_the_exchange_table_of_a_producer_is_asked_for_its_stream_first(handle: int) -> None:
    """This machine has no device: the conversion fails when it looks for the memory."""
    events: list[Any] = []

    class OnDevice:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (CUDA, 3)

        def __dlpack__(self, *, stream: object = None, **_: object) -> object:
            events.append(("export", stream))
            raise BufferError("no memory")

    kind = with_current_stream(OnDevice, lambda *device: (events.append(device), handle)[1])
    with pytest.raises(tb.BridgeError, match="no memory"):
        tb.to_torch(kind())
    assert events == [(CUDA, 3), ("export", 1)]


def test_a_producer_without_a_current_stream_is_refused() -> None:
    class OnDevice(Copies):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (CUDA, 3)

    with pytest.raises(tb.BridgeBufferError, match="no current stream for cuda:3"):
        tb.to_torch(with_current_stream(OnDevice, lambda *_: None)(np.ones(3)))


def test_memory_of_the_host_has_no_stream_to_ask_for() -> None:
    kind = with_current_stream(Copies, lambda *_: None)
    assert tb.to_torch(kind(np.ones(3))).tolist() == [1, 1, 1]


# Fields of records, whose strides are not a whole number of elements: NumPy packs them, and so they are copied.


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
