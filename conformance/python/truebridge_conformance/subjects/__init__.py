"""The frameworks under test, through their own public interfaces and never through the bridge.

Each framework has a module by its name, which holds all that is special to it. Its ``subject`` makes a `Subject` for a
device, its ``bench`` says what the benches need on a device, and ``prepare``, where it has one, is called before the
framework's adapter is opened. Dtypes have the names of ``bridge_core``, strides and offsets count elements, and
elements are ``bytes`` in row-major order. Tensors are whatever the framework makes: ``Any``.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

__all__ = ["Bench", "Capabilities", "Observed", "Path", "Raising", "Spec", "Stream", "Subject", "Usual", "bench"]


@dataclass(frozen=True)
class Capabilities:
    """What a framework can do on a device (``Capabilities`` in ``conformance/src/subject.rs``)."""

    dtypes: tuple[str, ...]
    negative_strides: bool = False
    broadcasts: bool = True
    read_only: bool = False
    unaligned: bool = False
    #: Operations that it defers: ``conjugation``, ``negation`` and ``negated_conjugation``.
    defers: tuple[str, ...] = ()
    writes: bool = True
    immutable: bool = False
    gigabytes: bool = False
    copies: bool = True
    parts: bool = False
    threads: bool = True
    devices: bool = False
    graphs: bool = False
    legacy_stream: bool = False
    compiles: bool = False
    watches: bool = False
    #: The alignment in bytes, beyond that of the element, that kernels need on what ``import_natively`` takes.
    imports: int | None = None
    #: Whether strides that it takes cost its users nothing.
    imports_strides: bool = True


class Spec(NamedTuple):
    """A tensor to make: a base buffer, and a strided view of it (``Spec`` in ``conformance/src/subject.rs``)."""

    dtype: str
    shape: list[int]
    strides: list[int]
    offset: int
    base: int
    align: int = 0
    read_only: bool = False
    pending: str | None = None


class Observed(NamedTuple):
    """What a framework reports of one of its tensors (``Observed`` in ``conformance/src/subject.rs``)."""

    dtype: str
    shape: list[int]
    strides: list[int]
    address: int
    read_only: bool
    device: str


class Usual(NamedTuple):
    """A tensor as users of a framework make it (``Usual`` in ``conformance/src/users.rs``)."""

    name: str
    #: Makes the tensor, in its own memory, with elements that a seed chooses.
    make: Callable[[int], Any]
    #: The kind of the error with which it is refused.
    refused: str | None = None
    #: The operation that the framework defers: as in ``Capabilities.defers``, or ``packing``.
    pending: str | None = None
    #: What a user does with it while a view of it lives.
    afterwards: Callable[[Any], Any] | None = None
    #: Whether a view only by the framework's public interface is right as well.
    public: bool = True


class Raising(Protocol):
    """A function of a framework that is made to raise (``Raised`` in ``conformance/src/users.rs``)."""

    name: str
    kind: str
    reaches: bool

    def begin(self, words: str) -> None:
        """Replace the function by one that raises an exception with these words."""

    def end(self) -> bool:
        """Put the function back. Return whether the one in its place was called."""


class Subject(Protocol):
    """What the suite needs of a framework. ``conformance/src/subject.rs`` documents what each method promises.

    Not every framework can do what has a body here. A subject that can says so in its capabilities, or by what it
    returns.
    """

    def capabilities(self) -> Capabilities:
        """Return what the framework can do on the device."""

    def create(self, spec: Spec, data: bytes) -> Any:
        """Make a tensor whose base buffer holds ``data``. Wait until it is there."""

    def create_unwritten(self, spec: Spec) -> Any:
        """Make a tensor whose base buffer is not initialised. Called only with the capability ``gigabytes``."""

    def observe(self, tensor: Any) -> Observed:
        """Return what the framework reports of a tensor."""

    def read(self, tensor: Any) -> bytes:
        """Return the elements. Wait for the current stream only."""

    def write(self, tensor: Any, data: bytes) -> None:
        """Overwrite the elements in the current stream."""

    def fill(self, tensor: Any, byte: int) -> Any:
        """Set every byte by a kernel. Return the tensor that replaces this one, or ``None``."""

    def allocate(self, nbytes: int) -> Any:
        """Allocate a compact uint8 tensor by the framework's allocator."""

    def snapshot(self, source: Any, into: Any) -> Any:
        """Copy the elements into a compact tensor. Return the tensor that replaces ``into``, or ``None``."""

    def part(self, tensor: Any, start: int) -> Any:
        """Return a view of the rows from ``start`` on. Called only with the capability ``parts``."""
        raise NotImplementedError

    def version(self, tensor: Any) -> int | None:
        """Return a number that is larger after each write, or ``None`` where writes are not counted."""
        return None

    def use_device(self, index: int) -> int:
        """Make a device the current one. Return the one before. Called only with the capability ``devices``."""
        raise NotImplementedError

    def begin_capture(self) -> Any:
        """Capture the current stream from now on. Return the graph. Called only with the capability ``graphs``."""
        raise NotImplementedError

    def end_capture(self, graph: Any) -> None:
        """End the capture of the current stream into the graph."""
        raise NotImplementedError

    def replay(self, graph: Any) -> None:
        """Submit the work of the graph to the current stream."""
        raise NotImplementedError

    def usual(self) -> list[Usual]:
        """Return how users of the framework make tensors."""
        return []

    def raising(self) -> Sequence[Raising]:
        """Return the functions that adapters call, each with the exceptions that it raises."""
        return []

    def join(self, earlier: int, later: int) -> None:
        """Make a stream wait for the work that another one has now. Called only with the capability ``graphs``."""
        raise NotImplementedError

    def streams(self) -> list[int]:
        """Return the handles of the streams other than the default one."""

    def use(self, handle: int) -> int:
        """Make a stream the current one. Return the handle of the one before."""

    def fresh(self, external: bool) -> int | None:
        """Make a stream and return its handle, or ``None`` where the framework makes no streams."""

    def end(self, handle: int) -> None:
        """Drop a stream that ``fresh`` has made. Destroy it where it is external."""

    def delay(self) -> None:
        """Submit work of a few milliseconds to the current stream."""

    def settle(self) -> int | None:
        """Wait for the device, empty the caches, and return the bytes in use where they are counted."""

    def import_natively(self, other: Any) -> Any:
        """Import a tensor by the framework's own means. Return ``None`` where it has none."""


class Stream(NamedTuple):
    """A stream of a framework, which the benches use with the default streams of the others."""

    handle: int
    #: Makes it the current one, or does nothing where the framework has one stream.
    inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    #: Whether the framework has no other, so that it is always on this one.
    only: bool = False


class Path(NamedTuple):
    """What the soak also repeats: its name, its tensor by the length in bytes, the call, its views."""

    name: str
    make: Callable[[int], Any]
    take: Callable[[Any], Any]
    views: int


@dataclass(frozen=True)
class Bench:
    """What the benches need of a framework on a device. Its own method is in the package's row."""

    #: Makes a float32 tensor of so many bytes, at an address that every framework takes in place.
    make: Callable[[int], Any]
    #: The bars for the ratio to the native method, by target and streams. ``None``: it is measured, and has no bar.
    bars: Mapping[tuple[str, str], float | None] = field(default_factory=dict)
    #: Targets from which the conversion back is measured, too.
    back: tuple[str, ...] = ()
    #: Whether slices of a tensor share its memory.
    slices: bool = True
    #: Makes a stream of a CUDA device.
    stream: Callable[[], Stream] | None = None
    #: Submits milliseconds of work to the current stream.
    occupy: Callable[[], Any] = lambda: None
    #: Whether one more event is needed where its memory is released, because it does not say how it is reused.
    unknown_reuse: bool = False
    #: Returns the bytes of the device that it has in use.
    used: Callable[[], int] = lambda: 0
    #: What the soak repeats in addition to the pairs.
    path: Path | None = None


def bench(framework: str, device: str) -> Bench | None:
    """Return what the benches need on ``cpu`` or ``cuda``. ``None``: it is not installed, or has no tensors there."""
    try:
        made: Bench | None = importlib.import_module(f"{__name__}.{framework}").bench(device)
    except ImportError:
        return None
    return made


def shape(nbytes: int) -> tuple[int, int]:
    """Return the shape of a float32 tensor of so many bytes, in rows of 256 elements."""
    return nbytes // (4 * 256), 256
