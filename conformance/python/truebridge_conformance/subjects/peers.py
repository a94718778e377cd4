"""Libraries that are known only by a protocol: what their subjects share."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Iterator
from typing import Any

from truebridge_conformance.subjects import Capabilities, Observed, Spec
from truebridge_conformance.subjects.common import beginning, row_major
from truebridge_conformance.subjects.streams import ManyStreams


class Peer(ManyStreams):
    """A library that shares memory by a protocol.

    The library allocates, makes tensors and describes them. NumPy and CuPy read and write at the addresses that it
    says, CuPy in the stream of the library that is current. No protocol is involved in that.
    """

    #: Numbers of dimensions that the library has: the least and the most.
    rank: tuple[int, int] = (0, 64)
    #: Whether its tensors have no gaps.
    compact = False

    def __init__(self, device: str) -> None:
        super().__init__()
        kind, _, index = device.partition(":")
        self.name, self.index, self.on_host = device, int(index or 0), kind == "cpu"
        self.lens: Any = importlib.import_module(
            f"truebridge_conformance.subjects.{'numpy' if self.on_host else 'cupy'}"
        ).subject(device)
        self.handle_now = 0
        if not self.on_host:
            self.keep_streams()
        self.dtypes = tuple(name for name in self.lens.named if self.makes(name))

    def makes(self, dtype: str) -> bool:
        """Return whether the library has this dtype."""
        raise NotImplementedError

    def allocate(self, nbytes: int) -> Any:
        """Allocate ``nbytes`` bytes of uint8 in the current stream."""
        raise NotImplementedError

    def over(self, memory: Any, dtype: str, shape: list[int], strides: list[int], offset: int) -> Any:
        """Return a tensor over ``memory``, which it keeps. Strides count elements, ``offset`` bytes."""
        raise NotImplementedError

    def seen(self, tensor: Any) -> tuple[str, list[int], list[int], int]:
        """Return the dtype, the shape, the strides in elements and the address that the library reports."""
        raise NotImplementedError

    def submitted(self, tensor: Any) -> Any:
        """Do what the library's users do after work in the current stream. Return what replaces the tensor."""
        return None

    def capabilities(self) -> Capabilities:
        return Capabilities(self.dtypes, copies=False)

    def at(self, tensor: Any) -> Any:
        """Return an array of integers over the elements, at their address."""
        dtype, shape, strides, address = self.seen(tensor)
        kind = self.lens.numpy.dtype({16: "complex128"}.get(self.size(dtype), f"i{self.size(dtype)}"))
        if 0 in shape or not address:
            return self.lens.module.empty(shape, kind)
        steps = [(length - 1) * stride * kind.itemsize for length, stride in zip(shape, strides, strict=True)]
        below, above = -sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
        nbytes = below + above + kind.itemsize
        if self.on_host:
            memory: Any = (ctypes.c_char * nbytes).from_address(address - below)
            return self.lens.numpy.ndarray(shape, kind, memory, below, [stride * kind.itemsize for stride in strides])
        cuda = self.lens.cupy.cuda
        start = cuda.MemoryPointer(cuda.UnownedMemory(address - below, nbytes, tensor, self.index), below)
        return self.lens.cupy.ndarray(shape, kind, start, [stride * kind.itemsize for stride in strides])

    def size(self, dtype: str) -> int:
        """Return the bytes of an element."""
        return int(self.lens.named[dtype].itemsize)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Let CuPy work in the library's stream."""
        if self.on_host:
            yield
            return
        before = self.lens.use(self.handle_now)
        try:
            yield
        finally:
            self.lens.use(before)

    def create(self, spec: Spec, data: bytes) -> Any:
        def address(memory: Any) -> int:
            return self.seen(memory)[3]

        if spec.strides == row_major(spec.shape) and not spec.align and not spec.offset:
            memory, start = self.allocate(len(data)), 0
        else:
            memory, start = beginning(self.allocate, address, len(data), spec.align)
        if data:
            with self.inside():
                self.lens.upload(
                    self.at(memory)[start : start + len(data)].view("uint8"),
                    self.lens.numpy.frombuffer(data, "uint8"),
                )
        offset = start + spec.offset * self.size(spec.dtype)
        made = self.over(memory, spec.dtype, spec.shape, spec.strides, offset)
        replaced = self.submitted(made)
        return made if replaced is None else replaced

    def observe(self, tensor: Any) -> Observed:
        dtype, shape, strides, address = self.seen(tensor)
        return Observed(dtype, shape, strides, address, self.capabilities().read_only, self.name)

    def read(self, tensor: Any) -> bytes:
        with self.inside():
            return bytes(self.lens.read(self.at(tensor)))

    def write(self, tensor: Any, data: bytes) -> None:
        with self.inside():
            self.lens.write(self.at(tensor), data)
        self.submitted(tensor)

    def fill(self, tensor: Any, byte: int) -> Any:
        with self.inside():
            self.lens.fill(self.at(tensor), byte)
        return self.submitted(tensor)

    def snapshot(self, source: Any, into: Any) -> Any:
        with self.inside():
            self.lens.snapshot(self.at(source), self.at(into))
        return self.submitted(into)

    def delay(self) -> None:
        with self.inside():
            self.lens.delay()

    def settle(self) -> int | None:
        self.lens.settle()
        return None

    def use(self, handle: int) -> int:
        before, self.handle_now = self.handle_now, handle
        if handle not in self.known:
            self.known[handle] = self.wrapped(handle)
        self.enter(self.known[handle])
        return before

    def streams(self) -> list[int]:
        return [] if self.on_host else super().streams()

    def enter(self, stream: Any) -> None:
        """Make a stream the current one, where the library has one. Where it has none, it is passed to each call."""

    def import_natively(self, other: Any) -> Any:
        return None
