"""Tensors for other hosts: what the program itself does. A carrier, a process beside it, moves the bytes by NIXL.

NIXL cannot be made safe in the program's own process, which is interrupted, forks, and ends beside running threads.
docs/design/hosts.md says more.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from multiprocessing import spawn
from typing import TYPE_CHECKING, Any

from . import _core
from ._channel import address_of
from .errors import BridgeError, of_kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ._core import Device, Order, Target, Ticket

__all__ = ["HostTicket"]

#: The most bytes of a message between the program and its carrier.
MOST = 1 << 16

#: What a carrier runs. It has no parent that would have to wait for its end.
_CARRIER = "import os, sys; os.fork() and os._exit(0); sys.path[:] = sys.argv[4:]; "
_CARRIER += "from truebridge._carrier import main; main(int(sys.argv[1]), int(sys.argv[2]))"


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


def read(ticket: HostTicket | str) -> HostTicket | None:
    """Return the ticket for hosts; ``None`` if this is another one."""
    if isinstance(ticket, HostTicket):
        return ticket
    if not isinstance(ticket, str) or not ticket.lstrip().startswith("{"):
        return None
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        values = json.loads(ticket)
        if values.pop("truebridge", None) != "hosts":
            return None
        made = HostTicket(**values)
        kinds = [(made.host, str), (made.port, int), (made.share, int), (made.token, str)]
        sound = all(type(value) is kind for value, kind in kinds) and type(made.expires) in {int, float}
        sound = sound and max(len(made.host), len(made.token)) < 256
        if sound and 0 <= made.port < 1 << 16 and 0 <= made.share < 1 << 63 and bytes.fromhex(made.token):
            return made
    raise of_kind("argument", "this is not a ticket: pass one as it was sent, whole")


@dataclass(frozen=True)
class _Share:
    ticket: Ticket
    token: str
    until: float


class _Carrier:
    """A running carrier. It ends when this process closes its socket, or ends."""

    def __init__(self, folder: str | None) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                watched = os.pidfd_open(os.getpid())
                try:
                    passed = (theirs.fileno(), watched)
                    # The last of the numbers shows in a list of processes whose carrier this is.
                    arguments = [str(number) for number in (*passed, os.getpid())]
                    started = subprocess.Popen(
                        [os.fsdecode(spawn.get_executable()), "-c", _CARRIER, *arguments, *sys.path],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        pass_fds=passed,
                        start_new_session=True,
                    )
                finally:
                    os.close(watched)
            started.wait()
            self.tell({"do": "begin", "folder": folder})
        except BaseException:
            self.control.close()
            raise

    def tell(self, message: dict[str, Any], request: socket.socket | None = None) -> None:
        """Send a message, perhaps with the end of a connection for its answer. It is sent whole or not at all."""
        body = [json.dumps(message).encode()]
        # It takes no lock: threads may send at once, and an interrupt leaves no part of a message.
        socket.send_fds(self.control, body, [] if request is None else [request.fileno()])


class _Here:
    """What this process has for other hosts. A fork begins with none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.carrier: _Carrier | None = None
        self.shares: dict[int, _Share] = {}
        self.numbers = itertools.count(1)
        #: The port at which the carrier listens, or has listened.
        self.port = 0

    def tell(self, message: dict[str, Any], request: socket.socket | None = None) -> None:
        """Send a message to the carrier. One that has ended is replaced."""
        carrier = self.carrier
        if carrier is not None:
            try:
                carrier.tell(message, request)
                return
            except OSError:
                pass
        self.start(carrier).tell(message, request)

    def start(self, ended: _Carrier | None = None) -> _Carrier:
        """Return the carrier: a new one if there is none, or only ``ended``."""
        with self.lock:
            if self.carrier is None or self.carrier is ended:
                try:
                    carrier = _Carrier(_folder)
                    for number, share in self.shares.items():
                        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                        with near, far:
                            carrier.tell(self.described(number, share), far)
                except OSError as error:
                    raise of_kind("driver", f"the carrier of this process does not start: {error}") from error
                self.carrier = carrier
            return self.carrier

    def described(self, number: int, share: _Share) -> dict[str, Any]:
        """Return what the carrier is told of a share."""
        about = {"share": number, "token": share.token, "until": share.until}
        return {"do": "share", "ticket": share.ticket.text, "address": _address, "port": self.port, **about}


@contextlib.contextmanager
def _asked(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Send a request to the carrier, and yield its answer. At the end of the block the carrier forgets the request."""
    # To close the connection is to give the request up, also for an interrupt at any time.
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own:
        with theirs:
            _here.tell(message, theirs)
        try:
            try:
                body = own.recv(MOST)
            except ConnectionError:
                body = b""
            if not body:
                text = "the carrier of this process has ended before it answered, or has too many files open: try again"
                raise of_kind("gone", text)
            answer = json.loads(body)
            if answer["is"] == "refused":
                raise of_kind(answer["kind"], answer["text"])
            yield answer
        finally:
            # A fork may have the socket, too.
            with contextlib.suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)


_here = _Here()

#: The address at which the carrier listens, and the folder of this process's sockets.
_address: str | None = None
_folder: str | None = None


def _begin_anew() -> None:
    """Leave the carrier to the process that this one was forked from."""
    global _here
    if _here.carrier is not None:
        _here.carrier.control.close()
    _here = _Here()


os.register_at_fork(after_in_child=_begin_anew)


def configure(address: str | None, folder: str | os.PathLike[str] | None) -> None:
    """Name the address at which this process is reached by other hosts, and begin to start what listens there."""
    global _address, _folder
    if folder is not None:
        _folder = os.path.abspath(folder)
    if address is None:
        return
    address_of(address)
    if _here.port and address != _address:
        raise of_kind("argument", "this process shares with other hosts already: configure it before its first share")
    _address = address
    _here.start()


def has_address() -> bool:
    """Return whether this process has an address that other hosts reach."""
    return _address is not None


def check() -> None:
    """Raise an error if this process has no address."""
    if not has_address():
        text = "name the address at which other hosts reach this process: processes.configure(address='10.0.0.5')"
        raise of_kind("argument", text)


def share(ticket: Ticket, expires: float) -> HostTicket:
    """Let other hosts open what a ticket for this host shares, after ``check``."""
    here, now = _here, time.time()
    number, made = next(here.numbers), _Share(ticket, secrets.token_hex(16), now + expires)
    assert _address is not None

    def told() -> int:
        with _asked(here.described(number, made)) as answer:
            return int(answer["port"])

    try:
        here.port = told()
    except BridgeError as error:
        if error.kind != "gone":
            raise
        # The carrier was killed before it answered, and nothing is lost: the next one is told.
        here.port = told()
    with here.lock:
        here.shares = {known: one for known, one in here.shares.items() if one.until > now}
        here.shares[number] = made
    return HostTicket(address_of(_address)[0], here.port, number, made.token, made.until)


def revoke(ticket: HostTicket, told: bool) -> None:
    """End a share: no other host opens it any more."""
    here = _here
    with here.lock:
        known = here.shares.get(ticket.share)
        is_own = known is not None and secrets.compare_digest(known.token.encode(), ticket.token.encode())
        if is_own:
            del here.shares[ticket.share]
    if known is not None and is_own:
        with contextlib.suppress(OSError):
            if here.carrier is not None:
                here.carrier.tell({"do": "forget", "share": ticket.share})
        _core.ipc_revoke(known.ticket, told)
    elif _address is None or (ticket.host, ticket.port) != (address_of(_address)[0], here.port):
        raise of_kind("argument", "another process has made this ticket: end or revoke it there")


def open(
    ticket: HostTicket,
    target: Target,
    copy: bool | None,
    device: Device | None,
    order: Order | None,
    permute: Sequence[int] | None,
    read_only: bool,
) -> tuple[list[Any], str | None]:
    """Open a ticket of another host: return its tensors, and the text of their tree."""
    with _asked({"do": "open", "ticket": asdict(ticket), "place": _place(device)}) as answer:
        return _core.ipc_open(answer["ticket"], target, copy, device, order, permute, read_only)


def _place(device: Any) -> tuple[str, int | None] | None:
    """Return where the bytes are to arrive; ``None`` where they are at the other host.

    It saves a copy. Whether the device is one, and the tensors are on it, is up to ``ipc_open``.
    """
    kind, index = None, None
    with contextlib.suppress(Exception):
        if isinstance(device, tuple):
            kind, index = {1: "cpu", 2: "cuda"}[int(device[0])], int(device[1])
        elif isinstance(device, str):
            kind, _, number = device.partition(":")
            index = int(number) if number else None
        elif device is not None:
            # Of PyTorch, JAX and CuPy.
            kind = getattr(device, "type", None) or getattr(device, "platform", "cuda")
            numbers = [getattr(device, name, None) for name in ("index", "local_hardware_id", "id")]
            index = next((number for number in numbers if isinstance(number, int)), None)
        if kind == "cpu":
            return "cpu", 0
        if kind in {"cuda", "gpu"} and (index is None or 0 <= index < 1 << 16):
            return "cuda", index
    return None
