"""Tensors for other hosts: NIXL moves the bytes, and a channel says what there is.

The process that shares has a ticket for its own host as well, and opens that for each process of another host: so it
waits for the producer's work, and holds a lease until the bytes have arrived. docs/design/hosts.md says more.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import ctypes
import importlib
import itertools
import json
import logging
import math
import os
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import _core
from ._channel import Channel, Server, address_of, connect
from .errors import BridgeError, of_kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from ._core import Ticket

    #: The name of a dtype, and a shape.
    _Spec = tuple[str, list[int]]

__all__ = ["HostTicket"]

#: Tensors of fewer bytes, and those that are not compact, are packed into one piece of memory.
_SMALL = 1 << 20

#: Bytes that the offset of a tensor is a multiple of: here, and at least.
_APART, _ALIGNED = 256, 16

#: Seconds for which the memory stays after the other process was lost: what it had asked for may still be sent. Its
#: connections end together, unless the network is lost.
_LINGER, _LINGER_LOST = 5.0, 120.0

#: What the text of a ticket begins with.
PREFIX = '{"truebridge":"hosts"'

#: The modules that NIXL's packages have, the one for any CUDA first.
_MODULES = ("nixl", "nixl_cu13", "nixl_cu12")

#: The address that this process listens at.
_configured: str | None = None


@dataclass(frozen=True)
class HostTicket:
    """A ticket that processes of other hosts open: send it, or its ``text``.

    Every program that has it can read the tensors: send it by a way that others do not see.

    Attributes
    ----------
    host : str
        The address of the process that shares.
    port : int
        Its port.
    share : int
        The number of the share.
    token : str
        What both ends must know.
    expires : float
        Until when it can be opened, in seconds since 1970.

    Examples
    --------
    >>> import truebridge as tb
    >>> ticket = tb.processes.HostTicket("10.0.0.5", 7000, 1, "00" * 16, 0.0)
    >>> ticket.remaining
    0.0
    """

    host: str
    port: int
    share: int
    token: str = field(repr=False)
    expires: float

    @property
    def text(self) -> str:
        """The ticket as text."""
        values = {"truebridge": "hosts", **vars(self)}
        return json.dumps(values, separators=(",", ":"))

    @property
    def remaining(self) -> float:
        """Seconds until it expires, by this host's clock."""
        return max(0.0, self.expires - time.time())


def read(ticket: HostTicket | Ticket | str | bytes) -> HostTicket | None:
    """Return the ticket for hosts; ``None`` if this is another one."""
    if isinstance(ticket, HostTicket):
        return ticket
    text = ticket.decode(errors="replace") if isinstance(ticket, bytes) else ticket
    if not isinstance(text, str) or not text.lstrip().startswith(PREFIX):
        return None
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        values = json.loads(text)
        values.pop("truebridge")
        made = HostTicket(**values)
        numbers = (made.port, made.share, made.expires)
        sound = isinstance(made.host, str) and all(isinstance(one, (int, float)) for one in numbers)
        whole = isinstance(made.port, int) and isinstance(made.share, int)
        if sound and whole and 0 <= made.port < 1 << 16 and 0 <= made.share < 1 << 63 and bytes.fromhex(made.token):
            return made
    raise of_kind("argument", "this is not a ticket: pass one as it was sent, whole")


@dataclass
class _Share:
    ticket: Ticket
    token: str
    until: float


class _Here:
    """What this process shares with other hosts, and its ends of NIXL. A fork begins with none."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.lock = threading.Lock()
        self.server: Server | None = None
        self.shares: dict[int, _Share] = {}
        self.numbers = itertools.count(1)
        #: Every reading that has not ended, from before its first transfer on: an interrupt loses none.
        self.readings: list[_Reading] = []
        #: Agents that read, and are free: each is of one reading at a time, since the end of one would take the peer
        #: from another.
        self.idle: list[Any] = []
        self._lender: Any = None
        self._made = threading.Lock()

    def lender(self) -> Any:
        """Return the agent that lends. It reads nothing, as no agent of NIXL reads from itself."""
        with self._made:
            if self._lender is None:
                self._lender = _agent()
            return self._lender

    def reader(self) -> Any:
        """Return an agent that no other reading uses."""
        with self._made:
            # They are not made side by side.
            return self.idle.pop() if self.idle else _agent()

    def sweep(self) -> None:
        """Free the memory of transfers that were given up and have ended since."""
        for reading in list(self.readings):
            if reading.is_given_up:
                reading.end(self)

    def token(self, share: int) -> bytes | None:
        with self.lock:
            known = self.shares.get(share)
        return bytes.fromhex(known.token) if known else None


_here: _Here | None = None
_making = threading.Lock()


def _own() -> _Here:
    global _here
    with _making:
        if _here is None or _here.process != os.getpid():
            _here = _Here()
        return _here


@atexit.register
def _close() -> None:
    here = _here
    if here is None or here.process != os.getpid():
        return
    here.sweep()
    for reading in here.readings:
        # Its memory may be written to until the process has ended.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(reading))
    if here.server is not None:
        here.server.close()


def _agent() -> Any:
    errors = []
    for name in _MODULES:
        try:
            api = importlib.import_module(f"{name}._api")
            break
        except ImportError as error:
            errors.append(str(error))
    else:
        text = f"tensors travel to other hosts by NIXL, which is not installed ({errors[-1]}): pip install"
        raise of_kind("missing", f"{text} 'truebridge[hosts]', or nixl[cu12] for CUDA 12")
    # It says hello at each start.
    logging.getLogger("nixl").setLevel(logging.WARNING)
    strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    try:
        agent = api.nixl_agent(secrets.token_hex(8), api.nixl_agent_config(backends=["UCX"], sync_mode=strict))
    except Exception as error:
        raise of_kind("driver", f"NIXL does not start: {error}") from error
    if not agent.backends:
        raise of_kind("missing", "NIXL has no backend UCX here: install its own package")
    return agent


def configure(address: str | None) -> None:
    """Name the address at which this process listens for other hosts."""
    global _configured
    if address is None:
        return
    address_of(address)
    if _own().server is not None:
        raise of_kind("argument", "this process shares with other hosts already: configure it before its first share")
    _configured = address


def prepare() -> None:
    """Start what other hosts need of this process."""
    if _configured is None:
        text = "name the address at which other hosts reach this process: processes.configure(address='10.0.0.5')"
        raise of_kind("argument", text)
    here = _own()
    here.lender()
    with here.lock:
        if here.server is None:
            here.server = Server(address_of(_configured), here.token, _serve)


def share(ticket: Ticket, expires: float) -> HostTicket:
    """Let other hosts open what a ticket for this host shares, after ``prepare``."""
    here, now = _own(), time.monotonic()
    token, number = secrets.token_hex(16), next(here.numbers)
    with here.lock:
        here.shares = {known: one for known, one in here.shares.items() if one.until > now}
        here.shares[number] = _Share(ticket, token, now + expires)
        assert _configured is not None
        assert here.server is not None
        return HostTicket(address_of(_configured)[0], here.server.port, number, token, time.time() + expires)


def revoke(ticket: HostTicket, told: bool) -> None:
    """End a share: no other host opens it any more."""
    here = _own()
    with here.lock:
        known = here.shares.get(ticket.share)
        is_own = known is not None and secrets.compare_digest(known.token, ticket.token)
        if is_own:
            del here.shares[ticket.share]
    if known is not None and is_own:
        _core.ipc_revoke(known.ticket, told)
    elif here.server is None:
        raise of_kind("argument", "this process shares nothing with other hosts: revoke the ticket where it was made")


@dataclass
class _Group:
    """Tensors on one device: those that lie in one piece of memory, and those that are pieces by themselves."""

    device: tuple[str, int]
    #: The number of each, and its offset in the piece, in bytes.
    packed: list[tuple[int, int]]
    alone: list[int]
    #: The address and the bytes of each piece of memory: first of the one with several tensors.
    pieces: list[tuple[int, int]]
    #: What keeps the memory.
    kept: Any

    def described(self) -> dict[str, Any]:
        """Return what the other host is told."""
        return {name: value for name, value in vars(self).items() if name != "kept"}

    @property
    def memory(self) -> str:
        """What NIXL calls the memory."""
        return _memory(self.device[0])


def _memory(kind: str) -> str:
    return "DRAM" if kind == "cpu" else "VRAM"


def _registered(agent: Any, group: _Group) -> Any:
    try:
        spans = [(*piece, group.device[1], "") for piece in group.pieces]
        return agent.register_memory(spans, group.memory)
    except Exception as error:
        raise of_kind("driver", f"NIXL cannot reach memory of {group.device[0]}: {error}") from error


def _views(block: torch.Tensor, specs: Sequence[_Spec], offsets: Sequence[int]) -> list[torch.Tensor]:
    """Return compact tensors that lie in a block of bytes."""
    import torch

    views = []
    for (name, shape), offset in zip(specs, offsets, strict=True):
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or min(shape, default=0) < 0:
            raise ValueError(f"{name} and {shape} are no tensor")
        end = offset + math.prod(shape) * dtype.itemsize
        if offset % _ALIGNED or not 0 <= offset <= end <= block.numel():
            raise ValueError(f"{offset} to {end} are not in a block of {block.numel()} bytes")
        views.append(block[offset:end].view(dtype).view(shape))
    return views


def _block(nbytes: int, device: Any) -> torch.Tensor:
    """Return memory that no work uses."""
    import torch

    block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    if block.device.type == "cuda":
        # The allocator hands out memory that earlier work of this stream may still use.
        torch.cuda.current_stream(block.device).synchronize()
    return block


def _spec_of(tensor: torch.Tensor) -> _Spec:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _gathered(place: tuple[str, int], tensors: dict[int, torch.Tensor]) -> _Group:
    """Gather tensors on one device: pack the small ones, if they do not lie side by side already."""
    import truebridge

    small = {
        number: tensor for number, tensor in tensors.items() if tensor.nbytes < _SMALL or not tensor.is_contiguous()
    }
    alone = {number: tensor for number, tensor in tensors.items() if number not in small}
    pieces, packed, block = [], _side_by_side(small) if place[0] == "cpu" else None, None
    if packed is None:
        offsets, total = [], 0
        for tensor in small.values():
            offsets.append(total)
            total += -(-tensor.nbytes // _APART) * _APART
        block = _block(total, _named(place))
        views = _views(block, [_spec_of(tensor) for tensor in small.values()], offsets)
        truebridge.copy(list(small.values()), out=views)
        packed = block.data_ptr(), total, offsets
    if packed[1]:
        pieces.append((packed[0], packed[1]))
    pieces += [(tensor.data_ptr(), tensor.nbytes) for tensor in alone.values()]
    return _Group(place, list(zip(small, packed[2], strict=True)), list(alone), pieces, (tensors, block))


def _side_by_side(tensors: dict[int, torch.Tensor]) -> tuple[int, int, list[int]] | None:
    """Return where tensors of the host lie, the bytes, and their offsets, if there is little else between them.

    Memory of the host is shared as a copy: what is between the tensors is nothing of the program's.
    """
    spans = [(tensor.data_ptr() if tensor.nbytes else 0, tensor.nbytes) for tensor in tensors.values()]
    start = min((start for start, nbytes in spans if nbytes), default=0)
    end = max((start + nbytes for start, nbytes in spans if nbytes), default=start)
    offsets = [address - start if nbytes else 0 for address, nbytes in spans]
    compact = all(tensor.is_contiguous() for tensor in tensors.values())
    aligned = all(offset % _ALIGNED == 0 for offset in offsets)
    dense = end - start <= 2 * sum(nbytes for _, nbytes in spans) + _APART
    return (start, end - start, offsets) if compact and aligned and dense else None


@contextlib.contextmanager
def _ready(ticket: Ticket) -> Iterator[tuple[list[_Spec], list[_Group], str | None]]:
    """Open a ticket of this process, gather its tensors, and wait until the work on them has run."""
    import torch

    with contextlib.ExitStack() as streams:
        if torch.cuda.is_initialized():
            # The work of the program in other streams is not waited for.
            for ordinal in range(torch.cuda.device_count()):
                streams.enter_context(torch.cuda.stream(torch.cuda.Stream(ordinal)))
        opened, tree = _core.ipc_open(ticket, "torch", None, None, None, None, False)
        places: dict[tuple[str, int], dict[int, torch.Tensor]] = {}
        for number, tensor in enumerate(opened):
            places.setdefault((tensor.device.type, tensor.device.index or 0), {})[number] = tensor
        groups = [_gathered(place, tensors) for place, tensors in places.items()]
        for group in groups:
            if group.device[0] == "cuda":
                torch.cuda.current_stream(group.device[1]).synchronize()
        yield [_spec_of(tensor) for tensor in opened], groups, tree


def _named(device: tuple[str, int]) -> str:
    return "cpu" if device[0] == "cpu" else f"{device[0]}:{device[1]}"


def _serve(channel: Channel, number: int) -> None:
    """Answer one process of another host, and hold what it reads until it is done."""
    here = _own()
    with here.lock:
        known = here.shares.get(number)
    try:
        if known is None:
            raise of_kind("gone", "the share has ended")
        _lend(here.lender(), channel, known.ticket)
    except BridgeError as error:
        with contextlib.suppress(BridgeError):
            channel.send({"is": "refused", "kind": error.kind, "text": str(error)})
    except Exception as error:
        with contextlib.suppress(BridgeError):
            channel.send({"is": "refused", "kind": "framework", "text": f"{type(error).__name__}: {error}"})


def _lend(agent: Any, channel: Channel, ticket: Ticket) -> None:
    with _ready(ticket) as (specs, groups, tree), contextlib.ExitStack() as registered:
        for group in groups:
            if group.pieces:
                registered.callback(agent.deregister_memory, _registered(agent, group))
        metadata = base64.b64encode(agent.get_agent_metadata()).decode()
        described = [group.described() for group in groups]
        channel.send({"is": "opened", "tensors": specs, "tree": tree, "groups": described, "agent": metadata})
        try:
            channel.receive(None)
        except BridgeError as error:
            time.sleep(_LINGER_LOST if error.kind == "busy" else _LINGER)


@dataclass(eq=False)
class _Reading:
    """What reads from another process, with the memory that it writes to until nothing is under way."""

    agent: Any
    channel: Channel
    peer: Any = None
    groups: list[_Group] = field(default_factory=list)
    memories: list[Any] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    is_given_up: bool = False
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def end(self, here: _Here) -> None:
        """Free everything, unless a transfer is under way: to cancel one does not end its writes at once.

        An interrupt in the middle leaves the rest to the next call.
        """
        if not self._turn.acquire(blocking=False):
            return
        try:
            if self not in here.readings or any(self._is_under_way(handle) for handle in self.handles):
                return
            for free, all in (
                (self.agent.release_xfer_handle, self.handles),
                (self.agent.deregister_memory, self.memories),
            ):
                while all:
                    with contextlib.suppress(Exception):
                        free(all.pop())
            if self.peer is not None:
                with contextlib.suppress(Exception):
                    self.agent.remove_remote_agent(self.peer)
                self.peer = None
            # The other process keeps what it lends as long as the connection is open.
            self.channel.close()
            here.readings.remove(self)
            here.idle.append(self.agent)
        finally:
            self._turn.release()

    def _is_under_way(self, handle: Any) -> bool:
        try:
            return bool(self.agent.check_xfer_state(handle) == "PROC")
        except Exception:
            # The other process was lost.
            return False


def open(ticket: HostTicket, device: Any) -> tuple[list[Any], str | None]:
    """Open a ticket of another host: return its tensors, in memory of this one, and the text of their tree."""
    here = _own()
    here.sweep()
    channel = connect((ticket.host, ticket.port), ticket.share, bytes.fromhex(ticket.token))
    try:
        reading = _Reading(here.reader(), channel)
        here.readings.append(reading)
    except BaseException:
        channel.close()
        raise
    try:
        # The work on the tensors may take long there.
        said = reading.channel.receive(None)
        if said.get("is") == "refused":
            kind, text = str(said.get("kind")), str(said.get("text"))
            raise of_kind(kind, f"the process that shares refuses: {text}")
        tensors = _fetched(reading, said, device)
        reading.channel.send({"do": "done"})
        return tensors, said.get("tree")
    finally:
        reading.is_given_up = True
        reading.end(here)


def _fetched(reading: _Reading, said: dict[str, Any], device: Any) -> list[Any]:
    """Make the tensors of an answer, and read their bytes from the other host."""
    found: dict[int, torch.Tensor] = {}
    try:
        specs = [(str(dtype), [int(length) for length in shape]) for dtype, shape in said["tensors"]]
        metadata = base64.b64decode(said["agent"])
        groups = [_received(specs, _Group(**described, kept=None), device, found) for described in said["groups"]]
        tensors = [found[number] for number in range(len(specs))]
    except (AttributeError, TypeError, ValueError, LookupError, OverflowError) as error:
        if isinstance(error, BridgeError):
            raise
        text = "the other end describes tensors that make no sense: use one version of truebridge in both"
        raise of_kind("protocol", text) from error
    except (MemoryError, RuntimeError) as error:
        raise of_kind("out_of_memory", f"there is no memory for what the other host shares: {error}") from error
    try:
        reading.peer = reading.agent.add_remote_agent(metadata)
    except Exception as error:
        raise of_kind(
            "version", f"NIXL does not know the other end: use one version of it in both ({error})"
        ) from error
    for theirs, own in groups:
        if own.pieces:
            _read(reading, theirs, own)
    return tensors


def _received(specs: list[_Spec], theirs: _Group, device: Any, found: dict[int, torch.Tensor]) -> tuple[_Group, _Group]:
    """Make the tensors of a group in memory of this host. Return what is read, and what it is read into."""
    kind, index = theirs.device
    own = _named((str(kind), int(index))) if device is None else device
    numbers, offsets = ([int(one[which]) for one in theirs.packed] for which in (0, 1))
    sizes = [int(nbytes) for _, nbytes in theirs.pieces]
    blocks = [_block(nbytes, own) for nbytes in sizes]
    together = blocks.pop(0) if len(blocks) > len(theirs.alone) else _block(0, own)
    found.update(zip(numbers, _views(together, [specs[number] for number in numbers], offsets), strict=True))
    for number, block in zip(theirs.alone, blocks, strict=True):
        (found[number],) = _views(block, [specs[number]], [0])
        if found[number].nbytes != block.nbytes:
            raise ValueError(f"{specs[number]} has not {block.nbytes} bytes")
    all = ([together] if len(blocks) < len(sizes) else []) + blocks
    place = (together.device.type, together.device.index or 0)
    return theirs, _Group(place, [], [], [(block.data_ptr(), block.nbytes) for block in all], all)


def _read(reading: _Reading, theirs: _Group, group: _Group) -> None:
    """Read pieces of memory of the other host, and wait for them."""
    agent = reading.agent
    reading.groups.append(group)
    reading.memories.append(_registered(agent, group))
    try:
        own, other = (
            agent.get_xfer_descs([(*piece, one.device[1]) for piece in one.pieces], one.memory)
            for one in (group, theirs)
        )
        handle = agent.initialize_xfer("READ", own, other, reading.peer)
        reading.handles.append(handle)
        _arrived(reading, handle)
    except BridgeError:
        raise
    except Exception as error:
        raise of_kind("gone", f"the transfer has failed: {error}. Ask for a new ticket") from error


def _arrived(reading: _Reading, handle: Any) -> None:
    """Begin a transfer, and wait until it is done."""
    state, pause, looked, lost = reading.agent.transfer(handle), 0.0, time.monotonic(), None
    while state != "DONE":
        if state != "PROC":
            raise of_kind("gone", "the transfer has failed: the other process has ended. Ask for a new ticket")
        now = time.monotonic()
        if lost is None and now - looked > 0.05:
            looked, lost = now, None if reading.channel.is_quiet() else now
        # The bytes may be here already.
        if lost is not None and now - lost > 1.0:
            raise of_kind("gone", "the other process has ended while it sent the tensors. Ask for a new ticket")
        time.sleep(pause)
        pause = min(0.001, pause + 0.00002)
        state = reading.agent.check_xfer_state(handle)
