"""Tensors of other frameworks inside TensorFlow's graphs, on the host and on a GPU where there is one."""

from __future__ import annotations

import gc
import pickle
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from memory import counts, eventually

torch: Any = pytest.importorskip("torch")
tf: Any = pytest.importorskip("tensorflow")

graph = tb.tensorflow


#: PyTorch's and TensorFlow's names of the devices.
PLACES = {"cpu": "CPU:0"}
if torch.cuda.is_available() and tf.config.list_physical_devices("GPU"):
    PLACES["cuda"] = "GPU:0"


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def session(device: str) -> Iterator[Any]:
    with tf.Graph().as_default(), tf.device(PLACES[device]), tf.compat.v1.Session() as session:
        yield session


@pytest.fixture(autouse=True)
def everything_is_taken() -> Iterator[None]:
    before = counts()["unclaimed"]
    yield
    eventually(lambda: counts()["unclaimed"] == before)


def test_a_session_works_on_the_memory_of_torch(session: Any, device: str) -> None:
    handle = graph.placeholder()
    x = graph.external_input(tf.float32, [None, 4], handle)
    same, result = graph.external_output(x), graph.external_output(2 * x + 1)
    assert x.shape.as_list() == [None, 4]
    for rows in (1, 2, 5):
        tensor = torch.rand(rows, 4, device=device)
        fetched = session.run([same, result], {handle: graph.feed(tensor)})
        view, computed = (graph.take(one, "torch") for one in fetched)
        assert torch.equal(view, tensor)
        assert torch.equal(computed, 2 * tensor + 1)


def test_a_function_is_traced_once(device: str) -> None:
    traced = []

    @tf.function
    def double(handle: Any) -> Any:
        with tf.device(PLACES[device]):
            x = graph.external_input(tf.float32, [None, 3], handle)
            traced.append(x.shape.as_list())
            return graph.external_output(2 * x), x + 1

    for rows in (2, 2, 7):
        tensor = torch.rand(rows, 3, device=device)
        fetched, eager = double(graph.feed(tensor))
        assert torch.equal(graph.take(fetched, "torch"), 2 * tensor)
        assert torch.equal(tb.to_torch(eager), tensor + 1)
    assert traced == [[None, 3]]


def test_one_feed_serves_many_runs(session: Any, device: str) -> None:
    x = graph.external_input(tf.int64, [3])
    total = tf.reduce_sum(x)
    tensor = torch.tensor([1, 2, 3], device=device)
    fed = graph.feed(tensor)
    assert session.run(total, {graph.handle_of(x): fed}) == 6
    tensor[0] = 10
    fed = graph.feed(tensor)
    assert session.run(total, {graph.handle_of(x): fed}) == 15
    assert session.run(total, {graph.handle_of(x): fed.copy()}) == 15


def test_the_memory_lives_as_long_as_a_run_or_a_view_needs_it(session: Any, device: str) -> None:
    x = graph.external_input(tf.float32, [1000])
    fetched = session.run(
        graph.external_output(x), {graph.handle_of(x): graph.feed(torch.arange(1000.0, device=device))}
    )
    gc.collect()
    view = graph.take(fetched, "torch")
    gc.collect()
    assert torch.equal(view, torch.arange(1000.0, device=device))


@pytest.mark.parametrize("shape", [[], [0], [2, 0, 3], [1, 1]])
def test_every_shape_converts(session: Any, device: str, shape: list[int]) -> None:
    x = graph.external_input(tf.float64, shape)
    tensor = torch.ones(shape, dtype=torch.float64, device=device)
    result = graph.take(session.run(graph.external_output(x), {graph.handle_of(x): graph.feed(tensor)}), "torch")
    assert (list(result.shape), result.dtype, result.sum()) == (shape, torch.float64, tensor.sum())


@pytest.mark.parametrize("name", ["int32", "bool", "bfloat16", "complex128", "uint8", "int64"])
def test_dtypes_convert(session: Any, device: str, name: str) -> None:
    x = graph.external_input(name, [3])
    tensor = torch.tensor([1, 0, 1], device=device).to(getattr(torch, name))
    result = graph.take(session.run(graph.external_output(x), {graph.handle_of(x): graph.feed(tensor)}), "torch")
    assert torch.equal(result.to(device), tensor)


def test_what_is_fed_wrongly_is_named(session: Any, device: str) -> None:
    x = graph.external_input(tf.float32, [None, 2], name="weights")
    y = x + 1
    for wrong, words in [
        (
            graph.feed(torch.ones(1, 2, dtype=torch.float64, device=device)),
            "weights.*float64, but float32 was declared",
        ),
        (graph.feed(torch.ones(1, 3, device=device)), r"weights.*\[1,3\]"),
        (np.array([12345, 0], np.int32), "weights.*keep what feed returned"),
        (
            np.asarray(graph.feed(torch.ones(1, 2, device=device))).tolist(),
            "weights.*keep what feed returned",
        ),
    ]:
        gc.collect()
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            session.run(y, {graph.handle_of(x): wrong})
        assert re.search(words, caught.value.message.replace("\n", " "))
    with pytest.raises(tf.errors.InvalidArgumentError, match="feed a value for placeholder"):
        session.run(y)


def test_each_result_is_taken_once(session: Any, device: str) -> None:
    before = counts()["unclaimed"]
    fetched = session.run(graph.external_output(tf.ones([2])))
    assert tb.stats()["unclaimed"] == before + 1
    with pytest.raises(tb.BridgeValueError, match="choose one of"):
        graph.take(fetched, "caffe")
    assert graph.take(fetched, "torch").tolist() == [1, 1]
    with pytest.raises(tb.BridgeBufferError, match="taken before") as caught:
        graph.take(fetched, "numpy")
    assert caught.value.kind == "consumed"


@pytest.mark.parametrize("device", ["cpu"])
def test_results_that_nobody_takes_go_with_the_session(device: str) -> None:
    with tf.Graph().as_default(), tf.device(PLACES[device]):
        x = graph.external_input(tf.float32, [None])
        y, session = graph.external_output(2 * x), tf.compat.v1.Session()
        before, taken = counts(), []
        for length in (1, 2, 3):
            feed = graph.feed(torch.ones(length, device=device))
            # Another set of results makes TensorFlow build its kernels anew.
            taken.append(session.run([y] * length, {graph.handle_of(x): feed})[0])
        kept = graph.take(taken[1], "torch")
        assert tb.stats()["unclaimed"] == before["unclaimed"] + 2
        session.close()
        del session
    eventually(lambda: tb.stats()["reclaimed"] == before["reclaimed"] + 2)
    assert tb.stats()["unclaimed"] == before["unclaimed"]
    assert kept.tolist() == [2, 2]
    with pytest.warns(ResourceWarning, match="2 results of external_output were never taken"):
        graph.feed(torch.ones(1))
    with pytest.raises(tb.BridgeBufferError, match="its session is closed") as caught:
        graph.take(taken[0], "torch")
    assert caught.value.kind == "consumed"


def test_results_outlive_a_function_that_is_called_once(device: str) -> None:
    def double(handle: Any) -> Any:
        return graph.external_output(2 * graph.external_input(tf.float32, [None], handle))

    feed = graph.feed(torch.ones(3, device=device))
    with tf.device(PLACES[device]):
        fetched = tf.function(double)(feed)
    gc.collect()
    assert graph.take(fetched, "torch").tolist() == [2, 2, 2]


def test_a_failed_take_leaves_the_result(session: Any) -> None:
    memory = aligned(4)
    memory.flags.writeable = False
    with tf.device("CPU:0"):
        x = graph.external_input(tf.float32, [4])
        y = graph.external_output(x)
    fetched = session.run(y, {graph.handle_of(x): graph.feed(memory)})
    # CuPy has no tensors on the host, and may be missing.
    with pytest.raises(tb.BridgeError):
        graph.take(fetched, "cupy")
    # A copy of the read-only memory.
    assert graph.take(fetched, "numpy").flags.writeable


def aligned(length: int) -> Any:
    """A float32 array where TensorFlow takes it in place."""
    memory = np.zeros(4 * length + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + 4 * length].view(np.float32)


def test_gradients_are_taken_in_a_graph(session: Any, device: str) -> None:
    x = graph.external_input(tf.float32, [3])
    weights = tf.constant([5.0, 6.0, 7.0])
    by_x, by_weights = tf.gradients(tf.reduce_sum(weights * x * x), [x, weights])
    fed = graph.feed(torch.tensor([1.0, 2.0, 3.0], device=device))
    results = session.run([graph.external_output(by_x), by_weights], {graph.handle_of(x): fed})
    assert graph.take(results[0], "torch").tolist() == [10, 24, 42]
    assert results[1].tolist() == [1, 4, 9]
    # Nothing leads from a number to the tensor that it stands for.
    assert tf.gradients(x, graph.handle_of(x)) == [None]


def test_gradients_are_taken_in_a_function(device: str) -> None:
    @tf.function
    def watched(handle: Any) -> Any:
        with tf.device(PLACES[device]):
            x = graph.external_input(tf.float32, [None], handle)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x * x
            return graph.external_output(tape.gradient(y, x))

    fed = graph.feed(torch.tensor([1.0, 2.0, 3.0], device=device))
    assert graph.take(watched(fed), "torch").tolist() == [2, 4, 6]


def test_gradients_are_taken_through_a_function(device: str) -> None:
    """TensorFlow then builds the gradient by all that the function takes, its handle among it."""

    @tf.function
    def loss(handle: Any, weights: Any) -> Any:
        with tf.device(PLACES[device]):
            x = graph.external_input(tf.float32, [None], handle)
            return tf.reduce_sum(weights * weights * x), graph.external_output(weights + x)

    variable = tf.Variable([1.0, 2.0, 3.0])
    fed = tf.convert_to_tensor(kept := graph.feed(torch.tensor([1.0, 2.0, 3.0], device=device)))
    with tf.GradientTape() as tape:
        value, fetched = loss(fed, variable)
    assert (value.numpy(), tape.gradient(value, variable).numpy().tolist()) == (36, [2, 8, 18])
    assert graph.take(fetched, "torch").tolist() == [2, 4, 6]
    del kept


def test_unaligned_memory_is_copied_or_refused(session: Any, device: str) -> None:
    x = graph.external_input(tf.float32, [None])
    tensor = torch.arange(16.0, device=device)[1:]
    assert session.run(tf.reduce_sum(x), {graph.handle_of(x): graph.feed(tensor)}) == 120
    with pytest.raises(tb.BridgeBufferError, match="unaligned"):
        graph.feed(tensor, copy=False)


@pytest.mark.skipif("cuda" not in PLACES, reason="no GPU")
def test_the_place_of_an_input_is_checked(session: Any, device: str) -> None:
    x = graph.external_input(tf.float32, [2])
    other = torch.ones(2, device="cpu" if device == "cuda" else "cuda")
    with pytest.raises(tf.errors.InvalidArgumentError, match="under tf.device"):
        session.run(x + 1, {graph.handle_of(x): graph.feed(other)})


@pytest.mark.skipif("cuda" not in PLACES, reason="no GPU")
@pytest.mark.parametrize("device", ["cuda"])
def test_a_run_waits_for_the_work_on_what_is_fed_and_reuse_for_the_run(session: Any) -> None:
    x = graph.external_input(tf.float32, [1 << 20])
    y = graph.external_output(x + 0)
    side = torch.cuda.Stream()
    for value in range(20):
        with torch.cuda.stream(side):
            tensor = torch.zeros(1 << 20, device="cuda")
            torch.cuda._sleep(20_000_000)
            tensor += value
            fed = graph.feed(tensor)
            del tensor
        fetched = session.run(y, {graph.handle_of(x): fed})
        del fed
        with torch.cuda.stream(side):
            garbage = torch.full((1 << 20,), -1.0, device="cuda")
        assert bool((graph.take(fetched, "torch") == value).all())
        del garbage


@pytest.mark.parametrize("device", ["cpu"])
def test_what_has_no_memory_is_no_output(session: Any) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="strings"):
        session.run(graph.external_output(tf.constant("text")))


def test_graphs_only() -> None:
    with pytest.raises(tb.BridgeValueError, match="to_tensorflow"):
        graph.external_input(tf.float32, [1])
    with pytest.raises(tb.BridgeValueError, match="convert"):
        graph.external_output(tf.ones(1))
    # TensorFlow raises its own error for what is raised while it traces.
    with pytest.raises(Exception, match="pass the handle"):
        tf.function(lambda: graph.external_input(tf.float32, [1])).get_concrete_function()
    with pytest.raises(tb.BridgeValueError, match="not a handle"), tf.Graph().as_default():
        graph.external_input(tf.float32, [1], tf.constant([1, 2], tf.int64))
    with tf.Graph().as_default():
        for wrong in (tf.ones([2]), tf.ensure_shape(tf.ones([2]), [2]), 3, None):
            with pytest.raises(tb.BridgeValueError, match="not an external_input"):
                graph.handle_of(wrong)
    with pytest.raises(tb.BridgeValueError, match="not an external_input"):
        graph.handle_of(tf.ones([2]))
    for wrong in (3, [1, 2, 3], "handle", np.zeros(2), [[1], [2, 3]], Loud()):
        with pytest.raises(tb.BridgeValueError, match="not a handle") as caught:
            graph.take(wrong, "torch")
        assert len(str(caught.value)) < 200


class Loud:
    """An object with much to say of itself."""

    def __repr__(self) -> str:
        return "loud" * 100_000


def test_a_dtype_of_another_framework_is_taken(session: Any) -> None:
    for dtype in (torch.bfloat16, "bfloat16", tf.bfloat16):
        assert graph.external_input(dtype, [2]).dtype == tf.bfloat16


def test_what_is_no_tensor_of_a_graph_is_named(session: Any) -> None:
    for wrong in (1.0, [1.0], None, np.ones(2), Loud(), tf.sparse.from_dense([1.0]), torch.ones(2)):
        with pytest.raises(
            tb.BridgeTypeError, match=f"type {type(wrong).__name__} is not a tensor of a graph"
        ) as caught:
            graph.external_output(wrong)
        assert caught.value.kind == "not_a_tensor"
        assert len(str(caught.value)) < 200
    for dtype, shape, handle, kind in [
        ("no dtype", [1], None, "dtype"),
        (Loud(), [1], None, "dtype"),
        (None, [1], None, "dtype"),
        (tf.float32, "text", None, "argument"),
        (tf.float32, [-2], None, "argument"),
        (tf.float32, [1 << 63], None, "argument"),
        (tf.float32, [Loud()], None, "argument"),
        (tf.float32, [1], Loud(), "argument"),
    ]:
        with pytest.raises(tb.BridgeError) as refused:
            graph.external_input(dtype, shape, handle)
        assert refused.value.kind == kind
        assert len(str(refused.value)) <= 300


def test_a_feed_stays_in_its_process() -> None:
    fed = graph.feed(torch.ones(3))
    with pytest.raises(TypeError, match="valid in its process only"):
        pickle.dumps(fed)
