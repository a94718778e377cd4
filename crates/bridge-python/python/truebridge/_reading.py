"""What a carrier reads from another host, and shares with its program by a ticket of this host."""

from __future__ import annotations

import base64
import contextlib
import math
import time
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _core
from ._agents import current, memory_of, registered
from ._channel import check_that_it_has_time, connect
from ._lending import Group, place_of, views
from .errors import BridgeError, of_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ._agents import Agents, Reader
    from ._channel import Channel
    from ._core import Ticket
    from ._lending import Spec

    #: A kind of device, and its number; ``None`` for that of the same number.
    Place = tuple[str, int | None]

__all__ = ["Reading"]

#: The offset of a tensor in a block is a multiple of this many bytes.
_APART = 256

#: Seconds for which the result can be opened.
_LONG = 60.0

#: The kinds of errors that another host may answer with.
_PLAUSIBLE = {"gone", "busy", "denied", "out_of_memory", "missing", "driver", "framework", "device", "dtype", "layout"}

#: The kinds of errors that tell the program of its tensors: here the other host has described them.
_OF_TENSORS = {"argument", "dtype", "framework", "layout", "not_a_tensor"}

#: Memory of transfers whose end is not known: it is never freed.
_unknown: list[Any] = []

_NONSENSE = "the other end describes tensors that make no sense: use one version of truebridge in both"


@dataclass(eq=False)
class _Transfer:
    """What NIXL has of a transfer."""

    reader: Reader
    peer: Any = None
    memory: Any = None
    handle: Any = None
    is_done: bool = False

    def end(self) -> bool:
        """Wait until nothing is under way, and free what NIXL has. Return whether the end is known."""
        agent = self.reader.agent
        if self.handle is not None and not _has_ended(agent, self.handle):
            return False
        for free, thing in (
            (agent.release_xfer_handle, self.handle),
            (agent.deregister_memory, self.memory),
            (agent.remove_remote_agent, self.peer),
        ):
            if thing is not None:
                with contextlib.suppress(Exception):
                    free(thing)
        self.handle = None
        return True


@dataclass(eq=False)
class Reading:
    """One request for the tensors of a ticket of another host."""

    agents: Agents
    #: Raises an error if the program does not wait any more.
    check: Callable[[], None]
    channel: Channel | None = None
    transfers: list[_Transfer] = field(default_factory=list)
    #: What keeps the memory that is written to.
    kept: Any = None

    def run(self, ticket: Any, place: Place | None) -> Ticket:
        """Read the tensors. Return a ticket of this host for them."""
        self.channel = connect((ticket.host, ticket.port), ticket.share, bytes.fromhex(ticket.token))
        # The work on the tensors may take long there.
        while not self.channel.wait(0.05):
            self.check()
        said = self.channel.receive()
        check_that_it_has_time(said)
        if said.get("is") == "refused":
            kind, text = said.get("kind"), said.get("text")
            if not isinstance(kind, str) or kind not in _PLAUSIBLE or not isinstance(text, str):
                raise of_kind(
                    "protocol", "the other end refuses for an unknown reason: use one version of truebridge in both"
                )
            raise of_kind(kind, f"the process that shares refuses: {text}")
        return self.read(said, place)

    def read(self, said: dict[str, Any], place: Place | None) -> Ticket:
        """Read what an answer describes."""
        specs, sizes, tree, groups, metadata = _described(said)
        self.kept = tensors = _made(specs, sizes, groups, place)
        for group, about in zip(groups, metadata, strict=True):
            if group.tensors:
                self._transfer(group, about, tensors)
        if self.channel is not None:
            with contextlib.suppress(BridgeError):
                self.channel.send({"do": "done"})
        try:
            return _core.ipc_share(tensors, tree, _LONG, None, None)
        except BridgeError as error:
            if error.kind not in _OF_TENSORS:
                raise
            raise of_kind("protocol", f"{_NONSENSE} ({error})") from error

    def end(self) -> None:
        """Free everything, as soon as nothing is under way: to cancel a transfer does not end its writes at once."""
        for transfer in self.transfers:
            if not transfer.end():
                _unknown.append(self)
                return
            # One that has failed may know a part of the other one.
            if transfer.is_done:
                self.agents.give(transfer.reader)
        # The other process keeps what it lends as long as the connection is open.
        if self.channel is not None:
            self.channel.close()
        self.kept = None

    def _transfer(self, theirs: Group, about: bytes, tensors: list[torch.Tensor]) -> None:
        """Read the tensors of a group, and wait for them."""
        # All of them are received on one device.
        place, spans = place_of(tensors[theirs.tensors[0][0]]), _spans(theirs, tensors)
        transfer = _Transfer(self.agents.take(place))
        self.transfers.append(transfer)
        agent = transfer.reader.agent
        with current(place):
            transfer.peer = _loaded(agent, about)
            transfer.memory = registered(agent, place, _covers(spans))
            try:
                here = [(mine, nbytes, place[1]) for mine, _, nbytes in spans]
                there = [(other, nbytes, theirs.device[1]) for _, other, nbytes in spans]
                ends = (
                    agent.get_xfer_descs(pieces, memory_of(kind))
                    for pieces, kind in ((here, place[0]), (there, theirs.device[0]))
                )
                transfer.handle = agent.initialize_xfer("READ", *ends, transfer.peer)
                self._arrived(agent, transfer.handle)
                transfer.is_done = True
            except BridgeError:
                raise
            except Exception as error:
                raise of_kind("gone", f"the transfer has failed: {error}. Ask for a new ticket") from error

    def _arrived(self, agent: Any, handle: Any) -> None:
        """Begin a transfer, and wait until it is done."""
        state, pause, looked, lost = agent.transfer(handle), 0.0, time.monotonic(), None
        while state != "DONE":
            if state != "PROC":
                raise of_kind("gone", "the transfer has failed: the other process has ended. Ask for a new ticket")
            now = time.monotonic()
            if now - looked > 0.05:
                looked = now
                self.check()
                if lost is None and self.channel is not None and not self.channel.is_quiet():
                    lost = now
            # The bytes may be here already.
            if lost is not None and now - lost > 1.0:
                raise of_kind("gone", "the other process has ended while it sent the tensors. Ask for a new ticket")
            time.sleep(pause)
            pause = min(0.001, pause + 0.00002)
            state = agent.check_xfer_state(handle)


def _loaded(agent: Any, about: bytes) -> Any:
    """Tell an agent of the other one. Return its name."""
    try:
        return agent.add_remote_agent(about)
    except Exception as error:
        if type(error).__name__ == "nixlBackendError":
            text = f"the other process cannot be reached by NIXL, or has ended ({error}). Ask for a new ticket"
            raise of_kind("gone", text) from error
        text = f"NIXL does not know the other end: use one version of it in both ({error})"
        raise of_kind("version", text) from error


def _has_ended(agent: Any, handle: Any) -> bool:
    """Wait until a transfer has ended. Return whether that is known."""
    pause = 0.001
    while True:
        try:
            if agent.check_xfer_state(handle) != "PROC":
                return True
        except Exception as error:
            # These say that nothing is under way: the other process was lost, or the transfer was never begun.
            return type(error).__name__ in {"nixlRemoteDisconnectError", "nixlNotPostedError"}
        time.sleep(pause)
        pause = min(0.1, pause * 2)


def _described(said: dict[str, Any]) -> tuple[list[Spec], list[int], str | None, list[Group], list[bytes]]:
    """Read an answer: the tensors, their bytes, the tree, the groups, and NIXL's metadata of each.

    Check that each tensor is there once, in a piece that has its bytes.
    """
    try:
        specs, items = [(name, [int(length) for length in shape]) for name, shape in said["tensors"]], {}
        for name in {name for name, _ in specs}:
            items[name] = _itemsize(name)
        sizes = [items[name] * math.prod(shape) for name, shape in specs]
        if any(not 0 <= length < 1 << 63 for _, shape in specs for length in shape):
            raise ValueError("a length is out of range")
        tree, groups, metadata = said["tree"], [], []
        if not isinstance(tree, (str, type(None))):
            raise ValueError("the tree is a text")
        missing = {number for number, nbytes in enumerate(sizes) if nbytes}
        for group in said["groups"]:
            metadata.append(base64.b64decode(group["agent"], validate=True))
            (kind, index), pieces = group["device"], [(int(start), int(nbytes)) for start, nbytes in group["pieces"]]
            if kind not in {"cpu", "cuda"} or not 0 <= int(index) < 1 << 16:
                raise ValueError(f"{kind} {index} is not a device")
            if not all(0 <= start < start + nbytes < 1 << 63 for start, nbytes in pieces):
                raise ValueError("a piece of memory is out of range")
            tensors = [(int(number), int(piece), int(offset)) for number, piece, offset in group["tensors"]]
            for number, piece, offset in tensors:
                missing.remove(number)
                if piece < 0 or not 0 <= offset <= offset + sizes[number] <= pieces[piece][1]:
                    raise ValueError(f"tensor {number} is not in its piece")
            groups.append(Group((kind, int(index)), pieces, tensors))
        if missing or not specs or set(said) != {"is", "tensors", "tree", "groups"}:
            raise ValueError(f"tensors {missing} are missing")
    except (AttributeError, TypeError, ValueError, LookupError, OverflowError) as error:
        raise of_kind("protocol", _NONSENSE) from error
    return specs, sizes, tree, groups, metadata


def _itemsize(name: str) -> int:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return int(dtype.itemsize)


def _devices(specs: list[Spec], groups: list[Group], place: Place | None) -> dict[str, list[int]]:
    """Return the numbers of the tensors to receive on each device. Tensors without elements follow the first."""
    import torch

    found: dict[str, list[int]] = {}
    left = set(range(len(specs)))
    for group in groups:
        kind, index = group.device if place is None else place
        if index is None:
            index = group.device[1] if group.device[0] == kind else 0
        numbers = [number for number, _, _ in group.tensors]
        left.difference_update(numbers)
        if kind == "cuda" and index >= torch.cuda.device_count():
            text = f"the tensors would arrive on GPU {index}, and this host has {torch.cuda.device_count()} GPUs"
            raise of_kind("device", f"{text}: pass device='cpu', or one that there is")
        found.setdefault("cpu" if kind == "cpu" else f"cuda:{index}", []).extend(numbers)
    if left:
        found.setdefault(next(iter(found), "cpu"), []).extend(sorted(left))
    return found


def _made(specs: list[Spec], sizes: list[int], groups: list[Group], place: Place | None) -> list[torch.Tensor]:
    """Return tensors of these shapes, in memory that nothing uses."""
    import torch

    found: dict[int, torch.Tensor] = {}
    try:
        for device, numbers in _devices(specs, groups, place).items():
            stream = contextlib.nullcontext() if device == "cpu" else torch.cuda.stream(_stream(device))
            with stream:
                made = _empty(device, [specs[number] for number in numbers], [sizes[number] for number in numbers])
            found.update(zip(numbers, made, strict=True))
    except BridgeError:
        raise
    except (MemoryError, RuntimeError) as error:
        raise of_kind(
            "out_of_memory", f"the memory does not suffice for what the other host shares: {error}"
        ) from error
    return [found[number] for number in range(len(specs))]


def _stream(device: str) -> Any:
    """Return the stream in which memory is received: no other work runs in it, for which it would be waited."""
    import torch

    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


_streams: dict[str, Any] = {}


def _empty(device: str, specs: list[Spec], sizes: list[int]) -> list[torch.Tensor]:
    """Return tensors in a block of memory that no work uses."""
    import torch

    offsets, total = [], 0
    for nbytes in sizes:
        offsets.append(total)
        total += -(-nbytes // _APART) * _APART
    if device == "cpu" and total > (available := _available()):
        raise of_kind("out_of_memory", f"{total:,} bytes arrive, and this host has {available:,} left")
    block = torch.empty(max(total, _APART), dtype=torch.uint8, device=device)
    if device != "cpu":
        # The allocator returns memory that earlier work of this stream may still use.
        torch.cuda.current_stream(block.device).synchronize()
    return views(block, specs, offsets)


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62


def _spans(theirs: Group, tensors: list[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Return what to read: an own address, the other one, and a number of bytes.

    Neighbours that lie at the same distance at both ends are one span: what is between them is nothing of either end.
    """
    starts = sorted(tensor.data_ptr() for tensor in tensors if tensor.nbytes)
    following = dict(zip(starts, starts[1:], strict=False))
    spans: list[tuple[int, int, int]] = []
    # The piece of the tensor before, and its own address.
    last = (-1, -1)
    for number, piece, offset in sorted(theirs.tensors, key=itemgetter(1, 2)):
        tensor = tensors[number]
        mine, other, nbytes = tensor.data_ptr(), theirs.pieces[piece][0] + offset, tensor.nbytes
        joins = last[0] == piece and following.get(last[1]) == mine
        last = piece, mine
        if joins:
            before, there, length = spans[-1]
            if mine - before == other - there and mine - before - length < _APART:
                spans[-1] = before, there, mine - before + nbytes
                continue
        spans.append((mine, other, nbytes))
    return spans


def _covers(spans: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Return the memory of spans, as few pieces."""
    found: list[tuple[int, int]] = []
    for start, _, nbytes in sorted(spans):
        if found and start - sum(found[-1]) < _APART:
            first, _ = found[-1]
            found[-1] = first, max(sum(found[-1]), start + nbytes) - first
        else:
            found.append((start, nbytes))
    return found
