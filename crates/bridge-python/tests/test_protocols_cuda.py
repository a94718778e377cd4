"""Producers known only by a protocol, on a CUDA device: the CUDA array interface, managed and pinned memory."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from capsules import CUDA, Producer, Wrapper, with_current_stream

torch: Any = pytest.importorskip("torch")

cupy: Any = pytest.importorskip("cupy")


if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

CUDA_HOST, CUDA_MANAGED = 3, 13


class Interface:
    """An object with only ``__cuda_array_interface__``."""

    def __init__(self, array: Any, **changes: object) -> None:
        self.array, self.changes = array, changes

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {**self.array.__cuda_array_interface__, **self.changes}


@pytest.fixture
def managed() -> Iterator[None]:
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(cupy.cuda.malloc_managed)
    yield
    cupy.cuda.set_allocator(before)


@pytest.mark.parametrize("target", ["torch", "cupy"])
@pytest.mark.parametrize("data", [None, (None, False), (0, False), (None, True)])
def test_an_array_without_elements_has_no_address(target: Any, data: Any) -> None:
    view = tb.convert(Interface(cupy.zeros((0, 3), cupy.float32), data=data, strides=None), target, read_only=True)
    assert (tuple(view.shape), view.sum().item()) == ((0, 3), 0)


@pytest.mark.parametrize("target", ["torch", "cupy"])
@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_a_cuda_array_interface_is_enough(target: str, version: int) -> None:
    array = cupy.arange(12.0).reshape(3, 4).T
    changes = {"version": version} if version == 3 else {"version": version, "stream": None}
    producer = Interface(array, **changes)
    alive = weakref.ref(producer)
    view = tb.convert(producer, target, copy=False)
    del producer
    gc.collect()
    assert alive() is not None
    assert view.tolist() == array.tolist()
    assert (view.data.ptr if target == "cupy" else view.data_ptr()) == array.data.ptr
    copied = tb.convert(Interface(array), target, copy=True)
    array[0, 0] = 99
    assert view[0, 0].item() == 99
    assert copied[0, 0].item() == 0


def test_the_stream_of_an_interface_is_waited_for() -> None:
    for _ in range(20):
        stream = torch.cuda.Stream()
        tensor = torch.zeros(1 << 20, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            tensor.fill_(7)
        view = tb.to_cupy(Interface(tensor, stream=stream.cuda_stream, version=3))
        assert bool((view == 7).all())


class Deaf(Wrapper):
    """A producer that takes no notice of the stream that it is called with."""

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.tensor.__dlpack__(**{**keywords, "stream": -1})


@pytest.mark.parametrize("target", ["torch", "cupy", "lend"])
def test_the_current_stream_of_an_exchange_table_is_waited_for(target: str) -> None:
    for i in range(1, 11):
        stream = torch.cuda.Stream()
        kind = with_current_stream(Deaf, lambda *_, stream=stream: stream.cuda_stream)
        tensor = torch.zeros(1 << 20, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            tensor.fill_(i)
        producer = kind(tensor)
        if target == "lend":
            view = torch.from_dlpack(tb.lend(producer, stream=torch.cuda.current_stream()))
        else:
            view = tb.convert(producer, target)
        assert bool((view == i).all())


@pytest.mark.parametrize("target", ["torch", "jax"])
def test_the_current_stream_of_tvm_ffi_is_waited_for(target: str) -> None:
    tvm_ffi: Any = pytest.importorskip("tvm_ffi")
    pytest.importorskip(target)
    for i in range(1, 11):
        stream, memory = cupy.cuda.Stream(non_blocking=True), cupy.zeros(1 << 20, "float32")
        tensor = tvm_ffi.from_dlpack(memory)
        torch.cuda.synchronize()
        with stream, tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), stream.ptr):
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                torch.cuda._sleep(20_000_000)
            memory.fill(i)
            view = tb.convert(tensor, target)
        copy = view + 0
        assert bool((copy == i).all())


def test_negative_strides_are_refused_before_a_consumer_of_the_interface_has_them() -> None:
    array = cupy.arange(12.0).reshape(3, 4)[::-1]
    with pytest.raises(ValueError, match=r"negative.*pass copy=True to lend"):
        _ = tb.lend(array).__cuda_array_interface__
    assert tb.lend(array, copy=True).__cuda_array_interface__["strides"] is None
    assert tb.lend(array, copy=False).__cuda_array_interface__["strides"] == (-32, 8)
    assert cupy.from_dlpack(tb.lend(array)).tolist() == array.tolist()
    cuda: Any = pytest.importorskip("numba.cuda")
    assert cuda.as_cuda_array(tb.lend(array, copy=True)).copy_to_host().tolist() == array.tolist()


def test_a_cuda_array_interface_is_screened() -> None:
    array = cupy.arange(4, dtype=cupy.float32)
    pointer = array.data.ptr
    with pytest.raises(tb.BridgeBufferError, match="read-only"):
        tb.to_torch(Interface(array, data=(pointer, True)))
    assert tb.to_torch(Interface(array, data=(pointer, True)), copy=True).tolist() == [0, 1, 2, 3]
    assert tb.to_torch(Interface(array, data=(0, False), shape=(0,), strides=None)).shape == (0,)
    reverse = Interface(array, data=(pointer + 12, False), strides=(-4,))
    assert tb.to_cupy(reverse).tolist() == [3, 2, 1, 0]
    host = np.ones(4, np.float32)
    for changes, kind in [
        ({"data": (host.ctypes.data, False)}, "protocol"),
        ({"shape": (1 << 30,), "strides": None}, "layout"),
        ({"strides": (1 << 20,)}, "layout"),
        ({"data": (pointer - (1 << 40), False)}, "protocol"),
        ({"stream": 0}, "protocol"),
        ({"mask": array}, "not_a_tensor"),
    ]:
        with pytest.raises(tb.BridgeError) as caught:
            tb.to_torch(Interface(array, **changes))  # type: ignore[arg-type]
        assert caught.value.kind == kind, changes


class Labelled:
    """A producer of capsules that says itself where its memory is."""

    def __init__(self, kind: int, device: int = 0) -> None:
        self.kind, self.device, self.streams = kind, device, []  # type: ignore[var-annotated]
        self.producer = Producer()

    def at(self, address: int) -> Labelled:
        tensor = self.producer.tensor
        tensor.data, tensor.device_type, tensor.device_id = address, self.kind, self.device
        return self

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.kind, self.device)

    def __dlpack__(self, *, stream: object = None, **_: object) -> object:
        self.streams.append(stream)
        return self.producer.capsule()


@pytest.mark.parametrize("kind", [CUDA, CUDA_MANAGED])
@pytest.mark.parametrize("target", ["torch", "cupy"])
def test_managed_memory_converts_by_either_label(managed: None, target: str, kind: int) -> None:
    array = cupy.arange(8, dtype=cupy.float32)
    producer = Labelled(kind).at(array.data.ptr)
    view = tb.convert(producer, target)
    assert view.tolist() == list(range(8))
    assert (view.data.ptr if target == "cupy" else view.data_ptr()) == array.data.ptr
    assert producer.streams == [1]
    del view
    torch.cuda.synchronize()


def test_numpy_reads_managed_memory_after_its_writer(managed: None) -> None:
    for _ in range(10):
        array = cupy.zeros(8, dtype=cupy.float32)
        cupy.cuda.Device().synchronize()
        torch.cuda._sleep(20_000_000)
        array[:] = 7
        view = tb.to_numpy(Labelled(CUDA_MANAGED).at(array.data.ptr))
        assert view.tolist() == [7] * 8
        assert view.ctypes.data == array.data.ptr
        del view
        cupy.cuda.Device().synchronize()


def test_numpy_reads_pinned_memory_after_its_writer() -> None:
    pinned = cupy.cuda.alloc_pinned_memory(32)
    source = cupy.full(8, 7, dtype=cupy.float32)
    for _ in range(10):
        ctypes.memset(pinned.ptr, 0, 32)
        cupy.cuda.Device().synchronize()
        torch.cuda._sleep(20_000_000)
        source.data.copy_to_host_async(ctypes.c_void_p(pinned.ptr), 32, cupy.cuda.Stream.null)
        view = tb.to_numpy(Labelled(CUDA_HOST).at(pinned.ptr))
        assert view.tolist() == [7] * 8
        assert view.ctypes.data == pinned.ptr
        del view
        cupy.cuda.Device().synchronize()


def test_memory_that_is_only_called_pinned_is_host_memory() -> None:
    array = np.arange(8, dtype=np.float32)
    assert tb.to_torch(Labelled(CUDA_HOST).at(array.ctypes.data)).device.type == "cpu"


@pytest.mark.parametrize("kind", [CUDA, CUDA_MANAGED])
def test_a_false_label_is_refused(kind: int) -> None:
    array = np.arange(8, dtype=np.float32)
    device = cupy.arange(8, dtype=cupy.float32)
    for address in [array.ctypes.data] + ([device.data.ptr] if kind == CUDA_MANAGED else []):
        with pytest.raises(tb.BridgeBufferError, match="knows no such memory") as caught:
            tb.to_cupy(Labelled(kind).at(address))
        assert caught.value.kind == "protocol"


def test_a_full_memory_stays_what_the_framework_says() -> None:
    array = cupy.zeros(1, dtype=cupy.float32)

    class Full:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (CUDA, 0)

        def __dlpack__(self, **_: object) -> object:
            return torch.empty(1 << 50, device="cuda").__dlpack__()

    with pytest.raises(torch.OutOfMemoryError):
        tb.to_cupy(Full())
    with pytest.raises(torch.OutOfMemoryError):
        tb.to_torch(cupy.broadcast_to(array, (1 << 46,)), copy=True)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        tb.to_cupy(torch.zeros(1, device="cuda").expand(1 << 46), copy=True)


# Loans on a CUDA device: what a library's stream waits for, and how long memory is kept. The library is PyTorch.


N = 1 << 20
ROUNDS = 10

#: Cycles of a GPU: some tens of milliseconds, in which everything that does not wait is too early.
LONG = 100_000_000


def full(value: float) -> Any:
    return torch.full((N,), float(value), device="cuda")


def overwrite() -> None:
    """Write to memory that PyTorch reuses."""
    for _ in range(4):
        full(-1)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_library_reads_after_the_stream_that_writes(is_named: bool) -> None:
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    for i in range(ROUNDS):
        with torch.cuda.stream(writer):
            x = torch.zeros(N, device="cuda")
            torch.cuda._sleep(LONG)
            x.fill_(i)
            loan = tb.lend(x, stream=reader if is_named else None)
        with torch.cuda.stream(reader):
            copy = torch.from_dlpack(loan).clone()
        torch.cuda.synchronize()
        assert (copy == i).all()


@pytest.mark.parametrize("is_named", [True, False])
def test_memory_is_kept_until_a_dropped_view_was_read(is_named: bool) -> None:
    reader = torch.cuda.Stream()
    for i in range(ROUNDS):
        x = full(i)
        with tb.lend(x, stream=reader if is_named else None) as loan, torch.cuda.stream(reader):
            view = torch.from_dlpack(loan)
            torch.cuda._sleep(LONG)
            copy = view.clone()
            del view
        del x, loan
        overwrite()
        torch.cuda.synchronize()
        assert (copy == i).all()


def test_memory_is_kept_until_a_view_was_read_that_outlives_the_block() -> None:
    reader = torch.cuda.Stream()
    for i in range(ROUNDS):
        x = full(i)
        with tb.lend(x) as loan:
            view = torch.from_dlpack(loan)
        del x, loan
        torch.cuda.synchronize()
        with torch.cuda.stream(reader):
            torch.cuda._sleep(LONG)
            copy = view.clone()
        del view
        overwrite()
        torch.cuda.synchronize()
        assert (copy == i).all()


@pytest.mark.parametrize("is_named", [True, False])
def test_the_framework_waits_at_the_end_of_the_block_for_what_a_library_writes(is_named: bool) -> None:
    writer = torch.cuda.Stream()
    for i in range(ROUNDS):
        x = full(-1)
        with tb.lend(x, stream=writer if is_named else None) as loan:
            with torch.cuda.stream(writer):
                torch.cuda._sleep(LONG)
                torch.from_dlpack(loan).fill_(i)
        assert (x == i).all()


def test_a_view_by_the_cuda_array_interface_keeps_the_memory_after_the_block() -> None:
    for i in range(ROUNDS):
        x = full(i)
        address = x.data_ptr()
        with tb.lend(x, stream=torch.cuda.current_stream()) as loan:
            view = torch.as_tensor(loan, device="cuda")
        assert view.data_ptr() == address and repr(loan) == "<Loan: closed>"
        del x, loan
        gc.collect()
        overwrite()
        torch.cuda.synchronize()
        assert (view == i).all()


def test_a_call_puts_tensors_of_two_streams_into_one() -> None:
    first, second, library = (torch.cuda.Stream() for _ in range(3))

    def add(a: Any, b: Any, out: Any) -> None:
        with torch.cuda.stream(library):
            torch.add(torch.from_dlpack(a), torch.from_dlpack(b), out=torch.from_dlpack(out))

    for i in range(ROUNDS):
        out = full(-1)
        made = []
        for stream in (first, second):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LONG)
                made.append(full(i))
            # The call sees one current stream, that of the caller, which has to be after both.
            torch.cuda.current_stream().wait_stream(stream)
        tb.call(add, *made, out, stream=library)
        assert (out == 2 * i).all()
