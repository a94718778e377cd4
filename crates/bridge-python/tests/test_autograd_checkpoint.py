"""Functions that draw random numbers, under ``torch.utils.checkpoint``: the gradient is the value's, or refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import truebridge as tb

jax: Any = pytest.importorskip("jax")
torch: Any = pytest.importorskip("torch")
tf: Any = pytest.importorskip("tensorflow")
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop  # noqa: E402

from truebridge.autograd import torch_function  # noqa: E402

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
    "a moving average beside a seed": lambda x: (
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


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(tb.BridgeError, match=r"runs this function of TensorFlow again.*stateless_dropout") as error:
        call()
    assert error.value.kind == "argument"


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_that_would_be_drawn_again_are_refused(name: str) -> None:
    module = torch_function(DRAWS[name])
    refused(lambda: slope(module, torch.square, True))
    refused(lambda: slope(module, torch.square, False))
    # Nothing of it is left: outside of a checkpoint the function draws as it likes.
    module(torch.ones(N, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("name", DRAWS)
def test_a_checkpoint_that_ends_with_the_function_has_the_gradient_of_its_value(name: str) -> None:
    """Without reentry the gradient is that of the first run, and PyTorch stops the second one there."""
    y, found = slope(torch_function(DRAWS[name]), lambda y: y, False)
    assert torch.allclose(found * torch.linspace(1, 2, N), y, rtol=1e-5) and 0 < found.count_nonzero()


def test_without_an_early_stop_it_is_refused() -> None:
    with set_checkpoint_early_stop(False):
        refused(lambda: slope(torch_function(DRAWS["tf.nn.dropout"]), lambda y: y, False))


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
    from truebridge._autograd_draws import _drawn

    assert _drawn("CudnnRNNV3", None, True, 0.0) == frozenset() != _drawn("CudnnRNNV3", None, True, 0.5)


def test_threads_that_run_again_at_once_are_all_watched() -> None:
    module = torch_function(DRAWS["tf.nn.dropout, compiled"])
    errors: list[Any] = []

    def work() -> None:
        for _ in range(20):
            try:
                slope(module, torch.square, True)
            except tb.BridgeError as error:
                errors.append(error.kind)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == ["argument"] * 80
