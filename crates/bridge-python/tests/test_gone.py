"""Memory of another process that is gone: what refuses it, and what it must not disturb."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from capsules import Wrapper
from raising import kind_of
from truebridge import publications
from truebridge_conformance.others import Other, wait_until

torch: Any = pytest.importorskip("torch")


pytestmark = pytest.mark.usefixtures("ipc_folder")


def is_gone(call: Any) -> bool:
    return kind_of(call) == "gone"


def opened(writing: Any = "shared", target: Any = "numpy") -> tuple[Any, Any]:
    """Return a ticket of this process, and its array."""
    ticket = tb.share(np.zeros(3), writing=writing)
    return ticket, tb.open(ticket, target)


def test_other_tensors_cross_as_ever_while_a_ticket_is_open() -> None:
    _, view = opened()
    parameter = torch.ones(3, requires_grad=True)
    assert tb.to_numpy(parameter, detach=True).tolist() == [1, 1, 1]
    assert tb.to_numpy([parameter, view], detach=True)[0].tolist() == [1, 1, 1]
    with pytest.raises(tb.BridgeBufferError, match="^the target: .*detach"):
        tb.copy(np.ones(3, np.float32), out=parameter)


def test_gradients_cross_as_ever_while_a_ticket_is_open() -> None:
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
