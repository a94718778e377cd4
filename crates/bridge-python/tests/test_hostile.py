"""Objects that lie, recurse, interrupt or leave errors behind: each ends in the right exception, and at once."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from capsules import CPU, CUDA, Producer, new_capsule

torch: Any = pytest.importorskip("torch")


TARGETS = ["numpy", "torch"]


class Liar(np.ndarray):
    """Every attribute that can be overridden describes another array, except for ``__dlpack__``, which is believed."""

    @property
    def dtype(self) -> Any:  # type: ignore[override]
        return np.dtype(np.complex128)

    @property
    def shape(self) -> Any:  # type: ignore[override]
        return (1 << 40,)

    @property
    def strides(self) -> Any:  # type: ignore[override]
        return (1 << 20,)

    @property
    def nbytes(self) -> Any:  # type: ignore[override]
        return 1

    @property
    def __array_struct__(self) -> Any:  # type: ignore[override]
        return np.zeros(1 << 16).__array_struct__

    @property
    def __array_interface__(self) -> Any:  # type: ignore[override]
        raise AssertionError("never read")

    def view(self, *_: object) -> Any:  # type: ignore[override]
        return np.zeros(1)

    def __array_finalize__(self, other: object) -> None:
        pass

    def __array_function__(self, *_: object) -> Any:
        raise AssertionError("never called")


@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.parametrize("target", TARGETS)
def test_a_subclass_of_ndarray_is_read_as_the_array_that_it_is(target: str, copy: bool | None) -> None:
    array = np.arange(6, dtype=np.int16)
    result = tb.convert(array.view(Liar), target, copy=copy)
    assert str(result.dtype).removeprefix("torch.") == "int16"
    assert result.tolist() == [0, 1, 2, 3, 4, 5]
    address = result.ctypes.data if target == "numpy" else result.data_ptr()
    assert (address == array.ctypes.data) == (copy is None)
    reversed_copy = tb.convert(array[::-1].view(Liar), target, copy=True)
    assert reversed_copy.tolist() == [5, 4, 3, 2, 1, 0]


def test_a_subclass_lives_as_long_as_its_view() -> None:
    array = np.full(1 << 16, 7.0).view(Liar)
    tensor = tb.to_torch(array)
    del array
    gc.collect()
    junk = [np.zeros(1 << 16) for _ in range(8)]
    assert bool((tensor == 7).all())
    del junk


@pytest.mark.parametrize("stride", [(1 << 63) - 1, -(1 << 63), 1 << 62, -(1 << 62), -(1 << 47)])
@pytest.mark.parametrize("target", TARGETS)
def test_strides_to_the_end_of_the_world_are_refused(target: str, stride: int) -> None:
    array = np.lib.stride_tricks.as_strided(np.zeros(4, np.uint8), (3,), (stride,))
    for copy in (None, False):
        with pytest.raises((tb.BridgeValueError, tb.BridgeBufferError)):
            tb.convert(array, target, copy=copy)


class Nested:
    """Converts itself, ``depth`` times or for ever."""

    def __init__(self, depth: int, end: Callable[[], object]) -> None:
        self.depth, self.end = depth, end

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0)

    def __dlpack__(self, **_: object) -> object:
        self.depth -= 1
        return self.end() if self.depth <= 0 else tb.to_numpy(self)


def end_in_error() -> object:
    raise ValueError("\"'\\" * 1000)


@pytest.mark.parametrize("depth", [2, 10, 26, 500, 1 << 60])
@pytest.mark.parametrize("end", [end_in_error, lambda: "no capsule", lambda: np.ones(1)])
def test_a_producer_that_converts_itself_ends_at_once(depth: int, end: Callable[[], object]) -> None:
    started = time.process_time()
    with pytest.raises((tb.BridgeError, RecursionError)) as caught:
        tb.to_numpy(Nested(depth, end))
    assert time.process_time() - started < 1
    seen: BaseException | None = caught.value
    while seen is not None:
        assert len(str(seen)) < 5000
        seen = seen.__cause__


def test_other_conversions_of_oneself_end_as_well() -> None:
    class Interface:
        @property
        def __array_interface__(self) -> object:
            return tb.to_numpy(self).__array_interface__

    class CudaInterface:
        @property
        def __cuda_array_interface__(self) -> object:
            return tb.to_numpy(self)

    class Device:
        def __dlpack_device__(self) -> object:
            return tb.to_numpy(self)

        def __dlpack__(self, **_: object) -> object:
            raise AssertionError("never reached")

    for kind in (Interface, CudaInterface, Device):
        for call in (tb.to_numpy, tb.to_torch, lambda x: tb.plan(x, "torch")):
            with pytest.raises((tb.BridgeError, RecursionError)):
                call(kind())
    assert tb.to_numpy(torch.ones(2)).tolist() == [1, 1]


def test_messages_are_bounded() -> None:
    name = "x" * 100_000

    class Long:
        def __repr__(self) -> str:
            return name

        __str__ = __repr__

        def __dlpack_device__(self) -> object:
            raise LookupError(name)

        def __dlpack__(self) -> object:
            raise AssertionError("never reached")

    nameless = type(name, (), {})()
    calls: list[Callable[[], object]] = [
        lambda: tb.to_numpy(Long()),
        lambda: tb.to_numpy(nameless),
        lambda: tb.convert(torch.ones(1), name),  # type: ignore[arg-type]
        lambda: tb.convert(torch.ones(1), nameless),
        lambda: tb.to_numpy(torch.ones(1), device=name),
        lambda: tb.record_stream(tb.to_numpy(torch.ones(1)), Long()),
        lambda: tb.record_stream(tb.to_numpy(torch.ones(1)), torch.ones(1000, 1000)),
        lambda: tb.to_torch(np.zeros(2, [(f"{name}{i}", "f4") for i in range(4)])),
    ]
    for i, call in enumerate(calls):
        with pytest.raises(tb.BridgeError) as caught:
            call()
        assert len(str(caught.value)) < 1000, i


INTERRUPTS = [KeyboardInterrupt, SystemExit, MemoryError, RecursionError]


@pytest.mark.parametrize("interrupt", INTERRUPTS)
def test_no_probe_swallows_an_interrupt(interrupt: type[BaseException]) -> None:
    def raises(*_: object, **__: object) -> Any:
        raise interrupt

    class Attribute:
        __dlpack__ = property(raises)

    class CudaInterface:
        __cuda_array_interface__ = property(raises)

    class Interface:
        __array_interface__ = property(raises)

    class Device:
        __dlpack_device__ = property(raises)

        def __dlpack__(self) -> object:
            raise AssertionError("never reached")

    class Text(Exception):
        __str__ = raises

    class Unspeakable:
        def __dlpack_device__(self) -> object:
            raise Text

        def __dlpack__(self) -> object:
            raise AssertionError("never reached")

    class Stream:
        __cuda_stream__ = raises

    class PtrStream:
        ptr = property(raises)

    view = tb.to_numpy(torch.ones(1))
    calls: list[Callable[[], object]] = [
        lambda: tb.to_numpy(Attribute()),
        lambda: tb.to_numpy(CudaInterface()),
        lambda: tb.to_numpy(Interface()),
        lambda: tb.to_numpy(Device()),
        lambda: tb.to_numpy(Unspeakable()),
        lambda: tb.record_stream(view, Stream()),
        lambda: tb.record_stream(view, PtrStream()),
    ]
    for i, call in enumerate(calls):
        try:
            call()
        except interrupt as caught:
            assert not isinstance(caught, tb.BridgeError), i
        else:
            raise AssertionError(f"call {i} swallowed it")


def test_an_interrupt_during_the_first_look_drops_no_dtype() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            """
import numpy, torch, truebridge as tb
empty, calls = torch.empty, []
def interrupted(*arguments, **keywords):
    calls.append(keywords)
    if len(calls) == 5:
        raise KeyboardInterrupt
    return empty(*arguments, **keywords)
torch.empty = interrupted
try:
    tb.profile("torch")
except KeyboardInterrupt:
    pass
else:
    raise SystemExit("swallowed")
everything = tb.profile("torch")["dtypes"]
assert "int64" in everything and len(everything) == len(calls) - 5, everything
""",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("legacy", [False, True])
def test_an_error_that_a_deleter_leaves_is_reported_apart(legacy: bool) -> None:
    heard: list[object] = []

    def hear(unraisable: Any) -> None:
        heard.append(unraisable.exc_type)

    def producer() -> Producer:
        made = Producer(legacy=legacy)
        # It takes no argument, and leaves a MemoryError set.
        made.managed.deleter = ctypes.cast(ctypes.pythonapi.PyErr_NoMemory, ctypes.c_void_p)
        return made

    before, sys.unraisablehook = sys.unraisablehook, hear
    try:
        good = producer()
        array = tb.to_numpy(good.capsule())
        assert array[1] == 1
        del array
        assert heard == [MemoryError]
        for spoil, kind in (("major", "version"), ("ndim", "protocol"), ("lanes", "dtype"), ("device_type", "device")):
            if legacy and spoil == "major":
                continue
            bad = producer()
            setattr(bad.managed if spoil == "major" else bad.tensor, spoil, 77)
            heard.clear()
            with pytest.raises(tb.BridgeError) as caught:
                tb.to_numpy(bad.capsule())
            assert (caught.value.kind, heard) == (kind, [MemoryError]), spoil
        heard.clear()
        last = producer()
        view = [tb.to_numpy(last.capsule())]
        with pytest.raises(ZeroDivisionError):
            print(view.pop(), 1 / 0)
        gc.collect()
        assert heard == [MemoryError]
    finally:
        sys.unraisablehook = before


def test_names_are_text() -> None:
    for call in (tb.convert, tb.plan):
        for name in ("\ud800", "numpy\udfff", b"numpy", None, 3):
            with pytest.raises(tb.BridgeValueError) as caught:
                call(torch.ones(1), name)  # type: ignore[arg-type, operator]
            assert caught.value.kind == "argument"
    with pytest.raises(tb.BridgeValueError, match="surrogate"):
        tb.profile("\ud800")  # type: ignore[arg-type]


# Capsules: what follows DLPack's rules is converted, what breaks them is refused, and the deleter runs exactly once.


LAYOUTS = [False, True]


@pytest.mark.parametrize("legacy", LAYOUTS)
def test_a_good_capsule_converts_in_place_and_is_deleted_with_the_last_view(legacy: bool) -> None:
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


class ProtocolObject:
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
def test_any_producer_can_export(old: bool) -> None:
    pytest.importorskip("torch")
    array = np.arange(6.0).reshape(2, 3).T
    tensor = tb.to_torch(ProtocolObject(array, old=old))
    assert tensor.data_ptr() == array.ctypes.data
    assert tensor.stride() == (1, 3)


def test_a_producer_makes_its_copies_itself() -> None:
    pytest.importorskip("torch")
    array = np.arange(6.0)[::-1]
    with pytest.raises(tb.BridgeBufferError, match="negative strides"):
        tb.to_torch(ProtocolObject(array), copy=False)
    tensor = tb.to_torch(ProtocolObject(array))
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
