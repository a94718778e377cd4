"""Gradients, results and parameters are memory that nothing else writes to, and what is not trained says so."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import memory
import truebridge as tb
from conftest import kind_of as kind
from truebridge.autograd import tf_function, torch_function  # noqa: E402

torch: Any = pytest.importorskip("torch")
tf: Any = pytest.importorskip("tensorflow")
pytest.importorskip("jax")


# --- PyTorch in TensorFlow


def test_a_result_that_is_a_parameter_does_not_follow_it() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    x, same = tf_function(lambda x: (x, p))(tf.ones(2))
    with torch.no_grad():
        p.add_(1)
    assert same.numpy().tolist() == x.numpy().tolist() == [1, 1]


@pytest.mark.parametrize("graph", [False, True])
def test_parameters_are_trained_where_no_tape_watches_an_argument(graph: bool) -> None:
    table = torch.nn.Embedding(4, 2)
    layer: Any = tf_function(table, outputs=tf.TensorSpec([None, 2], tf.float32))
    layer = tf.function(layer) if graph else layer
    weight = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1, 1, 3], tf.int64))) * weight
    assert tape.gradient(loss, weight) is not None
    assert table.weight.grad[:, 0].tolist() == [0, 6, 0, 3]


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers_enter_a_graph_as_they_are(dtype: str) -> None:
    values = np.array([0, 1, -1, 7, -128, 2**62 + 1]).astype(dtype)
    seen: list[Any] = []
    layer = tf_function(lambda i, x: (seen.append(tb.to_numpy(i).copy()), x * 2)[1], outputs=tf.TensorSpec([1]))
    x = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        y = tf.function(layer)(tf.constant(values), x)
    assert tape.gradient(y, x).numpy() == [2]
    assert seen[0].dtype == values.dtype and seen[0].tolist() == values.tolist()


def test_parameters_of_results_that_are_not_used_have_no_gradient() -> None:
    heads = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    function = tf_function(lambda x: (heads[0](x), heads[1](x)))
    x = tf.Variable([0.0, 4.0])
    with tf.GradientTape() as tape:
        used, _ = function(x)
    assert tape.gradient(used, x) is not None
    assert heads[0].weight.grad is not None and heads[1].weight.grad is None


def test_slices_of_rows_become_dense() -> None:
    x = tf.Variable(tf.ones([3, 2]))
    function = tf_function(lambda x: (x * 2, x + 1))
    with tf.GradientTape() as tape:
        doubled, _ = function(x)
        loss = tf.reduce_sum(tf.gather(doubled, [0, 2, 2]))
    assert tf.convert_to_tensor(tape.gradient(loss, x)).numpy()[:, 0].tolist() == [2, 0, 4]


def test_a_write_to_an_argument_is_an_error() -> None:
    assert kind(lambda: tf_function(lambda i: i.add_(1))(tf.ones([2], tf.int64))) == "argument"


def test_results_of_another_form_are_refused() -> None:
    spec = tf.TensorSpec([2], tf.float32)
    for outputs, result in (({"b": spec, "a": spec}, lambda x: (x, x)), ([spec, [spec]], lambda x: (x, x))):
        function = tf.function(tf_function(result, outputs=outputs))
        with pytest.raises(tf.errors.OpError, match="does not describe"):
            function(tf.ones(2))
    pair = tf.function(tf_function(lambda x: [x, (2 * x,)], outputs=(spec, [spec])))(tf.ones(2))
    assert pair[1][0].numpy().tolist() == [2, 2]


def test_jacobians_run_one_at_a_time() -> None:
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape(persistent=True) as tape:
        y = tf_function(torch.square)(x)
    assert tape.jacobian(y, x, experimental_use_pfor=False).numpy().tolist() == [[2, 0], [0, 4]]
    with pytest.raises(Exception, match="experimental_use_pfor=False"):
        tape.jacobian(y, x)


def test_inference_mode_of_pytorch_changes_nothing() -> None:
    x = tf.Variable([3.0])
    with torch.inference_mode(), tf.GradientTape() as tape:
        y = tf_function(torch.square)(x)
    assert tape.gradient(y, x).numpy().tolist() == [6]


# --- TensorFlow in PyTorch


SHARES: dict[str, Callable[[Any], Any]] = {
    "assigned": lambda v: (other := tf.Variable(tf.zeros_like(v)), other.assign(v))[0],
    "identity": tf.identity,
    "another variable": tf.Variable,
    "a deep copy": copy.deepcopy,
    "its value": lambda v: v.value(),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("how", SHARES)
def test_an_optimizer_changes_no_other_tensor(how: str, shape: Any, dtype: str) -> None:
    online = tf.Variable(tf.cast(tf.fill(shape, 2), dtype))
    before = SHARES[how](online)
    module = torch_function(lambda x: x * online, variables=[online])
    (parameter,) = module.parameters()
    optimizer = torch.optim.SGD([parameter], 1.0)
    others = [before, SHARES[how](online)]
    for step in range(3):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert np.all(tf.cast(online, "complex64").numpy() == 1 - step)
        assert parameter.data_ptr() == tb.to_torch(online).data_ptr(), "in place"
        assert [complex(tf.cast(tf.reshape(other, [-1])[0], "complex64").numpy()) for other in others] == [
            2,
            2,
            *range(1, 1 - step, -1),
        ]
        others.append(SHARES[how](online))


def test_a_state_that_is_loaded_changes_no_other_tensor() -> None:
    variable = tf.Variable([1.0, 2.0])
    module = torch_function(lambda x: x * variable, variables=[variable])
    other = tf.identity(variable)
    torch.nn.Sequential(module).load_state_dict({"0.variables.0": torch.tensor([7.0, 8.0])})
    assert (variable.numpy().tolist(), other.numpy().tolist()) == ([7, 8], [1, 2])
    other = tf.identity(variable)
    module.unshare()
    with torch.no_grad():
        next(module.parameters()).zero_()
    assert (variable.numpy().tolist(), other.numpy().tolist()) == ([0, 0], [7, 8])


def test_a_variable_that_nothing_shares_stays_where_it_is() -> None:
    variable = tf.Variable(tf.zeros([64, 64]))
    module = torch_function(lambda x: x @ variable, variables=[variable])
    (parameter,) = module.parameters()
    optimizer, place = torch.optim.Adam([parameter]), parameter.data_ptr()
    for _ in range(3):
        module(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        assert parameter.data_ptr() == place == tb.to_torch(variable).data_ptr()


def test_modules_over_one_variable_have_one_parameter() -> None:
    variable = tf.Variable([2.0, 3.0])
    modules = [torch_function(lambda x: x * variable, variables=[variable]) for _ in range(2)]
    (first,), (second,) = (list(module.parameters()) for module in modules)
    assert first is second
    y = modules[0](torch.ones(2, requires_grad=True))
    with torch.no_grad():
        second.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


def test_what_pytorch_writes_reaches_no_gradient_of_tensorflow_and_no_frozen_variable() -> None:
    constant, frozen = tf.ones([20_000]), tf.Variable(tf.ones([20_000]), trainable=False)
    function = tf.custom_gradient(lambda x: (tf.identity(x), lambda _: constant))
    x = torch.zeros(20_000, requires_grad=True)
    y, other = torch_function(lambda x: (function(x), frozen))(x)
    y.sum().backward()
    for written in (x.grad, other.detach()):
        written.fill_(7)
    torch.nn.utils.clip_grad_norm_([x], 1e-3)
    assert constant.numpy().max() == frozen.numpy().max() == 1


def test_what_cannot_work_says_so() -> None:
    variable = tf.Variable([1.0])
    module = torch_function(lambda x: x * variable, variables=[variable])
    for call in (copy.deepcopy, pickle.dumps):
        assert kind(lambda call=call: call(module)) == "argument"  # type: ignore[misc]
    with torch.inference_mode():
        assert module(torch.ones(1)).tolist() == [1]
    assert module(torch.ones(1, requires_grad=True)).requires_grad


@pytest.mark.parametrize("steps", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS])
def test_a_closure_makes_the_gradients_of_a_step(steps: Any) -> None:
    online = tf.Variable([1.0, 2.0])
    module = torch_function(lambda x: (x * online) ** 2, variables=[online])
    optimizer = steps(module.parameters(), lr=0.1)
    target, seen = tf.Variable([0.0, 0.0]), []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = module(torch.ones(2)).sum()
        loss.backward()
        seen.append((online.numpy().copy(), tf.identity(online)))
        return loss

    target.assign(online)
    optimizer.step(closure)
    assert target.numpy().tolist() == [1, 2] and online.numpy().tolist() != [1, 2]
    assert all(np.array_equal(before, snapshot) for before, snapshot in seen)


def test_threads_that_only_read_do_not_see_a_step_half_done() -> None:
    weight = tf.Variable(np.ones((8, 8), np.float32))
    module = torch_function(lambda x: x @ weight, variables=[weight])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            with torch.no_grad():
                module(torch.ones(1, 8))

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        try:
            for _ in range(100):
                optimizer.zero_grad()
                module(torch.ones(1, 8)).sum().backward()
                optimizer.step()
        finally:
            done.set()
        reader.result()
    assert np.allclose(weight, 0, atol=1e-5)


def test_forward_accumulators_see_every_result_and_add_nothing() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    function = tf_function(lambda x: ((x * p).sqrt(), x**2))
    x = tf.constant([0.0, 4.0])
    with tf.autodiff.ForwardAccumulator(x, tf.ones(2)) as accumulator:
        root, square = function(x)
    assert accumulator.jvp(root).numpy().tolist() == [np.inf, 0.25]
    assert accumulator.jvp(square).numpy().tolist() == [0, 8]
    assert p.grad is None


def test_parameters_of_pytorch_inside_a_function_of_tensorflow_are_trained() -> None:
    p, weight = torch.nn.Parameter(torch.tensor([3.0])), tf.Variable([2.0])
    scaled = tf_function(lambda x: x * p)
    inner = torch_function(lambda x: tf.sin(x * weight), variables=[weight])
    outer = torch_function(lambda x: scaled(x) + tf_function(lambda y: inner(y) * p)(tf.ones(1)), variables=[weight])
    x = torch.tensor([0.5], requires_grad=True)
    outer(x).sum().backward()
    assert x.grad.tolist() == [3]
    assert np.allclose(p.grad, 0.5 + np.sin(2))
    assert np.allclose(inner.variables[0].grad, 3 * np.cos(2))
    assert kind(lambda: torch_function(scaled)(torch.ones(1))) == "argument"
    with torch.no_grad():
        assert outer(torch.ones(1)).shape == (1,)


@pytest.mark.parametrize("then", [lambda y: y, lambda y: 2 * y])
def test_the_gradient_of_a_parameter_shares_no_memory(then: Any) -> None:
    # PyTorch makes both of views of one tensor: of what it is handed, or of what it has made.
    constant, x = tf.ones([20_000]), tf.Variable(tf.zeros([20_000]))
    parameters = [torch.nn.Parameter(torch.zeros(200, 100)) for _ in range(2)]
    function = tf_function(lambda x: then(parameters[0].reshape(-1) + parameters[1].reshape(-1)) + x)
    with tf.GradientTape() as tape:
        y = function(x)
    tape.gradient(y, x, output_gradients=constant)
    for number, parameter in enumerate(parameters):
        parameter.grad.fill_(7 + number)
    assert [parameter.grad.max() for parameter in parameters] == [7, 8]
    assert constant.numpy().max() == 1


def test_parameters_are_not_replaced() -> None:
    variable = tf.Variable([1.0, 2.0])
    module = torch_function(lambda x: x * variable, variables=[variable])
    state = {name: value.clone() + 1 for name, value in module.state_dict().items()}
    assert kind(lambda: module.load_state_dict(state, assign=True)) == "argument"
    assert module(torch.ones(2)).tolist() == [1, 2]
    torch.nn.Sequential(module).load_state_dict({f"0.{name}": value for name, value in state.items()})
    assert variable.numpy().tolist() == [2, 3]
    module.variables[0] = torch.nn.Parameter(torch.zeros(2))
    assert kind(lambda: module(torch.ones(2))) == kind(module.unshare) == "argument"


# Functions of PyTorch inside a ``tf.function``: each run has its own gradient, in any order and on any thread.


cube = tf_function(lambda x: x**3, outputs=tf.TensorSpec([], tf.float32))
step = tf.function(lambda x: cube(x) + 1)


@tf.function  # type: ignore[untyped-decorator, unused-ignore]
def slope(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = cube(x)
    return tape.gradient(y, x)


def test_a_gradient_belongs_to_its_run_and_not_to_the_last_one() -> None:
    x, other = tf.Variable(2.0), tf.Variable(5.0)
    with tf.GradientTape() as tape:
        y = step(x)
    step(other)
    assert float(tape.gradient(y, x)) == 12


def test_two_runs_under_one_tape() -> None:
    x, other = tf.Variable(2.0), tf.Variable(5.0)
    with tf.GradientTape() as tape:
        y = step(x) + step(other)
    assert [float(found) for found in tape.gradient(y, [x, other])] == [12, 75]


def test_two_gradients_of_one_run() -> None:
    @tf.function  # type: ignore[untyped-decorator, unused-ignore]
    def both(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = cube(x)
            double = y * 2
        return tape.gradient(y, x), tape.gradient(double, x)

    assert [float(found) for found in both(tf.constant(2.0))] == [12, 24]


def test_threads_that_run_one_function() -> None:
    slope(tf.constant(1.0))
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda x: [float(slope(tf.constant(x))) for _ in range(50)], (1.0, 2.0, 3.0, 4.0))
        assert list(found) == [[3.0] * 50, [12.0] * 50, [27.0] * 50, [48.0] * 50]


@pytest.mark.parametrize("of", ["torch", "jax"])
def test_derivatives_of_any_order(of: Any) -> None:
    cubed = tf_function(lambda x: x**3, of=of, outputs=tf.TensorSpec([], tf.float32))

    @tf.function  # type: ignore[untyped-decorator, unused-ignore]
    def orders(x: Any) -> Any:
        with tf.GradientTape() as third:
            third.watch(x)
            with tf.GradientTape() as second:
                second.watch(x)
                with tf.GradientTape() as first:
                    first.watch(x)
                    y = cubed(x) + cubed(2 * x)
                one = first.gradient(y, x)
            two = second.gradient(one, x)
        return y, one, two, third.gradient(two, x)

    assert [float(found) for found in orders(tf.constant(2.0))] == [72, 108, 108, 54]


@pytest.mark.parametrize("how", ["only a parameter", "a detached input", "without parameters"])
def test_a_derivative_where_no_result_depends_on_the_input(how: str) -> None:
    """The first one is zeros there, and the second one is the derivative of zeros."""
    p = torch.nn.Parameter(torch.tensor(3.0))
    bodies = {
        "only a parameter": lambda x: p * 2,
        "a detached input": lambda x: p * x.detach(),
        "without parameters": lambda x: x.detach() * 3,
    }
    function = tf_function(bodies[how], outputs=tf.TensorSpec([], tf.float32))
    product = tf.function(lambda x: function(x) * x)
    x = tf.Variable(2.0)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            y = product(x)
        first = inner.gradient(y, x)
        square = first * first
    assert (float(y), float(first)) == (12, 6)
    assert float(outer.gradient(square, x)) == 0
    assert (p.grad is None) == (how == "without parameters")


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("of", ["torch", "jax"])
def test_a_loop_of_the_graph(of: Any, steps: int) -> None:
    layer = tf_function(lambda x, w: w * x**3, of=of, outputs=tf.TensorSpec([], tf.float32))
    x, w, same = tf.Variable(0.9), tf.Variable(0.8), torch.tensor([0.9, 0.8], requires_grad=True)

    @tf.function  # type: ignore[untyped-decorator, unused-ignore]
    def loop(x: Any) -> Any:
        for _ in tf.range(steps):
            x = 0.9 * layer(x, w) + 0.1 * x
        return x

    with tf.GradientTape() as second:
        with tf.GradientTape() as first:
            y = loop(x)
        one = first.gradient(y, [x, w])
    expected = same[0]
    for _ in range(steps):
        expected = 0.9 * same[1] * expected**3 + 0.1 * expected
    (slopes,) = torch.autograd.grad(expected, same, create_graph=True)
    (bends,) = torch.autograd.grad(slopes[0], same)
    found = [*one, *second.gradient(one[0], [x, w])]
    assert np.allclose(found, [*slopes.tolist(), *bends.tolist()], rtol=1e-4)


def test_parameters_and_integers_and_containers() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    outputs = {"rows": tf.TensorSpec([None], tf.float32), "rest": (tf.TensorSpec([], tf.int64),)}
    layer = tf_function(lambda x, i: {"rows": (x.sin() * weight)[i], "rest": (i.sum(),)}, outputs=outputs)
    x = tf.Variable([1.0, 2.0, 3.0])
    run = tf.function(lambda i: layer(x, i))
    with tf.GradientTape() as tape:
        first, second = run(tf.constant([0, 0, 2], tf.int64)), run(tf.constant([1], tf.int64))
        loss = tf.reduce_sum(first["rows"]) + tf.reduce_sum(second["rows"])
    assert [int(found["rest"][0]) for found in (first, second)] == [2, 1]
    assert np.allclose(tape.gradient(loss, x), np.cos([1, 2, 3]) * [2, 1, 1])
    assert np.allclose(weight.grad, np.sin([1, 2, 3]) * [2, 1, 1])


def test_a_graph_of_version_1_is_refused() -> None:
    with tf.Graph().as_default(), pytest.raises(tb.BridgeError) as error:
        cube(tf.compat.v1.placeholder(tf.float32, []))
    assert error.value.kind == "argument"


def test_a_run_that_is_not_differentiated_keeps_nothing() -> None:
    x = tf.Variable(2.0)
    step(x)
    with tf.GradientTape():
        step(x)
    before = memory.views()
    for _ in range(20):
        step(x)
        with tf.GradientTape() as tape:
            y = step(x)
    del tape, y
    assert memory.views() <= before + 2
