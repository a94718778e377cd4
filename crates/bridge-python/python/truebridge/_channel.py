"""A connection to another host on which both ends prove that they have the token of a ticket.

docs/design/hosts.md specifies it. Nothing is encrypted: a message has a code that cannot be made without the token.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from .errors import BridgeError, of_kind

if TYPE_CHECKING:
    from collections.abc import Callable

#: The version of the messages.
VERSION = 2

#: Seconds in which the other end proves itself and answers.
PATIENCE = 10.0

#: The most bytes of a message before both ends are known, and after that.
_UNKNOWN, _KNOWN = 1 << 10, 1 << 28

#: The most connections of a process whose other end is not known, that are idle, and in all.
_MOST_UNKNOWN, _MOST_IDLE, _MOST = 64, 16, 128

#: Seconds after which a client closes a connection that is idle.
_IDLE = 2.0

#: What the system says of a connection whose other host it does not reach.
_CUT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}

_NONCE = 16
_CODE = hashlib.sha256().digest_size


def address_of(text: str) -> tuple[str, int]:
    """Return the host and the port of ``host``, ``host:port``, ``[host]`` or ``[host]:port``; port 0 is any."""
    if not isinstance(text, str):
        raise of_kind("argument", f"an address is a str such as 10.0.0.5:7000, not {type(text).__name__}")
    host, port = text, ""
    if text.startswith("[") and "]" in text:
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or not (port == "" or (port.isdecimal() and int(port) < 1 << 16)):
        raise of_kind("argument", f"{text!r:.80} is not an address: write one such as 10.0.0.5 or 10.0.0.5:7000")
    return host, int(port or 0)


def _code(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


class Channel:
    """One connection. Its messages are dicts. One thread uses it at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._key = b""
        #: Whether the other end has proved itself for the request.
        self._is_known = False
        self._ways = (b"", b"")
        self._sent = self._received = 0
        #: Whether the network is lost: the other process may be there.
        self.is_cut = False

    def close(self) -> None:
        """Close the connection. The other end sees that."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def is_quiet(self) -> bool:
        """Return whether the other end is there and has sent nothing."""
        return not self.wait(0)

    def wait(self, seconds: float) -> bool:
        """Wait until the other end has sent something or is gone. Return whether that is so."""
        poll = select.poll()
        try:
            poll.register(self._connection, select.POLLIN)
        except ValueError:
            # Another thread has closed it.
            return True
        return bool(poll.poll(seconds * 1000))

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""
        body = json.dumps(message, separators=(",", ":")).encode()
        code = _code(self._key, self._ways[0], self._sent.to_bytes(8, "big"), body) if self._key else b""
        self._sent += 1
        try:
            self._connection.settimeout(PATIENCE)
            self._connection.sendall(len(body).to_bytes(4, "big") + body + code)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, patience: float | None = PATIENCE) -> dict[str, Any]:
        """Return the next message; ``None`` waits as long as the other end is there."""
        until = None if patience is None else time.monotonic() + patience
        length = int.from_bytes(self._read(4, until), "big")
        if length > (_KNOWN if self._is_known else _UNKNOWN):
            raise _broken()
        body = self._read(length, until)
        if self._key:
            code = _code(self._key, self._ways[1], self._received.to_bytes(8, "big"), body)
            if not hmac.compare_digest(code, self._read(_CODE, until)):
                raise _broken()
        self._received += 1
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise _broken() from error
        if not isinstance(message, dict):
            raise _broken()
        return message

    def begin(self) -> None:
        """Begin a request, for which both ends prove themselves anew."""
        self._is_known = False

    def greet(self, share: int, token: bytes) -> None:
        """Prove to the process that has a share, and let it prove, that both know the token."""
        self.begin()
        own = os.urandom(_NONCE)
        self.send({"truebridge": VERSION, "share": share, "nonce": own.hex()})
        said = self.receive()
        check_that_it_has_time(said)
        if said.get("truebridge") != VERSION:
            raise of_kind("version", "the other end speaks another version: use one version of truebridge in both")
        self.prove(token, share, (own, _nonce(said)), is_server=False)

    def prove(self, token: bytes, share: int, nonces: tuple[bytes, bytes], is_server: bool) -> None:
        """Send the proof of this end, check that of the other one, and give both ways their keys."""
        about = (share.to_bytes(8, "big"), *nonces)
        client, server = _code(token, b"client", *about), _code(token, b"server", *about)
        own, other = (server, client) if is_server else (client, server)

        def check() -> None:
            message = self.receive()
            check_that_it_has_time(message)
            said = message.get("proof")
            if not isinstance(said, str) or not hmac.compare_digest(
                said.encode(errors="replace"), other.hex().encode()
            ):
                text = "the other end does not have this share: it has ended or was revoked, or another program listens"
                raise of_kind("gone", f"{text} there now. Ask for a new ticket")

        def take_keys() -> None:
            self._key, self._sent, self._received = _code(token, b"session", *about), 0, 0
            self._ways = (b"server", b"client") if is_server else (b"client", b"server")

        # The server is first: a client proves itself to no other program.
        if is_server:
            self.send({"proof": own.hex()})
            try:
                check()
            finally:
                # The client has them by now, also where the server gives it up for others.
                take_keys()
        else:
            check()
            self.send({"proof": own.hex()})
            take_keys()
        self._is_known = True

    def _read(self, count: int, until: float | None) -> bytes:
        read = bytearray()
        while len(read) < count:
            try:
                self._connection.settimeout(None if until is None else max(0.001, until - time.monotonic()))
                more = self._connection.recv(min(count - len(read), 1 << 20))
            except OSError as error:
                raise self._lost(error) from error
            if not more:
                raise self._lost(None)
            read += more
        return bytes(read)

    def _lost(self, error: OSError | None) -> BridgeError:
        if error is not None and error.errno in _CUT:
            self.is_cut = True
        elif isinstance(error, TimeoutError):
            return of_kind("busy", "the other end does not answer in time: try again, or look at its process")
        return of_kind("gone", f"the connection to the other host has ended{f': {error}' if error else ''}")


def _broken() -> BridgeError:
    return of_kind("protocol", "the other end sends what is not a message: use one version of truebridge in both")


def refusal(error: Exception) -> dict[str, str]:
    """Return the answer that says why something fails."""
    if not isinstance(error, BridgeError):
        error = of_kind("framework", f"{type(error).__name__}: {error}")
    # A carrier's answer to its program is one packet.
    return {"is": "refused", "kind": error.kind, "text": str(error)[:4000]}


def check_that_it_has_time(message: dict[str, Any]) -> None:
    """Raise an error if the other end has said that it is busy."""
    if message.get("is") == "busy":
        raise of_kind("busy", "the process that shares has too many connections: try again")


def connect(address: tuple[str, int], share: int, token: bytes) -> Channel:
    """Connect to the process that has a share, and prove to each other that both know the token."""
    try:
        connection = socket.create_connection(address, timeout=PATIENCE)
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}:
            raise of_kind("out_of_memory", "too many files are open: raise the limit (ulimit -n)") from error
        text = f"no process listens at {address[0]}, port {address[1]}: {error}. Ask for a new ticket, or open the port"
        raise of_kind("gone", text) from error
    channel = Channel(connection)
    try:
        alive(connection)
        channel.greet(share, token)
    except BaseException:
        channel.close()
        raise
    return channel


class Channels:
    """Connections that have served a request, for the next one to the same address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Each with its address, and since when it is idle.
        self._idle: list[tuple[tuple[str, int], Channel, float]] = []

    def connect(self, address: tuple[str, int], share: int, token: bytes) -> Channel:
        """Connect as the function ``connect`` does, by an idle connection if there is one."""
        while channel := self._take(address):
            try:
                channel.greet(share, token)
            except BridgeError as error:
                channel.close()
                # Else the other end has ended, or has dropped it for others.
                if isinstance(error.__cause__, TimeoutError):
                    raise
            else:
                return channel
        return connect(address, share, token)

    def _take(self, address: tuple[str, int]) -> Channel | None:
        with self._lock:
            for number, (known, channel, _) in enumerate(self._idle):
                if known == address:
                    del self._idle[number]
                    return channel
        return None

    def give(self, address: tuple[str, int], channel: Channel) -> None:
        """Take back a connection on which nothing is pending."""
        with self._lock:
            self._idle.append((address, channel, time.monotonic()))
        self.clear(_IDLE)

    def clear(self, age: float = 0.0) -> None:
        """Close the connections that have been idle for so many seconds."""
        since = time.monotonic() - age
        with self._lock:
            old = [channel for _, channel, then in self._idle if then <= since]
            self._idle = [kept for kept in self._idle if kept[2] > since]
        for channel in old:
            channel.close()


def _nonce(message: dict[str, Any]) -> bytes:
    try:
        nonce = bytes.fromhex(message["nonce"])
    except (KeyError, TypeError, ValueError) as error:
        raise _broken() from error
    if len(nonce) != _NONCE:
        raise _broken()
    return nonce


def alive(connection: socket.socket) -> None:
    """Send each message at once, and let the system notice within a minute that the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Server:
    """Accepts connections at an address, and serves each on a thread of its own, once its other end is known.

    ``serve`` returns whether the connection serves another request, for which the other end proves itself anew.
    """

    def __init__(
        self, address: tuple[str, int], token: Callable[[int], bytes | None], serve: Callable[[Channel, int], bool]
    ) -> None:
        try:
            family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server(address, family=family)
        except (OSError, UnicodeError) as error:
            text = (
                f"this process cannot listen at {address[0]}, port {address[1]}: {error}. Name an address of this host"
            )
            raise of_kind("argument", text) from error
        self.port: int = self._listener.getsockname()[1]
        self._token, self._serve = token, serve
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        #: The connections whose other end is not known, and those that are idle, the oldest first.
        self._unknown: dict[Channel, socket.socket] = {}
        self._idle: dict[Channel, socket.socket] = {}
        #: Those that must end.
        self._dropped: set[Channel] = set()
        threading.Thread(target=self._accept, name="truebridge-hosts", daemon=True).start()

    def stop(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        """Accept no more connections, and end the open ones."""
        self.stop()
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except ConnectionError:
                continue
            except OSError:
                # Too many files are open, or the listener is closed.
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)
                continue
            channel = Channel(connection)
            with self._lock:
                self._channels.add(channel)
                self._unknown[channel] = connection
                self._drop()
            thread = threading.Thread(target=self._attend, args=(channel, connection), name="truebridge-hosts")
            thread.daemon = True
            try:
                thread.start()
            except RuntimeError:
                # The system has no more threads.
                with self._lock:
                    self._unknown.pop(channel, None)
                self._end(channel)

    def _drop(self) -> None:
        """Drop the oldest idle connection, or else the oldest whose other end is not known, if there are too many.

        So silent ones lock no other out. The thread of the connection ends it.
        """
        if self._idle and (len(self._idle) > _MOST_IDLE or len(self._channels) > _MOST):
            dropped = self._idle
        elif len(self._unknown) > _MOST_UNKNOWN or len(self._channels) > _MOST:
            dropped = self._unknown
        else:
            return
        channel, connection = next(iter(dropped.items()))
        del dropped[channel]
        self._dropped.add(channel)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RD)

    def _attend(self, channel: Channel, connection: socket.socket) -> None:
        try:
            while (share := self._known(channel, connection)) is not None and self._serve(channel, share):
                self._rest(channel, connection)
        finally:
            self._end(channel)

    def _rest(self, channel: Channel, connection: socket.socket) -> None:
        """Let a connection be idle until its next request begins."""
        with self._lock:
            self._idle[channel] = connection
            self._drop()
        channel.wait(PATIENCE)
        with self._lock:
            if self._idle.pop(channel, None) is not None:
                self._unknown[channel] = connection

    def _end(self, channel: Channel) -> None:
        with self._lock:
            self._channels.discard(channel)
            self._dropped.discard(channel)
        channel.close()

    def _known(self, channel: Channel, connection: socket.socket) -> int | None:
        """Return the share whose token the other end has."""
        try:
            share = self._proved(channel, connection)
        except (BridgeError, OSError):
            share = None
        with self._lock:
            self._unknown.pop(channel, None)
            is_dropped = channel in self._dropped
        if is_dropped:
            with contextlib.suppress(BridgeError):
                channel.send({"is": "busy"})
            return None
        return share

    def _proved(self, channel: Channel, connection: socket.socket) -> int | None:
        alive(connection)
        channel.begin()
        said = channel.receive()
        if channel in self._dropped:
            return None
        if said.get("truebridge") != VERSION or not isinstance(share := said.get("share"), int):
            channel.send({"truebridge": VERSION})
            return None
        if not 0 <= share < 1 << 63:
            return None
        own = os.urandom(_NONCE)
        channel.send({"truebridge": VERSION, "nonce": own.hex()})
        # A share that there is not is refused as a wrong token is.
        token = self._token(share) or os.urandom(_NONCE)
        channel.prove(token, share, (_nonce(said), own), is_server=True)
        return share
