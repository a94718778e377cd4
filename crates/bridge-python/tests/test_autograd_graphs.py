"""Functions of PyTorch inside a ``tf.function``: each run has a gradient of its own, in any order and on any thread."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")
tf: Any = pytest.importorskip("tensorflow")
from truebridge.autograd import tf_function  # noqa: E402

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
    wrong: list[Any] = []

    def work(number: float) -> None:
        for _ in range(50):
            found = float(slope(tf.constant(number)))
            if found != 3 * number**2:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1.0, 2.0, 3.0, 4.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_derivatives_of_any_order() -> None:
    @tf.function  # type: ignore[untyped-decorator, unused-ignore]
    def orders(x: Any) -> Any:
        with tf.GradientTape() as third:
            third.watch(x)
            with tf.GradientTape() as second:
                second.watch(x)
                with tf.GradientTape() as first:
                    first.watch(x)
                    y = cube(x)
                one = first.gradient(y, x)
            two = second.gradient(one, x)
        return y, one, two, third.gradient(two, x)

    assert [float(found) for found in orders(tf.constant(2.0))] == [8, 12, 12, 6]


@pytest.mark.parametrize("how", ["a parameter alone", "a detached input", "without parameters"])
def test_a_derivative_where_no_result_depends_on_the_input(how: str) -> None:
    """The first one is zeros there, and the second one is the derivative of zeros."""
    p = torch.nn.Parameter(torch.tensor(3.0))
    bodies = {
        "a parameter alone": lambda x: p * 2,
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
def test_a_loop_of_the_graph(steps: int) -> None:
    @tf.function  # type: ignore[untyped-decorator, unused-ignore]
    def loop(x: Any) -> Any:
        for _ in tf.range(steps):
            x = 0.9 * cube(x) + 0.1 * x
        return x

    x, same = tf.Variable(0.9), torch.tensor(0.9, requires_grad=True)
    with tf.GradientTape() as second:
        with tf.GradientTape() as first:
            y = loop(x)
        one = first.gradient(y, x)
    expected = same
    for _ in range(steps):
        expected = 0.9 * expected**3 + 0.1 * expected
    (first_order,) = torch.autograd.grad(expected, same, create_graph=True)
    (second_order,) = torch.autograd.grad(first_order, same)
    assert np.allclose([one, second.gradient(one, x)], [first_order.item(), second_order.item()], rtol=1e-4)


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
    def alive() -> int:
        gc.collect()
        stats = tb.stats()
        return stats["leased"] - stats["released"]

    x = tf.Variable(2.0)
    step(x)
    with tf.GradientTape():
        step(x)
    before = alive()
    for _ in range(20):
        step(x)
        with tf.GradientTape() as tape:
            y = step(x)
    del tape, y
    assert alive() <= before + 2
