"""What a carrier reads from another host, and shares with its program by a ticket of this host."""

from __future__ import annotations

import base64
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from . import _core
from ._agents import enter, memory_of, registered
from ._channel import check_that_it_has_time
from .errors import BridgeError, of_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._agents import Agents, Place, Reader
    from ._channel import Channel, Channels
    from ._core import Ticket

__all__ = ["Reading"]

Made = TypeVar("Made")

#: Seconds for which the result can be opened.
_LONG = 60.0

#: Seconds in which the other process usually fills its blocks.
_SOON = 1.0

#: The kinds of errors that another host may answer with.
_PLAUSIBLE = {"gone", "busy", "denied", "out_of_memory", "missing", "driver", "framework", "device", "dtype", "layout"}

#: Memory of transfers whose end is not known: it is never freed.
_unknown: list[Any] = []

_NONSENSE = "the other end describes tensors that make no sense: use one version of truebridge in both"


@dataclass(frozen=True)
class _Block:
    """A block of memory of the other host, and NIXL's metadata for it."""

    device: Place
    address: int
    nbytes: int
    agent: bytes


@dataclass(eq=False)
class _Transfer:
    """A block that is read."""

    theirs: _Block
    reader: Reader
    address: int
    memory: Any = None
    #: What NIXL has of it, and what it said of that last: nothing before it was begun.
    handle: Any = None
    state: str = ""

    @property
    def is_done(self) -> bool:
        """Whether all bytes are there."""
        return self.state == "DONE"

    def prepare(self) -> None:
        """Tell NIXL of both ends."""
        place, theirs = self.reader.device, self.theirs
        enter(place)
        self.reader.meet(theirs.agent)
        agent = self.reader.agent
        self.memory = registered(agent, place, self.address, theirs.nbytes)
        try:
            ends = (
                agent.get_xfer_descs([(start, theirs.nbytes, index)], memory_of(kind))
                for start, (kind, index) in ((self.address, place), (theirs.address, theirs.device))
            )
            self.handle = agent.initialize_xfer("READ", *ends, self.reader.peer)
        except Exception as error:
            raise _failed(error) from error

    def begin(self) -> None:
        """Begin to read."""
        enter(self.reader.device)
        self.state = "ERR"
        try:
            self.state = self.reader.agent.transfer(self.handle)
        except Exception as error:
            raise _failed(error) from error

    def is_under_way(self) -> bool:
        """Look whether it is under way. Raise an error if it has failed."""
        if self.state == "PROC":
            try:
                self.state = self.reader.agent.check_xfer_state(self.handle)
            except Exception as error:
                raise _failed(error) from error
        if self.state not in {"PROC", "DONE"}:
            raise _failed("the other process has ended")
        return not self.is_done

    def release(self) -> bool:
        """Wait until nothing is under way, and let go of the memory. Return whether the end is known."""
        agent = self.reader.agent
        is_begun = bool(self.state) and self.handle is not None
        if is_begun and not self.is_done and not _has_ended(agent, self.handle):
            return False
        for free, thing in ((agent.release_xfer_handle, self.handle), (agent.deregister_memory, self.memory)):
            if thing is not None:
                with contextlib.suppress(Exception):
                    free(thing)
        self.handle = self.memory = None
        return True


@dataclass(eq=False)
class Reading:
    """One request for the tensors of a ticket of another host."""

    agents: Agents
    channels: Channels
    #: Raises an error if the program does not wait any more.
    check: Callable[[], None]
    channel: Channel | None = None
    address: tuple[str, int] = ("", 0)
    transfers: list[_Transfer] = field(default_factory=list)
    #: The memory that is written to.
    incoming: _core.Incoming | None = None
    #: Whether it is one of those that read at a time.
    has_turn: bool = False
    #: Whether the other end has been told that all is done.
    is_done: bool = False

    def run(self, ticket: Any, place: tuple[str, int | None] | None) -> Ticket:
        """Read the tensors. Return a ticket of this host for them."""
        self.address = ticket.host, ticket.port
        self.channel = self.channels.connect(self.address, ticket.share, bytes.fromhex(ticket.token))
        # The work on the tensors may take long there.
        return self.read(self.answer(), place)

    def answer(self) -> dict[str, Any]:
        """Return the next message of the other end, which may refuse."""
        assert self.channel is not None
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
            raise of_kind(kind, f"the process that shares refuses: {_printable(text)}")
        return said

    def read(self, said: dict[str, Any], place: tuple[str, int | None] | None) -> Ticket:
        """Read what an answer describes. ``place`` is where it is to arrive, if not at the same devices."""
        tensors, tree, blocks = _described(said)
        lengths = [(*_place_of(block.device, place), block.nbytes) for block in blocks]
        self._take_turn()
        self.incoming = incoming = _sound(lambda: _core.Incoming(tensors, lengths))
        ends = [
            (block, (kind, index), address)
            for block, (kind, index, address, _) in zip(blocks, incoming.blocks, strict=True)
            if block.nbytes
        ]
        self._prepare(ends)
        if self.channel is not None and not self.channel.wait(_SOON):
            # The work on the tensors takes long there. Others read meanwhile.
            self._give_turn()
            said = self.answer()
            self._take_turn()
            self._prepare(ends)
        else:
            said = self.answer()
        if said != {"is": "filled"}:
            raise of_kind("protocol", _NONSENSE)
        for transfer in self.transfers:
            transfer.begin()
        for transfer in self.transfers:
            self._wait(transfer)
        if self.channel is not None:
            with contextlib.suppress(BridgeError):
                self.channel.send({"do": "done"})
                self.is_done = True
        # NIXL must not know the memory any more when the program has it.
        for transfer in self.transfers:
            transfer.release()
        return _sound(lambda: incoming.share(tree, _LONG))

    def end(self) -> None:
        """Free everything, as soon as nothing is under way: to cancel a transfer does not end its writes at once."""
        try:
            self._free()
        finally:
            if self.has_turn:
                self.agents.turns.release()

    def _free(self) -> None:
        is_begun = any(transfer.state for transfer in self.transfers)
        for transfer in self.transfers:
            if not transfer.release():
                _unknown.append(self)
                return
            # One that has failed may know a part of the other one.
            if transfer.is_done:
                self.agents.give(transfer.reader)
        # The other process keeps what it lends as long as the connection is open.
        if self.channel is not None:
            if self.is_done:
                self.channels.give(self.address, self.channel)
            else:
                if not is_begun:
                    # It need not wait for the end of what may be under way.
                    with contextlib.suppress(BridgeError):
                        self.channel.send({"do": "done"})
                self.channel.close()
        self.incoming = None

    def _take_turn(self) -> None:
        while not self.has_turn:
            self.check()
            self.has_turn = self.agents.turns.acquire(timeout=0.05)

    def _give_turn(self) -> None:
        """Let another request read. What was prepared is given back."""
        for transfer in self.transfers:
            transfer.release()
            self.agents.give(transfer.reader)
        self.transfers = []
        self.has_turn = False
        self.agents.turns.release()

    def _prepare(self, ends: list[tuple[_Block, Place, int]]) -> None:
        """Prepare the transfer of each block to a device, at an address there."""
        for block, place, address in ends:
            self.transfers.append(_Transfer(block, self.agents.take(place, block.agent), address))
            self.transfers[-1].prepare()

    def _wait(self, transfer: _Transfer) -> None:
        """Wait until a block is there."""
        pause, looked, lost = 0.0, time.monotonic(), None
        while transfer.is_under_way():
            now = time.monotonic()
            if now - looked > 0.05:
                looked = now
                self.check()
                if lost is None and self.channel is not None and not self.channel.is_quiet():
                    lost = now
            # The bytes may be here already.
            if lost is not None and now - lost > 1.0:
                raise _failed("the other process has ended while it sent the tensors")
            time.sleep(pause)
            pause = min(0.001, pause + 0.00002)


def _failed(why: object) -> BridgeError:
    return of_kind("gone", f"the transfer has failed: {why}. Ask for a new ticket")


def _printable(text: str) -> str:
    """Return what a terminal may show of a text of another host."""
    return "".join(character if character.isprintable() else "?" for character in text[:1000])


def _place_of(theirs: Place, place: tuple[str, int | None] | None) -> Place:
    """Return the device at which a block arrives."""
    kind, index = theirs if place is None else place
    if index is None:
        index = theirs[1] if kind == theirs[0] else 0
    return kind, index


def _sound(call: Callable[[], Made]) -> Made:
    """Make a call with what the other host has described. The program has not chosen it."""
    try:
        return call()
    except (BridgeError, ValueError, OverflowError) as error:
        if isinstance(error, BridgeError) and error.kind not in {"argument", "protocol"}:
            raise
        raise of_kind("protocol", f"{_NONSENSE} ({error})") from error


def _described(said: dict[str, Any]) -> tuple[str, str | None, list[_Block]]:
    """Read an answer: the text about the tensors, that about their tree, and their blocks."""
    try:
        tensors, tree, blocks = said["tensors"], said["tree"], [_block(**block) for block in said["blocks"]]
        if set(said) != {"is", "tensors", "tree", "blocks"} or not isinstance(tensors, str):
            raise ValueError("the tensors are a text")
        if not isinstance(tree, (str, type(None))):
            raise ValueError("the tree is a text")
        if len({block.device for block in blocks}) < len(blocks):
            raise ValueError("a device has one block")
    except (AttributeError, TypeError, ValueError, LookupError, OverflowError) as error:
        raise of_kind("protocol", _NONSENSE) from error
    return tensors, tree, blocks


def _block(device: list[Any], address: int, nbytes: int, agent: str) -> _Block:
    kind, index = device
    if kind not in {"cpu", "cuda"} or not 0 <= int(index) < 1 << 16:
        raise ValueError(f"{kind} {index} is not a device")
    if not 0 <= int(address) <= int(address) + int(nbytes) < 1 << 63 or int(nbytes) < 0:
        raise ValueError("a block is out of range")
    return _Block((kind, int(index)), int(address), int(nbytes), base64.b64decode(agent, validate=True))


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
