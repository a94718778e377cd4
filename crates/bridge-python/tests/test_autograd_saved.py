"""Modes in which PyTorch saves other tensors than it was given: no backward computes from later writes.

JAX computes from what PyTorch has saved, so the gradient equals PyTorch's. The tape of TensorFlow has the
memory itself, so a write to it is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

import truebridge as tb
from conftest import kind_of

jax: Any = pytest.importorskip("jax")
torch: Any = pytest.importorskip("torch")
tf: Any = pytest.importorskip("tensorflow")
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop  # noqa: E402

from truebridge.autograd import torch_function  # noqa: E402

graph = torch.autograd.graph

#: Contexts in which PyTorch saves copies.
COPIES: dict[str, Callable[[], Any]] = {
    "hooks": lambda: graph.saved_tensors_hooks(torch.clone, lambda x: x),
    "hooks that convert": lambda: graph.saved_tensors_hooks(torch.Tensor.double, torch.Tensor.float),
    "allow_mutation": graph.allow_mutation_on_saved_tensors,
}
of_both = pytest.mark.parametrize("of", ["jax", "tensorflow"])


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


def gradients(of: str | None, body: Callable[..., None], mode: Any = contextlib.nullcontext) -> list[float]:
    """Return the gradients of an argument and a parameter after a body, which runs in a mode of PyTorch."""
    function, parameter = product(of, torch.tensor([3.0, 5.0]))
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with mode():
        body(function, parameter, x)
    return [*x.grad.tolist(), *parameter.grad.tolist()]


def first_order(written: str, function: Any, parameter: Any, x: Any) -> None:
    """Write to the argument or to the parameter between forward and backward."""
    inner = x * 1
    y = function(inner)
    with torch.no_grad():
        {"argument": inner, "parameter": parameter}[written].zero_()
    y.sum().backward()


def second_order(function: Any, parameter: Any, x: Any) -> None:
    """Write to an incoming gradient before the gradient is differentiated."""
    sent = torch.tensor([1.0, 1.0], requires_grad=True) * 7
    (slope,) = torch.autograd.grad(function(x), x, sent, create_graph=True)
    with torch.no_grad():
        sent.zero_()
    slope.sum().backward()


def both_orders(function: Any, parameter: Any, x: Any) -> None:
    """Write nothing."""
    (slope,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    (slope.sum() + function(x).sum()).backward()


def checkpointed(function: Any, parameter: Any, x: Any) -> None:
    """Write to the argument after the call, in a checkpoint."""

    def body(x: Any) -> Any:
        inner = x * 1
        y = function(inner)
        with torch.no_grad():
            inner.zero_()
        return y

    checkpoint(body, x, use_reentrant=False).sum().backward()


WRITES = {
    "argument": partial(first_order, "argument"),
    "parameter": partial(first_order, "parameter"),
    "incoming gradient": second_order,
}
written = pytest.mark.parametrize("written", ["argument", "parameter"])


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(tb.BridgeError, match=r"wrote to an argument.*Pass a \.clone\(\)") as error:
        call()
    assert error.value.kind == "argument"


def compared(of: str, body: Any, mode: Any = contextlib.nullcontext) -> None:
    """Check the gradients of JAX against those of PyTorch by itself, and that TensorFlow refuses."""
    if of == "jax":
        assert gradients("jax", body, mode) == gradients(None, body, mode)
    else:
        refused(lambda: gradients("tensorflow", body, mode))


@of_both
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("mode", COPIES)
def test_a_write_does_not_reach_the_gradient(mode: str, write: str, of: str) -> None:
    compared(of, WRITES[write], COPIES[mode])


@of_both
def test_a_write_in_a_checkpoint_does_not_reach_the_gradient(of: str) -> None:
    compared(of, checkpointed)


@of_both
@written
def test_without_a_mode_a_write_is_the_error_of_pytorch(written: str, of: str) -> None:
    with pytest.raises(RuntimeError, match="inplace operation"):
        gradients(of, WRITES[written])


@of_both
@written
@pytest.mark.parametrize("mode", ["identity", "save_on_cpu"])
def test_a_write_to_what_a_hook_has_saved_is_an_error(mode: str, written: str, of: str) -> None:
    """PyTorch counts no writes where there are hooks: its own operations compute from what was written."""
    identity = graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    modes = {"identity": lambda: identity, "save_on_cpu": graph.save_on_cpu}
    refused(lambda: gradients(of, WRITES[written], modes[mode]))


@of_both
@pytest.mark.parametrize("mode", [*COPIES.values(), graph.save_on_cpu, contextlib.nullcontext])
def test_without_a_write_the_gradients_are_those_of_pytorch(mode: Any, of: str) -> None:
    assert gradients(of, both_orders, mode) == gradients(None, both_orders, mode)


@of_both
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_has_the_gradients_of_pytorch(reentrant: bool, of: str) -> None:
    def body(function: Any, parameter: Any, x: Any) -> None:
        checkpoint(lambda x: function(x * 2).sin(), x, use_reentrant=reentrant).sum().backward()

    assert gradients(of, body) == pytest.approx(gradients(None, body))


def test_counting_writes_takes_no_memory() -> None:
    from truebridge.autograd._in_torch import Writes

    x = torch.zeros(1000)
    writes = Writes([x])
    assert [counter.untyped_storage().nbytes() for counter, *_ in writes.counted] == [0]
    assert not writes and x.view(10, 100).mul_(1) is not None and writes


# Functions that draw random numbers, under ``torch.utils.checkpoint``: the gradient is the value's, or refused.


N = 256
RATE = 0.5
layer = tf.keras.layers.Dropout(RATE)
generator = tf.random.Generator.from_seed(5)


def masked(draw: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda x: x * tf.cast(draw() > RATE, x.dtype)


#: Functions that draw other numbers when they run again.
DRAWS: dict[str, Callable[[Any], Any]] = {
    "tf.nn.dropout": lambda x: tf.nn.dropout(x, RATE),
    "with a seed of the operation": lambda x: tf.nn.dropout(x, RATE, seed=7),
    "Keras": lambda x: layer(x, training=True),
    "tf.random.Generator": masked(lambda: generator.uniform([N])),
    "tf.random.shuffle": lambda x: x * tf.random.shuffle(tf.range(N, dtype=x.dtype)),
    "numbers that no generator counts": masked(
        lambda: tf.cast(tf.raw_ops.NonDeterministicInts(shape=[N]) % 2, tf.float32)
    ),
}
for name in ("tf.nn.dropout", "Keras", "tf.random.Generator"):
    inner = tf.function(DRAWS[name])
    DRAWS[f"{name}, compiled"] = inner
    DRAWS[f"{name}, in a branch of a compiled function"] = tf.function(
        lambda x, inner=inner: tf.cond(tf.reduce_sum(x) > -1.0, lambda: inner(x), lambda: x)
    )
DRAWS["tf.nn.dropout, by XLA"] = tf.function(DRAWS["tf.nn.dropout"], jit_compile=True)

#: Functions that compute the same when they run again. The variable of the last one counts in floats.
average = tf.Variable(0.0, trainable=False)
SAME: dict[str, Callable[[Any], Any]] = {
    "cannot read random numbers": tf.sin,
    "from a seed": lambda x: tf.nn.experimental.stateless_dropout(x, RATE, seed=[3, 4]),
    "from a seed, compiled": tf.function(lambda x: tf.nn.experimental.stateless_dropout(x, RATE, seed=[3, 4])),
    "a moving average with a seed": lambda x: (
        average.assign_add(tf.reduce_mean(x)),
        tf.nn.experimental.stateless_dropout(x, RATE, seed=[3, 4]),
    )[1],
}


def slope(function: Any, after: Any, reentrant: bool) -> tuple[Any, Any]:
    """Return the value of a checkpoint and the gradient of its sum."""
    x = torch.linspace(1, 2, N, requires_grad=True)
    y = checkpoint(lambda x: after(function(x)), x, use_reentrant=reentrant)
    y.sum().backward()
    return y.detach(), x.grad


def refused_again(call: Callable[[], Any]) -> None:
    with pytest.raises(tb.BridgeError, match=r"runs this function of TensorFlow again.*stateless_dropout") as error:
        call()
    assert error.value.kind == "argument"


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_that_would_be_drawn_again_are_refused(name: str) -> None:
    module = torch_function(DRAWS[name])
    refused_again(lambda: slope(module, torch.square, True))
    refused_again(lambda: slope(module, torch.square, False))
    # Nothing of it is left: outside of a checkpoint the function draws as it likes.
    module(torch.ones(N, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("name", DRAWS)
def test_a_checkpoint_that_ends_with_the_function_has_the_gradient_of_its_value(name: str) -> None:
    """Without reentry the gradient is that of the first run, and PyTorch stops the second one there."""
    y, found = slope(torch_function(DRAWS[name]), lambda y: y, False)
    assert torch.allclose(found * torch.linspace(1, 2, N), y, rtol=1e-5) and 0 < found.count_nonzero()


def test_without_an_early_stop_it_is_refused() -> None:
    with set_checkpoint_early_stop(False):
        refused_again(lambda: slope(torch_function(DRAWS["tf.nn.dropout"]), lambda y: y, False))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", SAME)
def test_what_is_the_same_in_each_run_is_not_refused(name: str, reentrant: bool) -> None:
    module = torch_function(SAME[name])
    x = torch.linspace(1, 2, N, requires_grad=True)
    module(x).square().sum().backward()
    assert torch.allclose(slope(module, torch.square, reentrant)[1], x.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_keys_of_jax_are_arguments(reentrant: bool) -> None:
    module = torch_function(lambda x, i: x * jax.random.bernoulli(jax.random.key(i), RATE, x.shape), of="jax")
    seed = torch.tensor(3, dtype=torch.int32)
    x = torch.linspace(1, 2, N, requires_grad=True)
    module(x, seed).square().sum().backward()
    assert torch.equal(slope(lambda x: module(x, seed), torch.square, reentrant)[1], x.grad)


def test_an_lstm_without_dropout_is_not_refused() -> None:
    """Its operation on a GPU has seeds, also where it drops nothing."""
    from truebridge.autograd._draws import _drawn

    assert _drawn("CudnnRNNV3", None, True, 0.0) == frozenset() != _drawn("CudnnRNNV3", None, True, 0.5)


def test_threads_that_run_again_at_once_are_all_watched() -> None:
    module = torch_function(DRAWS["tf.nn.dropout, compiled"])

    def work(_: int) -> list[str | None]:
        return [kind_of(lambda: slope(module, torch.square, True)) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [["argument"] * 20] * 4
