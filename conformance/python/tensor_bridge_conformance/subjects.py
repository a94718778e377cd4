"""The frameworks under test, as the suite uses them: through their own public interfaces, never through the bridge.

Every class has the same methods; ``conformance/src/subject.rs`` says what each of them promises. Dtypes go by the names
of ``bridge_core``, strides and offsets count elements, and elements travel as ``bytes`` in row-major order.
"""

# What the methods promise is said there, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import ctypes
import gc
import importlib
import sys
from collections.abc import Callable
from typing import Any, ClassVar

from tensor_bridge_conformance import _conformance, allocators

NAMES = [
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "bfloat16", "complex32", "complex64", "complex128"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]

#: Cycles of a delay: about three milliseconds.
CYCLES = 6_000_000

#: Seconds of a delay, for a framework that has no kernel that counts cycles.
DELAY = 3e-3

#: The most bytes that any tensor of the suite has.
MOST = 1 << 20

#: What addresses of base buffers are counted from (``Spec::GRAIN``).
GRAIN = 128

#: Streams that a framework makes beside its default one.
STREAMS = 2


def pattern(byte: int, size: int) -> int:
    """The signed integer of ``size`` bytes that are all ``byte``."""
    return int.from_bytes(bytes([byte]) * size, "little", signed=True)


def taken(take: Callable[[Any], Any], tensor: Any) -> Any:
    """What a framework's own ``from_dlpack`` makes of a tensor; ``None`` of one that does not know DLPack.

    On a GPU TensorFlow gives nothing but a capsule.
    """
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and tensorflow.is_tensor(tensor) and "GPU" in tensor.device:
        return take(tensorflow.experimental.dlpack.to_dlpack(tensor))
    return take(tensor) if hasattr(tensor, "__dlpack__") else None


def placed(allocate: Callable[[int], Any], address: Callable[[Any], int], nbytes: int, align: int) -> Any:
    """A base buffer that begins ``align`` bytes behind a multiple of ``GRAIN``.

    No more is allocated than that takes, because allocators hand out a block again for a request of the same size.
    """
    memory = allocate(align + nbytes)
    if address(memory) % GRAIN:
        memory = allocate(GRAIN + align + nbytes)
    start = -address(memory) % GRAIN + align
    return memory[start : start + nbytes]


def raw_stream() -> int:
    """A stream of the driver that no framework knows: it does not wait for the legacy stream."""
    stream = ctypes.c_void_p()
    failed = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(stream), 1)
    if failed or not stream.value:
        raise RuntimeError(f"cuStreamCreate reports {failed}")
    return stream.value


def destroy(stream: int) -> None:
    """Destroys a stream of the driver. What was put into it still runs."""
    failed = ctypes.CDLL("libcuda.so.1").cuStreamDestroy_v2(ctypes.c_void_p(stream))
    if failed:
        raise RuntimeError(f"cuStreamDestroy reports {failed}")


class Passing:
    """Streams of one case, beside those that a framework keeps in ``known``: its own, or external ones."""

    known: ClassVar[dict[int, Any]] = {}

    def __init__(self) -> None:
        #: Whether a stream is external, by its handle.
        self.passing: dict[int, bool] = {}

    def stream(self, external: bool) -> tuple[int, Any]:
        """A new stream and its handle."""
        raise NotImplementedError

    def fresh(self, external: bool) -> int | None:
        handle, stream = self.stream(external)
        if handle not in self.known:
            self.known[handle] = stream
            self.passing[handle] = external
        return handle

    def end(self, handle: int) -> None:
        """Drops the framework's stream. An external one is destroyed."""
        if handle not in self.passing:
            return
        del self.known[handle]
        if self.passing.pop(handle):
            destroy(handle)


class Torch(Passing):
    """PyTorch on one device."""

    writes = True
    makes_negative_strides = False
    makes_read_only = False
    unaligned = False
    puts_off = ("conjugation", "negation")

    #: Streams of the process by handle, so that two instances speak of the same ones.
    known: ClassVar[dict[int, Any]] = {}

    def __init__(self, device: str) -> None:
        import torch

        super().__init__()
        self.torch = torch
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.named = {name: getattr(torch, name) for name in NAMES if hasattr(torch, name)}
        self.dtypes = list(self.named)
        self.names = {dtype: name for name, dtype in self.named.items()}
        # What is there now stays: collecting garbage need not look at it again.
        gc.collect()
        gc.freeze()
        if self.cuda:
            # Whoever shares the process works on this device, too.
            torch.cuda.set_device(self.device)
            if not Torch.known:
                made = [torch.cuda.Stream(self.device) for _ in range(STREAMS)]
                Torch.known = {stream.cuda_stream: stream for stream in made}

    def bits(self, tensor: Any) -> Any:
        """The same memory as integers, which every kernel leaves alone; 16 bytes become two integers of 8."""
        torch = self.torch
        if tensor.dtype == torch.complex128:
            return torch.view_as_real(tensor).view(torch.int64)
        return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])

    def host(self, data: bytes) -> Any:
        torch = self.torch
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    def create(
        self,
        dtype: str,
        shape: list[int],
        strides: list[int],
        offset: int,
        base: int,
        align: int,
        read_only: bool,
        pending: str | None,
        data: bytes,
    ) -> Any:
        memory = placed(self.allocate, self.torch.Tensor.data_ptr, len(data), align)
        memory.copy_(self.host(data))
        elements = memory.view(self.named[dtype])
        tensor = elements.as_strided(shape, strides, elements.storage_offset() + offset)
        if pending == "conjugation":
            tensor = tensor.conj()
        if pending == "negation":
            tensor = self.torch._neg_view(tensor)
        if self.cuda:
            self.torch.cuda.current_stream().synchronize()
        return tensor

    def observe(self, tensor: Any) -> tuple[str, list[int], list[int], int, bool, str]:
        name = self.names[tensor.dtype]
        return name, list(tensor.shape), list(tensor.stride()), tensor.data_ptr(), False, str(tensor.device)

    def read(self, tensor: Any) -> bytes:
        tensor = tensor.resolve_conj().resolve_neg()
        data: bytes = self.bits(tensor).contiguous().reshape(-1).cpu().numpy().tobytes()
        return data

    def write(self, tensor: Any, data: bytes) -> None:
        bits = self.bits(tensor)
        bits.copy_(self.host(data).view(bits.dtype).view(bits.shape))

    def fill(self, tensor: Any, byte: int) -> None:
        bits = self.bits(tensor)
        bits.fill_(byte if bits.itemsize == 1 else pattern(byte, bits.itemsize))

    def allocate(self, nbytes: int) -> Any:
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device=self.device)

    def snapshot(self, source: Any, into: Any) -> None:
        bits = self.bits(source)
        into.view(bits.dtype).view(bits.shape).copy_(bits)

    def streams(self) -> list[int]:
        return list(Torch.known)[:STREAMS] if self.cuda else []

    def use(self, handle: int) -> int:
        """Makes a stream the current one, and gives the one before."""
        torch = self.torch
        before: int = torch.cuda.current_stream(self.device).cuda_stream
        if handle not in Torch.known:
            default = torch.cuda.default_stream(self.device)
            external = torch.cuda.ExternalStream(handle, self.device)
            Torch.known[handle] = default if handle == default.cuda_stream else external
        torch.cuda.set_stream(Torch.known[handle])
        return before

    def stream(self, external: bool) -> tuple[int, Any]:
        cuda = self.torch.cuda
        stream = cuda.ExternalStream(raw_stream(), self.device) if external else cuda.Stream(self.device)
        return stream.cuda_stream, stream

    def fresh(self, external: bool) -> int | None:
        return super().fresh(external) if self.cuda else None

    def delay(self) -> None:
        if self.cuda:
            self.torch.cuda._sleep(CYCLES)

    def settle(self) -> int | None:
        if not self.cuda:
            gc.collect()
            return None
        self.torch.cuda.synchronize()
        gc.collect()
        self.torch.cuda.empty_cache()
        if allocators.chosen("torch") == "pluggable":
            return int(_conformance.plugged_in_use())
        used: int = self.torch.cuda.memory_allocated()
        return used

    def import_natively(self, other: Any) -> Any:
        return taken(self.torch.from_dlpack, other)


class Arrays:
    """What NumPy and CuPy have in common."""

    writes = True
    makes_negative_strides = True
    puts_off = ()

    def __init__(self, module: Any, names: list[str]) -> None:
        import numpy

        self.numpy = numpy
        self.module = module
        self.named = {name: dtype for name in names if (dtype := self.dtype(name)) is not None}
        self.dtypes = list(self.named)
        gc.collect()
        gc.freeze()

    def dtype(self, name: str) -> Any:
        try:
            return self.numpy.dtype(name)
        except TypeError:
            pass
        try:
            # The package names them for NumPy.
            return self.numpy.dtype(getattr(importlib.import_module("ml_dtypes"), name))
        except (ImportError, AttributeError, TypeError):
            return None

    def bits(self, array: Any) -> Any:
        """The same memory as integers, which every kernel leaves alone; elements of 16 bytes stay what they are."""
        return array.view(f"i{array.itemsize}") if array.itemsize <= 8 else array

    def elements(self, data: bytes, like: Any) -> Any:
        return self.numpy.frombuffer(data, dtype=like.dtype).reshape(like.shape)

    def strides(self, array: Any) -> list[int]:
        size = array.itemsize
        if any(stride % size for stride in array.strides):
            raise ValueError(f"strides {array.strides} in bytes are no multiples of {size}")
        return [stride // size for stride in array.strides]

    def fill(self, array: Any, byte: int) -> None:
        bits = self.bits(array)
        bits[...] = self.numpy.frombuffer(bytes([byte]) * bits.itemsize, dtype=bits.dtype)[0]

    def allocate(self, nbytes: int) -> Any:
        return self.module.empty(nbytes, dtype="uint8")

    def snapshot(self, source: Any, into: Any) -> None:
        bits = self.bits(source)
        into.view(bits.dtype).reshape(bits.shape)[...] = bits

    def import_natively(self, other: Any) -> Any:
        return taken(self.module.from_dlpack, other)


class Numpy(Arrays):
    """NumPy."""

    makes_read_only = True
    unaligned = True

    def __init__(self, device: str) -> None:
        import numpy

        super().__init__(numpy, NAMES)

    def create(
        self,
        dtype: str,
        shape: list[int],
        strides: list[int],
        offset: int,
        base: int,
        align: int,
        read_only: bool,
        pending: str | None,
        data: bytes,
    ) -> Any:
        memory = placed(self.allocate, self.address, len(data), align)
        memory[...] = self.numpy.frombuffer(data, dtype="uint8")
        known = self.named[dtype]
        size = known.itemsize
        in_bytes = [stride * size for stride in strides]
        array = self.numpy.ndarray(shape, known, memory, offset * size, in_bytes)
        array.flags.writeable = not read_only
        return array

    def observe(self, array: Any) -> tuple[str, list[int], list[int], int, bool, str]:
        return (
            array.dtype.name,
            list(array.shape),
            self.strides(array),
            self.address(array),
            not array.flags.writeable,
            "cpu",
        )

    def address(self, array: Any) -> int:
        start: int = array.__array_interface__["data"][0]
        return start

    def read(self, array: Any) -> bytes:
        data: bytes = array.tobytes()
        return data

    def write(self, array: Any, data: bytes) -> None:
        array[...] = self.elements(data, array)

    def streams(self) -> list[int]:
        return []

    def fresh(self, external: bool) -> None:
        """There are no streams."""

    def delay(self) -> None:
        pass

    def settle(self) -> int | None:
        gc.collect()
        return None


class Cupy(Arrays, Passing):
    """CuPy on one device."""

    makes_read_only = False
    unaligned = False

    #: Streams of the process by handle, so that two instances speak of the same ones.
    known: ClassVar[dict[int, Any]] = {}

    def __init__(self, device: str) -> None:
        import cupy

        self.cupy = cupy
        self.index = int(device.partition(":")[2] or 0)
        cupy.cuda.Device(self.index).use()
        Arrays.__init__(self, cupy, NAMES)
        Passing.__init__(self)
        self.pool = allocators.cupy_pool(cupy)
        self.named = {name: dtype for name, dtype in self.named.items() if self.knows(dtype)}
        self.dtypes = list(self.named)
        self.spin = cupy.RawKernel(
            'extern "C" __global__ void spin(long long cycles)'
            "{ long long start = clock64(); while (clock64() - start < cycles); }",
            "spin",
        )
        self.delay()
        if not Cupy.known:
            made = [cupy.cuda.Stream(non_blocking=True) for _ in range(STREAMS)]
            Cupy.known = {stream.ptr: stream for stream in made}

    def knows(self, dtype: Any) -> bool:
        try:
            self.cupy.zeros(1, dtype).copy().get()
        except (TypeError, ValueError):
            return False
        return True

    def create(
        self,
        dtype: str,
        shape: list[int],
        strides: list[int],
        offset: int,
        base: int,
        align: int,
        read_only: bool,
        pending: str | None,
        data: bytes,
    ) -> Any:
        memory = placed(self.allocate, self.address, len(data), align)
        memory.set(self.numpy.frombuffer(data, dtype="uint8"))
        known = self.named[dtype]
        size = known.itemsize
        in_bytes = [stride * size for stride in strides]
        array = self.cupy.ndarray(shape, known, memory.data + offset * size, in_bytes)
        self.cupy.cuda.get_current_stream().synchronize()
        return array

    def observe(self, array: Any) -> tuple[str, list[int], list[int], int, bool, str]:
        device = f"cuda:{array.device.id}"
        return array.dtype.name, list(array.shape), self.strides(array), self.address(array), False, device

    def address(self, array: Any) -> int:
        start: int = array.data.ptr
        return start

    def read(self, array: Any) -> bytes:
        data: bytes = self.bits(array).get().tobytes()
        return data

    def write(self, array: Any, data: bytes) -> None:
        bits = self.bits(array)
        bits[...] = self.cupy.asarray(self.elements(data, bits))

    def streams(self) -> list[int]:
        return list(Cupy.known)[:STREAMS]

    def use(self, handle: int) -> int:
        """Makes a stream the current one, and gives the one before."""
        cuda = self.cupy.cuda
        before: int = cuda.get_current_stream().ptr
        if handle not in Cupy.known:
            Cupy.known[handle] = cuda.Stream.null if handle == 0 else cuda.ExternalStream(handle, self.index)
        Cupy.known[handle].use()
        return before

    def stream(self, external: bool) -> tuple[int, Any]:
        cuda = self.cupy.cuda
        stream = cuda.ExternalStream(raw_stream(), self.index) if external else cuda.Stream(non_blocking=True)
        return stream.ptr, stream

    def delay(self) -> None:
        self.spin((1,), (1,), (self.numpy.int64(CYCLES),))

    def settle(self) -> int | None:
        self.cupy.cuda.runtime.deviceSynchronize()
        gc.collect()
        if self.pool is None:
            return None
        self.pool.free_all_blocks()
        used: int = self.pool.used_bytes()
        return used
