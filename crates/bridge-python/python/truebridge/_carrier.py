"""A carrier: the process beside a program that moves its tensors to and from other hosts.

NIXL and UCX are here alone: an interrupt, a fork or the end of the program does not meet them. ``_hosts.py`` starts
it, and docs/design/hosts.md says what the two tell each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import _core
from ._agents import Agents, nixl
from ._channel import Channels, Server, address_of, refusal
from ._hosts import MOST, HostTicket
from ._lending import lend
from ._reading import Reading
from .errors import BridgeError, of_kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._channel import Channel

__all__ = ["main"]

#: Seconds that the carrier stays at most for pending transfers after its program has ended.
_AFTER = 150.0

#: Seconds without a transfer after which its agents, whose threads poll, and unused memory of GPUs are returned.
_IDLE = 2.0


@dataclass
class _Share:
    ticket: _core.Ticket
    token: bytes
    until: float


@dataclass
class Carrier:
    """What a carrier has."""

    agents: Agents = field(default_factory=Agents)
    channels: Channels = field(default_factory=Channels)
    #: Threads, one for each request.
    work: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1 << 16))
    lock: threading.Lock = field(default_factory=threading.Lock)
    shares: dict[int, _Share] = field(default_factory=dict)
    server: Server | None = None
    #: How many transfers are pending, and how many there were.
    pending: int = 0
    count: int = 0

    @contextlib.contextmanager
    def transfer(self) -> Iterator[None]:
        """Count a transfer."""
        with self.lock:
            self.pending += 1
            self.count += 1
        try:
            yield
        finally:
            with self.lock:
                self.pending -= 1

    def token(self, number: int) -> bytes | None:
        """Return the token of a share."""
        with self.lock:
            known = self.shares.get(number)
        return None if known is None or known.until < time.time() else known.token

    def serve(self, channel: Channel, number: int) -> bool:
        """Answer a process of another host, and hold what it reads until it is done. Return whether it said so."""
        with self.lock:
            known = self.shares.get(number)
        with self.transfer():
            try:
                if known is None:
                    raise of_kind("gone", "the share has ended")
                return lend(self.agents, channel, known.ticket)
            except Exception as error:
                with contextlib.suppress(BridgeError):
                    channel.send(refusal(error))
                return False

    def share(self, said: dict[str, Any]) -> dict[str, Any]:
        """Serve a ticket to other hosts. Return the port."""
        with self.lock:
            now = time.time()
            self.shares = {number: share for number, share in self.shares.items() if share.until > now}
            made = _core.Ticket(said["ticket"])
            self.shares[said["share"]] = _Share(made, bytes.fromhex(said["token"]), said["until"])
        # Without NIXL no share is made.
        nixl()
        with self.lock:
            if self.server is None:
                host, port = address_of(said["address"])
                try:
                    self.server = Server((host, said["port"] or port), self.token, self.serve)
                except BridgeError:
                    if not said["port"]:
                        raise
                    # That of an earlier carrier is taken by now.
                    self.server = Server((host, port), self.token, self.serve)
            return {"is": "shared", "port": self.server.port}

    def forget(self, number: int) -> None:
        """End a share."""
        with self.lock:
            self.shares.pop(number, None)

    def open(self, said: dict[str, Any], request: socket.socket) -> None:
        """Read what another host shares, and let the program open it."""
        reading = Reading(self.agents, self.channels, lambda: _check(request))
        made = None
        try:
            with self.transfer():
                try:
                    made = reading.run(HostTicket(**said["ticket"]), said["place"] and tuple(said["place"]))
                    _answer(request, {"is": "opened", "ticket": made.text})
                except Exception as error:
                    _answer(request, refusal(error))
                finally:
                    reading.end()
            # The program closes its end when it has opened the ticket.
            with contextlib.suppress(OSError):
                request.recv(1)
        finally:
            if made is not None:
                _core.ipc_revoke(made, False)

    def attend(self, said: dict[str, Any], request: socket.socket) -> None:
        """Answer a request of the program."""
        with request:
            if said["do"] == "open":
                self.open(said, request)
                return
            try:
                answer = self.share(said)
            except Exception as error:
                answer = refusal(error)
            _answer(request, answer)

    def rest(self) -> None:
        """Return what only transfers need."""
        self.channels.clear()
        self.agents.clear()
        _core.ipc_rest()

    def warm(self) -> None:
        """Import what transfers need, before the first one."""
        with contextlib.suppress(Exception):
            nixl()


def _answer(request: socket.socket, answer: dict[str, Any]) -> None:
    """Send an answer, unless the program does not wait any more."""
    with contextlib.suppress(OSError):
        request.send(json.dumps(answer).encode())


def _check(request: socket.socket) -> None:
    """Raise an error if the program has closed its end of a request."""
    poll = select.poll()
    poll.register(request, select.POLLIN)
    if poll.poll(0):
        raise of_kind("gone", "the program does not wait any more")


def _requests(control: socket.socket, program: int, carrier: Carrier) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield the messages of the program until it ends. Let the carrier rest meanwhile."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(program, select.POLLIN)
    count = 0
    # Since when there is no transfer; None while the carrier rests.
    since: float | None = None
    while True:
        ready = dict(poll.poll(_IDLE * 1000))
        now = time.monotonic()
        if carrier.pending or count != carrier.count:
            count, since = carrier.count, now
        elif since is not None and now - since >= _IDLE:
            since = None
            carrier.rest()
        if control.fileno() in ready:
            try:
                body, descriptors, _, _ = socket.recv_fds(control, MOST, 1)
            except OSError:
                return
            if not body:
                return
            yield json.loads(body), descriptors
        elif program in ready:
            return


def main(control: int, program: int) -> None:
    """Answer the requests of a program until it ends, and pending transfers have ended.

    Parameters
    ----------
    control : int
        The descriptor of a socket to the program.
    program : int
        A descriptor that says when the program has ended.
    """
    # It is that of the program alone: a terminal sends it to both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Each connection and each result has descriptors. A library that gets none aborts.
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    carrier = Carrier()
    threading.Thread(target=carrier.warm, daemon=True).start()
    for said, descriptors in _requests(socket.socket(fileno=control), program, carrier):
        if said["do"] == "begin":
            if said["folder"] is not None:
                _core.ipc_configure(said["folder"], (), None, None, None, None)
        elif said["do"] == "forget":
            carrier.forget(said["share"])
        elif descriptors:
            request = socket.socket(fileno=descriptors[0])
            if said["do"] == "share":
                # What comes next may open it.
                carrier.attend(said, request)
            else:
                carrier.work.submit(carrier.attend, said, request)
    # A program that waits for the end of the output must not wait for this process.
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    if carrier.server is not None:
        carrier.server.stop()
    until = time.monotonic() + _AFTER
    while carrier.pending and time.monotonic() < until:
        time.sleep(0.05)
    # The libraries' own ends may wait for other processes.
    _core.ipc_close()
    os._exit(0)
