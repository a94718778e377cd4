"""How this package's tensor transports move what Ray passes: the part of ``ray`` that knows Ray's interface."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .._core import convert_inside, copy, plan
from .._frameworks.table import ALL
from ..errors import BridgeError, of_kind
from .tickets import open, revoke, share

try:
    import ray
    from ray import cloudpickle
    from ray._private import ray_constants
    from ray._private.serialization import SerializationContext
    from ray._private.worker import global_worker
    from ray.actor import ActorHandle
    from ray.exceptions import RayDirectTransportError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as _error:
    raise of_kind("missing", "truebridge.ray needs Ray: pip install ray") from _error
try:
    from ray.experimental.rdt import TensorTransportManager, TensorTransportMetadata, util
    from ray.experimental.rdt.tensor_transport_manager import CommunicatorMetadata
except ImportError as _error:
    text = f"Ray {ray.__version__} has no Ray Direct Transport that this package knows: install Ray 2.60"
    raise of_kind("missing", text) from _error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_log = logging.getLogger(__name__)

#: The transport of each framework, as Ray writes it.
NAMES: Final = {framework: f"TRUEBRIDGE_{framework.upper()}" for framework in ALL}

#: Seconds for which a ticket can be opened: Ray's references end it earlier.
_LONG = 10.0 * 365 * 24 * 3600

#: Tensors of the host with more bytes are copied for processes of their node when the first of these asks: the copy
#: takes longer than the question, and processes of other nodes do not need it.
_LARGE = 1 << 20


class Choice(NamedTuple):
    """What a process receives tensors as, and where."""

    target: Any = None
    device: Any = None


#: The choice of this process, and that of a call.
in_process = Choice()
in_call: ContextVar[Choice | None] = ContextVar("truebridge.ray.receiving", default=None)


# What Ray knows of a transport


class _Absent:
    """Stands for the class of tensors of a framework that this process has not imported: it has no such tensors."""


def _imported(framework: str) -> type | None:
    """Return the class of a framework's tensors, if this process has imported the framework."""
    module, name = ALL[framework].kind
    return getattr(sys.modules.get(module), name, None)


class _Entry(util.TransportManagerInfo):  # type: ignore[misc]
    """Ray's entry of a transport, with the name of the framework instead of the class of its tensors.

    Ray sends its entries to each actor, which would import every framework to unpickle the classes.
    """

    __slots__ = ()

    def __reduce__(self) -> Any:
        return registered, (self[2],)

    @property
    def data_type(self) -> type:
        """The class of tensors. Ray asks for it right before it takes the tensors out of a value.

        Ray takes out the tensors of every class that it was asked to take once. So that a value may have tensors of
        several frameworks, it is asked for all that can be on a GPU. NumPy's arrays are taken only by their own
        transport: Ray itself passes them without a copy.
        """
        context = global_worker.get_serialization_context()
        with _taking:
            taken = _taken.setdefault(context, {})
            for framework in {self[2], *(name for name, row in ALL.items() if row.on_gpus)} - taken.keys():
                if (kind := _imported(framework)) is not None:
                    taken[framework] = kind
                    context.serialize_rdt_objects(None, NAMES[framework])
        return taken.get(self[2], _Absent)


#: The classes of tensors that a connection to Ray takes out of values, by the framework.
_taken: weakref.WeakKeyDictionary[Any, dict[str, type]] = weakref.WeakKeyDictionary()
_taking = threading.RLock()


def registered(framework: str) -> _Entry:
    """Register a framework's transport in this process, unless it is. Return Ray's entry of it."""
    name = NAMES[framework]
    if not isinstance(util.transport_manager_info.get(name), _Entry):
        util.register_tensor_transport(name, ["cuda", "cpu"], _Transport, _Absent)
        util.transport_manager_info[name] = _Entry(_Transport, ["cuda", "cpu"], framework)
    return util.transport_manager_info[name]  # type: ignore[no-any-return]


def check() -> None:
    """Refuse a version of Ray whose transports are not those that this module was written for."""
    known = [
        getattr(util.TransportManagerInfo, "_fields", ()) == ("transport_manager_class", "devices", "data_type"),
        isinstance(getattr(util, "transport_manager_info", None), dict),
        hasattr(SerializationContext, "serialize_rdt_objects"),
        not _Transport.__abstractmethods__,
    ]
    if not all(known):
        text = f"truebridge.ray does not know the tensor transports of Ray {ray.__version__}: install Ray 2.60"
        raise of_kind("missing", text)


# What is sent


@dataclass
class _Part:
    """Those tensors of an object that have one framework and are on one kind of device."""

    framework: str
    device: str
    #: The positions of the tensors in the object.
    positions: list[int]
    #: What receivers need, by the method by which they receive. ``None`` for one that these tensors cannot take.
    offers: dict[str, Any] = field(default_factory=dict)


class _About(TensorTransportMetadata):  # type: ignore[misc]
    """What Ray keeps of an object, and sends to its receivers."""

    def __init__(self, parts: list[_Part], kinds: list[tuple[tuple[int, ...], str]], node: str) -> None:
        self.parts, self.kinds, self.node = parts, kinds, node
        self.tensor_device = parts[0].device if parts else None

    @property
    def tensor_meta(self) -> Any:
        """Shape and dtype of each tensor. Ray compares PyTorch's buffers with them, and makes such buffers."""
        torch = sys.modules.get("torch")
        return [(shape, getattr(torch, dtype, dtype)) for shape, dtype in self.kinds]


@dataclass
class _From(CommunicatorMetadata):  # type: ignore[misc]
    """The actor that has an object; ``None`` where Ray does not say."""

    actor: Any = None


@dataclass
class _Fetch:
    """An object that this process shall receive."""

    obj_id: str
    about: _About
    actor: Any
    buffers: Sequence[Any] | None


@dataclass
class _Held:
    """An object of this process."""

    about: _About
    #: ``None`` once the object is freed.
    tensors: Sequence[Any] | None
    #: The connection to Ray that counts its references.
    connection: tuple[str, str]
    #: PyTorch's views that NIXL reads, by the number of the part.
    views: dict[int, list[Any]] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)


#: The objects of this process.
_held: dict[str, _Held] = {}


class _Transport(TensorTransportManager):  # type: ignore[misc]
    """The transport of any framework. Ray documents the methods."""

    def tensor_transport_backend(self) -> str:
        return "TRUEBRIDGE"

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        # Otherwise Ray kills the sender as well when a receiver has died.
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> _From:
        return _From(src_actor)

    def send_multiple_tensors(self, tensors: Any, about: Any, between: Any) -> None:
        raise NotImplementedError("receivers fetch the tensors of this transport")

    def extract_tensor_transport_metadata(self, obj_id: str, tensors: Sequence[Any]) -> _About:
        # A task that Ray repeats has made the object already.
        if (made := _held.get(obj_id)) is None:
            context = ray.get_runtime_context()
            connection = (context.get_node_id(), context.get_worker_id())
            # The references of an earlier connection ended with it, which Ray does not tell.
            # Threads of Ray free objects meanwhile, so a copy is walked.
            for other in [other for other, held in _held.copy().items() if held.connection != connection]:
                _free(other)
            try:
                _held[obj_id] = made = _Held(_about(tensors, connection[0]), tensors, connection)
                _prepare(obj_id)
            except BaseException:
                _free(obj_id)
                # Ray has stored the tensors already, and frees them only if there is something to know of them.
                global_worker.rdt_manager.rdt_store.pop_object(obj_id)
                raise
        return made.about

    def recv_multiple_tensors(
        self, obj_id: str, about: _About, between: _From, target_buffers: Sequence[Any] | None = None
    ) -> list[Any]:
        return self.wait_fetch_complete(self.fetch_multiple_tensors(obj_id, about, between, target_buffers))

    def fetch_multiple_tensors(
        self, obj_id: str, about: _About, between: _From, target_buffers: Sequence[Any] | None = None
    ) -> _Fetch:
        return _Fetch(obj_id, about, between.actor, target_buffers)

    def wait_fetch_complete(self, fetch_request: _Fetch, timeout: float = -1) -> list[Any]:
        fetch, longest = fetch_request, ray_constants.RDT_FETCH_FAIL_TIMEOUT_SECONDS
        until = time.monotonic() + (timeout if 0 <= timeout < longest else longest)
        received: list[Any] = [None] * len(fetch.about.kinds)
        for number, part in enumerate(fetch.about.parts):
            for position, tensor in zip(part.positions, _received(fetch, number, until), strict=True):
                received[position] = tensor
        return received

    def garbage_collect(self, obj_id: str, about: _About, tensors: Sequence[Any]) -> None:
        _free(obj_id)

    def abort_transport(self, obj_id: str, between: _From) -> None:
        """Do nothing: every wait ends by itself."""


def _about(tensors: Sequence[Any], node: str) -> _About:
    parts: dict[Any, _Part] = {}
    kinds = []
    for position, x in enumerate(tensors):
        framework = next(name for name in ALL if type(x) is _imported(name))
        is_suitable = _is_suitable(x, framework)
        # What has to be pickled is its own part, so that the other tensors go as they should.
        key = (framework, "cuda" if ALL[framework].on_gpu(x) else "cpu", is_suitable)
        part = parts.setdefault(key, _Part(*key[:2], [], {} if is_suitable else dict.fromkeys(_METHODS[:-1])))
        part.positions.append(position)
        dtype = str(getattr(x.dtype, "name", x.dtype)).removeprefix("torch.")
        kinds.append((tuple(x.shape) if is_suitable else (), dtype))
    return _About([*parts.values()], kinds, node)


def _is_suitable(x: Any, framework: Any) -> bool:
    try:
        plan(x, framework)
    except BridgeError as error:
        return error.kind not in _UNSUITABLE
    return True


def _prepare(obj_id: str) -> None:
    """Make what receivers most likely need, and all of it if they cannot ask this process."""
    held, can_be_asked = _held[obj_id], ray.get_runtime_context().get_actor_id() is not None
    for number, part in enumerate(held.about.parts):
        is_asked_for = can_be_asked and part.device == "cpu" and not part.offers
        if not is_asked_for or sum(map(ALL[part.framework].nbytes, _of(held, part))) <= _LARGE:
            _offer(obj_id, number, _NEAR)
        if not can_be_asked and sum(node["Alive"] for node in ray.nodes()) > 1:
            _offer(obj_id, number, ("nixl",))


def _offer(obj_id: str, number: int, methods: Sequence[str]) -> tuple[str, Any] | None:
    """Return the first of these paths in which a part of an object can be received, and what its receiver needs."""
    if (held := _held.get(obj_id)) is None:
        raise of_kind("gone", f"the actor that made the object {obj_id} has started again, and does not have it")
    part = held.about.parts[number]
    with held.lock:
        tensors = _of(held, part)
        for method in methods:
            if method not in part.offers:
                try:
                    part.offers[method] = _MAKERS[method].offer(held, obj_id, number, tensors)
                except BridgeError as error:
                    if error.kind not in _UNSUITABLE:
                        raise
                    part.offers[method] = None
            if part.offers[method] is not None:
                return method, part.offers[method]
    return None


def _of(held: _Held, part: _Part) -> list[Any]:
    """Return the tensors of a part."""
    if held.tensors is None:
        raise of_kind("gone", "the last reference to the object was dropped")
    return [held.tensors[position] for position in part.positions]


def _free(obj_id: str) -> None:
    """Free what was made of an object. Receivers keep what they have."""
    if (held := _held.pop(obj_id, None)) is None:
        return
    with held.lock:
        held.tensors = None
        for number, part in enumerate(held.about.parts):
            if (ticket := part.offers.pop("ticket", None)) is not None:
                with contextlib.suppress(BridgeError):
                    revoke(ticket, leases=False)
            if (about := part.offers.pop("nixl", None)) is not None:
                _nixl().garbage_collect(_name(obj_id, number), about, held.views[number])
            part.offers.clear()


# What is received


@dataclass
class _Wish:
    """How a process wants to receive a part."""

    part: _Part
    target: Any
    device: Any
    #: PyTorch's tensors to fill.
    buffers: list[Any] | None
    #: The name of the part for NIXL.
    name: str
    #: When to give up, as ``time.monotonic`` counts.
    until: float

    def seconds(self) -> float:
        return max(0.0, self.until - time.monotonic())


def _received(fetch: _Fetch, number: int, until: float) -> list[Any]:
    """Return the tensors of a part, or the buffers with their elements."""
    part, choice, buffers = fetch.about.parts[number], in_call.get() or in_process, None
    known = global_worker.rdt_manager.get_rdt_metadata(fetch.obj_id)
    if (device := getattr(known, "target_device", None)) is not None:
        # Ray has made buffers of PyTorch for it.
        choice = choice._replace(device=device)
    elif fetch.buffers:
        buffers = [fetch.buffers[position] for position in part.positions]
        choice = Choice("torch", str(buffers[0].device))
    target = choice.target or part.framework
    wish = _Wish(part, target, choice.device, buffers, _name(fetch.obj_id, number), until)
    near = fetch.about.node == ray.get_runtime_context().get_node_id()
    methods = _NEAR if near else _FAR if _has_nixl() else _FAR[1:]
    method = next((method for method in methods if part.offers.get(method) is not None), None)
    method, offer = _asked(fetch, number, wish, methods) if method is None else (method, part.offers[method])
    if method == "arrays":
        missing = "the sender" if _has_nixl() else "this process"
        _warn(f"{missing} has no PyTorch with NIXL, which takes fewer copies. On each node: pip install torch nixl")
    try:
        tensors = _MAKERS[method].receive(offer, wish)
    except RayDirectTransportError as error:
        # NIXL also reads what else the sender had registered, and fails if that is freed meanwhile.
        _log.info("NIXL failed: %s", error)
        _warn("NIXL failed: the log of truebridge.ray, at the level INFO, says why")
        method, offer = _asked(fetch, number, wish, _FAR[1:])
        tensors = _MAKERS[method].receive(offer, wish)
    if buffers is None or tensors is buffers:
        return tensors
    return copy(tensors, out=buffers)


def _asked(fetch: _Fetch, number: int, wish: _Wish, methods: Sequence[str]) -> tuple[str, Any]:
    """Ask the sender how to receive a part of an object."""
    actor = fetch.actor
    if actor is None and (known := global_worker.rdt_manager.get_rdt_metadata(fetch.obj_id)) is not None:
        actor = known.src_actor
    if not isinstance(actor, ActorHandle):
        # Ray calls only actors. Any process of the sender's node can open the ticket.
        there = NodeAffinitySchedulingStrategy(fetch.about.node, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0)(_bytes_of_ticket).options(scheduling_strategy=there)
        return "arrays", task.remote(wish.part.offers["ticket"])
    # In the other group the sender may be waiting for an answer of this process.
    call = actor.__ray_call__.options(concurrency_group="_ray_system_error")
    answer = call.remote(_answered, fetch.obj_id, number, methods)
    return ray.get(answer, timeout=wish.seconds())  # type: ignore[no-any-return]


def _answered(_: Any, obj_id: str, number: int, methods: Sequence[str]) -> tuple[str, Any] | None:
    return _offer(obj_id, number, methods)


# The paths


def _ticket(held: _Held, obj_id: str, number: int, tensors: list[Any]) -> str:
    return share(tensors, expires=_LONG).text


def _opened(ticket: str, wish: _Wish) -> list[Any]:
    try:
        return open(ticket, wish.target, device=wish.device)  # type: ignore[no-any-return]
    except BridgeError as error:
        if error.kind != "gone":
            raise
        raise of_kind("gone", "the process that made the object has ended, and its memory with it") from error


def _registered(held: _Held, obj_id: str, number: int, tensors: list[Any]) -> Any:
    if not _has_nixl():
        return None
    views = tensors
    if held.about.parts[number].framework != "torch":
        views = convert_inside(tensors, "torch", read_only=True)
    # NIXL reads bytes, so that what is pending is done first. Memory without elements may have any address.
    views = [x.resolve_conj().resolve_neg().contiguous() if x.numel() else x.new_empty(x.shape) for x in views]
    about = _nixl().extract_tensor_transport_metadata(_name(obj_id, number), views)
    held.views[number] = views
    return about


def _read(about: Any, wish: _Wish) -> list[Any]:
    import torch

    nixl, buffers = _nixl(), wish.buffers
    if buffers is None and wish.device is not None:
        buffers = util.create_empty_tensors_from_metadata(about, wish.device)
    elif buffers is None and wish.part.device == "cuda" and not torch.cuda.is_available():
        raise of_kind("device", "the tensors are on a GPU, and this process sees none: receive them on device='cpu'")
    request = nixl.fetch_multiple_tensors(wish.name, about, nixl.get_communicator_metadata(None, None), buffers)
    try:
        tensors = nixl.wait_fetch_complete(request, wish.seconds())
    finally:
        # It ends the transfer in NIXL, and must not do so when a later error's traceback is collected.
        del request
    return wish.buffers or convert_inside(tensors, wish.target)


def _stored(held: _Held, obj_id: str, number: int, tensors: list[Any]) -> Any:
    return ray.put(_bytes_of(convert_inside(tensors, "numpy", device="cpu")))


def _bytes_of(arrays: list[Any]) -> list[tuple[Any, Any, tuple[int, ...]]]:
    """Return the elements, the dtype and the shape of arrays: Ray copies bytes once, and pickles dtypes of others."""
    import numpy as np

    return [(np.ascontiguousarray(x).reshape(-1).view(np.uint8), x.dtype, x.shape) for x in arrays]


def _bytes_of_ticket(ticket: str) -> Any:
    return _bytes_of(open(ticket, "numpy", device="cpu"))


def _fetched(reference: Any, wish: _Wish) -> list[Any]:
    arrays = [
        elements.view(dtype).reshape(shape) for elements, dtype, shape in ray.get(reference, timeout=wish.seconds())
    ]
    return convert_inside(arrays, wish.target, copy=True, device=wish.device or wish.part.device)  # type: ignore[no-any-return]


def _pickled(held: _Held, obj_id: str, number: int, tensors: list[Any]) -> bytes:
    return cloudpickle.dumps(tensors)  # type: ignore[no-any-return]


def _unpickled(pickled: bytes, wish: _Wish) -> list[Any]:
    return cloudpickle.loads(pickled)  # type: ignore[no-any-return]


class _Method(NamedTuple):
    """How tensors go from one process to another."""

    #: Returns what receivers need; ``None``, or an error of a kind in ``_UNSUITABLE``, for tensors that cannot go so.
    offer: Callable[[_Held, str, int, list[Any]], Any]
    #: Returns the tensors, as the receiver wants them; the receiver's buffers if it has filled these.
    receive: Callable[[Any, _Wish], list[Any]]


_MAKERS: Final = {
    "ticket": _Method(_ticket, _opened),
    "nixl": _Method(_registered, _read),
    "arrays": _Method(_stored, _fetched),
    "pickled": _Method(_pickled, _unpickled),
}
_METHODS: Final = tuple(_MAKERS)
#: The paths to a process of the same node, and of another one, the best first.
_NEAR: Final = ("ticket", "pickled")
_FAR: Final = ("nixl", "arrays", "pickled")
#: Kinds of errors of tensors that another method may take.
_UNSUITABLE: Final = ("copy_needed", "dtype", "layout", "not_a_tensor", "refused", "requires_grad")


def _name(obj_id: str, number: int) -> str:
    """Return the name of a part for NIXL's transport, which is for its own object."""
    return f"{obj_id}-{number}"


def _nixl() -> Any:
    return util.get_tensor_transport_manager("NIXL")


@functools.cache
def _has_nixl() -> bool:
    """Return whether NIXL works in this process."""
    flags = sys.getdlopenflags()
    try:
        if any(row.hides_cuda() for name, row in ALL.items() if _imported(name) is not None):
            # TensorFlow makes its copies of libraries global that NIXL brings as well: a mixture ends the process.
            sys.setdlopenflags(os.RTLD_NOW | os.RTLD_DEEPBIND)
        _nixl().get_nixl_agent()
    except Exception as error:
        _log.info("NIXL does not work in this process: %s", error)
        return False
    finally:
        sys.setdlopenflags(flags)
    return True


@functools.cache
def _warn(reason: str) -> None:
    text = f"Ray's object store moves tensors from another node, with a copy at each end: {reason}"
    warnings.warn(text, RuntimeWarning, stacklevel=2)
