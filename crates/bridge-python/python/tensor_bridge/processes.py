"""Tensors of other processes.

One process shares tensors, and passes a ticket on, by whatever way. Another opens the ticket::

    ticket = tb.share({"weights": weights, "step": 7})  # in one process
    send(ticket.text)

    model = tb.open(text, "tensorflow")  # in another: the same memory

The first process keeps the memory until the ticket has expired and every process that opened it has dropped the
tensors, or has died. Programs that run for long give names to what they share: see ``serve`` and ``connect``.
"""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Any, Literal

from . import _core
from ._core import Ticket
from ._trees import flattened, tree_of
from .errors import of_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._core import Device, Order, Target

__all__ = ["Ticket", "configure", "end", "held", "open", "revoke", "road", "share"]

Writing = Literal["private", "never", "shared"]

atexit.register(_core.ipc_close)


def share(
    x: Any,
    *,
    expires: float = 60.0,
    writing: Writing | None = None,
    copy: bool | None = None,
    isolated: bool = False,
) -> Ticket:
    """Share a tensor of any framework with other processes, and return a ticket.

    ``x`` may also be a dict, a list or a tuple of tensors, numbers, strings and ``None``, at any depth. A subclass of
    ``dict`` comes out as a ``dict``, a named tuple as a ``tuple``. The ticket opens all of it.

    The ticket can be opened for ``expires`` seconds, any number of times, by any process of this user on this machine.
    This process keeps the memory until then, and until every process that opened the ticket has dropped the tensors or
    has died; ``revoke`` ends it before.

    Memory of the host is copied once, into memory that can be shared: later writes to ``x`` are not seen. A tensor that
    was opened from such memory is passed on in place, with ``writing="never"`` and ``"shared"``. Memory of a GPU is
    shared in place, where its allocator allows that; the pools of ``cudaMallocAsync`` do not, and one copy is made on
    the device: see ``road``. ``copy=False`` refuses a copy, ``copy=True`` makes it always. A block of a GPU's allocator
    holds other tensors as well, which a process with the ticket could read: ``isolated=True`` shares a copy in an
    allocation of its own.

    ``writing`` says what a process that opens the ticket may do. With ``"private"`` it may write, and sees its own
    writes alone (the default on the host); with ``"never"`` no process may write; with ``"shared"`` all may, and see
    each other's writes (the default on a GPU, which has no private memory).

    The work of this process on a GPU's tensor is waited for, on the device, by every process that opens the ticket; its
    memory is reused behind the work of every process that had it open.

    Raises a ``BridgeError``.
    """
    leaves, tree = flattened(x)
    if isolated and copy is False:
        raise of_kind("argument", "an isolated share is a copy: leave copy=False out")
    return _core.ipc_share(leaves, tree, float(expires), writing, True if isolated else copy)


def road(x: Any) -> Literal["passed", "handle", "files", "copy"]:
    """Return how the memory of a tensor would leave this process.

    ``"passed"``: in place, because it is memory of another process. ``"handle"``: in place, by the driver's handle of
    the allocator's block. ``"files"``: in place, by file descriptors of virtual memory. ``"copy"``: by one copy, as all
    memory of the host that is not passed on.
    """
    return _core.ipc_road(x)


def open(
    ticket: Ticket | str | bytes,
    target: Target,
    *,
    copy: bool | None = None,
    device: Device | None = None,
    order: Order | None = None,
    permute: Sequence[int] | None = None,
    layout: Literal["compact"] | None = None,
) -> Any:
    """Return what another process has shared, as tensors of the framework ``target``, in place.

    ``ticket`` is the ticket or its text. The other arguments are those of ``convert``, for each tensor. When the last
    view of the tensors is dropped, the memory goes back to the process that shares it.

    Raises a ``BridgeConnectionError`` if the ticket has expired or was revoked, or its process has ended, and a
    ``BridgePermissionError`` if that process runs as another user.
    """
    tensors, tree = _core.ipc_open(ticket, target, copy, device, order, permute, layout)
    return tree_of(tree, tensors)


def revoke(ticket: Ticket | str | bytes) -> None:
    """End a share of this process now. A process that has it open keeps the memory, and is told at its next call."""
    _core.ipc_revoke(ticket, True)


def end(ticket: Ticket | str | bytes) -> None:
    """Let a ticket of this process expire now. A process that has it open goes on as before."""
    _core.ipc_revoke(ticket, told=False)


def configure(
    *,
    folder: str | os.PathLike[str] | None = None,
    users: Sequence[int] = (),
    connections: int | None = None,
    shares: int | None = None,
    leases: int | None = None,
    nbytes: int | None = None,
) -> None:
    """Say how this process shares, before its first share.

    ``folder`` is for the socket, and must be this user's alone; the default is ``TENSOR_BRIDGE_IPC``, else
    ``tensor-bridge`` in ``XDG_RUNTIME_DIR``, else one in ``/tmp``. ``users`` are numbers of users who may open tickets
    beside this one. ``connections`` is the most processes at once, ``shares`` the most shares, ``leases`` the most that
    one process may have open, and ``nbytes`` the most memory for copies.
    """
    path = None if folder is None else os.fspath(folder)
    _core.ipc_configure(path, list(users), connections, shares, leases, nbytes)


def held() -> dict[str, int]:
    """Return what this process shares now: ``shares``, ``leases`` of other processes, ``connections``, ``nbytes``."""
    return dict(zip(("shares", "leases", "connections", "nbytes"), _core.ipc_held(), strict=True))
