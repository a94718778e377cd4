"""Tensors of every framework between the actors and tasks of Ray.

After ``register()``, in the driver and in the workers, Ray passes tensors between processes of one node by ticket, in
place, and between nodes by its object store, with one copy at each end::

    ray.init(runtime_env={"worker_process_setup_hook": "truebridge.ray.register"})
    truebridge.ray.register()

A tensor is shared until the last ``ObjectRef`` of the object that holds it is dropped, in any process. A process that
has received the tensor keeps it for longer. The memory belongs to the process that made the object, and is lost when
that process ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
from collections import ChainMap
from dataclasses import dataclass
from pathlib import Path
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ._core import Ticket, convert
from ._frameworks import ALL
from .errors import BridgeError, of_kind
from .processes import end, open, share

try:
    import ray
    from ray.cloudpickle import CloudPickler
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as _error:
    raise of_kind("missing", "truebridge.ray needs Ray: pip install ray") from _error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from ._core import Device, Target

__all__ = ["register", "unregister"]

_log = logging.getLogger(__name__)

#: The framework of each class, by the names of its module and of itself: none has to be imported for that.
_FRAMEWORKS = {row.kind: name for name, row in ALL.items()}
#: The frameworks whose tensors are sent by ticket by default.
_ON_GPUS = tuple(name for name, row in ALL.items() if row.on_gpus)

#: Seconds for which a ticket can be opened: Ray's references end the share earlier.
_LONG = 10.0 * 365 * 24 * 3600

#: Makes the passed object too large for the message that submits a task. Ray counts the references in such a message
#: late: one that only the message contains would be dropped before.
_PADDING = bytes(int(os.environ.get("RAY_max_direct_call_object_size", 100 << 10)) + 1)


@dataclass(frozen=True)
class _Settings:
    frameworks: frozenset[str] = frozenset()
    device: Device | None = None
    target: Target | None = None
    smallest: int = 0
    expires: float = _LONG
    transport: str | None = None


@dataclass(frozen=True)
class _Passed:
    """What Ray passes instead of a tensor."""

    ticket: str
    framework: str
    on_gpu: bool
    #: The node of the process that shares.
    node: str
    #: The name of a tensor transport, the number of the object in it, and its metadata.
    transport: tuple[str, str, Any] | None


class _Reducers(dict[type, Any]):
    """Reducers by class."""

    def __missing__(self, kind: type) -> Any:
        framework = _FRAMEWORKS.get((kind.__module__, kind.__qualname__))
        if framework not in _settings.frameworks:
            raise KeyError(kind)
        return functools.partial(_reduced, framework)


_settings = _Settings()
_reducers = _Reducers()

#: The functions that end shares, for each reference that keeps them.
_ends: dict[bytes, list[Callable[[], object]]] = {}

#: The connection to Ray that has these references.
_connection: str | None = None


def register(
    frameworks: Sequence[str] = _ON_GPUS,
    *,
    device: Device | None = None,
    target: Target | None = None,
    smallest: int = 100 << 10,
    expires: float | None = None,
    transport: str | None = None,
) -> None:
    """Let this process pass tensors through Ray by ticket. A second call replaces the choices of the first.

    Senders need this call, and so do receivers that choose a ``device`` or a ``target``. As
    ``worker_process_setup_hook`` of a ``runtime_env``, Ray calls it in every worker; your own function there can call
    it with arguments.

    Parameters
    ----------
    frameworks : sequence of str, optional
        The frameworks whose tensors this process sends by ticket. NumPy's are not among them by default: Ray itself
        passes them without a copy, read-only. Ray also passes tensors that cannot be shared, such as one that requires
        grad.
    device : str or device, optional
        Where this process receives tensors. The default is where they are: on the same kind of device, if they come
        from another node.
    target : Target, optional
        The name of the framework that this process receives tensors as, one that Python imports. The default is
        their own.
    smallest : int, optional
        Ray itself passes tensors of fewer bytes.
    expires : float, optional
        The longest time, in seconds, for which other processes can receive what this process sends. The default is as
        long as Ray has references.
    transport : str, optional
        A one-sided tensor transport of Ray, such as ``"nixl"``, by which tensors of its class are sent to other nodes,
        instead of the object store. It has to be available in this process.

    Raises
    ------
    BridgeImportError
        If this version of Ray lacks what this module needs.
    BridgeValueError
        If an argument has an invalid value.

    Examples
    --------
    >>> import ray
    >>> import truebridge as tb
    >>> tb.ray.register(["torch", "numpy"], smallest=1 << 20)
    >>> tb.ray.unregister()
    """
    global _settings
    if unknown := set(frameworks) - set(_FRAMEWORKS.values()):
        known = ", ".join(sorted(_FRAMEWORKS.values()))
        raise of_kind(
            "argument", f"{sorted(unknown)} are not frameworks that Ray's tensors are of: pass some of {known}"
        )
    maps = _dispatch().maps
    if transport is not None:
        transport = _one_sided(transport)
    _settle()
    long = _LONG if expires is None else float(expires)
    _settings = _Settings(frozenset(frameworks), device, target, smallest, long, transport)
    if not any(known is _reducers for known in maps):
        # After the serializers that were registered by class: they have precedence.
        maps.append(_reducers)


def unregister() -> None:
    """Let Ray itself pass this process's tensors again. Tensors that were sent by ticket can still be received.

    After ``ray.shutdown()`` this frees what is still shared.

    Examples
    --------
    >>> import ray
    >>> import truebridge as tb
    >>> tb.ray.unregister()
    """
    global _settings
    _settle()
    _settings = _Settings()


def _dispatch() -> ChainMap[type, Any]:
    """Return Ray's table of reducers. Refuse a version of Ray that lacks what this module needs."""
    dispatch = getattr(CloudPickler, "dispatch", None)
    needed = [
        isinstance(dispatch, ChainMap),
        hasattr(ray._raylet.CoreWorker, "add_object_out_of_scope_callback"),
        hasattr(ray._private.serialization.SerializationContext, "is_in_band_serialization"),
    ]
    if not all(needed):
        raise of_kind("missing", f"truebridge.ray does not know Ray {ray.__version__}: install Ray 2.60")
    return dispatch  # type: ignore[return-value]


def _transports() -> Any:
    """Return the module of Ray's tensor transports."""
    try:
        from ray.experimental.rdt import util
    except ImportError as error:
        text = f"Ray {ray.__version__} has no tensor transports that this package knows: pass transport=None"
        raise of_kind("missing", text) from error
    return util


def _one_sided(name: str) -> str:
    """Return Ray's name of a tensor transport that needs only the receiver."""
    known = _transports()
    try:
        name = known.normalize_and_validate_tensor_transport(name)
        one_sided = known.is_one_sided_transport(name)
    except ValueError as error:
        raise of_kind("argument", f"Ray has no tensor transport {name!r}: pass 'nixl', or register it first") from error
    if not one_sided:
        text = f"the tensor transport {name} needs the sender while the receiver receives: pass 'nixl', or None"
        raise of_kind("argument", text)
    return str(name)


def _worker() -> Any:
    return ray._private.worker.global_worker


def _reduced(framework: str, x: Any) -> Any:
    """Return how to pass a tensor: by ticket, or by Ray itself if it cannot be shared or Ray counts no references."""
    settings, context = _settings, _worker().get_serialization_context()
    if not _is_counted(context) or ALL[framework].nbytes(x) < settings.smallest or getattr(x, "__dict__", None):
        return x.__reduce_ex__(5)
    try:
        ticket = share(x, expires=settings.expires)
    except BridgeError as refused:
        _log.info("Ray passes a tensor of %s by itself: %s", framework, refused)
        return x.__reduce_ex__(5)
    ends: list[Callable[[], object]] = [functools.partial(end, ticket)]
    try:
        transport = _sent(settings.transport, ticket, framework, x, ends)
        token = _kept(context, ends)
    except BaseException:
        _end(ends)
        raise
    node = ray.get_runtime_context().get_node_id()
    passed = _Passed(ticket.text, framework, ALL[framework].on_gpu(x), node, transport)
    return _received, (passed, *token)


def _is_counted(context: Any) -> bool:
    """Return whether Ray will count references to what it is serializing.

    It does not for functions with their own tensors, nor for the channels of compiled graphs.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("ray.experimental.channel"):
            return False
        frame = frame.f_back
    return bool(context.is_in_band_serialization())


def _kept(context: Any, ends: list[Callable[[], object]]) -> tuple[Any, ...]:
    """Bind shares to the object that is being serialized. Return what the object must contain to keep them.

    Ray keeps the references that an object contains until the last reference to the object is dropped. One of them is
    enough for all tensors of an object.
    """
    for ref in getattr(context._thread_local, "object_refs", ()):
        if (others := _ends.get(ref.binary())) is not None:
            others.extend(ends)
            return ()
    _settle()
    # Ray serializes bytes without the context, which is in use.
    token = ray.put(b"")
    _ends[token.binary()] = ends
    if not _worker().core_worker.add_object_out_of_scope_callback(token, _dropped):
        _dropped(token.binary())
    return token, PickleBuffer(_PADDING)


def _settle() -> None:
    """End the shares of an earlier connection to Ray: its references ended with it."""
    global _connection
    connection = ray.get_runtime_context().get_worker_id() if ray.is_initialized() else None
    if connection != _connection:
        for token in list(_ends):
            _dropped(token)
        _connection = connection


def _dropped(token: bytes) -> None:
    """End the shares that a reference kept. Ray calls this on its own thread."""
    _end(_ends.pop(token, []))


def _end(ends: list[Callable[[], object]]) -> None:
    for each in ends:
        with contextlib.suppress(BridgeError):
            each()


def _sent(
    name: str | None, ticket: Ticket, framework: str, x: Any, ends: list[Callable[[], object]]
) -> tuple[str, str, Any] | None:
    """Offer a tensor through a tensor transport, if that is for its class."""
    if name is None or type(x) is not _transports().get_transport_data_type(name):
        return None
    manager, number = _transports().get_tensor_transport_manager(name), uuid4().hex
    # On the host the share is a copy, which later writes to the tensor do not change.
    tensors = [x if ALL[framework].on_gpu(x) else open(ticket, framework)]  # type: ignore[arg-type]
    about = manager.extract_tensor_transport_metadata(number, tensors)
    ends.append(functools.partial(manager.garbage_collect, number, about, tensors))
    return name, number, about


def _received(passed: _Passed, *token: Any) -> Any:
    """Return the tensor that was passed."""
    # The caller has it as well. Here it would stay in the traceback of an error.
    del token
    target: Any = _settings.target or passed.framework
    ticket, device = Ticket(passed.ticket), _settings.device
    if passed.node == ray.get_runtime_context().get_node_id():
        return open(ticket, target, device=device)
    if device is None:
        device = "cuda" if passed.on_gpu else "cpu"
    if passed.transport is None:
        return convert(_fetched(ticket, passed.node), target, copy=True, device=device)
    name, number, about = passed.transport
    manager = _transports().get_tensor_transport_manager(name)
    between = manager.get_communicator_metadata(None, None, name)
    buffers = None if _settings.device is None else _transports().create_empty_tensors_from_metadata(about, str(device))
    return convert(manager.recv_multiple_tensors(number, about, between, buffers)[0], target)


def _fetched(ticket: Ticket, node: str) -> Any:
    """Return the elements of a ticket of another node as a NumPy array, through Ray's object store."""
    thread = Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip()
    if thread == "worker.io":
        text = (
            "Ray awaits on the thread that moves its objects, which cannot move one of another node meanwhile: pass "
            "the reference as an argument of a task, or await asyncio.to_thread(ray.get, reference)"
        )
        raise of_kind("refused", text)
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    copied = ray.remote(num_cpus=0, max_retries=0)(_copied).options(scheduling_strategy=there)
    try:
        elements, dtype, shape = ray.get(copied.remote(ticket.text))
    except ray.exceptions.RayError as error:
        raise of_kind("gone", f"node {node}, which has the tensor, does not send it: {error}") from error
    import numpy as np

    return np.frombuffer(elements, np.uint8).view(dtype).reshape(shape)


def _copied(ticket: str) -> tuple[PickleBuffer, Any, tuple[int, ...]]:
    """Return the elements of a ticket of this node: Ray copies them into its object store."""
    import numpy as np

    x = open(ticket, "numpy", device="cpu")
    return PickleBuffer(np.ascontiguousarray(x).reshape(-1).view(np.uint8)), x.dtype, x.shape
