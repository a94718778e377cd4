"""Streams of CUDA devices, for frameworks that have several."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import ctypes
from typing import Any, ClassVar

from truebridge_conformance.subjects import Subject

#: Streams that a framework makes in addition to its default one, and that do not wait for it.
STREAMS = 2

#: The handle of CUDA's default stream of the calling thread, which waits for the legacy stream.
PER_THREAD = 2

#: Cycles of a delay: about three milliseconds.
CYCLES = 6_000_000


def raw_stream() -> int:
    """Make a stream of the driver that no framework knows. It does not wait for the legacy stream."""
    stream = ctypes.c_void_p()
    failed = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(stream), 1)
    if failed or not stream.value:
        raise RuntimeError(f"cuStreamCreate reports {failed}")
    return stream.value


def destroy(stream: int) -> None:
    """Destroy a stream of the driver. Work that was submitted to it still runs."""
    failed = ctypes.CDLL("libcuda.so.1").cuStreamDestroy_v2(ctypes.c_void_p(stream))
    if failed:
        raise RuntimeError(f"cuStreamDestroy reports {failed}")


class ManyStreams(Subject):
    """A framework that makes streams: those that it keeps for the process, and those of one case."""

    #: Streams of the process by handle, so that two instances use the same ones.
    known: ClassVar[dict[int, Any]]

    #: Number of those that ``blocking`` makes.
    waiting: ClassVar[int] = 0

    def __init__(self) -> None:
        #: Whether a stream of a case is external, by its handle.
        self.passing: dict[int, bool] = {}

    def handle(self, stream: Any) -> int:
        """Return the handle of a stream of the framework."""
        raise NotImplementedError

    def current(self) -> Any:
        """Return the current stream."""
        raise NotImplementedError

    def enter(self, stream: Any) -> None:
        """Make a stream the current one."""
        raise NotImplementedError

    def made(self) -> Any:
        """Make a stream."""
        raise NotImplementedError

    def wrapped(self, handle: int) -> Any:
        """Return the stream with this handle: the default one, or an external one."""
        raise NotImplementedError

    def blocking(self) -> list[Any]:
        """Make streams that wait for the legacy stream, and that stream for them."""
        return []

    def keep_streams(self) -> None:
        """Make the streams that the process keeps, once."""
        if not self.known:
            made = [*(self.made() for _ in range(STREAMS)), *self.blocking()]
            self.known.update((self.handle(stream), stream) for stream in made)

    def streams(self) -> list[int]:
        return list(self.known)[: STREAMS + self.waiting]

    def known_as(self, handle: int) -> Any:
        """Return the stream with this handle."""
        if handle not in self.known:
            self.known[handle] = self.wrapped(handle)
        return self.known[handle]

    def use(self, handle: int) -> int:
        before = self.handle(self.current())
        self.enter(self.known_as(handle))
        return before

    def fresh(self, external: bool) -> int | None:
        stream = self.wrapped(raw_stream()) if external else self.made()
        handle = self.handle(stream)
        # A framework with a pool may return one that the process keeps. Any other that is known under this handle has
        # been destroyed: the driver uses handles again.
        if handle not in self.streams():
            self.known[handle] = stream
            self.passing[handle] = external
        return handle

    def end(self, handle: int) -> None:
        if handle not in self.passing:
            return
        del self.known[handle]
        if self.passing.pop(handle):
            destroy(handle)
