"""JAX under test."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from truebridge_conformance.subjects import Bench, Capabilities, Observed, Raising, Spec, Stream, Subject, Usual, shape
from truebridge_conformance.subjects.common import (
    NAMES,
    Replaced,
    Unwritable,
    collect,
    elements,
    raising,
    row_major,
    taken,
)

#: The dtypes that JAX has only in its mode with elements of 64 bits.
WIDE = ("int64", "uint64", "float64", "complex128")


class JAX(Unwritable):
    """JAX on one device."""

    def __init__(self, device: str) -> None:
        import jax
        import numpy

        self.jax = jax
        self.numpy = numpy
        kind, _, index = device.partition(":")
        self.cuda = kind == "cuda"
        self.device = jax.local_devices(backend=kind)[int(index or 0)]
        self.name = f"cuda:{index or 0}" if self.cuda else "cpu"
        self.operand: Any = self.put(numpy.ones((2048, 2048), "float32")) if self.cuda else None
        # One function for each dtype and shape, with any byte.
        self.filled = jax.jit(self.bytes_of, static_argnums=(0, 1))
        self.work = jax.jit(lambda x: x @ x * 1e-4)
        self.twice = jax.jit(lambda x: x * 2)
        self.grow = jax.jit(lambda x: x + 1, donate_argnums=0)
        if self.cuda:
            self.delay()
            self.settle()
        # Objects that exist now stay: garbage collection need not visit them.
        gc.collect()
        gc.freeze()

    def capabilities(self) -> Capabilities:
        known = (name for name in NAMES if hasattr(self.jax.numpy, name))
        named = (name for name in known if self.jax.config.jax_enable_x64 or name not in WIDE)
        # It takes other orders of dimensions, and then compiles every program anew. On the host programs want 64 bytes,
        # and a profile has one alignment for all devices.
        return Capabilities(
            tuple(named), writes=False, immutable=True, compiles=True, imports=64, imports_strides=False
        )

    def put(self, array: Any) -> Any:
        """Return an array with its own memory, for which no kernel has to be compiled."""
        return self.copied(self.jax.device_put(array, self.device)).block_until_ready()

    def copied(self, array: Any) -> Any:
        return self.jax.device_put(array, self.device, may_alias=False)

    def create(self, spec: Spec, data: bytes) -> Any:
        dtype = self.jax.numpy.dtype(spec.dtype)
        return self.put(self.numpy.frombuffer(data, dtype).reshape(spec.shape))

    def observe(self, tensor: Any) -> Observed:
        address = tensor.unsafe_buffer_pointer()
        shape = list(tensor.shape)
        return Observed(tensor.dtype.name, shape, row_major(shape), address, False, self.name)

    def read(self, tensor: Any) -> bytes:
        # JAX keeps the first host copy of an array on a GPU, and does not read the device again.
        source = self.copied(tensor) if self.cuda else tensor
        return bytes(self.numpy.asarray(source).tobytes())

    def fill(self, tensor: Any, byte: int) -> Any:
        # To compile a program for a shape takes 40 ms. On the host one in eight shapes has one, which may run late.
        if not self.cuda and (7 * sum(tensor.shape) + len(tensor.shape) + tensor.dtype.itemsize) % 8:
            byte = min(byte, 1) if tensor.dtype == bool else byte
            return self.copied(self.numpy.full(tensor.nbytes, byte, "uint8").view(tensor.dtype).reshape(tensor.shape))
        with self.jax.default_device(self.device):
            return self.filled(tensor.dtype, tensor.shape, byte)

    def bytes_of(self, kind: Any, shape: tuple[int, ...], byte: Any) -> Any:
        """Return the array whose bytes are all this one."""
        lax, numpy = self.jax.lax, self.jax.numpy
        if kind == numpy.bool_:
            return numpy.full(shape, byte != 0)
        if numpy.issubdtype(kind, numpy.complexfloating):
            part = self.bytes_of(numpy.dtype("float64" if kind.itemsize == 16 else "float32"), shape, byte)
            return lax.complex(part, part)
        width = [kind.itemsize] if kind.itemsize > 1 else []
        return lax.bitcast_convert_type(numpy.full([*shape, *width], byte, "uint8"), kind)

    def allocate(self, nbytes: int) -> Any:
        if not self.cuda:
            return self.copied(self.numpy.full(nbytes, 0x5A, "uint8"))
        with self.jax.default_device(self.device):
            return self.jax.numpy.full(nbytes, 0x5A, "uint8")

    def snapshot(self, source: Any, into: Any) -> Any:
        return self.jax.numpy.array(source, copy=True) if self.cuda else self.copied(source)

    def own(self, seed: int, dtype: str = "float32", shape: tuple[int, ...] = (4, 6)) -> Any:
        numpy = self.numpy
        kind = self.jax.numpy.dtype(dtype)
        count = int(numpy.prod(shape, dtype=int))
        return self.put(numpy.frombuffer(elements(seed, count * kind.itemsize), kind).reshape(shape))

    def deleted(self, seed: int) -> Any:
        array = self.own(seed)
        array.delete()
        return array

    def donated(self, seed: int) -> Any:
        array = self.own(seed)
        self.grow(array)
        return array

    def donate(self, array: Any) -> None:
        # XLA copies on the host what a view refers to, and refuses the call on a GPU.
        with contextlib.suppress(self.jax.errors.JaxRuntimeError) if self.cuda else contextlib.nullcontext():
            self.grow(array)

    def traced(self, seed: int) -> Any:
        """Return what stands for an array while a function is traced, and outlives that."""
        seen: list[Any] = []
        # It is called once, to be traced.
        self.jax.jit(seen.append)(self.own(seed))
        return seen[0]

    def usual(self) -> list[Usual]:
        jax, own = self.jax, self.own
        return [
            Usual("an array", own),
            Usual("a result that is still computed", lambda seed: self.twice(own(seed))),
            Usual("a result that is not jitted", lambda seed: own(seed) + 1),
            Usual("a number in an array", lambda seed: own(seed, shape=())),
            Usual("a weakly typed number", lambda seed: jax.numpy.asarray(float(seed % 97))),
            Usual("an array without elements", lambda seed: own(seed, shape=(3, 0))),
            Usual("a part of an array", lambda seed: own(seed)[1:, ::2]),
            Usual("a transposed array", lambda seed: own(seed).T),
            Usual("an array that NumPy has read", self.read_before),
            Usual("an array that is deleted later", own, afterwards=lambda array: array.delete()),
            Usual("an array that is donated later", own, afterwards=self.donate),
            Usual("a deleted array", self.deleted, "consumed"),
            Usual("a donated array", self.donated, "consumed"),
            Usual("what is traced", self.traced, "not a tensor"),
            Usual("keys", lambda seed: jax.random.key(seed & 0xFFFF), "not a tensor"),
            Usual("elements of four bits", lambda seed: own(seed).astype("int4"), "dtype"),
            Usual("elements of one bit", lambda seed: own(seed).astype("int1"), "dtype"),
            Usual("a number", lambda seed: float(seed % 97), "not a tensor"),
        ]

    def read_before(self, seed: int) -> Any:
        array = self.own(seed)
        self.numpy.asarray(array)
        return array

    def raising(self) -> Sequence[Raising]:
        array = type(self.own(0))
        functions = [(array, name) for name in ("clone", "copy", "is_deleted", "_fully_replicated_shard")]
        return raising(*functions, *((hook, "call") for hook in HOOKS.values()))

    def delay(self) -> None:
        if self.cuda:
            for _ in range(40):
                self.operand = self.work(self.operand)

    def settle(self) -> int | None:
        # Work on the host runs in threads, which drop what it has read.
        self.filled(self.numpy.dtype("uint8"), (1,), 0x5A).block_until_ready()
        if self.cuda:
            self.operand.block_until_ready()
        collect()
        if not self.cuda:
            return None
        # An allocator without a pool counts nothing.
        stats = self.device.memory_stats()
        used: int | None = stats and stats["bytes_in_use"]
        return used

    def import_natively(self, other: Any) -> Any:
        return taken(self.jax.dlpack.from_dlpack, other)


subject: Callable[[str], Subject] = JAX


#: Functions of jaxlib that the adapter looks up once, by their names.
HOOKS: dict[str, Replaced] = {}


def prepare() -> None:
    """Enable elements of 64 bits, unless the variant is JAX without them. The profile of the adapter depends on it.

    Functions of jaxlib become replaceable.
    """
    import jax

    functions = importlib.import_module("jaxlib._jax")
    jax.config.update("jax_enable_x64", os.environ.get("JAX_ENABLE_X64") != "0")
    for name in ("buffer_to_dlpack_managed_tensor", "dlpack_managed_tensor_to_buffer"):
        if name not in HOOKS:
            HOOKS[name] = Replaced(getattr(functions, name))
            setattr(functions, name, HOOKS[name])


BARS = {
    **{("torch", "host"): None, ("numpy", "host"): None},
    **{("torch", "cross"): 0.55, ("torch", "cross, busy"): None, ("cupy", "cross"): None},
}


def bench(device: str) -> Bench | None:
    """Return what the benches need."""
    import jax

    if device == "cuda" and not any(found.platform == "gpu" for found in jax.devices()):
        return None
    where = jax.local_devices(backend=device)[0]

    def make(nbytes: int) -> Any:
        with jax.default_device(where):
            return jax.numpy.zeros(shape(nbytes), "float32").block_until_ready()

    if device == "cpu":
        return Bench(make, BARS, slices=False)
    operand = jax.device_put(jax.numpy.ones((4096, 4096)), where)
    work = jax.jit(lambda x: x @ x)
    work(operand).block_until_ready()
    return Bench(
        make,
        BARS,
        slices=False,
        # JAX names a stream for work of others, and has no other choice.
        stream=lambda: Stream(where.get_stream_for_external_ready_events(), only=True),
        occupy=lambda: [work(operand) for _ in range(8)],
        unknown_reuse=True,
        used=lambda: int(where.memory_stats()["bytes_in_use"]),
    )
