"""Tensors of other frameworks inside TensorFlow's graphs, on the host."""

import gc
import pickle
import re
import threading
import warnings
from typing import Any, List

import numpy as np
import pytest

import truebridge_tf1 as tb
from conftest import aligned, resident, wait_until
from truebridge_tf1 import _calls


def test_a_session_works_on_the_memory_of_torch(tf: Any, session: Any) -> None:
    torch = pytest.importorskip("torch")
    handle = tb.placeholder()
    x = tb.external_input(tf.float32, [None, 4], handle)
    same, result = tb.external_output(x), tb.external_output(2 * x + 1)
    assert x.shape.as_list() == [None, 4]
    for rows in (1, 2, 5):
        tensor = torch.rand(rows, 4)
        fetched = session.run([same, result], {handle: tb.feed(tensor)})
        view, computed = (torch.utils.dlpack.from_dlpack(tb.take(one)) for one in fetched)
        assert torch.equal(view, tensor)
        assert torch.equal(computed, 2 * tensor + 1)


def test_a_session_works_on_the_memory_of_numpy(tf: Any, session: Any) -> None:
    x = tb.external_input(tf.float32, [None, 3])
    same, result = tb.external_output(x), tb.external_output(x * x)
    array = aligned((5, 3))
    array[:] = np.arange(15).reshape(5, 3)
    fetched = session.run([same, result], {tb.handle_of(x): tb.feed(array, copy=False)})
    view, computed = (tb.take(one).numpy() for one in fetched)
    assert view.flags.writeable
    assert (view == array).all()
    assert (computed == array * array).all()
    view[0, 0] = 7
    assert array[0, 0] == 0


def test_gradients_are_taken(tf: Any, session: Any) -> None:
    x = tb.external_input(tf.float32, [3])
    weights = tf.constant([5.0, 6.0, 7.0])
    by_x, by_weights = tf.gradients(weights * x * x, [x, weights])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * x
    outputs = [tb.external_output(by_x), tb.external_output(tape.gradient(y, x)), by_weights]
    feeds = {tb.handle_of(x): tb.feed(np.array([1, 2, 3], np.float32))}
    by_graph, by_tape, by_weights = session.run(outputs, feeds)
    assert tb.take(by_graph).numpy().tolist() == [10, 24, 42]
    assert tb.take(by_tape).numpy().tolist() == [2, 4, 6]
    assert by_weights.tolist() == [1, 4, 9]
    assert tf.gradients(x, tb.handle_of(x)) == [None]


class Loud:
    """An object with much to say of itself."""

    def __repr__(self) -> str:
        return "loud" * 100000


def test_what_is_no_tensor_is_named(tf: Any, session: Any) -> None:
    for wrong in (object(), None, Loud(), tf.sparse.from_dense([1.0])):
        with pytest.raises(tb.BridgeTypeError, match="is not a tensor") as caught:
            tb.external_output(wrong)
        assert caught.value.kind == "not_a_tensor"
        assert len(str(caught.value)) < 500
    for dtype, shape, handle, kind in [
        ("no dtype", [1], None, "dtype"),
        (Loud(), [1], None, "dtype"),
        (tf.float32, "text", None, "argument"),
        (tf.float32, [-2], None, "argument"),
        (tf.float32, [1], Loud(), "argument"),
    ]:
        with pytest.raises(tb.BridgeError) as refused:
            tb.external_input(dtype, shape, handle)
        assert refused.value.kind == kind
        assert len(str(refused.value)) <= 300
    for wrong in (Loud(), [[1], [2, 3]]):
        with pytest.raises(tb.BridgeValueError, match="not a handle") as refused:
            tb.take(wrong)
        assert len(str(refused.value)) < 200


def test_what_has_no_handle_is_named(tf: Any, session: Any) -> None:
    for wrong in (tf.ones([2]), tf.ensure_shape(tf.ones([2]), [2]), 3, None):
        with pytest.raises(tb.BridgeValueError, match="not an external_input"):
            tb.handle_of(wrong)


def test_a_result_is_one_tensor_for_all(tf: Any, session: Any) -> None:
    torch = pytest.importorskip("torch")
    taken = tb.take(session.run(tb.external_output(tf.range(12.0))))
    tensor, other = torch.utils.dlpack.from_dlpack(taken), torch.utils.dlpack.from_dlpack(taken)
    array = np.asarray(taken)
    assert tensor.data_ptr() == other.data_ptr() == array.ctypes.data
    assert (taken.shape, taken.dtype, taken.device, taken.read_only) == ((12,), "float32", "cpu", False)
    assert repr(taken) == "<Taken: float32 [12] on cpu>"
    assert not hasattr(taken, "__cuda_array_interface__")
    del taken, other
    gc.collect()
    assert tensor.sum() == array.sum() == 66
    x = tb.external_input(tf.float32, [None])
    again = tb.take(session.run(tb.external_output(x + 1), {tb.handle_of(x): tb.feed(tensor)}))
    assert np.asarray(again, dtype=np.float64).sum() == 78


def test_what_was_taken_can_be_fed(tf: Any, session: Any) -> None:
    x = tb.external_input(tf.float32, [2])
    same, double = tb.external_output(x), tb.external_output(2 * x)
    taken = tb.take(session.run(double, {tb.handle_of(x): tb.feed(np.ones(2, np.float32))}))
    for power in range(2, 5):
        fed = tb.feed(taken, copy=False)
        view = tb.take(session.run(same, {tb.handle_of(x): fed}))
        assert (view.numpy() == taken.numpy()).all()
        taken = tb.take(session.run(double, {tb.handle_of(x): fed}))
        assert taken.numpy().tolist() == [2**power] * 2


def test_one_feed_serves_many_runs(tf: Any, session: Any) -> None:
    x = tb.external_input(tf.int64, [3])
    total = tf.reduce_sum(x)
    array = aligned(3, np.int64)
    array[:] = 1, 2, 3
    fed = tb.feed(array, copy=False)
    assert session.run(total, {tb.handle_of(x): fed}) == 6
    array[0] = 10
    assert session.run(total, {tb.handle_of(x): fed}) == 15
    assert session.run(total, {tb.handle_of(x): fed.copy()}) == 15


@pytest.mark.parametrize("shape", [[], [0], [2, 0, 3], [1, 1], [1, 2, 1, 3, 1]])
def test_every_shape_converts(tf: Any, session: Any, shape: List[int]) -> None:
    x = tb.external_input(tf.float64, shape)
    array = np.ones(shape)
    taken = tb.take(session.run(tb.external_output(x), {tb.handle_of(x): tb.feed(array)}))
    assert (taken.shape, taken.numpy().shape, taken.numpy().sum()) == (tuple(shape), tuple(shape), array.sum())
    torch = pytest.importorskip("torch")
    assert list(torch.utils.dlpack.from_dlpack(taken).shape) == shape


DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128"),
]


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_convert(tf: Any, session: Any, name: str) -> None:
    dtype = tf.as_dtype(name).as_numpy_dtype
    array = aligned(6, dtype)
    array[:] = np.array([1, 0, 1, 0, 0, 1]).astype(dtype)
    x = tb.external_input(name, [6])
    taken = tb.take(session.run(tb.external_output(x), {tb.handle_of(x): tb.feed(array, copy=False)}))
    assert taken.dtype == name
    assert taken.numpy().dtype == dtype
    assert (taken.numpy() == array).all()
    assert (taken.numpy().view(np.uint8) == array.view(np.uint8)).all()


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_convert_to_torch(tf: Any, session: Any, name: str) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, name) or name == "bool":
        pytest.skip("DLPack of PyTorch 1.13 has no " + name)
    tensor = torch.tensor([1, 0, 1, 0, 0, 1]).to(getattr(torch, name))
    x = tb.external_input(name, [6])
    taken = tb.take(session.run(tb.external_output(x), {tb.handle_of(x): tb.feed(tensor, copy=False)}))
    result = torch.utils.dlpack.from_dlpack(taken)
    assert result.dtype == tensor.dtype
    assert torch.equal(result, tensor)


def test_a_saved_graph_takes_an_external_input(tf: Any, session: Any) -> None:
    with tf.Graph().as_default() as trained:
        tf.identity(tf.compat.v1.placeholder(tf.float32, [None, 2], "x") + [[10.0, 20.0]], "y")
    x = tb.external_input(tf.float32, [None, 2])
    (y,) = tf.import_graph_def(trained.as_graph_def(), input_map={"x:0": x}, return_elements=["y:0"])
    fetched = session.run(tb.external_output(y), {tb.handle_of(x): tb.feed(np.ones((3, 2), np.float32))})
    assert tb.take(fetched).numpy().tolist() == [[11, 21]] * 3


def test_a_graph_with_the_operations_can_be_saved_and_loaded(tf: Any, session: Any) -> None:
    with tf.Graph().as_default() as built:
        x = tb.external_input(tf.float32, [None], name="x")
        tb.external_output(x + 1, name="y")
        names = [tb.handle_of(x).name, "y:0"]
    handle, y = tf.import_graph_def(built.as_graph_def(), return_elements=names, name="")
    fetched = session.run(y, {handle: tb.feed(np.ones(3, np.float32))})
    assert tb.take(fetched).numpy().tolist() == [2, 2, 2]


def test_variables_are_trained_on_what_is_fed(tf: Any, session: Any) -> None:
    x, t = tb.external_input(tf.float32, [None, 1]), tb.external_input(tf.float32, [None, 1])
    weight = tf.compat.v1.get_variable("weight", [1, 1], use_resource=True)
    loss = tf.reduce_mean((x @ weight - t) ** 2)
    step = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    session.run(tf.compat.v1.global_variables_initializer())
    inputs = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]
    feeds = {tb.handle_of(x): tb.feed(inputs), tb.handle_of(t): tb.feed(3 * inputs)}
    for _ in range(200):
        session.run(step, feeds)
    assert abs(tb.take(session.run(tb.external_output(weight), feeds)).numpy().item() - 3) < 1e-3


def test_what_is_fed_wrongly_is_named(tf: Any, session: Any) -> None:
    x = tb.external_input(tf.float32, [None, 2], name="weights")
    y = x + 1
    fed = tb.feed(np.ones((1, 2), np.float32))
    for wrong, words in [
        (tb.feed(np.ones((1, 2))), "float64, but float32 was declared.*weights"),
        (tb.feed(np.ones((1, 3), np.float32)), r"weights.*\[1,3\]"),
        (np.array([12345, 0], np.int32), "keep what feed returned.*weights"),
        (np.asarray(tb.feed(np.ones((1, 2), np.float32))).tolist(), "keep what feed returned.*weights"),
    ]:
        gc.collect()
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            session.run(y, {tb.handle_of(x): wrong})
        assert re.search(words, caught.value.message.replace("\n", " "))
    numbers = np.asarray(fed).tolist()
    session.run(y, {tb.handle_of(x): fed})
    del fed
    with pytest.raises(tf.errors.InvalidArgumentError, match="keep what feed returned"):
        session.run(y, {tb.handle_of(x): numbers})
    with pytest.raises(tf.errors.InvalidArgumentError, match="feed a value for placeholder"):
        session.run(y)


def test_each_result_is_taken_once(tf: Any, session: Any) -> None:
    gc.collect()
    before = tb.stats()["unclaimed"]
    fetched = session.run(tb.external_output(tf.ones([2])))
    assert tb.stats()["unclaimed"] == before + 1
    assert tb.take(fetched).numpy().tolist() == [1, 1]
    with pytest.raises(tb.BridgeBufferError, match="taken before") as caught:
        tb.take(fetched)
    assert caught.value.kind == "consumed"


def test_what_is_never_taken_goes_with_its_session_and_is_warned_of(tf: Any) -> None:
    gc.collect()
    # The first call warns of what other tests have not taken.
    tb.stats()
    before = tb.stats()
    with tf.Graph().as_default():
        session = tf.compat.v1.Session()
        y = tb.external_output(tf.ones([1000]))
        handles = [session.run(y) for _ in range(3)]
        assert tb.stats()["unclaimed"] == before["unclaimed"] + 3
        session.close()
        del session
    wait_until(lambda: _calls.counts()["reclaimed"] == before["reclaimed"] + 3)
    wait_until(lambda: _calls.counts()["unclaimed"] == before["unclaimed"])
    with pytest.warns(ResourceWarning, match="3 results of external_output were never taken"):
        with pytest.raises(tb.BridgeBufferError, match="session is closed"):
            tb.take(handles[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tb.stats()


def test_views_outlive_their_session(tf: Any) -> None:
    torch = pytest.importorskip("torch")
    with tf.Graph().as_default():
        session = tf.compat.v1.Session()
        y = tb.external_output(tf.range(100000.0))
        tensor = torch.utils.dlpack.from_dlpack(tb.take(session.run(y)))
        array = tb.take(session.run(y)).numpy()
        session.close()
        del session, y
    gc.collect()
    assert tensor.sum() == tensor[::2].sum() + tensor[1::2].sum()
    assert (array == np.arange(100000, dtype=np.float32)).all()
    assert (tensor.numpy() == array).all()


def test_runs_on_many_threads(tf: Any, session: Any) -> None:
    x = tb.external_input(tf.float32, [None])
    same, total = tb.external_output(x), tb.external_output(tf.reduce_sum(x))
    failed: List[Any] = []

    def work(seed: int) -> None:
        try:
            for round in range(50):
                array = aligned(257)
                array[:] = seed * 1000 + round
                fetched = session.run([same, total], {tb.handle_of(x): tb.feed(array)})
                view, sum = (tb.take(one).numpy() for one in fetched)
                assert (view == array).all()
                assert sum == (seed * 1000 + round) * 257
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]


def test_two_thousand_runs_leave_nothing(tf: Any, session: Any) -> None:
    torch = pytest.importorskip("torch")
    x = tb.external_input(tf.float32, [None])
    y = tb.external_output(x + 1)
    tensor = torch.zeros(250000)

    def run() -> None:
        fetched = session.run(y, {tb.handle_of(x): tb.feed(tensor)})
        assert torch.utils.dlpack.from_dlpack(tb.take(fetched))[-1] == 1

    for _ in range(100):
        run()
    gc.collect()
    stats, before = tb.stats(), resident()
    for _ in range(2000):
        run()
    gc.collect()
    after = tb.stats()
    assert after["leased"] == stats["leased"] + 4000
    wait_until(lambda: tb.stats()["released"] == stats["released"] + 4000)
    # Each run has made a megabyte, of which the allocator keeps a few.
    assert resident() - before < 50e6


def test_read_only_memory_stays_so(tf: Any, session: Any) -> None:
    torch = pytest.importorskip("torch")
    array = aligned(4)
    array.flags.writeable = False
    x = tb.external_input(tf.float32, [4])
    fetched = session.run(tb.external_output(x), {tb.handle_of(x): tb.feed(array, copy=False)})
    taken = tb.take(fetched)
    # A copy.
    assert not taken.read_only
    taken.numpy()[:] = 5
    assert torch.utils.dlpack.from_dlpack(taken).tolist() == [5] * 4
    assert array.tolist() == [0] * 4


def test_what_has_no_memory_is_no_output(tf: Any, session: Any) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="strings"):
        session.run(tb.external_output(tf.constant("text")))


def test_nonsense_is_refused(tf: Any, session: Any) -> None:
    with pytest.raises(tb.BridgeValueError, match="not a handle"):
        tb.external_input(tf.float32, [1], tf.constant([1, 2], tf.int64))
    with pytest.raises(tb.BridgeValueError, match="in each run"):
        tb.external_input(tf.float32, [1], tb.feed(np.ones(1)))
    with pytest.raises(TypeError):
        tb.external_input("float31", [1])
    for wrong in (3, [1, 2, 3], "handle", np.zeros(2)):
        with pytest.raises(tb.BridgeValueError, match="not a handle"):
            tb.take(wrong)
    with pytest.raises(tb.BridgeBufferError, match="not a result of external_output"):
        tb.take(np.array([-1, -1], np.int32))
    with pytest.raises(tb.BridgeBufferError, match="not a result of external_output"):
        tb.take(tb.feed(np.ones(1)))


def test_a_feed_stays_in_its_process(tf: Any) -> None:
    with pytest.raises(TypeError, match="valid in its process only"):
        pickle.dumps(tb.feed(np.ones(3)))


def test_consumers_that_ask_for_too_much_are_told(tf: Any, session: Any) -> None:
    taken = tb.take(session.run(tb.external_output(tf.ones([2]))))
    for arguments, words in [
        ({"dl_device": (2, 0)}, "is on cpu"),
        ({"copy": True}, "copy it with"),
        ({"stream": -2}, "stream -2"),
    ]:
        with pytest.raises(tb.BridgeValueError, match=words):
            taken.__dlpack__(**arguments)  # type: ignore[arg-type]
    assert taken.__dlpack__(dl_device=(1, 0), copy=False, stream=-1) is not None
