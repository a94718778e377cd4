"""What several subjects share."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import gc
import importlib
import itertools
import math
import operator
import os
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

from truebridge_conformance.subjects import Raising, Spec, Subject, Usual

#: Every dtype that the suite names. A subject keeps those that its framework has.
NAMES = [
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "bfloat16", "complex32", "complex64", "complex128"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]

#: Seconds of a delay, for frameworks without a kernel that counts cycles.
DELAY = 3e-3

#: The modulus of the addresses of base buffers, in bytes (``Spec::GRAIN``).
GRAIN = 128


#: One in so many collections visits every object.
EVERY = 16

collections = itertools.count()


def collect() -> None:
    """Collect garbage: what became garbage lately, and sometimes all of it.

    The traces and programs of JAX and TensorFlow live long, and to visit them all takes some 10 ms. Where something is
    not released, the suite calls this again and again.
    """
    gc.collect(1 if next(collections) % EVERY else 2)


def row_major(shape: list[int]) -> list[int]:
    """Return the strides of a compact tensor, in elements."""
    return [math.prod(max(length, 1) for length in shape[dim + 1 :]) for dim in range(len(shape))]


def beginning(
    allocate: Callable[[int], Any], address: Callable[[Any], int], nbytes: int, align: int
) -> tuple[Any, int]:
    """Allocate memory for a base buffer that begins ``align`` bytes after a multiple of ``GRAIN``.

    Return it, and the bytes before the buffer. It allocates no more than that takes, because allocators reuse a block
    for a request of the same size.
    """
    memory = allocate(align + nbytes)
    if address(memory) % GRAIN:
        memory = allocate(GRAIN + align + nbytes)
    return memory, -address(memory) % GRAIN + align


def placed(allocate: Callable[[int], Any], address: Callable[[Any], int], nbytes: int, align: int) -> Any:
    """Allocate a base buffer that begins ``align`` bytes after a multiple of ``GRAIN``, as ``beginning`` does."""
    memory, start = beginning(allocate, address, nbytes, align)
    return memory[start : start + nbytes]


def allocator(adapter: str) -> str | None:
    """Return the allocator of an adapter's variant (``conformance/src/runner/variants.rs``), or ``None``."""
    return os.environ.get(f"CONFORMANCE_{adapter.upper()}_ALLOCATOR")


class OfTheHost:
    """A tensor whose framework gives its device no number, which DLPack demands, as PaddlePaddle on the host."""

    def __init__(self, tensor: Any) -> None:
        kind, _ = tensor.__dlpack_device__()
        self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, lambda: (kind, 0)


def taken(take: Callable[[Any], Any], tensor: Any) -> Any:
    """Import a tensor by a framework's ``from_dlpack``. Return ``None`` for a tensor without ``__dlpack__``.

    Of a tensor on a GPU TensorFlow exports a capsule only.
    """
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and tensorflow.is_tensor(tensor) and "GPU" in tensor.device:
        return take(tensorflow.experimental.dlpack.to_dlpack(tensor))
    if not hasattr(tensor, "__dlpack__"):
        return None
    return take(tensor if tensor.__dlpack_device__()[1] is not None else OfTheHost(tensor))


def elements(seed: int, nbytes: int) -> bytes:
    """Return bytes of which no floating-point number is a NaN, and of which each may be one element."""
    return bytes(byte & 0x3F for byte in random.Random(seed).randbytes(nbytes))


class Raised(NamedTuple):
    """What functions are made to raise."""

    error: type[BaseException]
    #: The kind of the error that an adapter makes of it.
    kind: str
    #: Whether the function does its work first.
    late: bool = False
    #: Whether the error must reach the caller, also where there is another way to convert.
    reaches: bool = False


RAISED = (
    Raised(RuntimeError, "framework"),
    Raised(RuntimeError, "framework", late=True),
    Raised(BufferError, "refused"),
    Raised(MemoryError, "out of memory"),
    Raised(KeyboardInterrupt, "framework", reaches=True),
)


class Raises:
    """A function that is made to raise."""

    def __init__(self, owner: Any, attribute: str, raised: Raised) -> None:
        self.owner, self.attribute = owner, attribute
        self.error, self.kind, self.late, self.reaches = raised
        self.called = False
        where = getattr(owner, "__name__", type(owner).__name__)
        when = "after it has done its work" if self.late else "at once"
        self.name = f"{where}.{attribute} raises {self.error.__name__} {when}"

    def begin(self, words: str) -> None:
        original = getattr(self.owner, self.attribute)
        self.called = False

        def instead(*arguments: Any, **keywords: Any) -> Any:
            self.called = True
            if self.late:
                original(*arguments, **keywords)
            raise self.error(words)

        self.patch = mock.patch.object(self.owner, self.attribute, instead)
        self.patch.start()

    def end(self) -> bool:
        self.patch.stop()
        return self.called


def raising(*functions: tuple[Any, str]) -> list[Raising]:
    """Return all that each of the functions is made to raise. A function is an object and one of its attributes."""
    return [Raises(*function, raised) for function in functions for raised in RAISED]


class Replaced:
    """A function that is looked up once, and kept, by those who call it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.call = function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.call(*arguments, **keywords)


#: Methods of tensors, of one framework or another, after which the elements are what they were. What they do to the
#: memory is the framework's own affair: PaddlePaddle's ``contiguous`` gives the tensor itself other memory.
HARMLESS = ("clone", "contiguous", "copy", "cpu", "detach", "flatten", "ravel", "tolist")


def usual(subject: Subject) -> list[Usual]:
    """Return how users make tensors: as the subject says, and a transposed one whose methods are called later."""
    own = subject.usual()
    if not own or "float32" not in subject.capabilities().dtypes:
        return own

    def make(seed: int) -> Any:
        return subject.create(Spec("float32", [4, 6], [1, 4], 0, 24), elements(seed, 96))

    def works(name: str) -> bool:
        sample = make(0)
        try:
            return callable(getattr(sample, name, None)) and bool([operator.methodcaller(name)(sample)])
        except RuntimeError:
            # Warp flattens no array with gaps.
            return False

    return own + [
        Usual(f"a tensor whose {name} is called later", make, afterwards=operator.methodcaller(name))
        for name in HARMLESS
        if works(name)
    ]


class SingleStream(Subject):
    """A framework that makes no streams."""

    def streams(self) -> list[int]:
        return []

    def use(self, handle: int) -> int:
        raise RuntimeError(f"the framework has a single stream, and cannot use {handle:#x}")

    def fresh(self, external: bool) -> int | None:
        return None

    def end(self, handle: int) -> None:
        raise RuntimeError(f"the framework has a single stream, and did not make {handle:#x}")


class Unwritable(SingleStream):
    """A framework whose tensors cannot be written to, and whose work on a GPU all runs in one stream."""

    def create_unwritten(self, spec: Any) -> Any:
        raise TypeError("tensors of TensorFlow cannot be written to")

    def write(self, tensor: Any, data: bytes) -> None:
        raise TypeError("tensors of TensorFlow cannot be written to")


class Arrays:
    """What NumPy and CuPy share: arrays with strides in bytes."""

    def __init__(self, module: Any) -> None:
        import numpy

        self.numpy = numpy
        self.module = module
        self.named = {name: dtype for name in NAMES if (dtype := self.dtype(name)) is not None}
        # Objects that exist now stay: garbage collection need not visit them.
        gc.collect()
        gc.freeze()

    def address(self, array: Any) -> int:
        """Return the address of the first element."""
        raise NotImplementedError

    def upload(self, memory: Any, data: Any) -> None:
        """Copy bytes, a NumPy array, into memory of the framework. Wait until they are there."""
        raise NotImplementedError

    def view(self, memory: Any, dtype: Any, shape: list[int], offset: int, strides: list[int]) -> Any:
        """Return an array over ``memory``. Offset and strides are in bytes."""
        raise NotImplementedError

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
        """Return the same memory as integers, which no kernel changes; elements of 16 bytes keep their dtype."""
        return array.view(f"i{array.itemsize}") if array.itemsize <= 8 else array

    def elements(self, data: bytes, like: Any) -> Any:
        return self.numpy.frombuffer(data, dtype=like.dtype).reshape(like.shape)

    def strides(self, array: Any) -> list[int]:
        # Those of a field of records need not be whole elements.
        return [stride // array.itemsize for stride in array.strides]

    def create(self, spec: Spec, data: bytes) -> Any:
        memory = placed(self.allocate, self.address, len(data), spec.align)
        self.upload(memory, self.numpy.frombuffer(data, dtype="uint8"))
        return self.over(memory, spec)

    def create_unwritten(self, spec: Spec) -> Any:
        nbytes = spec.base * self.named[spec.dtype].itemsize
        return self.over(placed(self.allocate, self.address, nbytes, spec.align), spec)

    def over(self, memory: Any, spec: Spec) -> Any:
        dtype = self.named[spec.dtype]
        size = dtype.itemsize
        return self.view(memory, dtype, spec.shape, spec.offset * size, [stride * size for stride in spec.strides])

    def fill(self, array: Any, byte: int) -> None:
        bits = self.bits(array)
        bits[...] = self.numpy.frombuffer(bytes([byte]) * bits.itemsize, dtype=bits.dtype)[0]

    def part(self, array: Any, start: int) -> Any:
        return array[start:]

    def allocate(self, nbytes: int) -> Any:
        return self.module.empty(nbytes, dtype="uint8")

    def snapshot(self, source: Any, into: Any) -> None:
        bits = self.bits(source)
        into.view(bits.dtype).reshape(bits.shape)[...] = bits

    def import_natively(self, other: Any) -> Any:
        return taken(self.module.from_dlpack, other)
