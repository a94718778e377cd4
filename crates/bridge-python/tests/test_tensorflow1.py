"""Tensors of other frameworks in sessions of the real TensorFlow 1.15, on the host."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from capsules import Producer
from graphs import FLOATS, aligned, line, on_host, placeholder, saved, tf, v1
from memory import counts, eventually, resident, views

torch: Any = pytest.importorskip("torch")

#: What 1.15 has of what DLPack has.
DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
]


@pytest.fixture(scope="module")
def session() -> Iterator[tb.tensorflow.v1.Session]:
    """Gives 2 x + 1 and x."""
    with on_host(line(), {"x:0": FLOATS}, ["y:0", "x:0"]) as session:
        yield session


@pytest.fixture(autouse=True)
def everything_is_taken() -> Iterator[None]:
    before = counts()
    yield
    eventually(lambda: all(tb.stats()[name] == before[name] for name in ("unclaimed", "reclaimed")))


# --- values


def test_a_session_works_on_the_memory_of_torch(session: Any) -> None:
    for count in (1, 2, 1000):
        tensor = torch.rand(count)
        computed, same = session.run({"x:0": tensor}, "torch", copy=False)
        assert torch.equal(computed, 2 * tensor + 1)
        assert torch.equal(same, tensor)
        computed, same = session.run({"x": tensor})
        assert (same.shape, same.dtype, same.device) == ((count,), "float32", "cpu")
        assert same.handle != computed.handle
        assert repr(computed) == f"<Tensor: float32 [{count}] on cpu>"


def test_the_profile_is_that_of_1_15() -> None:
    assert tb.tensorflow.v1.open().startswith("1.15.")
    profile = tb.profile("tensorflow1")
    assert (profile["name"], sorted(profile["dtypes"])) == ("tensorflow1", sorted(DTYPES))
    assert (profile["strides"], profile["alignment"], profile["keeps_read_only"]) == ("compact", 64, True)


def bits_of(name: str) -> Any:
    """Bytes that mean something in every dtype, of which one element has no more than 16."""
    return (torch.arange(192) % (2 if name == "bool" else 251)).to(torch.uint8)


@pytest.mark.parametrize("name", DTYPES)
def test_tensorflow_reads_every_dtype_in_place(name: str) -> None:
    x = placeholder
    graph = saved(lambda: tf.concat([x(name, [None])] * 2, 0, name="y"))
    bits = bits_of(name)
    tensor = bits.clone().view(getattr(torch, name))
    with on_host(graph, {"x:0": (name, [None])}, ["y:0", "x:0"]) as session:
        for given in (name, getattr(torch, name), getattr(tf, name)):
            with on_host(graph, {"x:0": (given, [None])}, ["y:0"]):
                pass
        twice, same = session.run({"x:0": tensor}, "torch", copy=False)
        assert (same.dtype, twice.dtype) == (tensor.dtype, tensor.dtype)
        assert torch.equal(same.view(torch.uint8), bits)
        assert torch.equal(twice.view(torch.uint8), bits.repeat(2))


@pytest.mark.parametrize("name", DTYPES)
def test_what_tensorflow_makes_of_every_dtype_is_exported(name: str) -> None:
    graph = saved(lambda: tf.constant(np.array([1, 0, 1, 1]), name, name="y"))
    with on_host(graph, {}, ["y:0"]) as session:
        (result,) = session.run({})
    tensor, array = tb.to_torch(result, copy=False), tb.to_numpy(result, copy=False)
    assert tensor.data_ptr() == array.ctypes.data == result.address
    assert (result.dtype, result.shape) == (name, (4,))
    assert (tensor.dtype, tensor.tolist()) == (getattr(torch, name), [1, 0, 1, 1])
    assert (array.dtype, array.tolist()) == (np.dtype(name) if name != "bfloat16" else array.dtype, [1, 0, 1, 1])


@pytest.mark.parametrize("shape", [[], [0], [2, 0, 3], [1, 1], [2, 3, 4, 1, 2]])
def test_every_shape_converts(shape: list[int]) -> None:
    graph = saved(lambda: tf.identity(placeholder("float64"), name="y"))
    tensor = torch.rand(shape, dtype=torch.float64)
    for declared in (shape, [None] * len(shape), None):
        with on_host(graph, {"x:0": ("float64", declared)}, ["y:0"]) as session:
            (result,) = session.run({"x": tensor}, "torch")
            assert (list(result.shape), result.dtype) == (shape, torch.float64)
            assert torch.equal(result, tensor)


#: Tensors that TensorFlow cannot take as they are, and why.
COPIED: dict[str, tuple[Callable[[], Any], str]] = {
    "transposed": (lambda: torch.arange(12.0).reshape(3, 4).T, "strides"),
    "every other": (lambda: torch.arange(12.0)[::2], "strides"),
    "broadcast": (lambda: torch.arange(3.0).expand(2, 3), "strides"),
    "unaligned": (lambda: torch.arange(12.0)[1:], "unaligned"),
    "backwards": (lambda: np.arange(12.0, dtype=np.float32)[::-1], "negative strides"),
    "unaligned array": (lambda: aligned(np.arange(12, dtype=np.float32))[3:], "unaligned"),
}


@pytest.mark.parametrize("case", COPIED)
def test_what_does_not_fit_is_copied_or_refused(case: str) -> None:
    make, reason = COPIED[case]
    x = make()
    values = tb.to_torch(x, copy=True)
    graph = saved(lambda: tf.negative(placeholder(), name="y"))
    with on_host(graph, {"x": ("float32",)}, ["y", "x"]) as session:
        for copy in (None, True):
            result, same = session.run({"x": x}, "torch", copy=copy)
            assert torch.equal(result, -values)
            assert torch.equal(same, values)
        with pytest.raises(tb.BridgeBufferError, match=reason) as caught:
            session.run({"x": x}, "torch", copy=False)
        assert caught.value.kind == "copy_needed"
    plan = tb.plan(x, "tensorflow1")
    assert (plan.zero_copy, plan.nbytes) == (False, values.nbytes)
    assert reason in str(plan.reason)


def test_a_copy_is_other_memory(session: Any) -> None:
    tensor = torch.arange(16.0)
    assert tb.plan(tensor, "tensorflow1").zero_copy
    fed, copied = tb.convert(tensor, "tensorflow1", copy=False), tb.convert(tensor, "tensorflow1", copy=True)
    assert fed.address == tensor.data_ptr() != copied.address
    results = [session.run({"x": fed}, copy=copy)[1] for copy in (False, True)]
    assert len({tensor.data_ptr(), copied.address, *(result.address for result in results)}) == 4
    tensor.zero_()
    assert tb.to_torch(fed).tolist() == [0] * 16
    assert all(tb.to_torch(other).tolist() == list(range(16)) for other in (copied, *results))
    assert tb.to_numpy(fed, copy=True).ctypes.data != fed.address


def test_read_only_memory_stays_so(session: Any) -> None:
    array = aligned(np.arange(16, dtype=np.float32))
    writes = tb.convert(array, "tensorflow1")
    array.flags.writeable = False
    reads = tb.convert(array, "tensorflow1", copy=False)
    # The memory is read-only for every consumer of TensorFlow's tensor.
    assert writes.read_only and reads.read_only
    view = tb.to_numpy(reads)
    assert (view.flags.writeable, view.ctypes.data) == (False, array.ctypes.data)
    with pytest.raises(tb.BridgeBufferError, match="read-only") as caught:
        tb.to_torch(reads)
    assert caught.value.kind == "read_only"
    assert tb.to_torch(reads, copy=True).tolist() == array.tolist()
    # Results are not that memory.
    for fed in (reads, array):
        results = session.run({"x": fed})
        assert not any(result.read_only for result in results)
        assert all(tb.to_numpy(result).flags.writeable for result in results)
        assert torch.equal(tb.to_torch(results[1]), torch.arange(16.0))
    del reads, view, fed, results
    gc.collect()
    assert not writes.read_only


# --- runs


def test_a_result_is_fed_again_here_and_elsewhere(session: Any) -> None:
    x = tb.convert(torch.tensor([0.0, 1.0]), "tensorflow1")
    addresses = set()
    for _ in range(5):
        x, before = session.run({"x": x})
        addresses.update((x.address, before.address))
    assert tb.to_torch(x).tolist() == [2**5 - 1, 2**6 - 1]
    graph = saved(lambda: tf.multiply(placeholder(name="a"), placeholder(name="b"), name="y"))
    with on_host(graph, {"a:0": FLOATS, "b:0": FLOATS}, ["y:0", "a:0", "b:0"]) as other:
        product, first, second = other.run({"b:0": before, "a:0": x})
    assert (tb.to_torch(first).tolist(), tb.to_torch(second).tolist()) == ([31, 63], [15, 31])
    assert tb.to_torch(product).tolist() == [31 * 15, 63 * 31]
    assert x.address in addresses


def test_what_was_converted_serves_many_runs(session: Any) -> None:
    before, tensor = views(), torch.arange(4.0)
    fed = tb.convert(tensor, "tensorflow1")
    for value in range(5):
        tensor[0] = value
        computed, same = session.run({"x": fed}, "torch")
        assert (computed.tolist(), same.tolist()) == ([2 * value + 1, 3, 5, 7], [value, 1, 2, 3])
    eventually(lambda: views() == before + 3)


def test_a_ring_of_all_four_is_the_same_memory(session: Any) -> None:
    first = torch.arange(16.0)
    view = tb.to_numpy(tb.convert(first, "tensorflow1", copy=False), copy=False)
    in_two = tb.to_tensorflow(view, copy=False)
    back = tb.convert(in_two, "tensorflow1", copy=False)
    computed, same = session.run({"x": back})
    assert (tb.to_tensorflow(computed, copy=False) - 1).numpy().tolist() == (2 * first).tolist()
    with tf.Graph().as_default(), tf.compat.v1.Session() as graph, tf.device("CPU:0"):
        x = tb.tensorflow.external_input(tf.float32, [None])
        fetched = graph.run(
            tb.tensorflow.external_output(2 * x), {tb.tensorflow.handle_of(x): tb.tensorflow.feed(same, copy=False)}
        )
        last = tb.tensorflow.take(fetched, "tensorflow1")
    assert torch.equal(tb.to_torch(last, copy=False), 2 * first)
    assert back.address == tb.to_torch(back, copy=False).data_ptr() == first.data_ptr()


def test_a_graph_of_other_inputs_than_placeholders() -> None:
    def build() -> None:
        weights = tf.constant([1.0, 2.0], name="weights")
        _, second = tf.split(weights * 3, 2, name="halves")
        tf.add(second, 1, name="y")

    graph = saved(build)
    with on_host(graph, {"weights": FLOATS}, ["y"]) as session:
        assert session.run({"weights": torch.tensor([5.0, 7.0])}, "torch")[0].tolist() == [22]
    with on_host(graph, {"halves:1": FLOATS}, ["halves:0", "y", "halves:1"]) as session:
        first, y, second = session.run({"halves:1": torch.tensor([5.0, 7.0])}, "torch")
    assert (first.tolist(), y.tolist(), second.tolist()) == ([3], [6, 8], [5, 7])


def test_one_name_will_do() -> None:
    with on_host(tf.compat.v1.GraphDef.FromString(line()), {"x": "float32"}, "y:0") as session:
        assert session.run({"x": torch.ones(2, 2)}, "torch")[0].tolist() == [[3, 3], [3, 3]]


def test_what_waits_for_a_placeholder_waits_for_what_is_fed() -> None:
    def build() -> None:
        x = placeholder(shape=[None])
        with tf.control_dependencies([x]):
            tf.constant([5.0], name="y")

    with on_host(saved(build), {"x": FLOATS}, ["y"]) as session:
        assert session.run({"x": torch.ones(2)}, "torch")[0].tolist() == [5]


def test_a_layer_of_a_network() -> None:
    weights = np.arange(12, dtype=np.float32).reshape(4, 3)
    graph = saved(lambda: tf.nn.relu(tf.matmul(placeholder(shape=[None, 4]), tf.constant(weights)) - 50, name="y"))
    with on_host(graph, {"x": ("float32", [None, 4])}, ["y"]) as session:
        for rows in (1, 5):
            x = torch.arange(4.0 * rows).reshape(rows, 4)
            expected = torch.relu(x @ torch.from_numpy(weights) - 50)
            assert torch.equal(session.run({"x": x}, "torch")[0], expected)
    assert 0 < (expected == 0).sum() < expected.numel()


def test_outputs_come_in_the_order_in_which_they_were_declared() -> None:
    a, b = torch.ones(2), torch.arange(4)
    graph = saved(lambda: (placeholder(name="a"), placeholder("int64", name="b")))
    for outputs in (["b:0", "a"], ["a", "b", "a:0"]):
        with on_host(graph, {"b": ("int64", [4]), "a": ("float32", None)}, outputs) as session:
            results = session.run({"a": a, "b": b}, "torch")
        expected = {"a": a.tolist(), "b": b.tolist()}
        assert [result.tolist() for result in results] == [expected[name[0]] for name in outputs]


@pytest.mark.parametrize("config", [None, {"GPU": 0}, {"CPU": 2, "GPU": 0}])
def test_an_output_that_1_15_computes_on_another_device_of_the_host(config: Any) -> None:
    """It stacks uint32 only on XLA_CPU, as TensorFlow's own session does without ``allow_soft_placement``."""
    x = np.arange(3, dtype=np.uint32)
    graph = saved(lambda: tf.stack([placeholder("uint32", [3])] * 2, name="y"))
    options = {} if config is None else {"config": v1.ConfigProto(device_count=config)}
    if config is None and torch.cuda.is_available():
        pytest.skip("this session has a GPU")
    with tb.tensorflow.v1.Session(graph, {"x": ("uint32", [3])}, "y", **options) as session:
        first, second = (session.run({"x": x}, "numpy")[0] for _ in range(2))
    assert (first.tolist(), second.tolist()) == ([[0, 1, 2]] * 2, [[0, 1, 2]] * 2)
    first[...] = 7
    assert second.tolist() == [[0, 1, 2]] * 2


def test_more_of_the_configuration_is_given_as_tensorflow_has_it() -> None:
    config = v1.ConfigProto(device_count={"CPU": 2, "GPU": 0})
    inputs = {"x": ("float32", [None], "/device:CPU:1")}
    for given in (config, config.SerializeToString()):
        options: dict[str, Any] = {"memory_growth": False, "memory_fraction": 0.5, "visible_devices": [0]}
        with tb.tensorflow.v1.Session(line(), inputs, ["y"], config=given, **options) as session:
            processors = [name for name in session.devices if "/device:CPU:" in name]
            assert [name.rpartition("/")[2] for name in processors] == ["device:CPU:0", "device:CPU:1"]
            assert session.run({"x": torch.ones(2)}, "numpy")[0].tolist() == [3, 3]


def test_the_configuration_wins_also_where_it_says_false() -> None:
    def build() -> None:
        with tf.device("/device:GPU:7"):
            tf.add(2 * placeholder(shape=[None]), 1, name="y")

    graph = saved(build)
    hard, soft = (v1.ConfigProto(device_count={"GPU": 0}, allow_soft_placement=allowed) for allowed in (False, True))
    for elsewhere in ({"config": soft}, {}):
        with tb.tensorflow.v1.Session(graph, {"x": FLOATS}, ["y"], **elsewhere) as session:
            device = session.devices[0]
            tensor = torch.ones(2, device="cuda" if any("GPU" in name for name in session.devices) else "cpu")
            assert session.run({"x": tensor}, "torch")[0].tolist() == [3, 3], device
    with pytest.raises(tb.BridgeRuntimeError, match="Cannot assign a device"):
        tb.tensorflow.v1.Session(graph, {"x": FLOATS}, ["y"], config=hard).run({"x": torch.ones(2)})


def test_threads_may_run_a_session_at_once(session: Any) -> None:
    wrong = []

    def work(seed: int) -> None:
        for i in range(100):
            tensor = torch.full((64,), float(1000 * seed + i))
            computed, same = session.run({"x": tensor}, "torch" if i % 2 else None)
            right = torch.equal(tb.to_torch(same), tensor) and bool(
                (tb.to_numpy(computed) == 2000 * seed + 2 * i + 1).all()
            )
            if not right:
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def slow() -> bytes:
    """One thread takes a good part of a second to run this."""

    def build() -> None:
        x = placeholder("float64", [None])
        y = x
        for _ in range(2):
            y = x + 0 * tf.math.igamma(x + 1e6, x + 1e6 + 0 * y)
        tf.identity(y, name="y")

    return saved(build)


def test_a_session_may_be_closed_during_a_run_which_lets_others_work() -> None:
    one_thread = v1.ConfigProto(device_count={"GPU": 0}, intra_op_parallelism_threads=1, use_per_session_threads=True)
    session = tb.tensorflow.v1.Session(slow(), {"x": ("float64", [None])}, ["y"], config=one_thread)
    results: list[Any] = []
    tensor = torch.arange(1e5, dtype=torch.float64)
    leased = tb.stats()["leased"]
    thread = threading.Thread(target=lambda: results.extend(session.run({"x": tensor}, "torch")))
    thread.start()
    eventually(lambda: tb.stats()["leased"] > leased)
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
        if turns == 10:
            session.close()
    assert turns > 20, "closing has waited for the run, no other thread has run, or the run was too short to tell"
    assert torch.equal(results[0], tensor)
    with pytest.raises(tb.BridgeValueError, match="closed"):
        session.run({"x": tensor})


# --- life


def test_results_outlive_their_session() -> None:
    session = on_host(line(), {"x": FLOATS}, ["y", "x"])
    tensor = torch.arange(1e5)
    computed, same = session.run({"x": tensor}, "torch")
    kept, _ = session.run({"x": tensor})
    session.close()
    session.close()
    with on_host(line(), {"x": FLOATS}, ["y"]) as other:
        junk = [other.run({"x": torch.zeros(100_000)}) for _ in range(8)]
        assert torch.equal(computed, 2 * tensor + 1)
        assert torch.equal(tb.to_torch(kept), 2 * tensor + 1)
        assert tb.to_torch(other.run({"x": kept})[0])[-1] == 4 * 99_999 + 3
    assert torch.equal(same, tensor)
    del junk


def test_the_memory_lives_as_long_as_somebody_needs_it(session: Any) -> None:
    array = aligned(np.arange(1000, dtype=np.float32))
    alive = weakref.ref(array)
    fed = tb.convert(array, "tensorflow1")
    results = session.run({"x": fed})
    view = tb.to_torch(fed)
    del array, fed
    gc.collect()
    assert alive() is not None
    assert view.sum().item() == 499500
    assert view.data_ptr() == alive().ctypes.data
    del view
    eventually(lambda: alive() is None)
    assert tb.to_torch(results[1]).sum().item() == 499500


def test_every_export_is_given_back_once(session: Any) -> None:
    before = counts()
    given_back: list[int] = []
    for i in range(100):
        array = aligned(np.full(64, i, np.float32))
        weakref.finalize(array, given_back.append, i)
        computed, same = session.run({"x": array})
        all_views = [tb.to_torch(same), tb.to_numpy(same), tb.to_numpy(computed)]
        assert i not in given_back
        del array, computed, same, all_views
    eventually(lambda: len(given_back) == 100)
    assert sorted(given_back) == list(range(100))
    assert tb.stats()["leased"] == before["leased"] + 400
    eventually(lambda: tb.stats()["released"] == before["released"] + 400)


@pytest.mark.parametrize("legacy", [False, True])
def test_the_deleter_of_a_capsule_runs_once(session: Any, legacy: bool) -> None:
    producer, memory = Producer(legacy=legacy), aligned(np.arange(8, dtype=np.float32))
    producer.tensor.data = memory.ctypes.data
    fed = tb.convert(producer.capsule(), "tensorflow1", copy=False)
    computed, same = session.run({"x": fed})
    assert (fed.address, producer.deleted) == (memory.ctypes.data, 0)
    assert tb.to_numpy(computed).tolist() == (2 * memory + 1).tolist()
    view = tb.to_torch(fed)
    session.run({"x": fed})
    del fed, computed, same
    gc.collect()
    assert (view.tolist(), producer.deleted) == (memory.tolist(), 0)
    del view
    eventually(lambda: producer.deleted > 0)
    assert producer.deleted == 1


def test_tensors_may_be_dropped_on_any_thread(session: Any) -> None:
    results = [session.run({"x": torch.full((64,), float(i))}) for i in range(50)]
    threads = [threading.Thread(target=results.pop) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not results


def test_a_failed_feed_keeps_nothing(session: Any) -> None:
    array = aligned(np.zeros((2, 2), np.float32))
    alive = weakref.ref(array)
    for arguments in ({"x": array, "z": array}, {"x": array}):
        with pytest.raises(tb.BridgeValueError):
            session.run(arguments)
    del array, arguments
    gc.collect()
    assert alive() is None


def test_thousands_of_runs_do_not_grow_the_process(session: Any) -> None:
    tensor = torch.ones(1 << 15)

    def runs(count: int) -> None:
        for i in range(count):
            session.run({"x": tensor}, "torch")
            if i % 10 == 0:
                tb.to_numpy(session.run({"x": torch.ones(1 << 15)})[0])
                session.run({"x": tensor[1:]}, copy=True)

    runs(100)
    gc.collect()
    before = resident()
    runs(1000)
    gc.collect()
    assert resident() - before < 8 << 20


def test_a_conversion_takes_microseconds(session: Any) -> None:
    """A look at TensorFlow's list of operations takes 10 ms, a thousand times as long as a conversion."""
    tensor = torch.ones(64)

    def seconds(target: Any) -> float:
        begun = time.perf_counter()
        for _ in range(100):
            tb.convert(tensor, target)
        return time.perf_counter() - begun

    seconds("tensorflow1")
    assert min(seconds("tensorflow1") for _ in range(5)) < 200 * max(seconds("numpy") for _ in range(5))


def test_hundreds_of_sessions_do_not_grow_the_process() -> None:
    constant = np.random.default_rng(1).random(1 << 17, np.float32)
    graph = saved(lambda: tf.add(placeholder(shape=[1 << 17]), tf.constant(constant), name="y"))
    tensor = torch.ones(1 << 17)

    def sessions(count: int) -> None:
        for i in range(count):
            session = on_host(graph, {"x": ("float32", [1 << 17])}, ["y"])
            session.run({"x": tensor})
            if i % 2:
                session.close()

    sessions(20)
    gc.collect()
    before = resident()
    sessions(200)
    gc.collect()
    assert resident() - before < 16 << 20
