"""A result of a run is memory that nothing else has: no later run changes it, and it may be written."""

from typing import Any

import numpy as np
import pytest

import random_graphs
import truebridge_tf1 as tb
from memory import aligned


def test_a_result_is_the_value_of_its_run(tf: Any, session: Any) -> None:
    """1.15 makes reference variables unless it is told otherwise."""
    w = tf.compat.v1.get_variable("w", initializer=np.zeros(4, np.float32))
    values = [w, tf.identity(w), tf.reshape(w, [2, 2]), tf.bitcast(w, tf.uint32), w._ref()]
    outputs = [tb.external_output(y) for y in values]
    step = tf.compat.v1.assign_add(w, tf.ones(4))
    session.run(tf.compat.v1.global_variables_initializer())
    before = session.run(outputs)
    results = []
    for _ in range(3):
        session.run(step.op)
        results.append([tb.take(handle).numpy() for handle in session.run(outputs)])
    for number, run in enumerate([[tb.take(handle).numpy() for handle in before]] + results):
        assert all((y.view(np.float32) == number).all() for y in run)
        for y in run:
            y[...] = 0
    assert session.run(w).tolist() == [3] * 4


def test_a_result_of_eager_execution_does_not_change(tf: Any) -> None:
    """It is the memory of the tensor that the program has; a variable takes other memory when it is assigned to."""
    if not tf.executing_eagerly():
        pytest.skip("this process executes graphs")
    w = tf.Variable(np.zeros(4, np.float32))
    taken = tb.take(tb.external_output(w)).numpy()
    w.assign_add(tf.ones(4))
    assert taken.tolist() == [0] * 4


def test_what_is_fed_stays_the_callers(tf: Any, session: Any) -> None:
    x = tb.external_input(tf.float32, [4])
    array = aligned(4)
    array[:] = 1
    fetched = session.run(tb.external_output(tf.reshape(x, [2, 2])), {tb.handle_of(x): tb.feed(array, copy=False)})
    result = tb.take(fetched).numpy()
    array += 1
    assert result.tolist() == [[1, 1], [1, 1]]
    result[...] = 5
    assert array.tolist() == [2] * 4


@pytest.mark.parametrize("seed", range(50))
def test_random_graphs_return_what_a_session_of_tensorflow_returns(tf: Any, seed: int) -> None:
    assert random_graphs.case(seed) > 0


def test_more_dimensions_than_numpy_has_are_refused(tf: Any, session: Any) -> None:
    fetched = session.run(tb.external_output(tf.fill([1] * 33, 7.0)))
    taken = tb.take(fetched)
    assert taken.shape == (1,) * 33
    with pytest.raises(tb.BridgeValueError, match=r"33 dimensions.*at most 32: squeeze or reshape"):
        taken.numpy()
