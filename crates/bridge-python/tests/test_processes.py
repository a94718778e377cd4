"""Tensors of other processes, on the host."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from capsules import Wrapper
from conftest import kind_of
from truebridge import processes
from truebridge.processes import publications
from truebridge_conformance import others
from truebridge_conformance.others import Other, wait_until

torch: Any = pytest.importorskip("torch")


pytestmark = pytest.mark.usefixtures("ipc_folder")


def leases() -> int:
    """Return the number of leases. What was opened is returned by a message: wait for it."""
    return processes.held()["leases"]


@pytest.fixture(autouse=True)
def _nothing_is_leased() -> Iterator[None]:
    """The tests count the leases of this process, and the end of another one is noticed a little later."""
    gc.collect()
    wait_until(lambda: leases() == 0)
    yield


def test_a_tensor_is_seen_by_another_process_in_place(other: Other) -> None:
    ticket = tb.share(torch.arange(6, dtype=torch.float32).reshape(2, 3))
    assert str(ticket).startswith("torch float32 [2, 3] on cpu, expires in ")
    assert len(ticket.text) <= 512
    assert other(f"x = tb.open({ticket.text!r}, 'numpy')") == "None"
    assert other("x.tolist()") == "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]"
    assert other("x.flags.owndata") == "False"
    assert leases() == 1
    other("del x")
    wait_until(lambda: leases() == 0)
    tb.revoke(ticket)
    assert other(f"tb.open({ticket.text!r}, 'numpy')") == "'gone'"


@pytest.mark.parametrize("target", ["torch", "numpy", "tensorflow"])
def test_every_framework_opens_what_every_framework_shares(target: str) -> None:
    pytest.importorskip(target)
    source = np.arange(24, dtype=np.int32).reshape(4, 6)
    for framework in ("torch", "numpy", "tensorflow"):
        pytest.importorskip(framework)
        ticket = tb.share(tb.convert(source, framework, copy=True))
        view = tb.open(ticket, target, copy=False)
        assert type(view) is type(tb.convert(source, target, copy=True))
        assert np.array_equal(tb.to_numpy(view), source)
    del view
    gc.collect()
    wait_until(lambda: leases() == 0)


def test_a_tree_comes_out_as_it_went_in() -> None:
    pair = namedtuple("pair", "first second")
    tree = OrderedDict(
        weights=[torch.ones(3), torch.zeros((2, 2), dtype=torch.bfloat16)],
        pair=pair(np.float64([1.5]), None),
        nested={"a": (np.arange(3),), 1: "text", None: 2.5, False: float("inf")},
        empty=[],
        big=1 << 100,
    )
    opened = tb.open(tb.share(tree), "torch")
    assert type(opened) is dict and list(opened) == list(tree)
    assert torch.equal(opened["weights"][0], torch.ones(3))
    assert opened["weights"][1].dtype is torch.bfloat16
    assert type(opened["pair"]) is tuple and opened["pair"][1] is None
    assert opened["nested"]["a"][0].tolist() == [0, 1, 2]
    assert {key: opened["nested"][key] for key in (1, None, False)} == {1: "text", None: 2.5, False: float("inf")}
    assert (opened["empty"], opened["big"]) == ([], 1 << 100)
    with pytest.raises(tb.BridgeTypeError, match="list holds no tensor: share a tensor"):
        tb.share([1, None])


def test_writing_is_as_the_share_says(other: Other) -> None:
    cases = [("private", "None", [0, 0]), ("never", "'ValueError'", [0, 0]), ("shared", "None", [0, 7])]
    for writing, raised, left in cases:
        ticket = tb.share(np.zeros(2, dtype=np.int64), writing=writing)  # type: ignore[arg-type]
        own = tb.open(ticket, "numpy")
        other(f"x = tb.open({ticket.text!r}, 'numpy')")
        assert other("x.__setitem__(1, 7)") == raised, writing
        assert own.tolist() == left, writing
        other("del x")
    ticket = tb.share(np.zeros(2), writing="never")
    with pytest.raises(tb.BridgeBufferError, match="read-only"):
        tb.open(ticket, "torch")
    assert tb.open(ticket, "torch", copy=True).tolist() == [0, 0]
    assert tb.open(ticket, "torch", copy=False, read_only=True).tolist() == [0, 0]


def test_a_view_of_a_dead_process_can_be_read(other: Other) -> None:
    text = other("tb.share(np.arange(3)).text")
    ticket = tb.Ticket(text.strip("'"))
    view = tb.open(ticket, "torch")
    assert tb.to_numpy(view).tolist() == [0, 1, 2]
    zeros = np.zeros(3, dtype=np.int64)
    copier = tb.copier(zeros, out=tb.open(ticket, "torch"))

    def traced() -> None:
        with tb.trace():
            copier()

    other.kill()
    assert view.tolist() == [0, 1, 2]
    calls: list[Any] = [
        lambda: tb.open(ticket, "torch"),
        lambda: tb.to_numpy(view),
        lambda: tb.to_numpy([view[1:]]),
        lambda: tb.copy(view, out=zeros),
        lambda: tb.copy(zeros, out=view),
        lambda: tb.copy([zeros, zeros[1:]], out=[zeros.copy(), view[1:]]),
        lambda: tb.copier(zeros, out=view),
        copier,
        traced,
    ]
    for call in calls:
        wait_until(lambda call=call: kind_of(call) == "gone")
    assert tb.to_numpy(view.clone()).tolist() == [0, 1, 2]


def test_a_process_in_namespaces_of_its_own(namespaces: list[str]) -> None:
    inside = Other([*namespaces, sys.executable])
    try:
        y = tb.open(inside.text("tb.share(np.arange(3.0)).text"), "numpy")
        assert y.tolist() == [0, 1, 2]
        ticket = tb.share(y)
        inside(f"y = tb.open({ticket.text!r}, 'numpy')")
        inside("import os")
        assert inside("(os.getpid(), y.tolist())") == repr((1, [0.0, 1.0, 2.0]))
        assert leases() == 1
    finally:
        inside.kill()
    wait_until(lambda: leases() == 0)
    tb.revoke(ticket)


def test_a_process_that_hangs_prints_its_stacks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    other = Other()
    other.define("def hangs(): import time; time.sleep(600)")
    monkeypatch.setattr(others, "HANGS", 0.1)
    with pytest.raises(AssertionError, match="has ended"):
        other("hangs()")
    assert "in hangs" in capfd.readouterr().err


def test_a_killed_reader_gives_back(other: Other) -> None:
    ticket = tb.share(torch.ones(4))
    other(f"x = tb.open({ticket.text!r}, 'numpy')")
    assert leases() == 1
    other.kill()
    wait_until(lambda: leases() == 0)


def test_what_was_opened_is_passed_on_in_place() -> None:
    ticket = tb.share(torch.arange(4), writing="never")
    view = tb.open(ticket, "numpy")
    own = tb.share(view, writing="never", copy=False)
    assert tb.open(own, "numpy").tolist() == [0, 1, 2, 3]
    # The share keeps the view that it passes on.
    tb.revoke(own)
    with pytest.raises(tb.BridgeBufferError, match="copy=None"):
        tb.share(torch.arange(4), copy=False)


def test_a_ticket_is_a_value() -> None:
    ticket = tb.share(torch.ones(1))
    again = pickle.loads(pickle.dumps(ticket))
    assert again == ticket and hash(again) == hash(ticket)
    assert tb.Ticket(ticket.text) == tb.Ticket(bytes(ticket)) == tb.Ticket(ticket) == ticket
    token = json.loads(ticket.text)["token"]
    assert token not in str(ticket) and token not in repr(ticket)
    assert 0 < ticket.remaining <= 60


def test_nonsense_is_a_typed_error() -> None:
    ticket = tb.share(torch.ones(1))
    forged = ticket.text.replace(json.loads(ticket.text)["token"], "0" * 32)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: tb.open("ticket", "torch"), tb.BridgeValueError, "argument"),
        (lambda: tb.open(b"\xff", "torch"), tb.BridgeValueError, "argument"),
        (lambda: tb.open(7, "torch"), tb.BridgeValueError, "argument"),  # type: ignore[arg-type]
        (lambda: tb.open(str(ticket), "torch"), tb.BridgeValueError, "argument"),
        (lambda: tb.open(ticket.text[:-1], "torch"), tb.BridgeValueError, "argument"),
        (lambda: tb.open(forged, "torch"), ConnectionError, "gone"),
        (lambda: tb.open(ticket, "nothing"), tb.BridgeValueError, "argument"),  # type: ignore[arg-type]
        (lambda: tb.share(object()), TypeError, "not_a_tensor"),
        (lambda: tb.share({1.5: torch.ones(1)}), tb.BridgeValueError, "argument"),
        (lambda: tb.share(torch.ones(1), expires=-1), tb.BridgeValueError, "argument"),
        (lambda: tb.share(torch.ones(1), expires=float("nan")), tb.BridgeValueError, "argument"),
        (lambda: tb.share(torch.ones(1), expires=1e300), tb.BridgeValueError, "argument"),
        (lambda: tb.share(torch.ones(1), writing="yes"), tb.BridgeValueError, "argument"),  # type: ignore[arg-type]
        (lambda: tb.share(torch.ones(1, requires_grad=True)), tb.BridgeBufferError, "requires_grad"),
        (lambda: tb.revoke(other_ticket(ticket)), tb.BridgeValueError, "argument"),
        (lambda: processes.configure(), tb.BridgeValueError, "argument"),
        (lambda: tb.connect("/nowhere/at/all"), ConnectionError, "gone"),
        (lambda: tb.share(deep(200)), tb.BridgeValueError, "argument"),
    ]
    for call, kind, name in cases:
        with pytest.raises(kind) as caught:
            call()
        assert isinstance(caught.value, tb.BridgeError) and caught.value.kind == name, caught.value


def other_ticket(ticket: tb.Ticket) -> str:
    """Return a ticket of a process that is not this one."""
    return ticket.text.replace(".sock", ".other")


def deep(levels: int) -> Any:
    tree: Any = torch.ones(1)
    for _ in range(levels):
        tree = [tree]
    return tree


def test_a_fork_shares_for_itself() -> None:
    ticket = tb.share(torch.arange(3))
    view = tb.open(ticket, "torch")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        # Nothing of the parent's is returned here, and what is shared here is the child's own.
        status = 1
        try:
            del view
            gc.collect()
            opened = tb.open(ticket, "numpy").tolist() == [0, 1, 2]
            own = tb.share(np.arange(5))
            refused = kind_of(lambda: tb.revoke(ticket)) == "argument"
            os.write(write, own.text.encode())
            os.close(write)
            status = 0 if opened and refused and processes.held()["shares"] == 1 else 2
            signal.pause()
        finally:
            os._exit(status)
    os.close(write)
    text = b""
    while part := os.read(read, 512):
        text += part
    own = tb.open(text, "numpy")
    assert own.tolist() == [0, 1, 2, 3, 4]
    assert view.tolist() == [0, 1, 2]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_until(lambda: kind_of(lambda: tb.open(text, "numpy")) == "gone")
    wait_until(lambda: leases() == 1)
    del view
    gc.collect()
    wait_until(lambda: leases() == 0)


#: Shares, opens and revokes, and compares what is held and what is open before and after.
ROUNDS = """
import os, time
import numpy as np
import truebridge as tb
from truebridge_conformance.others import Other, wait_until
from truebridge import processes

def rounds(count):
    for i in range(count):
        ticket = tb.share(np.full(1000, i))
        assert tb.open(ticket, "numpy")[-1] == i
        tb.revoke(ticket)

def settled():
    deadline = time.monotonic() + 60
    while any((held := processes.held()).values()):
        assert time.monotonic() < deadline, held
    return len(os.listdir("/proc/self/fd"))

rounds(20)
before = settled()
rounds(500)
# The last socket may be closed a little after its lease ends.
wait_until(lambda: settled() <= before)
"""


def test_a_fork_does_not_hide_the_death_of_its_parent(other: Other) -> None:
    """A fork keeps the sockets of its parent open."""
    ticket = tb.share(np.zeros(3))
    other(f"x = tb.open({ticket.text!r}, 'numpy')")
    theirs = tb.Ticket(other("tb.share(np.arange(3)).text").strip("'"))
    view = tb.open(theirs, "numpy")
    other("import os, signal; pid = os.fork() or signal.pause()")
    fork = int(other("pid"))
    try:
        assert leases() == 1
        other.kill()
        wait_until(lambda: leases() == 0)
        wait_until(lambda: kind_of(lambda: tb.to_torch(view)) == "gone")
        wait_until(lambda: kind_of(lambda: tb.open(theirs, "numpy")) == "gone")
    finally:
        os.kill(fork, signal.SIGKILL)


def test_the_memory_of_many_rounds_comes_back() -> None:
    subprocess.run([sys.executable, "-c", ROUNDS], check=True, timeout=300)


def test_the_page_runs(tmp_path: Path) -> None:
    """Every block of docs/processes.md runs, one after the other. That for Ray runs in test_ray.py."""
    pytest.importorskip("tensorflow")
    page = (Path(__file__).parents[3] / "docs" / "processes.md").read_text()
    space: dict[str, Any] = {}
    blocks = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "import ray" not in block]
    assert len(blocks) == 4
    for block in blocks:
        exec(block.replace("/tmp/names-of-the-example", str(tmp_path / "names")), space)
    for ticket in ("ticket", "text"):
        tb.revoke(space[ticket])


#: Opens a ticket as user 2, before and after it accepts the user who shares.
USER = """
import os, sys
import numpy as np
import truebridge as tb
# User 2 may not be able to import more.
tb.to_numpy(tb.processes and np.zeros(1))
os.setuid(2)
for users in ([], [0]):
    tb.processes.configure(users=users)
    try:
        print(tb.open(sys.argv[1], "numpy").tolist())
    except tb.BridgeError as error:
        print(error.kind)
try:
    print(tb.connect(sys.argv[2]).get("x", "numpy").tolist())
except tb.BridgeError as error:
    print(error.kind)
"""

SHARES = """
import os, subprocess, sys
import numpy as np
import truebridge as tb
from tempfile import TemporaryDirectory
with TemporaryDirectory() as folder:
    os.chmod(folder, 0o711)
    tb.processes.configure(folder=folder + "/sockets", users=eval(sys.argv[1]))
    ticket = tb.share(np.arange(2))
    with tb.serve(folder + "/names") as names:
        names.put("x", np.arange(3))
        subprocess.run([sys.executable, "-c", sys.argv[2], ticket.text, folder + "/names"], check=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser starts processes of other users")
@pytest.mark.parametrize(
    ("users", "seen"), [("[2]", "denied\n[0, 1]\n[0, 1, 2]\n"), ("[]", "denied\ndenied\ndenied\n")]
)
def test_users_accept_each_other(users: str, seen: str) -> None:
    program = [sys.executable, "-c", SHARES, users, USER]
    assert subprocess.run(program, check=True, timeout=120, capture_output=True, text=True).stdout == seen


@pytest.mark.parametrize("opened", ["private", "never", "shared"])
@pytest.mark.parametrize("writing", [None, "private", "never", "shared"])
def test_the_transport_is_what_share_does(opened: Any, writing: Any) -> None:
    ticket = tb.share(np.arange(4.0), writing=opened)
    y = tb.open(ticket, "numpy")
    copied = processes.held()["nbytes"]
    again = tb.share(y, writing=writing)
    assert (processes.transport(y, writing=writing) == "copy") == (processes.held()["nbytes"] > copied)
    for one in (ticket, again):
        tb.revoke(one)


def test_what_was_revoked_is_not_shared_again() -> None:
    ticket = tb.share([np.ones(4), np.ones(4)], writing="never")
    views = tb.open(ticket, "numpy")
    tb.revoke(ticket)

    def is_gone() -> bool:
        try:
            tb.to_numpy(views[1])
        except tb.BridgeConnectionError:
            return True
        return False

    wait_until(is_gone)
    for call in (tb.share, processes.transport, lambda view: tb.share([np.ones(1), view]), tb.to_torch):
        with pytest.raises(tb.BridgeConnectionError) as raised:
            call(views[1])
        assert raised.value.kind == "gone"


def test_an_error_names_the_path_to_the_tensor() -> None:
    torch = pytest.importorskip("torch")
    tree = {"layers": [np.zeros(2), torch.ones(2, requires_grad=True)], "step": 7}
    with pytest.raises(tb.BridgeBufferError, match=r"^tree\['layers'\]\[1\]: the tensor requires grad"):
        tb.share(tree)
    with pytest.raises(tb.BridgeBufferError, match="^the tensor requires grad"):
        tb.share(tree["layers"][1])
    with pytest.raises(tb.BridgeTypeError, match=r"^tree\['layers'\]\[1\]: complex"):
        tb.share({"layers": [np.zeros(2), 1j]})
    ticket = tb.share({"layers": [np.zeros(2)]}, writing="never")
    in_place = tb.open(ticket, "numpy")["layers"][0]
    with pytest.raises(tb.BridgeError, match=r"^tree\[1\]: .*copy"):
        tb.share([in_place, np.zeros(2)], copy=False)
    with pytest.raises(tb.BridgeError, match=r"^tree\['layers'\]\[0\]: the tensor is read-only"):
        tb.open(ticket, "torch")
    tb.revoke(ticket)


def test_a_hostile_number_in_a_tree_is_a_broken_protocol() -> None:
    huge = '["l",[["x",0],["f",1' + "0" * 400 + "]]]"
    ticket = tb._core.ipc_share([np.zeros(1)], huge, 60.0, None, None)
    with pytest.raises(tb.BridgeError) as raised:
        tb.open(ticket, "numpy")
    assert raised.value.kind == "protocol"
    tb.revoke(ticket)


def test_the_transport_is_named() -> None:
    ticket = tb.share(np.arange(4.0), writing="shared")
    y = tb.open(ticket, "torch")
    assert (processes.transport(np.arange(4.0)), processes.transport(y[1:], writing="shared")) == ("copy", "passed")
    seen = tb.open(tb.share(y, isolated=True, writing="shared"), "numpy")
    y[0] = 7
    assert seen[0] == 0
    with pytest.raises(tb.BridgeValueError, match="isolated"):
        tb.share(y, isolated=True, copy=False)
    tb.revoke(ticket)


# Memory of a process that has ended: what refuses it, and what it must not disturb.


def is_gone(call: Any) -> bool:
    return kind_of(call) == "gone"


def opened(writing: Any = "shared", target: Any = "numpy") -> tuple[Any, Any]:
    """Return a ticket of this process, and its array."""
    ticket = tb.share(np.zeros(3), writing=writing)
    return ticket, tb.open(ticket, target)


def test_other_tensors_convert_as_ever_while_a_ticket_is_open() -> None:
    _, view = opened()
    parameter = torch.ones(3, requires_grad=True)
    assert tb.to_numpy(parameter, detach=True).tolist() == [1, 1, 1]
    assert tb.to_numpy([parameter, view], detach=True)[0].tolist() == [1, 1, 1]
    with pytest.raises(tb.BridgeBufferError, match="^the target: .*detach"):
        tb.copy(np.ones(3, np.float32), out=parameter)


def test_gradients_convert_as_ever_while_a_ticket_is_open() -> None:
    pytest.importorskip("tensorflow")
    _, _view = opened()
    parameter = torch.ones(3, requires_grad=True)
    doubled = tb.autograd.torch_function(lambda x: 2 * x)(parameter)
    doubled.sum().backward()
    assert parameter.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("is_leasing", [False, True])
def test_a_producer_is_asked_once(is_leasing: bool) -> None:
    _view = opened() if is_leasing else None
    producer = Wrapper(np.arange(3.0))
    for call in (lambda: tb.to_torch(producer), lambda: tb.copy(producer, out=np.zeros(3)), lambda: tb.lend(producer)):
        producer.asked = 0
        call()
        assert producer.asked == 1


def test_publications_and_subscriptions_refuse_it(tmp_path: Path) -> None:
    ticket, view = opened()
    with tb.serve(tmp_path / "names") as names:
        mine = names.publish("mine", view)
        names.publish("theirs", np.full(3, 7.0))
        subscription = names.subscribe("theirs", out=view)
        tb.revoke(ticket)
        wait_until(lambda: is_gone(lambda: tb.to_torch(view)))
        for call in (mine.update, lambda: names.publish("again", view), subscription.refresh):
            assert is_gone(call)
    assert view.tolist() == [0, 0, 0]


def test_a_refresh_that_has_begun_ends_without_its_publisher(
    tmp_path: Path, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tb.serve(tmp_path / "names") as names:
        other(f"c = tb.connect({str(tmp_path / 'names')!r})")
        other("p = c.publish('weights', {'w': np.full(3, 7.0), 'b': np.ones(1)})")
        out = {"b": np.zeros(1), "w": np.zeros(3)}  # in another order, which is looked up
        subscription = names.subscribe("weights", out=out)
        matched = publications._matched

        def killed(*arguments: Any) -> list[int]:
            """Runs when the version is open, and was not copied yet."""
            other.kill()
            wait_until(lambda: names.list() == {})
            return matched(*arguments)

        monkeypatch.setattr(publications, "_matched", killed)
        assert subscription.refresh() and out["w"].tolist() == [7, 7, 7]
        assert names.list() == {} and subscription.refresh() is None


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_a_copier_refuses_it(target: str, check: bool) -> None:
    ticket, view = opened(target=target)
    into = tb.copier([np.ones(2), np.full(3, 7.0)], out=[np.zeros(2), view], check=check)
    out_of = tb.copier(view, out=np.zeros(3), check=check)
    into(), out_of()
    tb.revoke(ticket)
    wait_until(lambda: is_gone(into))
    assert is_gone(out_of) and is_gone(lambda: tb.copier(np.ones(3), out=view))


@pytest.mark.parametrize("check", [False, True])
def test_a_copier_goes_on_under_another_lease_of_the_memory(check: bool) -> None:
    ticket, view = opened()
    into = tb.copier(np.full(3, 7.0), out=view, check=check)
    again = tb.share(view, writing="shared")
    other = tb.open(again, "numpy")
    assert other.ctypes.data == view.ctypes.data
    tb.revoke(ticket)
    for _ in range(100):  # the notice comes meanwhile
        into()
        time.sleep(0.001)
    tb.revoke(again)
    wait_until(lambda: is_gone(into))


def test_a_plan_says_so() -> None:
    ticket, view = opened()
    assert tb.plan(view, "torch").zero_copy
    tb.revoke(ticket)
    wait_until(lambda: is_gone(lambda: tb.plan(view, "torch")))


def test_what_is_passed_on_does_not_hide_the_end_of_its_owner(other: Other) -> None:
    text = other("tb.share(np.arange(3), writing='shared').text").strip("'")
    view = tb.open(text, "numpy")
    again = tb.share(view[1:2], writing="shared")
    own = tb.open(again, "numpy")
    assert tb.to_torch(view).tolist() == [0, 1, 2] and own.tolist() == [1]
    other.kill()
    wait_until(lambda: is_gone(lambda: tb.to_torch(view)))
    assert is_gone(lambda: tb.share(view)) and is_gone(lambda: tb.copy(np.zeros(3, np.int64), out=view))
    tb.revoke(again)
