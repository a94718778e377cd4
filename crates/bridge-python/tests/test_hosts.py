"""Tensors for other hosts, through NIXL: two network namespaces stand in for two hosts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from hosted import LENDS, READS, Program, carriers_of, listening, over_tcp
from truebridge import _channel, _lending, processes
from truebridge._agents import Agents, nixl
from truebridge._channel import Channel, Channels, Server, connect
from truebridge._reading import Reading
from truebridge.errors import of_kind
from truebridge_conformance.others import wait_until

torch: Any = pytest.importorskip("torch")
try:
    nixl()
except ImportError:
    pytest.skip("NIXL is not installed", allow_module_level=True)

#: The host, and each GPU.
DEVICES = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


#: Carriers that are killed in a test, and the seed of the times.
KILLS, SEED = (int(os.environ.get(f"TRUEBRIDGE_{name}", usual)) for name, usual in (("KILLS", 3), ("SEED", 7)))


@pytest.fixture(autouse=True, scope="module")
def _address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with listening(tmp_path_factory.mktemp("ipc")):
        yield


def same(one: Any, other: Any) -> None:
    """Compare two trees by their elements, dtypes and shapes."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(other) and len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            same(left, right)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        # A length of 1 may have any stride, which `contiguous` keeps.
        copies = (tensor.cpu().flatten().clone(memory_format=torch.contiguous_format) for tensor in (one, other))
        one, other = (tensor.view(torch.uint8) for tensor in copies)
        assert torch.equal(one, other)
    else:
        assert one == other


def test_a_tree_arrives_whole() -> None:
    tree = {
        "large": torch.randn(700, 1000),
        "turned": torch.randn(600, 700).t(),
        "views": [torch.arange(100)[::3], torch.zeros(1).expand(5), torch.randn(4, 6)[1:, ::2]],
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "kinds": [
            torch.ones(5).to(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64)
        ],
        "step": 7,
        "text": ("x", None, 1.5),
    }
    ticket = tb.share(tree, reach="hosts")
    for _ in range(2):
        same(tree, tb.open(ticket.text, "torch"))
    found = tb.open(ticket, "numpy")
    np.testing.assert_array_equal(found["turned"], tree["turned"].numpy())
    assert found["kinds"][0].dtype.name == "bfloat16"
    found["large"][:] = 0
    same(tree, tb.open(ticket.text.encode(), "torch"))
    tb.revoke(ticket)
    wait_until(lambda: processes.held()["leases"] == 0)


@pytest.mark.parametrize("seed", range(5))
def test_random_tensors_arrive(seed: int) -> None:
    made = random.Random(seed)
    dtypes = [torch.uint8, torch.int64, torch.float16, torch.float64, torch.complex128]
    tree = []
    for _ in range(made.randrange(1, 40)):
        shape = [made.choice([0, 1, 2, 3, 7, 300]) for _ in range(made.randrange(4))]
        tensor = torch.randint(0, 100, shape).to(made.choice(DEVICES), made.choice(dtypes))
        if tensor.ndim:
            tensor = tensor.permute(made.sample(range(tensor.ndim), tensor.ndim))
            tensor = tensor[:: made.randrange(1, 3)]
        tree.append(tensor)
    if made.random() < 0.5:
        tree.append(torch.randn(1 << 19, device=made.choice(DEVICES)))
    ticket = tb.share(tree, reach="hosts")
    found = tb.open(ticket, "torch")
    assert [tensor.device for tensor in found] == [tensor.device for tensor in tree]
    same(tree, found)
    # Each block is used again.
    for device in DEVICES:
        del found
        found = tb.open(ticket, "torch", device=device)
        assert {str(tensor.device) for tensor in found} == {device}
        same(tree, found)
    tb.revoke(ticket)


def test_threads_open_at_once() -> None:
    sizes = [16, 1 << 18, 1 << 20, 1 << 21]
    tickets = [tb.share(torch.arange(size) + size, reach="hosts", expires=600) for size in sizes]

    def opened(number: int) -> bool:
        size = sizes[number % 4]
        return bool(torch.equal(tb.open(tickets[number % 4], "torch"), torch.arange(size) + size))

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(opened, range(48)))
    for ticket in tickets:
        tb.revoke(ticket)


def test_interrupts_at_any_time_leave_memory_to_its_transfer() -> None:
    """Repeated signals: also while an earlier call cleans up, and while the next one looks for what has ended."""
    code = """
import random, signal, sys
import torch
import truebridge as tb
small, large = (sys.stdin.readline() for _ in range(2))
tb.open(small, "torch")
def hand(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, hand)
made, count = random.Random(3), 0
for _ in range(10):
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.02 + made.random() * 0.2, 3e-4)
            tb.open(large, "torch")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        count += 1
    other = [torch.full((1 << 18,), 7) for _ in range(8)]
    assert all(bool((one == 7).all()) for one in other)
assert count, "none was interrupted"
assert tb.open(small, "torch").sum() == 3
"""
    tickets = [tb.share(torch.ones(size), reach="hosts", expires=600) for size in (3, 1 << 24)]
    lines = "".join(ticket.text + "\n" for ticket in tickets)
    subprocess.run([sys.executable, "-c", code], input=lines, text=True, check=True, env=over_tcp(), timeout=120)
    for ticket in tickets:
        tb.revoke(ticket)


def test_many_open_files_are_no_hindrance() -> None:
    left, right = socket.socketpair()
    made = fcntl.fcntl(left.fileno(), fcntl.F_DUPFD, 1500)
    left.close()
    channel = Channel(socket.socket(fileno=made))
    assert channel.is_quiet()
    right.close()
    assert not channel.is_quiet()
    channel.close()


def test_options_are_those_of_convert() -> None:
    ticket = tb.share(torch.arange(6).reshape(2, 3), reach="hosts")
    assert tb.open(ticket, "torch", permute=(1, 0)).shape == (3, 2)
    assert not tb.open(ticket, "numpy", read_only=True).flags.writeable
    assert tb.open(ticket, "torch", device="cpu").device.type == "cpu"
    tb.processes.end(ticket)


def kind_of(call: Any) -> tuple[str, str]:
    with pytest.raises(tb.BridgeError) as caught:
        call()
    return caught.value.kind, str(caught.value)


def test_a_ticket_that_has_ended_opens_nothing() -> None:
    short = tb.share(np.zeros(3), reach="hosts", expires=0.01)
    revoked = tb.share(np.zeros(3), reach="hosts")
    tb.revoke(revoked)
    tb.revoke(revoked)
    time.sleep(0.05)
    assert short.remaining == 0
    for ticket in (short, revoked):
        assert kind_of(lambda ticket=ticket: tb.open(ticket, "numpy"))[0] == "gone"
    good = tb.share(np.ones(3), reach="hosts")
    values = json.loads(good.text)
    for text in (json.dumps(values, indent=2), json.dumps(values, sort_keys=True)):
        assert tb.open(text, "numpy").sum() == 3
    tb.revoke(json.dumps(values, indent=2))
    assert kind_of(lambda: tb.open(good, "numpy"))[0] == "gone"
    with pytest.raises(tb.BridgeConnectionError):
        tb.open(short.text.replace(short.token, "00" * 16), "numpy")


@pytest.mark.parametrize(
    "text",
    [
        '{"truebridge":"hosts"}',
        '{"truebridge":"hosts","host":"x","port":70000,"share":1,"token":"00","expires":1}',
        '{"truebridge":"hosts","host":"x","port":1,"share":1,"token":"0g","expires":1}',
        '{"truebridge":"hosts","host":"x","port":1,"share":1,"token":"","expires":1}',
        '{"truebridge":"hosts","host":1,"port":1,"share":1,"token":"00","expires":1}',
        '{"truebridge":"hosts","host":"x","port":1,"share":-1,"token":"00","expires":1}',
        '{"truebridge":"hosts","host":"x","port":1,"share":1,"token":"00","expires":1,"more":1}',
        '{"truebridge":"hosts","host":"x","port":true,"share":1,"token":"00","expires":1}',
        '{"truebridge":"hosts","host":"x","port":1,"share":{},"token":"00","expires":1}',
        '{"truebridge":"hosts","host":"x","port":1,"share":1,"token":null,"expires":1}',
        '{"truebridge":"hosts","host":"x","port":1,"share":1,"token":["00"],"expires":1}',
        '{"truebridge":"hosts","host":"x","port":1,"share":1,"token":"00","expires":"1"}',
        '{"truebridge":"hosts","host":"x","port":1,"share":1,"token":"00","expires":[]}',
        '{"truebridge":"hosts",' + "[" * 5000,
        '{"truebridge":"hosts","host":"' + "x" * 300 + '","port":1,"share":1,"token":"00","expires":1}',
    ],
)
def test_what_is_no_ticket_is_refused(text: str) -> None:
    assert kind_of(lambda: tb.open(text, "numpy"))[0] == "argument"
    assert kind_of(lambda: tb.revoke(text))[0] == "argument"


def test_arguments_that_make_no_sense() -> None:
    ticket = tb.share(np.zeros(3), reach="hosts")
    assert kind_of(lambda: tb.share(np.zeros(3), reach="moon"))[0] == "argument"  # type: ignore[call-overload]
    assert kind_of(lambda: tb.share(np.zeros(3), reach="hosts", writing="shared"))[0] == "argument"  # type: ignore[call-overload]
    assert kind_of(lambda: tb.share("text", reach="hosts"))[0] == "not_a_tensor"
    assert kind_of(lambda: processes.configure(address="10.0.0.5"))[0] == "argument", "it shares already"
    assert kind_of(lambda: tb.open(ticket, "nonsense"))[0] == "argument"  # type: ignore[arg-type]
    assert ticket.token not in repr(ticket)
    foreign = replace(ticket, port=1, token="00" * 16)
    assert kind_of(lambda: tb.revoke(foreign))[0] == "argument"
    assert tb.open(ticket, "numpy").sum() == 0
    tb.revoke(ticket)


def test_it_says_what_is_missing(tmp_path: Path) -> None:
    code = """
import numpy as np
import truebridge as tb
from truebridge import _hosts
def kind(call):
    try:
        call()
    except tb.BridgeError as error:
        return error.kind
share = lambda: tb.share(np.zeros(3), reach="hosts")
assert kind(share) == "argument"
tb.processes.configure(address="127.0.0.1")
assert kind(lambda: tb.revoke(_hosts.HostTicket("x", 1, 1, "00", 1.0))) == "argument"
assert kind(share) == "missing"
assert tb.processes.held()["shares"] == 0
"""
    for name in ("nixl", "nixl_cu13", "nixl_cu12"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('there is none')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "TRUEBRIDGE_IPC": str(tmp_path / "ipc"), "PYTHONPATH": path}
    (tmp_path / "ipc").mkdir(mode=0o700)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    """Return two network namespaces, the first with the address 10.77.1.1."""
    names = tuple(f"tb{os.getpid()}{end}" for end in "ab")
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces are made by root, with ip")
    links = tuple(f"v{name}"[-15:] for name in names)
    commands = [["netns", "add", name] for name in names]
    commands.append(["link", "add", links[0], "netns", names[0], "type", "veth", "peer", links[1], "netns", names[1]])
    for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
        commands.append(["-n", name, "addr", "add", f"10.77.1.{number}/24", "dev", link])
        commands += [["-n", name, "link", "set", one, "up"] for one in (link, "lo")]
    try:
        for command in commands:
            made = subprocess.run(["ip", *command], capture_output=True, text=True)
            if made.returncode != 0:
                pytest.skip(f"no network namespace: {made.stderr.strip()}")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def test_between_two_hosts(hosts: tuple[str, str]) -> None:
    with Program(LENDS, "10.77.1.1", "8", namespace=hosts[0]) as lends:
        with Program(READS, namespace=hosts[1]) as reads, Program(READS, namespace=hosts[1]) as other:
            for _ in range(3):
                reads.begin(lends.first)
                other.begin(lends.first)
                assert (reads.line(), other.line()) == ("right", "right")
        wait_until(lambda: lends.ask("leases") == "0")


def test_a_reader_that_ends_leaves_nothing_behind(hosts: tuple[str, str]) -> None:
    made = random.Random(SEED)
    with Program(LENDS, "10.77.1.1", "64", namespace=hosts[0]) as lends:
        for how in (signal.SIGKILL, signal.SIGTERM):
            with Program(READS, namespace=hosts[1]) as reads:
                reads.begin(lends.first)
                time.sleep(made.uniform(0, 5))
                reads.end(how)
        with Program(READS, namespace=hosts[1]) as reads:
            assert reads.ask(lends.first) == "right"
        wait_until(lambda: lends.ask("leases") == "0")


def test_a_reader_goes_on_after_the_end_of_the_process_that_shares(hosts: tuple[str, str]) -> None:
    made = random.Random(SEED)
    with Program(READS, namespace=hosts[1]) as reads, Program(LENDS, "10.77.1.1", "8", namespace=hosts[0]) as good:
        assert reads.ask(good.first) == "right"
        for how in (signal.SIGKILL, signal.SIGINT):
            with Program(LENDS, "10.77.1.1", "64", namespace=hosts[0]) as lends:
                reads.begin(lends.first)
                time.sleep(made.uniform(0, 1))
                lends.end(how)
            assert reads.line() in {"right", "gone"}
            assert reads.ask(good.first) == "right"
        with contextlib.suppress(BrokenPipeError):
            assert reads.process.stdin is not None
            reads.process.stdin.close()
        assert reads.process.wait(30) == 0


def test_carriers_that_are_killed_at_random(hosts: tuple[str, str]) -> None:
    made = random.Random(SEED)
    with Program(LENDS, "10.77.1.1", "32", namespace=hosts[0]) as lends, Program(READS, namespace=hosts[1]) as reads:
        assert reads.ask(lends.first) == "right"
        for _ in range(KILLS):
            reads.begin(lends.first)
            time.sleep(made.uniform(0, 0.6))
            (carrier,) = carriers_of(made.choice([lends, reads]).process.pid)
            os.kill(carrier, signal.SIGKILL)
            assert reads.line() in {"right", "gone"}
            # It starts the next carrier, which serves the ticket again.
            lends.ask("share")
            assert reads.ask(lends.first) == "right"
        wait_until(lambda: lends.ask("leases") == "0")


def answered(**changed: Any) -> dict[str, Any]:
    block = {"device": ["cpu", 0], "address": 4096, "nbytes": 280, "agent": "AAAA"}
    tensors = '[["float32",[2,3],0,0],["int64",[3],0,256]]'
    return {"is": "opened", "tensors": tensors, "blocks": [{**block, **changed}], "tree": None}


@pytest.mark.parametrize(
    "answer",
    [
        {"is": "opened"},
        answered(),
        {**answered(), "tensors": [["float32", [2, 3], 0, 0]]},
        {**answered(), "tensors": "[]"},
        {**answered(), "tensors": '[["float32",[2,3],0,257]]'},
        {**answered(), "tensors": '[["float32",[2,3],1,0]]'},
        {**answered(), "tensors": "\ud800"},
        {**answered(), "tree": 5},
        {**answered(), "tree": "\ud800"},
        {**answered(), "blocks": [3]},
        {**answered(), "blocks": [{}]},
        {**answered(), "blocks": []},
        {**answered(), "more": 1},
        answered(more=1),
        answered(agent="?"),
        answered(agent=None),
        answered(device=["cpu"]),
        answered(device=["moon", 0]),
        answered(device=["cpu", -1]),
        answered(device=["cpu", 1 << 40]),
        answered(nbytes=-1),
        answered(nbytes="many"),
        answered(nbytes=1 << 62),
        answered(address=-4096),
        answered(address=1 << 63),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(answer: dict[str, Any]) -> None:
    reading = Reading(Agents(), Channels(), lambda: None)
    assert kind_of(lambda: reading.read(answer, None))[0] in {"protocol", "version", "out_of_memory", "gone"}
    reading.end()
    # It may know a part of the other one.
    assert not reading.agents._idle


def filled_by(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], None]) -> None:
    """Let the blocks that this process lends be filled when ``wait`` returns."""

    class Outgoing:
        def __init__(self, ticket: Any) -> None:
            self.made = processes._core.Outgoing(ticket)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.made, name)

        def wait(self) -> None:
            wait()

    monkeypatch.setattr(_lending, "_core", SimpleNamespace(Outgoing=Outgoing))


def test_blocks_that_cannot_be_filled_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other end has prepared the transfer by then."""

    def fail() -> None:
        raise of_kind("driver", "the device has failed")

    filled_by(monkeypatch, fail)
    monkeypatch.setattr(_lending, "_LINGER", 0.0)
    ticket, token, lent = tb.share(torch.arange(9)), b"a token of a test", []

    def serve(channel: Channel, _: int) -> bool:
        lent.append(_lending.lend(Agents(), channel, ticket))
        return lent[0]

    server = Server(("127.0.0.1", 0), lambda _: token, serve)
    reading = Reading(Agents(), Channels(), lambda: None)
    reading.channel = reading.channels.connect(("127.0.0.1", server.port), 1, token)
    said = reading.answer()
    refused = "driver", "the process that shares refuses: the device has failed"
    assert kind_of(lambda: reading.read(said, None)) == refused
    reading.end()
    wait_until(lambda: lent == [True])
    server.close()
    # The transfer was not begun, and the connection has ended.
    assert not reading.agents._idle
    assert not reading.channels._idle
    tb.revoke(ticket)


def test_blocks_that_are_filled_late_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was prepared is given back meanwhile, and prepared again."""
    ticket, token = tb.share({"a": torch.arange(9), "b": np.ones(5)}), b"a token of a test"
    reading = Reading(Agents(), Channels(), lambda: None)

    # Once the reader has given up its turn.
    filled_by(monkeypatch, lambda: wait_until(lambda: bool(reading.agents._idle) and not reading.has_turn))
    server = Server(("127.0.0.1", 0), lambda _: token, lambda channel, _: _lending.lend(Agents(), channel, ticket))
    reading.address = "127.0.0.1", server.port
    reading.channel = reading.channels.connect(reading.address, 1, token)
    tensors, _ = processes._core.ipc_open(reading.read(reading.answer(), None), "numpy", None, None, None, None, False)
    assert [tensor.tolist() for tensor in tensors] == [list(range(9)), [1.0] * 5]
    reading.end()
    assert len(reading.agents._idle) == len(reading.channels._idle) == 1
    reading.channels.clear()
    server.close()
    tb.revoke(ticket)


def test_blocks_that_are_never_filled_hold_no_other_up() -> None:
    """As many requests as read at a time wait for a process that says nothing after its description."""
    real, token = tb.share(np.arange(9), reach="hosts", expires=600), b"a token of a test"

    def serve(channel: Channel, _: int) -> bool:
        described = connect((real.host, real.port), real.share, bytes.fromhex(real.token))
        channel.send(described.receive())
        is_over.wait(60)
        described.close()
        return False

    is_over, server = threading.Event(), Server(("127.0.0.1", 0), lambda _: token, serve)
    silent = replace(real, port=server.port, token=token.hex())

    def wait() -> None:
        with contextlib.suppress(tb.BridgeError):
            tb.open(silent, "numpy")

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    begun = time.monotonic()
    assert tb.open(real, "numpy").sum() == 36
    assert time.monotonic() - begun < 30, "they do not keep their turns"
    is_over.set()
    for thread in threads:
        thread.join()
    server.close()
    tb.revoke(real)


def test_opens_that_fail_before_they_read_occupy_no_connection() -> None:
    """There are more of them than a carrier has connections."""
    ticket = tb.share(np.arange(9), reach="hosts", expires=600)
    place = f"cuda:{torch.cuda.device_count()}"
    kinds = {kind_of(lambda: tb.open(ticket, "numpy", device=place))[0] for _ in range(_channel._MOST + 10)}
    assert "busy" not in kinds
    assert tb.open(ticket, "numpy").sum() == 36
    tb.revoke(ticket)
