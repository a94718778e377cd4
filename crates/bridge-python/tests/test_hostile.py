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
from capsules import CPU, Producer

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


def test_other_ways_of_converting_oneself_end_as_well() -> None:
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
