"""Gradients through functions of another framework, compared with those of a single framework."""

from __future__ import annotations

import gc
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import memory
import truebridge as tb

torch: Any = pytest.importorskip("torch")
tf: Any = pytest.importorskip("tensorflow")
from truebridge.autograd import tf_function, torch_function  # noqa: E402

DOUBLE = {"dtype": torch.float64, "requires_grad": True}


def kind(call: Callable[[], Any]) -> str:
    with pytest.raises(tb.BridgeError) as error:
        call()
    return error.value.kind


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


# --- TensorFlow in PyTorch


FUNCTIONS = {
    "one": (lambda x, y: tf.sin(x) * y, 2),
    "two results": (lambda x, y: (tf.exp(x) * y, tf.reduce_sum(y * y)), 2),
    "an unused input": (lambda x, y: tf.tanh(x) * x, 2),
    "a cube": (lambda x: x**3, 1),
    "a tf.function": (tf.function(lambda x, y: (tf.sigmoid(x @ tf.transpose(y)), y)), 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_both_orders_are_those_of_differences(name: str) -> None:
    function, count = FUNCTIONS[name]
    inputs = tuple(torch.randn(2, 3, **DOUBLE) for _ in range(count))
    assert torch.autograd.gradcheck(torch_function(function), inputs)
    assert torch.autograd.gradgradcheck(torch_function(function), inputs)


def test_a_third_derivative() -> None:
    x = torch.tensor([2.0, -1.0], **DOUBLE)
    y = torch_function(lambda x: x**4)(x).sum()
    for expected in (4 * x**3, 12 * x**2, 24 * x):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert torch.allclose(y, expected)


def test_complex_gradients_are_those_of_pytorch() -> None:
    z = torch.randn(4, dtype=torch.complex128, requires_grad=True)
    (found,) = torch.autograd.grad(torch_function(lambda z: z * z * tf.math.conj(z))(z).real.sum(), z)
    (expected,) = torch.autograd.grad((z * z * z.conj()).real.sum(), z)
    assert torch.allclose(found, expected)


def test_a_layer_has_the_gradients_of_its_twin() -> None:
    layer = dense(5, 7)
    module, other = torch_function(layer, variables=layer.trainable_variables), twin(layer)
    x = torch.randn(11, 7)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for model, given in zip((module, other), inputs, strict=True):
        model(given).square().mean().backward()
    assert close(inputs[0].grad, inputs[1].grad)
    kernel, bias = module.parameters()
    assert close(kernel.grad.T, other[0].weight.grad) and close(bias.grad, other[0].bias.grad)


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


def test_a_tensor_that_is_passed_twice_has_both_gradients() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    torch_function(lambda a, b: a * a * b)(x, x).backward()
    assert x.grad.item() == 27


def test_containers_keywords_and_what_is_no_tensor() -> None:
    def function(pair: Any, *, scale: float, extra: Any) -> Any:
        assert pair["name"] == "n" and extra is None
        return {"sum": [pair["a"] + pair["b"][0]], "none": None, "where": tf.argmax(pair["a"]), "x": scale * pair["a"]}

    a, b = torch.tensor([1.0, 4.0], requires_grad=True), torch.tensor([2.0, 2.0], requires_grad=True)
    out = torch_function(function)({"a": a, "b": (b,), "name": "n"}, scale=3.0, extra=None)
    assert out["none"] is None and out["where"].item() == 1 and not out["where"].requires_grad
    (out["sum"][0].sum() + out["x"].sum()).backward()
    assert a.grad.tolist() == [4, 4] and b.grad.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_each_dtype_is_kept(dtype: Any) -> None:
    x = torch.ones(4, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch_function(lambda x: x * x)(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype and x.grad.tolist() == [2] * 4


def test_no_gradient_is_none_and_no_grad_records_nothing() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    module = torch_function(lambda x, y: 2 * x)
    assert torch.autograd.grad(module(x, y).sum(), [x, y], allow_unused=True)[1] is None
    with torch.no_grad():
        assert module(x, y).grad_fn is None
    assert torch_function(lambda x: tf.stop_gradient(x) * 1)(x).sum().requires_grad


def test_graphs_are_kept_and_dropped_as_in_pytorch() -> None:
    x = torch.ones(2, requires_grad=True)
    y = torch_function(tf.exp)(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert torch.allclose(x.grad, 2 * x.exp())
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    del y
    y = torch_function(tf.exp)(x)
    loss, before = y.sum(), memory.views()
    loss.backward()
    memory.eventually(lambda: memory.views() < before)  # What the tape held, while ``loss`` is alive.


def test_writes_between_forward_and_backward_are_noticed() -> None:
    x = torch.ones(2, requires_grad=True)
    inner = x * 2
    y = torch_function(lambda x: x * x)(inner)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()
    y = torch_function(tf.exp)(x)
    expected = 2 * y.detach()
    y.mul_(2)  # A result has its own memory: TensorFlow's tape keeps what it has computed.
    y.sum().backward()
    assert torch.equal(x.grad, expected)


def test_what_is_drawn_at_random_is_the_same_in_every_derivative() -> None:
    x = torch.ones(1000, requires_grad=True)
    y = torch_function(lambda x: x**3 * tf.round(tf.random.uniform([1000])))(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    assert torch.equal(slope, 3 * y) and torch.equal(bend, 6 * y) and 0 < y.sum() < 1000


def test_what_passes_through_is_memory_of_its_own() -> None:
    x = torch.ones(4, requires_grad=True)
    y, z = torch_function(lambda x: (tf.identity(x), tf.reshape(x, [2, 2])))(x)
    assert len({t.data_ptr() for t in (x, y, z)}) == 3
    a, b = (torch.ones(20_000, requires_grad=True) for _ in range(2))
    torch_function(lambda a, b: a + b)(a, b).sum().backward()
    assert a.grad.data_ptr() != b.grad.data_ptr()


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


def test_checkpoints_and_compiled_models() -> None:
    from torch.utils.checkpoint import checkpoint

    square = torch_function(tf.square)
    x = torch.tensor([3.0], requires_grad=True)
    checkpoint(lambda x: square(x * 2), x, use_reentrant=False).backward()
    assert x.grad.item() == 24
    compiled = torch.compile(lambda x: (square(x * 2) + 1).sum(), backend="eager")
    (found,) = torch.autograd.grad(compiled(x), x)
    assert found.item() == 24


def test_memory_does_not_grow() -> None:
    layer = dense(64, 256)
    module = torch_function(layer, variables=layer.trainable_variables)
    back = tf_function(torch.nn.Linear(256, 64))
    x, variable = torch.randn(512, 256, requires_grad=True), tf.Variable(tf.ones([512, 256]))

    def steps(count: int) -> int:
        for _ in range(count):
            (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
            slope.sum().backward()
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(back(variable))
            tape.gradient(loss, variable)
        gc.collect()
        return memory.resident()

    before, views = steps(40), memory.views()
    assert steps(200) - before < 40 << 20  # One step that stays is 0.5 MiB and more.
    memory.eventually(lambda: memory.views() == views)


# --- PyTorch in TensorFlow


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


def test_second_and_third_derivatives_in_tensorflow() -> None:
    function = tf_function(lambda x, y: (x**4 * y, x.argmax()))
    x, y = tf.Variable([1.0, 2.0]), tf.Variable([3.0, -1.0])
    with tf.GradientTape() as third:
        with tf.GradientTape(persistent=True) as second:
            with tf.GradientTape() as first:
                value, where = function(x, y)
            slope = first.gradient(value, x)
        bend, mixed = second.gradient(slope, [x, y])
    assert close(slope, 4 * x**3 * y) and close(bend, 12 * x**2 * y) and close(mixed, 4 * x**3)
    assert close(third.gradient(bend, y), 12 * x**2) and int(where) == 1


def test_unused_integers_and_twice_passed_inputs_in_tensorflow() -> None:
    x, unused, index = tf.Variable([1.0, 2.0, 3.0]), tf.Variable(1.0), tf.constant([2, 0], tf.int64)
    function = tf_function(lambda a, b, unused, rest: {"y": (a * b)[rest["i"]], "none": None})
    with tf.GradientTape() as tape:
        out = function(x, x, unused, {"i": index, "flag": True})
    assert out["none"] is None
    found = tape.gradient(out["y"], [x, unused])
    assert found[0].numpy().tolist() == [2, 0, 6] and found[1] is None


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
    tape.gradient(y, x, output_gradients=sent)
    bias.grad.zero_()
    assert sent.numpy().min() == 1


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
    for _ in range(30):
        optimizers[1].zero_grad()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((function(layer(x)) - y) ** 2)
        optimizers[0].apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        optimizers[1].step()
        losses.append(float(loss))
    assert losses[-1] < 0.6 * losses[0] and losses == sorted(losses, reverse=True)


# --- misuse


def test_misuse_is_refused_with_a_kind() -> None:
    x, t = torch.ones(2, requires_grad=True), tf.ones(2)
    assert kind(lambda: torch_function(3)) == "argument"  # type: ignore[arg-type]
    assert kind(lambda: tf_function("f")) == "argument"  # type: ignore[arg-type]
    assert kind(lambda: torch_function(tf.exp)(t)) == "not_a_tensor"
    assert kind(lambda: torch_function(tf.add)(x, np.ones(2))) == "not_a_tensor"
    assert kind(lambda: tf_function(torch.exp)(x)) == "not_a_tensor"
    assert kind(lambda: tf_function(torch.add)(t, np.ones(2))) == "not_a_tensor"
    assert kind(lambda: torch_function(lambda x: "text")(x)) == "not_a_tensor"
    assert kind(lambda: torch_function(lambda x: torch.ones(2))(x)) == "not_a_tensor"
    assert kind(lambda: tf_function(lambda x: [x, 3])(t)) == "not_a_tensor"
    assert kind(lambda: tf_function(lambda x: t)(t)) == "not_a_tensor"
    assert kind(lambda: torch_function(tf.add)(x, torch.ones(2, device="meta"))) == "device"
    assert kind(lambda: torch_function(tf.exp, variables=[x])) == "not_a_tensor"
    assert kind(lambda: torch_function(tf.exp, variables=[tf.Variable(1)])) == "dtype"


def test_a_variable_without_a_gradient_is_refused() -> None:
    variable = tf.Variable([1.0, 2.0])
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(tb.BridgeValueError, match="variables="):
        torch_function(lambda x: x * variable)(x)
    module = torch_function(lambda x: x * variable, variables=[variable]).requires_grad_(False)
    module(x).sum().backward()
    assert x.grad.tolist() == [1, 2]


def test_misuse_of_graphs_is_refused() -> None:
    assert kind(lambda: tf.function(tf_function(torch.exp))(tf.ones(2))) == "argument"
    assert kind(lambda: tf_function(torch.exp, outputs=3)) == "argument"
    wrong = tf_function(torch.exp, outputs=tf.TensorSpec([3], tf.float32))
    with pytest.raises(tf.errors.OpError, match="does not describe"):
        tf.function(wrong)(tf.ones(2))


def test_an_error_of_the_function_passes_through() -> None:
    def fails(x: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        torch_function(fails)(torch.ones(2, requires_grad=True))
    with pytest.raises(KeyError, match="mine"):
        tf_function(fails)(tf.ones(2))


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


@pytest.mark.parametrize("function", [torch_function, tf_function])
def test_the_examples_run(function: Any) -> None:
    import doctest

    lines = inspect.getdoc(function) or ""
    assert re.search(r"^Examples$", lines, re.MULTILINE)
    example = doctest.DocTestParser().get_doctest(lines, {}, function.__name__, None, None)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
