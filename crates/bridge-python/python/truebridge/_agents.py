"""NIXL's agents in a carrier: the ends of its transfers.

UCX looks for transports of a GPU in the context that is current when an agent is made. So each is of one device.

UCX keeps two to four descriptors of each connection until its agent is destroyed. So an agent is replaced after a
number of transfers, which bounds them.

A thread of each agent polls as long as it lives. So the carrier destroys them when it rests.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _core
from .errors import of_kind

if TYPE_CHECKING:
    #: A kind of device, and its number.
    Place = tuple[str, int]

__all__ = ["Agents", "Reader", "enter", "memory_of", "nixl", "nixl_agent", "registered"]

#: How many other ends one agent knows in turn, and how often it lends: then it is replaced.
_USES = 32

#: How many requests read at a time: each has an agent, whose threads and descriptors the system must have.
_TURNS = 8

#: The modules of NIXL's packages, that for any CUDA first.
_MODULES = ("nixl", "nixl_cu13", "nixl_cu12")


def nixl() -> Any:
    """Return the module of NIXL."""
    errors = []
    for name in _MODULES:
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError as error:
            errors.append(str(error))
    text = f"tensors travel to other hosts by NIXL, which is not installed ({errors[-1]}): pip install"
    raise of_kind("missing", f"{text} 'truebridge[hosts]', or nixl[cu12] for CUDA 12")


def nixl_agent(device: Place = ("cpu", 0)) -> Any:
    """Return a new agent with the backend UCX, for memory of a device."""
    enter(device)
    api = nixl()
    # It logs a line at each start.
    logging.getLogger("nixl").setLevel(logging.WARNING)
    strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    try:
        agent = api.nixl_agent(secrets.token_hex(8), api.nixl_agent_config(backends=["UCX"], sync_mode=strict))
    except Exception as error:
        raise of_kind("driver", f"NIXL does not start: {error}") from error
    if not agent.backends:
        raise of_kind("missing", "NIXL has no backend UCX here: install its own package")
    return agent


def memory_of(kind: str) -> str:
    """Return what NIXL calls the memory of a kind of device."""
    return "DRAM" if kind == "cpu" else "VRAM"


def enter(device: Place) -> None:
    """Make the context of a GPU current on this thread: NIXL and UCX look for it there."""
    if device[0] == "cuda":
        _core.ipc_enter(device[1])


def registered(agent: Any, device: Place, address: int, nbytes: int) -> Any:
    """Register a block of memory."""
    enter(device)
    try:
        return agent.register_memory([(address, nbytes, device[1], "")], memory_of(device[0]))
    except Exception as error:
        raise of_kind("driver", f"NIXL cannot reach memory of {device[0]}: {error}") from error


@dataclass(eq=False)
class Reader:
    """An agent that reads for one request at a time: the end of one would take the peer from another."""

    agent: Any
    device: Place
    #: NIXL's metadata of the other end, and the agent's name for it.
    about: bytes = b""
    peer: Any = None
    #: How many other ends it has known.
    count: int = 0

    def meet(self, about: bytes) -> None:
        """Tell the agent of another end. One that it knows, with the same memory, keeps its connection."""
        if about == self.about:
            return
        if self.peer is not None:
            # It may have ended.
            with contextlib.suppress(Exception):
                self.agent.remove_remote_agent(self.peer)
        self.about, self.peer, self.count = b"", None, self.count + 1
        try:
            self.peer = self.agent.add_remote_agent(about)
        except Exception as error:
            if type(error).__name__ == "nixlBackendError":
                text = f"the other process cannot be reached by NIXL, or has ended ({error}). Ask for a new ticket"
                raise of_kind("gone", text) from error
            text = f"NIXL does not know the other end: use one version of it in both ({error})"
            raise of_kind("version", text) from error
        self.about = about


class Agents:
    """The agents of this process. An agent of NIXL cannot read from itself, so agents that lend never read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.turns = threading.BoundedSemaphore(_TURNS)
        self._idle: list[Reader] = []
        #: The agent that lends memory of a device, and how often it was used.
        self._lenders: dict[Place, tuple[Any, int]] = {}

    def lender(self, device: Place) -> Any:
        """Return the agent that lends. A replaced one is destroyed with the last transfer that has it."""
        with self._lock:
            agent, uses = self._lenders.get(device, (None, _USES))
            if uses >= _USES:
                agent, uses = nixl_agent(device), 0
            self._lenders[device] = agent, uses + 1
            return agent

    def clear(self) -> None:
        """Destroy the agents that nothing uses."""
        with self._lock:
            self._idle.clear()
            self._lenders.clear()

    def take(self, device: Place, about: bytes) -> Reader:
        """Return an agent that no other request uses, and that knows the other end if there is one."""
        with self._lock:
            idle = [reader for reader in self._idle if reader.device == device]
            if not idle:
                # Agents are not made at the same time.
                return Reader(nixl_agent(device), device)
            reader = max(idle, key=lambda reader: reader.about == about)
            self._idle.remove(reader)
            return reader

    def give(self, reader: Reader) -> None:
        """Take back an agent on which no transfer is pending."""
        if reader.count < _USES:
            with self._lock:
                self._idle.append(reader)
