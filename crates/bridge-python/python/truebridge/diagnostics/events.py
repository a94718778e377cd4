"""What a trace says of one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from ..errors import Kind


class Event(NamedTuple):
    """One tensor that was converted, or did not.

    Attributes
    ----------
    call
        Number of the call. The tensors of a tree have the same.
    operation
        ``"convert"`` for ``convert``, ``to_torch`` and the like, ``load`` and ``save``; ``"copy"``; ``"share"`` and
        ``"open"``; ``"feed"`` and ``"take"`` at the edges of TensorFlow's graphs.
    source
        Framework of the tensor, ``"ipc"`` for memory of another process, and ``None`` where the call failed before it
        was known.
    target
        Framework of the result, or ``"ipc"``.
    path
        ``"in place"``, ``"copy"`` or ``"failed"``.
    copied_by
        Who made the copy: see ``Plan.copied_by``. ``None`` without a copy.
    reason
        Why the copy was made, or ``None``.
    error
        Kind of the error that the call raised: see ``BridgeError.kind``. ``None`` if it raised none.
    device
        Device of the tensor, or ``None`` where the call failed before it was known. So with ``dtype`` and ``shape``.
    dtype
        Dtype of the elements.
    shape
        Shape of the tensor, in elements, before ``permute=``.
    nbytes
        Bytes of its elements.
    streams
        The owner's stream and the stream that was made to wait for it, as the driver's handles; ``None`` where nothing
        had to wait.
    start
        Start of the call, in nanoseconds of ``time.monotonic_ns``. On Linux all processes have this clock in common.
    duration
        Host time of the call, in nanoseconds, for all of its tensors together. Work of a device is not in it.
    tensors
        Tensors of the call.
    pid
        Number of the process.
    thread
        Number of the thread: its ``threading.get_native_id``.
    """

    call: int
    operation: Literal["convert", "copy", "share", "open", "feed", "take"]
    source: str | None
    target: str
    path: Literal["in place", "copy", "failed"]
    copied_by: Literal["kernels", "host", "move", "producer", "consumer"] | None
    reason: str | None
    error: Kind | None
    device: str | None
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    streams: tuple[int, int] | None
    start: int
    duration: int
    tensors: int
    pid: int
    thread: int

    @property
    def method(self) -> str:
        """The path in words: ``"in place"``, ``"copy by host"``, or ``"failed"``."""
        return f"copy by {self.copied_by}" if self.path == "copy" else self.path

    @property
    def why(self) -> str:
        """The reason of the copy, or the kind of the error."""
        return self.reason or self.error or ""
