"""Tickets: text by which one process opens the tensors of another."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Any, Literal

from .. import _core
from .._core import Ticket
from ..errors import of_kind
from .trees import shareable, tree_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._core import Device, Order, Target

__all__ = ["Ticket", "configure", "held", "open", "revoke", "share", "transport"]

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
    """Share a tensor of any framework with other processes.

    The ticket can be opened any number of times, by any process of this user on this machine. This process keeps the
    memory until the ticket expires, and until every process that opened it has dropped the tensors or has ended.

    Parameters
    ----------
    x : tensor or tree
        A tensor, or dicts, lists and tuples of tensors, numbers, strings and ``None``, at any depth. A subclass of
        ``dict`` is opened as a ``dict``, a named tuple as a ``tuple``.
    expires : float, optional
        Seconds for which the ticket can be opened.
    writing : {None, "private", "never", "shared"}
        What a process that opens the ticket may do. With ``"private"`` it may write, and only it sees its writes (the
        default on the host); with ``"never"`` no process may write; with ``"shared"`` all may, and see each other's
        writes (the default on a GPU, which has no private memory).
    copy : bool, optional
        ``None`` copies if the memory cannot leave the process, which ``processes.transport`` tells in advance; ``True``
        copies always, ``False`` never.
    isolated : bool, optional
        Whether to share a copy in a separate allocation. A block of a GPU's allocator holds other tensors as well,
        which a process with the ticket could read.

    Returns
    -------
    Ticket
        The ticket. Send it, or its ``text``.

    Raises
    ------
    BridgeTypeError
        If ``x`` holds no tensor, or something in it can be neither shared nor described.
    BridgeValueError
        If an argument has a value that it cannot have.
    BridgeBufferError
        If a copy is needed and ``copy=False``, or a tensor requires grad.
    BridgeMemoryError
        If there is no memory for a copy.
    BridgeConnectionError
        If this process shares as much as ``processes.configure`` allows.

    Notes
    -----
    Memory of the host is copied once, into memory that can be shared: later writes to ``x`` are not seen. A tensor that
    was opened from such memory is shared again in place if both shares say ``writing="shared"``, or if the first one
    says ``"never"`` and the second one does not say ``"shared"``. Memory of a GPU is shared in place if its allocator
    allows that; the pools of ``cudaMallocAsync`` do not, and one copy is made on the device.

    Every process that opens the ticket waits, on the device, for the pending work of this process on a GPU's tensor.
    The memory is reused after the work of every process that had it open.

    See Also
    --------
    open : in the other process.
    revoke : ends the share at once.
    serve : shares under names.

    Examples
    --------
    >>> import torch
    >>> import truebridge as tb
    >>> ticket = tb.share({"weights": torch.zeros(2, 3), "step": 7})
    >>> len(ticket.text) <= 512  # what another process passes to tb.open
    True
    >>> tb.revoke(ticket)
    """
    if type(isolated) is not bool:
        raise of_kind("argument", f"isolated is {isolated!r:.80}: pass True or False")
    leaves, tree = shareable(x)
    if isolated and copy is False:
        raise of_kind("argument", "an isolated share is a copy: leave copy=False out")
    return _core.ipc_share(leaves, tree, expires, writing, True if isolated else copy)


def transport(x: Any, *, writing: Writing | None = None) -> Literal["passed", "handle", "files", "pool", "copy"]:
    """Return how the memory of a tensor would leave this process.

    Parameters
    ----------
    x : tensor
        A tensor of any framework.
    writing : {None, "private", "never", "shared"}
        As for ``share``.

    Returns
    -------
    {"passed", "handle", "files", "pool", "copy"}
        In place: ``"passed"`` on from another process; by the driver's ``"handle"`` of the allocator's block; by
        ``"files"``, descriptors of virtual memory; or by its ``"pool"``, which was made to be shared. Otherwise by one
        ``"copy"``, as for all other memory of the host.

    Raises
    ------
    BridgeTypeError
        If ``x`` is not a tensor.
    BridgeConnectionError
        If ``x`` lies in memory of another process that has ended or has revoked it.

    Examples
    --------
    >>> import numpy as np
    >>> import truebridge as tb
    >>> tb.processes.transport(np.zeros(3))
    'copy'
    """
    return _core.ipc_transport(x, writing)


def open(
    ticket: Ticket | str | bytes,
    target: Target,
    *,
    copy: bool | None = None,
    device: Device | None = None,
    order: Order | None = None,
    permute: Sequence[int] | None = None,
    read_only: bool = False,
) -> Any:
    """Open what another process has shared, in place.

    Parameters
    ----------
    ticket : Ticket, str or bytes
        The ticket, or its text.
    target : Target
        The name of the framework of the result.
    copy, device, order, permute, read_only
        As for ``convert``, for each tensor.

    Returns
    -------
    tensor or tree
        The shared tensors. When the last view of a tensor is dropped, its memory is returned to the process that shares
        it.

    Raises
    ------
    BridgeConnectionError
        If the ticket has expired or was revoked, or its process has ended.
    BridgePermissionError
        If that process runs as another user, and ``configure`` does not accept it.
    BridgeError
        If ``ticket`` is not a ticket, and as for ``convert``.

    Examples
    --------
    >>> import torch
    >>> import truebridge as tb
    >>> ticket = tb.share({"weights": torch.ones(3), "step": 7})
    >>> tb.open(ticket.text, "numpy")
    {'weights': array([1., 1., 1.], dtype=float32), 'step': 7}
    >>> tb.revoke(ticket)
    """
    tensors, tree = _core.ipc_open(ticket, target, copy, device, order, permute, read_only)
    return tree_of(tree, tensors)


def revoke(ticket: Ticket | str | bytes, *, leases: bool = True) -> None:
    """End a share of this process now: no process can open the ticket any more.

    Parameters
    ----------
    ticket : Ticket, str or bytes
        The ticket, or its text. One that was revoked already is not an error.
    leases : bool, optional
        Whether to revoke what processes have opened, too. They keep the memory until they drop the tensors, but are
        told, usually within a millisecond: from then on their conversions and shares of them, and copies from or into
        them, raise a ``BridgeConnectionError``. With ``False`` the ticket only expires early, and a process that has
        it open can continue to use it.

    Raises
    ------
    BridgeValueError
        If ``ticket`` is not a ticket, or if this process has shared nothing.

    Examples
    --------
    >>> import numpy as np
    >>> import truebridge as tb
    >>> ticket = tb.share(np.zeros(3))
    >>> weights = tb.open(ticket, "numpy")
    >>> tb.revoke(ticket, leases=False)
    >>> weights.sum()
    np.float64(0.0)
    >>> try:
    ...     tb.open(ticket, "numpy")
    ... except tb.BridgeConnectionError as error:
    ...     print(error.kind)
    gone
    """
    if type(leases) is not bool:
        raise of_kind("argument", f"leases is {leases!r:.80}: pass True or False")
    _core.ipc_revoke(ticket, leases)


def configure(
    *,
    folder: str | os.PathLike[str] | None = None,
    users: Sequence[int] = (),
    connections: int | None = None,
    shares: int | None = None,
    leases: int | None = None,
    nbytes: int | None = None,
) -> None:
    """Set how this process shares, before its first share.

    Parameters
    ----------
    folder : str or path, optional
        The folder of the socket. Only this user may have access to it, or with ``users`` it must have a mode that
        admits them (711). The default is ``TRUEBRIDGE_IPC`` of the environment, else ``truebridge`` in
        ``XDG_RUNTIME_DIR`` unless there are ``users``, else one in ``/tmp``.
    users : sequence of int, optional
        Numbers of the users that this process accepts next to its own: they may open what it shares and find the names
        that it serves, and it opens what they share.
    connections : int, optional
        The most connections at once, 256 by default. One process has half of them at most, and so has one user other
        than that of this process. A silent connection without leases is closed if another process needs one.
    shares : int, optional
        The most shares at once, 65,536 by default.
    leases : int, optional
        The most leases that one process may have on what is shared here, 65,536 by default.
    nbytes : int, optional
        The most bytes of memory for copies, without a limit by default.

    Raises
    ------
    BridgeValueError
        If this process shares already.

    Examples
    --------
    >>> import truebridge as tb
    >>> tb.processes.configure(shares=100, nbytes=1 << 30)
    """
    _core.ipc_configure(folder, users, connections, shares, leases, nbytes)


def held() -> dict[str, int]:
    """Return what this process shares now.

    Returns
    -------
    dict of str to int
        ``shares``, ``leases`` that processes have on them, ``connections`` of processes, and ``nbytes`` of memory.

    Examples
    --------
    >>> import truebridge as tb
    >>> tb.processes.held()
    {'shares': 0, 'leases': 0, 'connections': 0, 'nbytes': 0}
    """
    return dict(zip(("shares", "leases", "connections", "nbytes"), _core.ipc_held(), strict=True))
