"""JAX under test."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from truebridge_conformance.subjects import Bench, Capabilities, Observed, Spec, Stream, Subject, shape
from truebridge_conformance.subjects.common import NAMES, Unwritable, row_major, taken


class JAX(Unwritable):
    """JAX on one device, in its mode with elements of 64 bits."""

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
        if self.cuda:
            self.delay()
            self.settle()
        # Objects that exist now stay: garbage collection need not visit them.
        gc.collect()
        gc.freeze()

    def capabilities(self) -> Capabilities:
        named = (name for name in NAMES if hasattr(self.jax.numpy, name))
        return Capabilities(tuple(named), writes=False, immutable=True)

    def put(self, array: Any) -> Any:
        """Return an array with memory of its own, which no kernel has to be compiled for."""
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
        data: bytes = self.numpy.asarray(source).tobytes()
        return data

    def fill(self, tensor: Any, byte: int) -> Any:
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
        with self.jax.default_device(self.device):
            return self.jax.numpy.full(nbytes, 0x5A, "uint8")

    def snapshot(self, source: Any, into: Any) -> Any:
        return self.jax.numpy.array(source, copy=True)

    def delay(self) -> None:
        if self.cuda:
            for _ in range(40):
                self.operand = self.work(self.operand)

    def settle(self) -> int | None:
        # Work on the host runs in threads, which drop what it has read.
        self.allocate(1).block_until_ready()
        if self.cuda:
            self.operand.block_until_ready()
        gc.collect()
        if not self.cuda:
            return None
        # An allocator without a pool counts nothing.
        stats = self.device.memory_stats()
        used: int | None = stats and stats["bytes_in_use"]
        return used

    def import_natively(self, other: Any) -> Any:
        return taken(self.jax.dlpack.from_dlpack, other)


subject: Callable[[str], Subject] = JAX


def prepare() -> None:
    """Enable elements of 64 bits, which the profile of the adapter depends on."""
    import jax

    jax.config.update("jax_enable_x64", True)


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
