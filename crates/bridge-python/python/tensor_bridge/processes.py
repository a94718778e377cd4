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
import json
import math
import os
from typing import TYPE_CHECKING, Any, Literal

from . import _core
from ._core import Ticket
from .errors import of_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._core import Device, Order, Target

__all__ = ["Ticket", "configure", "held", "open", "revoke", "share"]

Writing = Literal["private", "never", "shared"]

atexit.register(_core.ipc_close)


def _flatten(x: Any, leaves: list[Any], depth: int = 0) -> Any:
    """Return the JSON of a tree, and add its tensors to ``leaves``."""
    if depth > 100:
        raise of_kind("argument", "more than 100 containers stand one inside another: share their tensors apart")
    if x is None or isinstance(x, bool | int | str):
        return ["p", x]
    if isinstance(x, float):
        return ["p", x] if math.isfinite(x) else ["f", repr(x)]
    if type(x) is list:
        return ["l", [_flatten(item, leaves, depth + 1) for item in x]]
    if isinstance(x, tuple):
        return ["t", [_flatten(item, leaves, depth + 1) for item in x]]
    if isinstance(x, dict):
        return ["d", [[_key(key), _flatten(item, leaves, depth + 1)] for key, item in x.items()]]
    leaves.append(x)
    return ["x", len(leaves) - 1]


def _key(key: Any) -> Any:
    if key is None or isinstance(key, bool | int | str):
        return key
    name = type(key).__name__
    raise of_kind("argument", f"a key of a shared dict is a str, an int, a bool or None, not {name}: use one of these")


def _tree(tree: Any, tensors: list[Any]) -> Any:
    """Return the tree that this JSON describes."""
    kind, value = tree
    if kind == "x":
        return tensors[value]
    if kind == "p":
        return value
    if kind == "f":
        return float(value)
    if kind == "l":
        return [_tree(item, tensors) for item in value]
    if kind == "t":
        return tuple(_tree(item, tensors) for item in value)
    if kind == "d":
        return {key: _tree(item, tensors) for key, item in value}
    raise ValueError(kind)


def share(x: Any, *, expires: float = 60.0, writing: Writing = "private", copy: bool | None = None) -> Ticket:
    """Share a tensor of any framework with other processes, and return a ticket.

    ``x`` may also be a dict, a list or a tuple of tensors, numbers, strings and ``None``, at any depth. A subclass of
    ``dict`` comes out as a ``dict``, a named tuple as a ``tuple``. The ticket opens all of it.

    The ticket can be opened for ``expires`` seconds, any number of times, by any process of this user on this machine.
    This process keeps the memory until then, and until every process that opened the ticket has dropped the tensors or
    has died; ``revoke`` ends it before.

    Memory of the host is copied once, into memory that can be shared: later writes to ``x`` are not seen. A tensor that
    was opened from such memory is passed on in place, with ``writing="never"`` and ``"shared"``. ``copy=False`` refuses
    the copy, ``copy=True`` makes it always.

    ``writing`` says what those who open the ticket may do. With ``"private"`` each may write, and sees its own writes
    alone; with ``"never"`` nobody may write; with ``"shared"`` all may, and see each other's writes.

    Raises a ``BridgeError``. Tensors on a GPU cannot be shared so far: move them with ``tb.to_numpy(x, device="cpu")``.
    """
    leaves: list[Any] = []
    tree = _flatten(x, leaves)
    text = None if tree == ["x", 0] else json.dumps(tree, separators=(",", ":"))
    return _core.ipc_share(leaves, text, float(expires), writing, copy)


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
    if tree is None:
        return tensors[0]
    try:
        return _tree(json.loads(tree), tensors)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        text = "the other process describes no tree that this one knows: use one version of tensor_bridge in both"
        raise of_kind("protocol", text) from error


def revoke(ticket: Ticket | str | bytes) -> None:
    """End a share of this process now. Who has it open keeps the memory, and is told at the next call."""
    _core.ipc_revoke(ticket)


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
