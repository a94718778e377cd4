"""CuPy under test."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from truebridge_conformance.subjects import Bench, Capabilities, Observed, Stream, Subject, Usual, shape
from truebridge_conformance.subjects.common import Arrays, allocator, collect, elements
from truebridge_conformance.subjects.streams import CYCLES, PER_THREAD, ManyStreams

#: The allocator of this process, which two subjects share: its name and its pool, ``None`` where it has none.
chosen: dict[str | None, Any] = {}


def pool(cupy: Any) -> Any:
    """Set CuPy's allocator. Return its pool, or ``None`` where it has none."""
    name, cuda = allocator("cupy"), cupy.cuda
    made = {
        None: cupy.get_default_memory_pool,
        "uncached": lambda: None,
        "async": cuda.MemoryAsyncPool,
        "managed": lambda: cuda.MemoryPool(cuda.malloc_managed),
        "shared": lambda: cuda.MemoryAsyncPool(_sharable_pools(cuda)),
    }
    if name not in chosen:
        chosen[name] = made[name]()
        if name is not None:
            cuda.set_allocator(chosen[name].malloc if chosen[name] is not None else None)
    return chosen[name]


def _sharable_pools(cuda: Any) -> list[int]:
    """Return a pool of the driver for each device, whose memory other processes can open by a descriptor."""
    pinned, descriptor, on_device = 1, 1, 1
    devices = range(cuda.runtime.getDeviceCount())
    properties = (cuda.runtime.MemPoolProps(pinned, descriptor, on_device, device) for device in devices)
    return [cuda.runtime.memPoolCreate(wanted) for wanted in properties]


def spin(cupy: Any) -> Callable[[], None]:
    """Return what submits some milliseconds of work to the current stream."""
    kernel = cupy.RawKernel(
        'extern "C" __global__ void spin(long long cycles)'
        "{ long long start = clock64(); while (clock64() - start < cycles); }",
        "spin",
    )
    return lambda: kernel((1,), (1,), (cupy.int64(CYCLES),))


class CuPy(Arrays, ManyStreams):
    """CuPy on one device."""

    known: ClassVar[dict[int, Any]] = {}
    waiting = 2

    def __init__(self, device: str) -> None:
        import cupy

        self.cupy = cupy
        self.index = int(device.partition(":")[2] or 0)
        cupy.cuda.Device(self.index).use()
        Arrays.__init__(self, cupy)
        ManyStreams.__init__(self)
        self.pool = pool(cupy)
        self.named = {name: dtype for name, dtype in self.named.items() if self.knows(dtype)}
        self.spin = spin(cupy)
        self.delay()
        self.keep_streams()

    def knows(self, dtype: Any) -> bool:
        try:
            self.cupy.zeros(1, dtype).copy().get()
        except (TypeError, ValueError):
            return False
        return True

    def capabilities(self) -> Capabilities:
        several = self.cupy.cuda.runtime.getDeviceCount() > 1
        return Capabilities(
            tuple(self.named),
            negative_strides=True,
            gigabytes=True,
            parts=True,
            devices=several,
            graphs=True,
            imports=1,
        )

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def upload(self, memory: Any, data: Any) -> None:
        memory.set(data)
        self.cupy.cuda.get_current_stream().synchronize()

    def view(self, memory: Any, dtype: Any, shape: list[int], offset: int, strides: list[int]) -> Any:
        return self.cupy.ndarray(shape, dtype, memory.data + offset, strides)

    def observe(self, array: Any) -> Observed:
        device = f"cuda:{array.device.id}"
        return Observed(array.dtype.name, list(array.shape), self.strides(array), self.address(array), False, device)

    def read(self, array: Any) -> bytes:
        return bytes(self.bits(array).get().tobytes())

    def write(self, array: Any, data: bytes) -> None:
        bits = self.bits(array)
        bits[...] = self.cupy.asarray(self.elements(data, bits))

    def own(self, seed: int, dtype: str = "float32", shape: tuple[int, ...] = (4, 6)) -> Any:
        """Return an array that owns its memory."""
        array = self.cupy.empty(shape, dtype)
        if array.size:
            self.upload(array, self.numpy.frombuffer(elements(seed, array.nbytes), dtype).reshape(shape))
        return array

    def filled(self, memory: Any, seed: int) -> Any:
        """Return an array over memory that no pool of CuPy has."""
        array = self.cupy.ndarray((4, 6), "float32", self.cupy.cuda.MemoryPointer(memory, 0))
        array[...] = self.own(seed)
        self.current().synchronize()
        return array

    def borrowed(self, seed: int) -> Any:
        """Return an array over memory of another owner, as CuPy's page on other libraries shows it."""
        owner = self.own(seed)
        return self.filled(self.cupy.cuda.UnownedMemory(owner.data.ptr, owner.nbytes, owner), seed)

    def usual(self) -> list[Usual]:
        cupy, own = self.cupy, self.own

        class Tagged(cupy.ndarray):  # type: ignore[misc, name-defined]
            pass

        def emptied(_: Any) -> None:
            self.settle()

        return [
            Usual("an array that owns its memory", own),
            Usual("an array in the order of Fortran", lambda seed: own(seed).copy(order="F")),
            Usual("a number in an array", lambda seed: own(seed, shape=())),
            Usual("an array without elements", lambda seed: own(seed, shape=(3, 0))),
            Usual("a part of an array", lambda seed: own(seed)[1:, ::2]),
            Usual("an array from its end", lambda seed: own(seed)[::-1]),
            Usual("a transposed array", lambda seed: own(seed).T),
            Usual("a broadcast row", lambda seed: cupy.broadcast_to(own(seed, shape=(6,)), (4, 6))),
            Usual("the real parts", lambda seed: own(seed, "complex64").real),
            Usual("bytes seen as another dtype", lambda seed: own(seed).view("int16")),
            Usual("an array of NumPy's elements", lambda seed: cupy.asarray(own(seed).get())),
            Usual("an array that was imported", lambda seed: cupy.from_dlpack(own(seed))),
            Usual("an array of a subclass", lambda seed: own(seed).view(Tagged)),
            Usual("managed memory", lambda seed: self.filled(cupy.cuda.ManagedMemory(96), seed)),
            Usual("memory of no pool", lambda seed: self.filled(cupy.cuda.Memory(96), seed)),
            Usual("memory of another owner", self.borrowed),
            Usual("an array whose pool is emptied later", own, afterwards=emptied),
            Usual("a number", lambda seed: float(seed % 97), "not a tensor"),
        ]

    def use_device(self, index: int) -> int:
        before: int = self.cupy.cuda.Device().id
        self.cupy.cuda.Device(index).use()
        return before

    def begin_capture(self) -> Any:
        self.current().begin_capture()
        return []

    def end_capture(self, graph: Any) -> None:
        graph.append(self.current().end_capture())

    def replay(self, graph: Any) -> None:
        graph[0].launch(self.current())

    def handle(self, stream: Any) -> int:
        return int(stream.ptr)

    def current(self) -> Any:
        return self.cupy.cuda.get_current_stream()

    def enter(self, stream: Any) -> None:
        stream.use()

    def made(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def blocking(self) -> list[Any]:
        # What `Stream()` makes, and the default stream of the thread.
        return [self.cupy.cuda.Stream(), self.cupy.cuda.Stream.ptds]

    def join(self, earlier: int, later: int) -> None:
        self.known_as(later).wait_event(self.known_as(earlier).record())

    def wrapped(self, handle: int) -> Any:
        cuda = self.cupy.cuda
        known = {0: cuda.Stream.null, PER_THREAD: cuda.Stream.ptds}
        return known[handle] if handle in known else cuda.ExternalStream(handle, self.index)

    def delay(self) -> None:
        self.spin()

    def settle(self) -> int | None:
        self.cupy.cuda.runtime.deviceSynchronize()
        collect()
        if self.pool is None:
            return None
        self.pool.free_all_blocks()
        return int(self.pool.used_bytes())


subject: Callable[[str], Subject] = CuPy


BARS = {
    **{
        ("torch", "same"): 0.20,
        ("torch", "same, busy"): None,
        ("torch", "cross"): 0.25,
        ("torch", "cross, busy"): None,
    },
    **{("tensorflow", "cross"): 1.9, ("tensorflow", "cross, busy"): None},
    ("jax", "cross"): None,
}


def bench(device: str) -> Bench | None:
    """Return what the benches need."""
    import cupy

    def stream() -> Stream:
        made = cupy.cuda.Stream(non_blocking=True)
        return Stream(made.ptr, lambda: made)

    if device == "cpu" or not cupy.cuda.is_available():
        return None
    return Bench(
        lambda nbytes: cupy.empty(shape(nbytes), dtype=cupy.float32),
        BARS,
        back=("torch",),
        stream=stream,
        occupy=spin(cupy),
        used=cupy.get_default_memory_pool().used_bytes,
    )
