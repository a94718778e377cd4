"""TensorFlow 1.15 that executes eagerly."""

import gc
import subprocess
import sys
import weakref
from typing import Any, Iterator

import numpy as np
import pytest

import random_graphs
import truebridge_tf1 as tb
from conftest import aligned


@pytest.fixture(autouse=True)
def eager(tf: Any) -> Iterator[None]:
    from tensorflow.python.eager import context

    with context.eager_mode():
        yield


def test_a_tensor_of_torch_is_an_eager_tensor_and_back(tf: Any) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.rand(4, 8)
    x = tb.external_input(tf.float32, [None, 8], tb.feed(tensor))
    assert x.shape.as_list() == [4, 8]
    assert torch.utils.dlpack.from_dlpack(tb.take(tb.external_output(x))).data_ptr() == tensor.data_ptr()
    computed = torch.utils.dlpack.from_dlpack(tb.take(tb.external_output(2 * x + 1)))
    assert torch.equal(computed, 2 * tensor + 1)
    tensor[0, 0] = 77
    assert tb.take(tb.external_output(x[0])).numpy()[0] == 77


def test_the_memory_lives_as_long_as_the_tensor(tf: Any) -> None:
    from conftest import wait_until

    array = aligned(8)
    alive = weakref.ref(array)
    x = tb.external_input(tf.float32, [8], tb.feed(array, copy=False))
    address = array.ctypes.data
    del array
    gc.collect()
    taken = tb.take(tb.external_output(x))
    del x
    gc.collect()
    assert taken.numpy().ctypes.data == address
    assert alive() is not None
    del taken
    # Eager tensors are let go by TensorFlow, and their owners by the library's own thread.
    wait_until(lambda: alive() is None)


@pytest.mark.parametrize("shape", [[], [0], [2, 0, 3], [1, 1]])
@pytest.mark.parametrize("name", ["bool", "int32", "float16", "bfloat16", "complex128", "uint8"])
def test_dtypes_and_shapes_convert(tf: Any, name: str, shape: Any) -> None:
    array = np.ones(shape, np.float32).astype(tf.as_dtype(name).as_numpy_dtype)
    x = tb.external_input(name, shape, tb.feed(array))
    taken = tb.take(tb.external_output(x))
    assert (taken.dtype, taken.shape) == (name, tuple(shape))
    assert (taken.numpy() == array).all()


def test_gradients_are_taken_by_what_is_fed(tf: Any) -> None:
    x = tb.external_input(tf.float32, [3], tb.feed(np.array([1, 2, 3], np.float32)))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * x
    assert tb.take(tb.external_output(tape.gradient(y, x))).numpy().tolist() == [2, 4, 6]


def test_gradients_are_taken_in_and_through_a_function(tf: Any) -> None:
    @tf.function
    def both(handle: Any, weights: Any) -> Any:
        x = tb.external_input(tf.float32, [None], handle)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * x
        return tb.external_output(tape.gradient(y, x)), tf.reduce_sum(weights * weights * x)

    fed = tb.feed(np.array([1, 2, 3], np.float32))
    variable = tf.Variable([1.0, 2.0, 3.0])
    with tf.GradientTape() as tape:
        fetched, loss = both(tf.convert_to_tensor(fed), variable)
    assert tb.take(fetched).numpy().tolist() == [2, 4, 6]
    assert tape.gradient(loss, variable).numpy().tolist() == [2, 8, 18]
    with pytest.raises(tb.BridgeValueError, match="not an external_input"):
        tb.handle_of(tb.external_input(tf.float32, [3], fed))


def test_the_place_is_named_as_tensorflow_names_it(tf: Any, monkeypatch: Any) -> None:
    """TensorFlow shows the driver's GPUs 3 and 1 as its own 0 and 1."""
    from tensorflow.python.eager import context
    from tensorflow.python.framework import ops

    from truebridge_tf1._graph import Operations

    operations = Operations.get()
    asked = []

    def execute(operation: str, name: str, device: str, argument: Any) -> Any:
        asked.append(device)
        return tf.constant([0, {"/device:GPU:0": 3, "/device:GPU:1": 1}[device]], tf.int64)

    monkeypatch.setattr(operations, "_gpus", {})
    monkeypatch.setattr(operations, "execute", execute)
    monkeypatch.setattr(type(context.context()), "num_gpus", lambda _: 2)
    monkeypatch.setattr(ops.EagerTensor, "gpu", lambda tensor, _: tensor)
    assert [operations.gpu(number) for number in (1, 3, 1)] == ["/device:GPU:1", "/device:GPU:0", "/device:GPU:1"]
    assert asked == ["/device:GPU:0", "/device:GPU:1"]
    with pytest.raises(tb.BridgeValueError, match="is on cuda:0, and TensorFlow shows cuda:1, cuda:3"):
        operations.gpu(0)


def test_what_is_wrong_is_named(tf: Any) -> None:
    fed = tb.feed(np.ones(2, np.float32))
    with pytest.raises(tf.errors.InvalidArgumentError, match="float32, but float64 was declared.*weights"):
        tb.external_input(tf.float64, [2], fed, name="weights")
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[2\].*weights"):
        tb.external_input(tf.float32, [3], fed, name="weights")
    with pytest.raises(tf.errors.InvalidArgumentError, match="keep what feed returned.*weights"):
        tb.external_input(tf.float32, [3], np.array([999999, 0], np.int32), name="weights")
    with pytest.raises(tb.BridgeValueError, match="pass the result of feed"):
        tb.external_input(tf.float32, [2])
    with pytest.raises(tb.BridgeValueError, match="not a handle"):
        tb.external_input(tf.float32, [2], np.ones(2))
    fetched = tb.external_output(tf.ones([2]))
    assert tb.take(fetched).numpy().tolist() == [1, 1]
    with pytest.raises(tb.BridgeBufferError, match="taken before"):
        tb.take(fetched)


def test_a_function_takes_the_handle_as_a_tensor(tf: Any) -> None:
    traced = []

    @tf.function
    def double(handle: Any) -> Any:
        x = tb.external_input(tf.float32, [None, 3], handle)
        traced.append(x.shape.as_list())
        return tb.external_output(2 * x), x + 1

    for rows in (2, 2, 7):
        array = np.random.rand(rows, 3).astype(np.float32)
        fed = tb.feed(array)
        fetched, eager = double(tf.convert_to_tensor(fed))
        gc.collect()
        assert (tb.take(fetched).numpy() == 2 * array).all()
        assert (eager.numpy() == array + 1).all()
    assert traced == [[None, 3]]
    # TensorFlow raises its own error for what is raised while it traces.
    with pytest.raises(Exception, match="convert_to_tensor"):
        double(tb.feed(np.ones((2, 3), np.float32)))


@pytest.mark.parametrize("mode", ["SYNC", "ASYNC"])
def test_eager_execution_is_enabled_as_programs_do(tf: Any, mode: str) -> None:
    code = f"""
import numpy as np, tensorflow as tf, truebridge_tf1 as tb
tf.compat.v1.enable_eager_execution(execution_mode=tf.contrib.eager.{mode})
for i in range(20):
    x = tb.external_input(tf.float32, [None], tb.feed(np.full(1000, i, np.float32)))
    assert (tb.take(tb.external_output(x * 2)).numpy() == 2 * i).all()
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    x = tb.external_input(tf.float32, [None])
    fetched = session.run(tb.external_output(x + 1), {{tb.handle_of(x): tb.feed(np.ones(4, np.float32))}})
    assert tb.take(fetched).numpy().tolist() == [2] * 4
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


# A result of a run is memory that nothing else has: no later run changes it, and it may be written.


def test_a_result_is_the_value_of_its_run(tf: Any, session: Any) -> None:
    """1.15 makes reference variables by default."""
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
