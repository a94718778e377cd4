"""Connections between hosts: each end proves that it has the token, and messages are whole and in order."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from raising import kind_of
from truebridge import BridgeError, _channel
from truebridge._channel import Channel, Channels, Server, address_of, connect
from truebridge_conformance.others import wait_until

TOKEN = b"a token of a test"


def echo(channel: Channel, share: int) -> None:
    with contextlib.suppress(BridgeError):
        while True:
            channel.send({"share": share, "said": channel.receive(None)})


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), lambda share: TOKEN if share == 7 else None, echo)
    yield server
    server.close()


def test_both_ends_talk(server: Server) -> None:
    channel = connect(("127.0.0.1", server.port), 7, TOKEN)
    for number in range(3):
        channel.send({"n": number})
        assert channel.receive() == {"share": 7, "said": {"n": number}}
    assert channel.is_quiet()
    server.close()
    assert kind_of(channel.receive) == "gone"
    assert not channel.is_quiet()
    channel.close()


class Served:
    """A server whose connections serve one request after the other."""

    def __init__(self) -> None:
        self.used: list[tuple[int, Channel]] = []
        self.server = Server(("127.0.0.1", 0), lambda share: TOKEN + bytes([share]) if share < 9 else None, self.serve)
        self.channels = Channels()

    def serve(self, channel: Channel, share: int) -> bool:
        self.used.append((share, channel))
        with contextlib.suppress(BridgeError):
            channel.send({"share": share})
            return channel.receive(None) == {"do": "done"}
        return False

    def ask(self, share: int, token: bytes | None = None) -> None:
        """Make one request."""
        channel = self.channels.connect(self.address, share, token or TOKEN + bytes([share]))
        assert channel.receive() == {"share": share}
        channel.send({"do": "done"})
        self.channels.give(self.address, channel)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.server.port


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.channels.clear()
    served.server.close()


def test_a_connection_serves_the_next_request_for_another_share(served: Served) -> None:
    for share in (1, 2, 1):
        served.ask(share)
    assert [share for share, _ in served.used] == [1, 2, 1]
    assert len({channel for _, channel in served.used}) == 1
    # Each request is proved anew.
    assert kind_of(lambda: served.ask(3, TOKEN + bytes([1]))) == "gone"
    assert kind_of(lambda: served.ask(9)) == "gone"
    served.channels.clear()
    served.ask(4)
    assert len({channel for _, channel in served.used}) == 2


def test_a_kept_connection_whose_other_end_has_ended_is_replaced(served: Served) -> None:
    served.ask(1)
    server = served.server
    server.close()
    # The next process listens at the same port.
    served.server = Server(served.address, lambda _: TOKEN + bytes([1]), served.serve)
    assert served.server.port == server.port
    served.ask(1)
    assert len({channel for _, channel in served.used}) == 2


def test_idle_connections_lock_no_other_out(served: Served) -> None:
    clients = [Channels() for _ in range(2 * _channel._MOST_IDLE)]
    for _ in range(2):
        for served.channels in clients:
            served.ask(1)
            assert len(served.server._idle) <= _channel._MOST_IDLE
    for channels in clients:
        channels.clear()


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_connection_that_is_dropped_between_the_proofs_is_told(
    served: Served, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    crowd = []

    class Slow(Channel):
        def send(self, message: dict[str, Any]) -> None:
            if "proof" in message and self.is_slow:
                crowd.extend(socket.create_connection(served.address) for _ in range(3))
                wait_until(lambda: self.wait(0))
            super().send(message)

        is_slow = False

    channel = Slow(socket.create_connection(served.address))
    if is_kept:
        channel.greet(1, TOKEN + bytes([1]))
        assert channel.receive() == {"share": 1}
        channel.send({"do": "done"})
    monkeypatch.setattr(_channel, "_MOST_UNKNOWN", 2)
    channel.is_slow = True
    channel.greet(1, TOKEN + bytes([1]))
    assert channel.receive() == {"is": "busy"}
    for connection in crowd:
        connection.close()


def test_a_greeting_is_short_also_on_a_kept_connection(served: Served) -> None:
    channel = served.channels.connect(served.address, 1, TOKEN + bytes([1]))
    assert channel.receive() == {"share": 1}
    channel.send({"do": "done"})
    wait_until(lambda: served.server._idle)
    channel._connection.sendall((1 << 20).to_bytes(4, "big"))
    assert kind_of(channel.receive) == "gone"


def test_old_idle_connections_are_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.ask(1)
    (_, old, _) = served.channels._idle[0]
    monkeypatch.setattr(_channel, "_IDLE", 0.0)
    served.channels.give(("127.0.0.1", 1), Channel(socket.socket()))
    assert not served.channels._idle
    assert old._connection.fileno() < 0


@pytest.mark.parametrize(("share", "token"), [(7, b"another token"), (8, TOKEN)])
def test_a_wrong_token_and_an_unknown_share_are_alike(server: Server, share: int, token: bytes) -> None:
    assert kind_of(lambda: connect(("127.0.0.1", server.port), share, token)) == "gone"


def test_a_client_proves_itself_to_none_that_has_no_token() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    said: list[bytes] = []

    def pretend() -> None:
        connection, _ = listener.accept()
        channel = Channel(connection)
        channel.receive()
        channel.send({"truebridge": _channel.VERSION, "nonce": "00" * 16})
        channel.send({"proof": "00" * 32})
        said.append(connection.recv(100))
        channel.close()

    thread = threading.Thread(target=pretend)
    thread.start()
    assert kind_of(lambda: connect(listener.getsockname(), 7, TOKEN)) == "gone"
    thread.join()
    listener.close()
    assert said == [b""]


class Middle:
    """A relay between two ends, which changes what it is told to."""

    def __init__(self, port: int, change: Any) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = port
        self.change = change
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        near, _ = self.listener.accept()
        far = socket.create_connection(("127.0.0.1", self.port))
        for one, other, is_answer in ((near, far, False), (far, near, True)):
            threading.Thread(target=self.pump, args=(one, other, is_answer), daemon=True).start()

    def pump(self, one: socket.socket, other: socket.socket, is_answer: bool) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while head := one.recv(4, socket.MSG_WAITALL):
                body = one.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
                # The first two messages of each end have no code.
                code = one.recv(32, socket.MSG_WAITALL) if number > 1 else b""
                for frame in self.change(is_answer, number, head + body + code):
                    other.sendall(frame)
                number += 1
            other.shutdown(socket.SHUT_WR)


def flipped(is_answer: bool, number: int, frame: bytes) -> list[bytes]:
    return [frame[:-40] + bytes([frame[-40] ^ 1]) + frame[-39:]] if is_answer and number == 2 else [frame]


def twice(is_answer: bool, number: int, frame: bytes) -> list[bytes]:
    return [frame, frame] if is_answer and number == 2 else [frame]


def turned(is_answer: bool, number: int, frame: bytes) -> list[bytes]:
    """Replace an answer by what the client itself has sent."""
    if not is_answer and number == 2:
        turned.kept = frame  # type: ignore[attr-defined]
    return [turned.kept] if is_answer and number == 2 else [frame]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "is_whole"), [(lambda *all: [all[2]], True), (flipped, False), (twice, False), (turned, False)]
)
def test_what_is_changed_on_the_way_is_refused(server: Server, change: Any, is_whole: bool) -> None:
    middle = Middle(server.port, change)
    channel = connect(middle.listener.getsockname(), 7, TOKEN)

    def talk() -> None:
        for number in range(2):
            channel.send({"n": number})
            assert channel.receive() == {"share": 7, "said": {"n": number}}

    if is_whole:
        talk()
    else:
        assert kind_of(talk) == "protocol"
    channel.close()
    middle.listener.close()


def said(port: int, *frames: bytes) -> bytes:
    """Send bytes to a server, and return what it answers."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(20)
        # The server may close the connection before all is sent.
        with contextlib.suppress(OSError):
            for frame in frames:
                connection.sendall(frame)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while more := connection.recv(1 << 16):
                answer += more
        return answer


def frame(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return len(body).to_bytes(4, "big") + body


HELLO = {"truebridge": _channel.VERSION, "share": 7, "nonce": "11" * 16}


@pytest.mark.parametrize(
    ("frames", "answers"),
    [
        ([], 0),
        ([b"GET / HTTP/1.1\r\n\r\n"], 0),
        ([b"\xff" * 64], 0),
        ([frame([1])], 0),
        ([frame({**HELLO, "truebridge": 99})], 1),
        ([frame({**HELLO, "share": "7"})], 1),
        ([frame({**HELLO, "share": -1})], 0),
        ([frame({**HELLO, "nonce": "zz"})], 1),
        ([frame({**HELLO, "nonce": "11"})], 1),
        ([frame(HELLO), frame({"proof": "00" * 32})], 2),
        ([frame(HELLO), frame({"proof": 3})], 2),
        ([frame(HELLO), frame({"proof": "\ud800"})], 2),
        ([(1 << 31).to_bytes(4, "big")], 0),
        ([b"\x00\x00\x03\xe8" + b"[" * 1000], 0),
    ],
)
def test_what_is_no_client_gets_nothing(server: Server, frames: list[bytes], answers: int) -> None:
    got = said(server.port, *frames)
    count = 0
    while got:
        length = int.from_bytes(got[:4], "big")
        got, count = got[4 + length :], count + 1
    assert count == answers
    connect(("127.0.0.1", server.port), 7, TOKEN).close()


def test_silent_connections_lock_no_other_out(server: Server) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2 * _channel._MOST_UNKNOWN)]
    for _ in range(_channel._MOST_UNKNOWN):
        connect(("127.0.0.1", server.port), 7, TOKEN).close()
    # The oldest were dropped, and told why.
    silent[0].settimeout(20)
    assert b'"busy"' in silent[0].recv(100)
    for connection in silent:
        connection.close()


def test_too_many_connections_are_refused_as_busy(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_channel, "_MOST", 2)
    channels = [connect(("127.0.0.1", server.port), 7, TOKEN) for _ in range(2)]
    wait_until(lambda: not server._unknown)
    assert kind_of(lambda: connect(("127.0.0.1", server.port), 7, TOKEN)) == "busy"
    channels.pop().close()
    until = time.monotonic() + 20
    while True:
        try:
            channels.append(connect(("127.0.0.1", server.port), 7, TOKEN))
            break
        except BridgeError as error:
            assert error.kind == "busy" and time.monotonic() < until
    for channel in channels:
        channel.close()


def test_a_system_without_threads_ends_one_connection_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        assert kind_of(lambda: connect(("127.0.0.1", server.port), 7, TOKEN)) == "gone"
    connect(("127.0.0.1", server.port), 7, TOKEN).close()


class Lost(socket.socket):
    """A connection whose other host the system does not reach any more."""

    def recv(self, *_: Any) -> bytes:
        raise OSError(self.number, "lost")

    number = 0


@pytest.mark.parametrize(
    ("number", "is_cut"), [(errno.EHOSTUNREACH, True), (errno.ETIMEDOUT, True), (errno.ECONNRESET, False)]
)
def test_a_lost_network_is_told_apart_from_a_lost_process(number: int, is_cut: bool) -> None:
    with Lost() as connection:
        connection.number = number
        channel = Channel(connection)
        assert kind_of(lambda: channel.receive(None)) == "gone"
        assert channel.is_cut == is_cut


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.5", ("10.0.0.5", 0)),
        ("10.0.0.5:7000", ("10.0.0.5", 7000)),
        ("node-3:80", ("node-3", 80)),
        ("::1", ("::1", 0)),
        ("[::1]", ("::1", 0)),
        ("[fe80::2]:65535", ("fe80::2", 65535)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert address_of(text) == expected


@pytest.mark.parametrize("text", ["", ":7000", "a:b", "a:65536", "a:-1", "[]:1", "[::1]x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    assert kind_of(lambda: address_of(text)) == "argument"


def test_an_address_that_is_not_of_this_host_is_refused() -> None:
    assert kind_of(lambda: Server(("192.0.2.1", 0), lambda _: None, echo)) == "argument"
    assert kind_of(lambda: connect(("127.0.0.1", 1), 7, TOKEN)) == "gone"
    assert kind_of(lambda: connect(("a" * 70, 1), 7, TOKEN)) == "gone"
    assert kind_of(lambda: Server(("a" * 70, 0), lambda _: None, echo)) == "argument"
    assert kind_of(lambda: address_of(5)) == "argument"  # type: ignore[arg-type]
