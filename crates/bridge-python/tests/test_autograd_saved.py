"""Modes in which PyTorch saves other tensors than it was given: no backward computes from later writes.

JAX computes from what PyTorch has saved, so the gradient is that of PyTorch alone. The tape of TensorFlow has the
memory itself, so a write to it is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

import truebridge as tb

jax: Any = pytest.importorskip("jax")
torch: Any = pytest.importorskip("torch")
tf: Any = pytest.importorskip("tensorflow")
from torch.utils.checkpoint import checkpoint  # noqa: E402

from truebridge.autograd import torch_function  # noqa: E402

graph = torch.autograd.graph

#: Contexts in which PyTorch saves copies.
COPIES: dict[str, Callable[[], Any]] = {
    "hooks": lambda: graph.saved_tensors_hooks(torch.clone, lambda x: x),
    "hooks that convert": lambda: graph.saved_tensors_hooks(torch.Tensor.double, torch.Tensor.float),
    "allow_mutation": graph.allow_mutation_on_saved_tensors,
}
OF = ["jax", "tensorflow"]


def product(of: str | None, w: Any) -> tuple[Any, Any]:
    """Return ``x * x * w`` as a function of x, and its parameter ``w``."""
    if of is None:
        parameter = torch.nn.Parameter(w.clone())
        return lambda x: x * x * parameter, parameter
    if of == "jax":
        module = torch_function(lambda w, x: x * x * w[0], of="jax", variables=[tb.to_jax(w, copy=True)])
    else:
        variable = tf.Variable(w.numpy())
        module = torch_function(lambda x: x * x * variable, variables=[variable])
    return module, module.variables[0]


def first_order(of: str | None, mode: Any, written: str) -> list[Any]:
    """Return the gradients of an argument and a parameter of which one is written between forward and backward."""
    function, parameter = product(of, torch.tensor([3.0, 5.0]))
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with mode():
        inner = x * 1
        y = function(inner)
        with torch.no_grad():
            {"argument": inner, "parameter": parameter}[written].zero_()
        y.sum().backward()
    return [x.grad.tolist(), parameter.grad.tolist()]


def second_order(of: str | None, mode: Any) -> list[Any]:
    """Return the gradients of a gradient whose incoming gradient is written before it is differentiated."""
    function, parameter = product(of, torch.tensor([3.0, 5.0]))
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with mode():
        sent = torch.tensor([1.0, 1.0], requires_grad=True) * 7
        (slope,) = torch.autograd.grad(function(x), x, sent, create_graph=True)
        with torch.no_grad():
            sent.zero_()
        slope.sum().backward()
    return [x.grad.tolist(), parameter.grad.tolist()]


def checkpointed(of: str | None) -> list[Any]:
    """Return the gradients of a checkpoint that writes to the argument after the call."""
    function, parameter = product(of, torch.tensor([3.0, 5.0]))
    x = torch.tensor([1.0, 2.0], requires_grad=True)

    def body(x: Any) -> Any:
        inner = x * 1
        y = function(inner)
        with torch.no_grad():
            inner.zero_()
        return y

    checkpoint(body, x, use_reentrant=False).sum().backward()
    return [x.grad.tolist(), parameter.grad.tolist()]


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(tb.BridgeError, match=r"wrote to an argument.*Pass a \.clone\(\)") as error:
        call()
    assert error.value.kind == "argument"


def compared(of: str, run: Callable[[str | None], Any]) -> None:
    """Check the gradients of JAX against those of PyTorch alone, and that TensorFlow refuses."""
    if of == "jax":
        assert run("jax") == run(None)
    else:
        refused(lambda: run("tensorflow"))


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("written", ["argument", "parameter"])
@pytest.mark.parametrize("mode", COPIES)
def test_a_write_after_the_forward_does_not_reach_the_gradient(mode: str, written: str, of: str) -> None:
    compared(of, lambda of: first_order(of, COPIES[mode], written))


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("mode", COPIES)
def test_a_write_to_an_incoming_gradient_does_not_reach_the_second_order(mode: str, of: str) -> None:
    compared(of, lambda of: second_order(of, COPIES[mode]))


@pytest.mark.parametrize("of", OF)
def test_a_write_in_a_checkpoint_does_not_reach_the_gradient(of: str) -> None:
    compared(of, checkpointed)


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("written", ["argument", "parameter"])
def test_without_a_mode_a_write_is_the_error_of_pytorch(written: str, of: str) -> None:
    with pytest.raises(RuntimeError, match="inplace operation"):
        first_order(of, contextlib.nullcontext, written)


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("written", ["argument", "parameter"])
@pytest.mark.parametrize("mode", ["identity", "save_on_cpu"])
def test_a_write_to_what_a_hook_has_saved_is_an_error(mode: str, written: str, of: str) -> None:
    """PyTorch counts no writes where there are hooks: its own operations compute from what was written."""
    identity = graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    refused(lambda: first_order(of, {"identity": lambda: identity, "save_on_cpu": graph.save_on_cpu}[mode], written))


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("mode", [*COPIES, "save_on_cpu", "nothing"])
def test_without_a_write_the_gradients_are_those_of_pytorch(mode: str, of: str) -> None:
    modes = {**COPIES, "save_on_cpu": graph.save_on_cpu, "nothing": contextlib.nullcontext}

    def gradients(of: str | None) -> Any:
        function, parameter = product(of, torch.tensor([3.0, 5.0]))
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        with modes[mode]():
            (slope,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
            (slope.sum() + function(x).sum()).backward()
        return slope.tolist(), x.grad.tolist(), parameter.grad.tolist()

    assert gradients(of) == gradients(None)


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_has_the_gradients_of_pytorch(reentrant: bool, of: str) -> None:
    def gradients(of: str | None) -> Any:
        function, parameter = product(of, torch.tensor([3.0, 5.0]))
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        checkpoint(lambda x: function(x * 2).sin(), x, use_reentrant=reentrant).sum().backward()
        return [*x.grad.tolist(), *parameter.grad.tolist()]

    assert gradients(of) == pytest.approx(gradients(None))


def test_counting_writes_takes_no_memory() -> None:
    from truebridge._autograd_in_torch import Writes

    x = torch.zeros(1000)
    writes = Writes([x])
    assert [counter.untyped_storage().nbytes() for counter, *_ in writes.counted] == [0]
    assert not writes and x.view(10, 100).mul_(1) is not None and writes
