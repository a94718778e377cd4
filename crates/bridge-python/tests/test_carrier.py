"""The carrier of a process: it starts, ends and dies beside its program, which it disturbs in nothing."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from hosted import carriers_of, descriptors_of, listening
from truebridge import _hosts, processes
from truebridge._channel import Channel, Server
from truebridge_conformance.others import wait_until

pytest.importorskip("torch")
pytest.importorskip("nixl_cu12")


@pytest.fixture(autouse=True, scope="module")
def _address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with listening(tmp_path_factory.mktemp("ipc")):
        yield


def run(code: str, *lines: str) -> list[str]:
    """Run a program, and return the lines that it prints. It must end without an error, and its carrier after it."""
    environment = {**os.environ, "UCX_LOG_LEVEL": "fatal"}
    program = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    printed, _ = program.communicate("".join(line + "\n" for line in lines), timeout=120)
    assert program.returncode == 0
    wait_until(lambda: not carriers_of(program.pid))
    return printed.splitlines()


def own() -> int:
    """Return the carrier of this process."""
    (carrier,) = carriers_of(os.getpid())
    return carrier


def test_a_forked_child_has_a_carrier_of_its_own() -> None:
    code = """
import os
import numpy as np
import truebridge as tb
from truebridge import processes
def kind(call):
    try:
        return call()
    except tb.BridgeError as error:
        return error.kind
text = input()
received = tb.open(text, "numpy")
assert received.sum() == 3
processes.configure(address="127.0.0.1")
ticket = tb.share(np.ones(2), reach="hosts")
child = os.fork()
if child == 0:
    try:
        received[:] = 7
        assert kind(lambda: tb.revoke(ticket)) == "argument", "it is the parent's"
        assert tb.open(text, "numpy").sum() == 3
        assert tb.open(ticket, "numpy").sum() == 2
        own = tb.share(np.ones(4), reach="hosts")
        assert tb.open(own, "numpy").sum() == 4
        os._exit(0)
    finally:
        os._exit(1)
assert os.waitpid(child, 0)[1] == 0
assert received.sum() == 3, "the child has written to its own"
assert tb.open(ticket, "numpy").sum() == 2
# No carrier is a child that a program would wait for.
try:
    os.wait()
except ChildProcessError:
    print("right")
"""
    ticket = tb.share(np.ones(3), reach="hosts")
    assert run(code, ticket.text) == ["right"]
    tb.revoke(ticket)


@pytest.mark.parametrize("how", ["", "os.kill(os.getpid(), 9)"])
def test_a_program_ends_beside_threads_that_open(how: str) -> None:
    code = f"""
import os, sys, threading, time
import truebridge as tb
text = input()
tb.open(text, "numpy")
def work():
    while True:
        tb.open(text, "numpy")
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
print("ends", flush=True)
{how}
"""
    ticket = tb.share(np.ones(1 << 20), reach="hosts", expires=600)
    program = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    # It does not hold the output of its program open.
    printed, errors = program.communicate(ticket.text + "\n", timeout=60)
    assert printed == "ends\n"
    assert program.returncode == (-signal.SIGKILL if how else 0), errors
    assert "Fatal" not in errors
    wait_until(lambda: not carriers_of(program.pid))
    wait_until(lambda: processes.held()["leases"] == 0)
    tb.revoke(ticket)


def test_a_killed_carrier_is_replaced() -> None:
    ticket = tb.share(np.ones(1 << 23), reach="hosts", expires=600)
    result = tb.open(ticket, "numpy")
    first = own()
    kinds: list[str] = []

    def opened() -> None:
        try:
            tb.open(ticket, "numpy")
        except tb.BridgeError as error:
            kinds.append(error.kind)

    thread = threading.Thread(target=opened)
    thread.start()
    time.sleep(0.1)
    os.kill(first, signal.SIGKILL)
    thread.join()
    assert set(kinds) <= {"gone"}
    # Its memory of the host stays.
    assert result.sum() == 1 << 23
    # The next one serves what this process shares, at the same port.
    other = tb.share(np.ones(3), reach="hosts")
    assert own() != first and other.port == ticket.port
    assert tb.open(ticket, "numpy").sum() == 1 << 23
    os.kill(own(), signal.SIGKILL)
    third = tb.share(np.ones(4), reach="hosts")
    assert third.port == ticket.port and tb.open(third, "numpy").sum() == 4
    for each in (ticket, other, third):
        tb.revoke(each)


def test_the_next_carrier_serves_before_it_opens() -> None:
    ticket = tb.share(np.ones(3), reach="hosts")
    for _ in range(3):
        assert _hosts._here.carrier is not None
        ended = select.poll()
        ended.register(_hosts._here.carrier.control, 0)
        os.kill(own(), signal.SIGKILL)
        assert ended.poll(20_000)
        assert tb.open(ticket, "numpy").sum() == 3
    tb.revoke(ticket)


@pytest.mark.parametrize("length", [70_000, 300_000])
def test_a_long_refusal_is_an_error_that_can_be_printed(length: int) -> None:
    def refuse(channel: Channel, _: int) -> None:
        channel.send({"is": "refused", "kind": "gone", "text": "\ud800\x1b[31m" + "x" * length})

    token = os.urandom(16)
    server = Server(("127.0.0.1", 0), lambda _: token, refuse)
    ticket = _hosts.HostTicket("127.0.0.1", server.port, 1, token.hex(), time.time() + 60)
    with pytest.raises(tb.BridgeConnectionError) as caught:
        tb.open(ticket, "numpy")
    server.stop()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 2000


def test_descriptors_are_bounded() -> None:
    ticket = tb.share(np.ones(100), reach="hosts", expires=600)
    tb.open(ticket, "numpy")
    before, found = descriptors_of(own()), []
    for _ in range(140):
        assert tb.open(ticket, "numpy").sum() == 100
        found.append(descriptors_of(own()))
    # At most four for each transfer, and an agent is replaced after 32. Without that it is two for each: 280.
    assert max(found) <= before + 200, found
    tb.revoke(ticket)


def test_a_carrier_rests_when_nothing_is_transferred() -> None:
    ticket = tb.share(np.ones(100), reach="hosts", expires=600)
    tb.open(ticket, "numpy")

    def used() -> int:
        numbers = Path(f"/proc/{own()}/stat").read_text().rpartition(")")[2].split()
        return int(numbers[11]) + int(numbers[12])

    def rests() -> bool:
        before = used()
        time.sleep(0.5)
        return used() - before <= 1  # hundredths of a second

    wait_until(rests)
    assert tb.open(ticket, "numpy").sum() == 100
    tb.revoke(ticket)


def test_the_arguments_of_a_carrier_hold_no_secret() -> None:
    ticket = tb.share(np.ones(100), reach="hosts")
    arguments = Path(f"/proc/{own()}/cmdline").read_text()
    assert ticket.token not in arguments and str(os.getpid()) in arguments
    tb.revoke(ticket)


def test_a_carrier_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hosts, "_here", _hosts._Here())
    monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda: b"/there/is/none")
    with pytest.raises(tb.BridgeError) as caught:
        tb.share(np.ones(3), reach="hosts")
    assert caught.value.kind == "driver"


def test_an_open_that_is_given_up_ends_in_the_carrier() -> None:
    """A program that does not wait any more leaves nothing in its carrier."""
    ticket = tb.share(np.ones(1 << 22), reach="hosts", expires=600)
    about: dict[str, Any] = {"do": "open", "ticket": vars(ticket), "place": None}
    for pause in (0, 0.01, 0.1):
        with pytest.raises(InterruptedError), _hosts._asked({**about, "place": ["cpu", 0]}):
            raise InterruptedError
        own_end, theirs = _hosts.socket.socketpair(_hosts.socket.AF_UNIX, _hosts.socket.SOCK_SEQPACKET)
        with own_end, theirs:
            _hosts._here.tell(about, theirs)
            time.sleep(pause)
    wait_until(lambda: processes.held()["leases"] == 0)
    assert tb.open(ticket, "numpy").sum() == 1 << 22
    tb.revoke(ticket)
