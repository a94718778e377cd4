"""Gradients of PyTorch and of TensorFlow through functions of another framework, and those of a single framework."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import memory
import truebridge as tb
from conftest import kind_of as kind

torch: Any = pytest.importorskip("torch")
tf: Any = pytest.importorskip("tensorflow")
jax: Any = pytest.importorskip("jax")
from truebridge.autograd import jax_function, tf_function, torch_function  # noqa: E402

jnp = jax.numpy

#: Functions whose names differ between the libraries.
SAME = {
    "tensorflow": SimpleNamespace(
        **{**vars(tf.math), "sum": tf.reduce_sum, "take": tf.gather, "reshape": tf.reshape, "ones": tf.ones}
    ),
    "jax": jnp,
    "torch": torch,
}
in_pytorch = pytest.mark.parametrize("of", ["tensorflow", "jax"])
in_tensorflow = pytest.mark.parametrize("of", ["torch", "jax"])


def close(a: Any, b: Any) -> bool:
    return bool(np.allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6))


def dense(units: int, inputs: int, dtype: str = "float32") -> Any:
    start = tf.keras.initializers.GlorotUniform(seed=5)
    layer = tf.keras.layers.Dense(units, activation="tanh", kernel_initializer=start, dtype=dtype)
    layer.build((None, inputs))
    return layer


def twin(layer: Any) -> Any:
    """The same layer, all in PyTorch."""
    kernel, bias = (torch.tensor(variable.numpy()) for variable in layer.trainable_variables)
    linear = torch.nn.Linear(*kernel.shape)
    with torch.no_grad():
        linear.weight.copy_(kernel.T)
        linear.bias.copy_(bias)
    return torch.nn.Sequential(linear, torch.nn.Tanh())


# --- TensorFlow and JAX in PyTorch


FUNCTIONS: dict[str, tuple[str, Callable[..., Any], int]] = {
    f"{name} of {of}": (of, lambda *x, function=function, own=SAME[of]: function(own, *x), count)
    for of in ("tensorflow", "jax")
    for name, function, count in [
        ("one", lambda own, x, y: own.sin(x) * y, 2),
        ("two results", lambda own, x, y: (own.exp(x) * y, own.sum(y * y)), 2),
        ("an unused input", lambda own, x, y: own.tanh(x) * x, 2),
        ("a cube", lambda own, x: x**3, 1),
    ]
} | {
    "a tf.function": ("tensorflow", tf.function(lambda x, y: (tf.sigmoid(x @ tf.transpose(y)), y)), 2),
    "compiled by JAX": ("jax", jax.jit(lambda x, y: (jax.nn.sigmoid(x @ y.T), y)), 2),
    "a scan": ("jax", lambda x: jax.lax.scan(lambda c, a: (c * jnp.sin(a), c), jnp.ones(3, x.dtype), x), 1),
    "a checkpoint": ("jax", jax.checkpoint(lambda x, y: jnp.sin(jnp.sin(x) * y)), 2),
    "a branch": ("jax", lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_both_orders_are_those_of_differences(name: str) -> None:
    of, function, count = FUNCTIONS[name]
    with jax.enable_x64(True):
        inputs = tuple(torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(count))
        assert torch.autograd.gradcheck(torch_function(function, of=of), inputs)
        assert torch.autograd.gradgradcheck(torch_function(function, of=of), inputs)


@in_pytorch
def test_a_third_derivative(of: Any) -> None:
    x = torch.tensor([2.0, -1.0], requires_grad=True)
    y = torch_function(lambda x: x**4, of=of)(x).sum()
    for expected in (4 * x**3, 12 * x**2, 24 * x):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert torch.allclose(y, expected)


@in_pytorch
def test_complex_gradients_are_those_of_pytorch(of: Any) -> None:
    z = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    y = torch_function(lambda z: z * z * SAME[of].conj(z), of=of)(z)
    (found,) = torch.autograd.grad(y.real.sum(), z, create_graph=True)
    (expected,) = torch.autograd.grad((z * z * z.conj()).real.sum(), z, create_graph=True)
    assert torch.allclose(found, expected)
    again = [torch.autograd.grad(slope.abs().sum(), z)[0] for slope in (found, expected)]
    assert torch.allclose(*again, rtol=1e-4)


def test_a_gradient_penalty_reaches_the_variables() -> None:
    layer = dense(3, 4)
    module, other = torch_function(layer, variables=layer.trainable_variables), twin(layer)
    for model in (module, other):
        x = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    assert close(next(module.parameters()).grad.T, other[0].weight.grad)


def test_training_with_a_layer_of_tensorflow_ends_where_the_twin_does() -> None:
    torch.manual_seed(0)
    layer = dense(8, 4)
    ours = torch.nn.Sequential(torch_function(layer, variables=layer.trainable_variables), torch.nn.Linear(8, 1))
    theirs = torch.nn.Sequential(twin(layer), torch.nn.Linear(8, 1))
    theirs[1].load_state_dict(ours[1].state_dict())
    x = torch.randn(64, 4)
    y = x.sin().sum(1, keepdim=True)
    losses = []
    for model in (ours, theirs):
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(40):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0] < 0.7 * y.var().item()
    # The layer itself has been trained.
    assert close(layer(tf.constant(x.numpy())), ours[0](x).detach())


def test_parameters_are_the_variables_and_follow_assignments() -> None:
    variable = tf.Variable([1.0, 2.0])
    module = torch_function(lambda x: x * variable, variables=[variable])
    (parameter,) = module.parameters()
    with torch.no_grad():
        parameter.add_(1)
    assert variable.numpy().tolist() == [2, 3]
    variable.assign([5.0, 6.0])
    assert module(torch.ones(2)).tolist() == [5, 6] == parameter.tolist()
    module.load_state_dict({"variables.0": torch.tensor([7.0, 8.0])})
    assert variable.numpy().tolist() == [7, 8]
    parameter.data = torch.zeros(2)
    assert kind(lambda: module(torch.ones(2))) == "argument"
    assert kind(lambda: module.double()(torch.ones(2))) == "dtype"


def test_rows_of_an_embedding_have_gradients() -> None:
    table = tf.Variable(tf.ones([5, 2]))
    module = torch_function(lambda i: tf.gather(table, i), variables=[table])
    module(torch.tensor([1, 3, 3])).sum().backward()
    (parameter,) = module.parameters()
    assert parameter.grad[:, 0].tolist() == [0, 1, 0, 2, 0]


@in_pytorch
def test_a_tensor_that_is_passed_twice_has_both_gradients(of: Any) -> None:
    x = torch.tensor(3.0, requires_grad=True)
    torch_function(lambda a, b: a * a * b, of=of)(x, x).backward()
    assert x.grad.item() == 27


@in_pytorch
def test_containers_keywords_integers_and_what_is_no_tensor(of: Any) -> None:
    def function(pair: Any, *, scale: Any, extra: Any) -> Any:
        assert pair["name"] == "n" and extra is None
        rows = SAME[of].take(pair["a"], pair["i"])
        return {"sum": [rows + pair["b"][0]], "none": None, "where": SAME[of].argmax(pair["a"]), "x": scale * pair["a"]}

    a, b = torch.tensor([1.0, 4.0], requires_grad=True), torch.tensor([2.0, 2.0], requires_grad=True)
    index = torch.tensor([0, 0], dtype=torch.int32)
    given = {"a": a, "b": (b,), "name": "n", "i": index}
    out = torch_function(function, of=of)(given, scale=torch.tensor(3.0), extra=None)
    assert out["none"] is None and out["where"].item() == 1 and not out["where"].requires_grad
    (out["sum"][0].sum() + out["x"].sum()).backward()
    assert a.grad.tolist() == [5, 3] and b.grad.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@in_pytorch
def test_each_dtype_is_kept(of: Any, dtype: Any) -> None:
    x = torch.ones(4, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), jax.enable_x64(True):
        y = torch_function(lambda x: x * x, of=of)(x)
        y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype and x.grad.tolist() == [2] * 4


@in_pytorch
def test_results_that_are_not_used_count_for_nothing(of: Any) -> None:
    x, y = torch.tensor([0.0, 4.0], requires_grad=True), torch.ones(2, requires_grad=True)
    inner = {"tensorflow": tf.function, "jax": jax.jit}[of](lambda y: y * 3)
    module = torch_function(lambda x, y: (x * 2, SAME[of].sqrt(x), inner(y)), of=of)
    twice, root, other = module(x, y)

    def found(result: Any, **keywords: Any) -> Any:
        return torch.autograd.grad(result.sum(), [x, y], retain_graph=True, allow_unused=True, **keywords)

    for again in (False, True):
        assert found(twice, create_graph=again)[0].tolist() == [2, 2]
        assert found(twice, create_graph=again)[1] is None and found(other, create_graph=again)[0] is None
        assert found(root, create_graph=again)[0].tolist() == [np.inf, 0.25]
    with torch.no_grad():
        assert module(x, y)[0].grad_fn is None
    assert torch_function(lambda x: tf.stop_gradient(x) * 1)(x).sum().requires_grad


@in_pytorch
def test_graphs_are_kept_and_dropped_as_in_pytorch(of: Any) -> None:
    exp = torch_function(SAME[of].exp, of=of)
    x = torch.ones(2, requires_grad=True)
    y = exp(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert torch.allclose(x.grad, 2 * x.exp())
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    del y
    if of == "tensorflow":
        y = exp(x)
        loss, before = y.sum(), memory.views()
        loss.backward()
        memory.eventually(lambda: memory.views() < before)  # What the tape held, while ``loss`` is alive.


@in_pytorch
def test_writes_between_forward_and_backward_are_noticed(of: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    inner = x * 2
    y = torch_function(lambda x: x * x, of=of)(inner)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()
    y = torch_function(SAME[of].exp, of=of)(x)
    expected = 2 * y.detach()
    y.mul_(2)  # A result has its own memory: the derivative of exp is computed from what the framework has.
    y.sum().backward()
    assert torch.equal(x.grad, expected)


def test_what_is_drawn_at_random_is_the_same_in_every_derivative() -> None:
    x = torch.ones(1000, requires_grad=True)
    y = torch_function(lambda x: x**3 * tf.round(tf.random.uniform([1000])))(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    assert torch.equal(slope, 3 * y) and torch.equal(bend, 6 * y) and 0 < y.sum() < 1000


@pytest.mark.parametrize("count", [4, 20_000])
@in_pytorch
def test_what_pytorch_writes_reaches_no_constant_and_no_other_tensor(of: Any, count: int) -> None:
    constant = SAME[of].ones([count])
    a, b = (torch.ones(count, requires_grad=True) for _ in range(2))
    # What passes through the function, and what it has made.
    results = torch_function(lambda a, b: (a, a + b, constant, SAME[of].reshape(a, (-1, 1))), of=of)(a, b)
    sent = torch.ones(count)
    torch.autograd.backward(results[:2], [sent, sent])
    assert len({tensor.data_ptr() for tensor in (a, b, sent, a.grad, b.grad, *results)}) == 9
    for written in (a.grad, b.grad, *(result.detach() for result in results)):
        written.fill_(7)
    assert tb.to_numpy(constant).max() == sent.max() == a.detach().max() == 1


def test_zeros_that_tensorflow_keeps_are_not_written() -> None:
    pair = torch_function(lambda a, b: tf.raw_ops.IdentityN(input=[a, b]))
    for _ in range(2):
        a, b = (torch.ones(3, requires_grad=True) for _ in range(2))
        pair(a, b)[0].sum().backward()
        assert b.grad.tolist() == [0, 0, 0]
        b.grad += 7


def test_arguments_convert_in_place() -> None:
    seen: list[int] = []
    x = torch.ones(1 << 16, requires_grad=True)
    torch_function(lambda x: (seen.append(tb.to_torch(x).data_ptr()), x * 2)[1])(x)
    assert seen == [x.data_ptr()]
    tf_function(lambda x: (seen.append(x.data_ptr()), x * 2)[1])(tb.to_tensorflow(x.detach()))
    assert seen == [x.data_ptr()] * 2


@in_pytorch
def test_checkpoints_and_compiled_models(of: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    square = torch_function(SAME[of].square, of=of)
    x = torch.tensor([3.0], requires_grad=True)
    checkpoint(lambda x: square(x * 2), x, use_reentrant=False).backward()
    assert x.grad.item() == 24
    compiled = torch.compile(lambda x: (square(x * 2) + 1).sum(), backend="eager")
    (found,) = torch.autograd.grad(compiled(x), x)
    assert found.item() == 24


@pytest.mark.filterwarnings("error:.*Dynamo.*")
@in_pytorch
def test_compiled_autograd_does_not_look_into_the_backward(of: Any) -> None:
    square = torch_function(SAME[of].square, of=of)

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator, unused-ignore]
    def loss(x: Any) -> Any:
        return (square(x * 2) + 1).sum()

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator, unused-ignore]
    def step(x: Any) -> None:
        loss(x).backward()

    x = torch.tensor([3.0], requires_grad=True)
    with torch._dynamo.config.patch(compiled_autograd=True):
        step(x)
        loss(x).backward()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        square(x * 2).sum().backward()
    assert x.grad.item() == 3 * 24


def test_memory_does_not_grow() -> None:
    layer = dense(64, 256)
    module = torch_function(layer, variables=layer.trainable_variables)
    back = tf_function(torch.nn.Linear(256, 64))
    x, variable = torch.randn(4096, 256, requires_grad=True), tf.Variable(tf.ones([4096, 256]))

    def steps(count: int) -> int:
        for _ in range(count):
            (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
            slope.sum().backward()
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(back(variable))
            tape.gradient(loss, variable)
        gc.collect()
        return memory.resident()

    before, views = steps(5), memory.views()
    assert steps(30) - before < 60 << 20  # One step that stays is 4 MiB and more.
    memory.eventually(lambda: memory.views() == views)


# --- PyTorch and JAX in TensorFlow


def test_a_tape_goes_through_a_module() -> None:
    linear = torch.nn.Linear(3, 2)
    x = tf.Variable(np.arange(12, dtype=np.float32).reshape(4, 3))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf_function(linear)(x) ** 2)
    found = tape.gradient(loss, x)
    grads = [parameter.grad.clone() for parameter in linear.parameters()]
    linear.zero_grad()
    inner = torch.tensor(x.numpy(), requires_grad=True)
    linear(inner).square().sum().backward()
    assert close(found, inner.grad)
    assert all(close(a, b.grad) for a, b in zip(grads, linear.parameters(), strict=True))


@in_tensorflow
def test_derivatives_of_any_order_in_tensorflow(of: Any) -> None:
    function = tf_function(lambda x, y: (x**4 * y, SAME[of].argmax(x)), of=of)
    x, y = tf.Variable([1.0, 2.0]), tf.Variable([3.0, -1.0])
    with tf.GradientTape() as third:
        with tf.GradientTape(persistent=True) as second:
            with tf.GradientTape() as first:
                value, where = function(x, y)
            slope = first.gradient(value, x)
        bend, mixed = second.gradient(slope, [x, y])
    assert close(slope, 4 * x**3 * y) and close(bend, 12 * x**2 * y) and close(mixed, 4 * x**3)
    assert close(third.gradient(bend, y), 12 * x**2) and int(where) == 1


@in_tensorflow
def test_unused_results_integers_and_twice_passed_inputs_in_tensorflow(of: Any) -> None:
    x, unused, index = tf.Variable([0.0, 4.0, 9.0]), tf.Variable(1.0), tf.constant([2, 0], tf.int32)

    def body(a: Any, b: Any, unused: Any, rest: Any) -> Any:
        return {"rows": (a * b)[rest["i"]], "rest": (SAME[of].sqrt(a), None), "unused": unused * 3}

    with tf.GradientTape(persistent=True) as tape:
        out = tf_function(body, of=of)(x, x, unused, {"i": index, "flag": True})
    assert out["rest"][1] is None
    slope, other = tape.gradient(out["rows"], [x, unused])
    assert slope.numpy().tolist() == [0, 0, 18] and other is None
    slope, other = tape.gradient(out["unused"], [x, unused])
    assert slope is None and float(other) == 3
    assert close(tape.gradient(out["rest"][0], x), [np.inf, 0.25, 1 / 6])


@in_tensorflow
def test_calls_under_one_tape_have_gradients_of_their_own(of: Any) -> None:
    function = tf_function(lambda x: SAME[of].sin(x.squeeze(0)), of=of)
    inputs = [tf.Variable(tf.fill([1, 3], 1.2)) for _ in range(3)]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(function(x)) for x in inputs])
    found = tape.gradient(loss, inputs)
    assert all(close(gradient, np.cos(1.2)) for gradient in found)
    assert len({tb.to_numpy(gradient).ctypes.data for gradient in found}) == 3


@in_tensorflow
def test_complex_gradients_are_those_of_tensorflow(of: Any) -> None:
    z = tf.Variable(tf.constant([1 + 1j, 2 - 1j], tf.complex64))
    function = tf_function(lambda z: z * z * SAME[of].conj(z), of=of)
    with tf.GradientTape(persistent=True) as tape:
        ours = tf.math.real(tf.reduce_sum(function(z)))
        theirs = tf.math.real(tf.reduce_sum(z * z * tf.math.conj(z)))
    assert close(tape.gradient(ours, z), tape.gradient(theirs, z))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "complex64"])
def test_each_dtype_is_kept_in_tensorflow(dtype: str) -> None:
    x = tf.Variable(tf.cast([1, 2], dtype))
    with tf.GradientTape() as tape:
        y = tf_function(torch.square)(x)
    found = tape.gradient(y, x)
    assert y.dtype == found.dtype == dtype and close(tf.cast(found, "complex128"), [2, 4])


def test_a_keras_variable_is_a_tensor() -> None:
    kernel = dense(2, 2).trainable_variables[0]
    with tf.GradientTape() as tape:
        y = tf_function(torch.square)(kernel)
    assert close(tape.gradient(y, kernel.value), 2 * kernel.numpy())


def test_gradients_of_parameters_are_memory_of_their_own() -> None:
    bias = torch.nn.Parameter(torch.zeros(6))
    x = tf.Variable(tf.zeros([2, 3]))
    with tf.GradientTape(persistent=True) as tape:
        y = tf_function(lambda x: (x.reshape(6) + bias).reshape(2, 3))(x)
    sent = tf.ones([2, 3])
    found = tape.gradient(y, x, output_gradients=sent)
    bias.grad.zero_()
    assert sent.numpy().min() == found.numpy().min() == 1


def test_inside_a_tf_function() -> None:
    linear = torch.nn.Linear(3, 2)
    layer = tf_function(linear, outputs=tf.TensorSpec([None, 2], tf.float32))
    traces: list[int] = []

    @tf.function  # type: ignore[untyped-decorator, unused-ignore]
    def step(x: Any) -> Any:
        traces.append(1)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            assert y.shape.as_list() == [None, 2]
            loss = tf.reduce_sum(y**2)
        return loss, tape.gradient(loss, x)

    signature = step.get_concrete_function(tf.TensorSpec([None, 3], tf.float32))
    for rows in (1, 4):
        x = torch.randn(rows, 3, requires_grad=True)
        expected = linear(x).square().sum()
        loss, slope = signature(tb.to_tensorflow(x.detach()))
        assert close(loss, expected.detach()) and close(slope, torch.autograd.grad(expected, x)[0])
    assert len(traces) == 1
    assert linear.weight.grad is not None


def test_a_keras_model_is_trained_through_a_module() -> None:
    torch.manual_seed(1)
    middle = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    layer, function = dense(4, 3), tf_function(middle)
    optimizers = tf.keras.optimizers.SGD(0.1), torch.optim.SGD(middle.parameters(), 0.1)
    x, y = tf.random.stateless_normal([32, 3], [1, 2]), tf.random.stateless_uniform([32, 4], [3, 4])
    losses = []
    for _ in range(10):
        optimizers[1].zero_grad()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((function(layer(x)) - y) ** 2)
        optimizers[0].apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        optimizers[1].step()
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0] and losses == sorted(losses, reverse=True)


# --- misuse


@in_pytorch
def test_misuse_in_pytorch_is_refused_with_a_kind(of: Any) -> None:
    x, own, exp = torch.ones(2, requires_grad=True), SAME[of].ones([2]), SAME[of].exp
    made = partial(torch_function, of=of)
    integers = {"tensorflow": tf.Variable(1), "jax": jnp.arange(3)}[of]
    assert kind(lambda: made(3)) == "argument"  # type: ignore[arg-type]
    for call in (
        lambda: made(exp)(own),
        lambda: made(SAME[of].add)(x, np.ones(2, np.float32)),
        lambda: made(lambda x: "text")(x),
        lambda: made(lambda x: 3.0)(x),
        lambda: made(lambda x: torch.ones(2))(x),
        lambda: made(exp, variables=[x]),
    ):
        assert kind(call) == "not_a_tensor"
    assert kind(lambda: made(exp, variables=[integers])) == "dtype"
    assert kind(lambda: made(SAME[of].add)(x, torch.ones(2, device="meta"))) == "device"
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        assert kind(lambda: made(exp)(forward.make_dual(torch.ones(1), torch.ones(1)))) == "argument"


@in_tensorflow
def test_misuse_in_tensorflow_is_refused_with_a_kind(of: Any) -> None:
    t, exp = tf.ones(2), SAME[of].exp
    made = partial(tf_function, of=of)
    for call in (
        lambda: made(exp)(SAME[of].ones([2])),
        lambda: made(SAME[of].add)(t, np.ones(2, np.float32)),
        lambda: made(lambda x: [x, 3])(t),
        lambda: made(lambda x: t)(t),
    ):
        assert kind(call) == "not_a_tensor"
    for call in (lambda: made("f"), lambda: made(exp, outputs=3), lambda: tf.function(made(exp))(t)):
        assert kind(call) == "argument"
    with pytest.raises(tf.errors.OpError, match="does not describe"):
        tf.function(made(exp, outputs=tf.TensorSpec([3], tf.float32)))(t)


def test_a_variable_without_a_gradient_is_refused() -> None:
    variable = tf.Variable([1.0, 2.0])
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(tb.BridgeValueError, match="variables="):
        torch_function(lambda x: x * variable)(x)
    assert kind(lambda: torch_function(lambda x: x * variable)(torch.ones(2))) == "argument"
    with torch.no_grad():
        assert torch_function(lambda x: x * variable)(x).tolist() == [1, 2]
    module = torch_function(lambda x: x * variable, variables=[variable]).requires_grad_(False)
    module(x).sum().backward()
    assert x.grad.tolist() == [1, 2]


def test_an_error_of_the_function_passes_through() -> None:
    def fails(x: Any) -> Any:
        raise KeyError("mine")

    x = torch.ones(2, requires_grad=True)
    for call in (
        *(lambda of=of: torch_function(fails, of=of)(x) for of in ("tensorflow", "jax")),
        *(lambda of=of: tf_function(fails, of=of)(tf.ones(2)) for of in ("torch", "jax")),
        lambda: jax_function(fails)(jnp.ones(2)),
        lambda: jax.grad(jax_function(fails, of="tensorflow"))(jnp.ones(2)),
    ):
        with pytest.raises(KeyError, match="mine"):
            call()


def test_the_import_stays_light_and_says_what_is_missing() -> None:
    code = """
import sys
import truebridge as tb
tb.autograd
assert not {"torch", "tensorflow", "numpy"} & set(sys.modules)
sys.modules["tensorflow"] = None
try:
    tb.autograd.torch_function(len)
except tb.BridgeImportError as error:
    assert error.kind == "missing", error.kind
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=dict(os.environ))
