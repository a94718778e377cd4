"""Tensors of every framework between the actors of Ray, by Ray Direct Transport.

``register()`` adds a tensor transport for each framework. A method or ``ray.put`` names one::

    names = truebridge.ray.register()  # before the actors are made, in the process that makes them


    @ray.remote
    class Trainer:
        @ray.method(tensor_transport=names["torch"])
        def weights(self): ...

An actor on the same node receives the tensors in place, in the framework of its choice. For one on another node Ray's
NIXL transport moves the bytes. Ray counts the references: the memory is freed after the last ``ObjectRef`` and the last
reader.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ._frameworks.table import ALL
from .errors import of_kind
from .processes import _rdt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._core import Device, Target

__all__ = ["receiving", "register"]


def register(*, target: Target | None = None, device: Device | None = None) -> dict[str, str]:
    """Let Ray send tensors through this package, and choose what this process receives them as.

    Call this before the actors are made, in the process that makes them: Ray then registers the transports in the
    actors. An actor that Ray restarts, or that another actor made, is registered if it calls this itself, or if
    ``"truebridge.ray.register"`` is the ``worker_process_setup_hook`` of the ``runtime_env``. A second call replaces
    the choice of the first.

    Parameters
    ----------
    target : Target, optional
        The name of the framework that this process receives tensors as. The default is that of the sender's tensor.
    device : str or device, optional
        Where this process receives tensors. The default is where they are: on the same kind of device, if they come
        from another node.

    Returns
    -------
    dict of str to str
        The name of the transport of each framework, by the framework's name: what ``ray.method(tensor_transport=)``
        and ``ray.put(_tensor_transport=)`` take.

    Raises
    ------
    BridgeImportError
        If Ray lacks Ray Direct Transport, or this package does not know its version.
    BridgeValueError
        If ``target`` is not the name of a framework.

    See Also
    --------
    receiving : chooses for only some calls of ``ray.get``.

    Examples
    --------
    >>> import ray
    >>> import truebridge as tb
    >>> tb.ray.register()["jax"]
    'TRUEBRIDGE_JAX'
    """
    choice = _chosen(target, device)
    _rdt.check()
    for framework in _rdt.NAMES:
        _rdt.registered(framework)
    _rdt.in_process = choice
    return dict(_rdt.NAMES)


@contextlib.contextmanager
def receiving(target: Target | None = None, *, device: Device | None = None) -> Iterator[None]:
    """Choose what ``ray.get`` receives tensors as in a ``with`` block, in this thread or task.

    Ray receives the arguments of a method on its own thread, before the method runs: they follow ``register``.

    Parameters
    ----------
    target, device
        As for ``register``.

    Returns
    -------
    context manager
        At its end the earlier choice holds again.

    Raises
    ------
    BridgeValueError
        If ``target`` is not the name of a framework.

    Examples
    --------
    >>> import ray
    >>> import truebridge as tb
    >>> with tb.ray.receiving("jax", device="cpu"):
    ...     pass  # x = ray.get(reference)
    """
    token = _rdt.in_call.set(_chosen(target, device))
    try:
        yield
    finally:
        _rdt.in_call.reset(token)


def _chosen(target: Target | None, device: Device | None) -> _rdt.Choice:
    if target is not None and target not in ALL:
        raise of_kind("argument", f"target is {target!r:.80}: pass one of {', '.join(ALL)}, or None")
    return _rdt.Choice(target, device)
