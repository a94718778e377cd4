"""Moves between the host and CUDA devices, asked for by ``device=``: what arrives, after what, and what is refused."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")
cupy: Any = pytest.importorskip("cupy")
tf: Any = pytest.importorskip("tensorflow")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from devices import spin  # noqa: E402

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")

GIB = 1 << 30
# Long enough for several pieces, and no multiple of one.
LONG = (6 << 20) + 5
DTYPES = ["bool", "uint8", "float16", "float32", "float64", "complex64", "complex128"]


def on_tensorflow(array: Any, device: str) -> Any:
    with tf.device("/" + device.replace("cuda", "GPU")):
        return tf.identity(tf.constant(array))


# Each framework: how a tensor on a device is made of an array, and how its values are read, by the framework itself.
MAKE: dict[str, Callable[[Any, str], Any]] = {
    "torch": lambda array, device: torch.tensor(array, device=device),
    "cupy": lambda array, device: cupy.array(array),
    "numpy": lambda array, device: np.array(array),
    "tensorflow": on_tensorflow,
}
READ: dict[str, Callable[[Any], Any]] = {
    "torch": lambda tensor: tensor.resolve_conj().resolve_neg().cpu().numpy(),
    "cupy": lambda array: array.get(),
    "numpy": np.array,
    "tensorflow": lambda tensor: tensor.numpy(),
}
PLACES = {"torch": ("cpu", "cuda:0"), "cupy": ("cuda:0",), "numpy": ("cpu",), "tensorflow": ("cpu", "cuda:0")}
ENDS = [(name, place) for name, places in PLACES.items() for place in places]
DIRECTIONS = [(source, target) for source, target in itertools.product(ENDS, ENDS) if source[1] != target[1]]


def numbers(shape: Any, dtype: str, seed: int = 1) -> Any:
    values = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 100, size=shape)
    array = values.astype(dtype)
    return array * (1 - 2j) if dtype.startswith("complex") else array


@pytest.fixture
def side() -> Iterator[Any]:
    """A side stream that is current in torch and CuPy."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        yield cupy.cuda.ExternalStream(stream.cuda_stream)
        stream.synchronize()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*(((37, 53), dtype) for dtype in DTYPES), *((s, "uint8") for s in [(), (0,), (0, 3), (1,), (LONG,), (3, LONG)])],
)
@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_every_direction_dtype_and_length(source: Any, target: Any, shape: Any, dtype: str) -> None:
    array = numbers(shape, dtype)
    tensor = MAKE[source[0]](array, source[1])
    result = tb.convert(tensor, target[0], device=target[1])
    values = READ[target[0]](result)
    assert values.shape == array.shape and values.tobytes() == array.tobytes()
    if array.size:
        plan = tb.plan(tensor, target[0], device=target[1])
        assert (plan.zero_copy, plan.reason, plan.device) == (False, "another device", target[1])
        assert plan.copied_by == "move" and tb.plan(result, target[0]).device == target[1]


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_nothing_moves_unless_asked(source: tuple[str, str], target: tuple[str, str]) -> None:
    tensor = MAKE[source[0]](numbers((5,), "float32"), source[1])
    for call in (tb.convert, tb.plan):
        with pytest.raises(tb.BridgeError, match=f"on {source[1]}, not on {target[1]}") as caught:
            call(tensor, target[0], device=target[1], copy=False)
        assert caught.value.kind == "copy_needed"


STRIDED: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda x: x.T,
    "every other": lambda x: x[:, ::2],
    "a column": lambda x: x[:, 3],
    "a slice": lambda x: x[5:-3, 1:-1],
}


@pytest.mark.parametrize("view", STRIDED)
@pytest.mark.parametrize(
    ("source", "target"), [direction for direction in DIRECTIONS if direction[0][0] != "tensorflow"]
)
def test_strided_sources(source: tuple[str, str], target: tuple[str, str], view: str) -> None:
    array = numbers((300, 411), "float32")
    tensor = STRIDED[view](MAKE[source[0]](array, source[1]))
    result = tb.convert(tensor, target[0], device=target[1])
    assert np.array_equal(READ[target[0]](result), STRIDED[view](array))


def test_negative_and_broadcast_strides() -> None:
    array = numbers((40, 50), "float32")
    reversed_, spread = cupy.asarray(array)[::-1, ::-2], torch.tensor(array[0], device="cuda").expand(7, 50)
    assert np.array_equal(tb.to_numpy(reversed_, device="cpu"), array[::-1, ::-2])
    assert np.array_equal(tb.to_numpy(spread, device="cpu"), np.broadcast_to(array[0], (7, 50)))
    assert np.array_equal(tb.to_cupy(array[::-1, ::-2], device="cuda:0").get(), array[::-1, ::-2])


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_deferred_conjugation_and_negation(dtype: str) -> None:
    array = numbers((33, 21), dtype)
    down, up = torch.tensor(array, device="cuda"), torch.tensor(array)
    assert np.array_equal(tb.to_numpy(down.conj(), device="cpu"), array.conj())
    assert np.array_equal(tb.to_numpy(down.conj().imag, device="cpu"), array.conj().imag)
    assert np.array_equal(tb.to_cupy(up.conj().mT, device="cuda:0").get(), array.conj().T)
    assert np.array_equal(tb.to_cupy(up.conj().imag, device="cuda:0").get(), array.conj().imag)


def test_a_move_with_an_order_and_a_permutation() -> None:
    array = numbers((6, 7, 8), "float32")
    result = tb.to_cupy(array, device="cuda:0", order="F", permute=(2, 0, 1))
    assert result.flags.f_contiguous
    assert np.array_equal(result.get(), array.transpose(2, 0, 1))
    back = tb.to_numpy(result, device="cpu", order="F")
    assert back.flags.f_contiguous
    assert np.array_equal(back, array.transpose(2, 0, 1))


@pytest.mark.parametrize("target", ["torch", "cupy", "tensorflow"])
@pytest.mark.parametrize("source", ["torch", "cupy", "tensorflow"])
def test_a_move_through_the_host_and_back(source: str, target: str) -> None:
    expected = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    x = MAKE[source](expected, "cuda:0")
    plan = tb.plan(x, target, via="host")
    assert (plan.nbytes, plan.device, plan.copied_by, plan.reason) == (2 * 96, "cuda:0", "move", 'via="host"')
    y = tb.convert([x], target, via="host", permute=(2, 0, 1))[0]
    assert tb.plan(y, target).device == "cuda:0"
    assert np.array_equal(READ[target](y), expected.transpose(2, 0, 1))
    with tb.trace() as trace:
        tb.convert(x, target, via="host")
    assert [event.device for event in trace.events] == ["cuda:0", "cpu"]
    y = tb.convert(x, "numpy" if target == "cupy" else target, via="host", device="cpu")
    assert tb.plan(y, "torch").device == "cpu"


def test_the_result_has_memory_of_its_own() -> None:
    array = numbers((LONG,), "uint8")
    up = tb.to_torch(array, device="cuda:0")
    array_before = array.copy()
    up.zero_()
    torch.cuda.synchronize()
    assert np.array_equal(array, array_before)
    down = tb.to_numpy(up, device="cpu")
    assert down.flags.writeable
    down[:] = 7
    assert not up.any()
    array.flags.writeable = False
    assert tb.to_torch(array, device="cuda:0").sum(dtype=torch.int64).item() == array_before.sum(dtype=np.int64)


def test_pinned_memory_moves_in_both_directions() -> None:
    for nbytes in (1000, LONG, 4 * LONG):
        array = numbers((nbytes,), "uint8")
        pinned = torch.from_numpy(array).pin_memory()
        up = tb.to_cupy(pinned, device="cuda:0")
        pinned.zero_()
        assert np.array_equal(up.get(), array)


# --- order


@pytest.mark.usefixtures("uninterrupted")
@pytest.mark.parametrize("n", [1 << 10, LONG])
@pytest.mark.parametrize("target", ["torch", "cupy"])
def test_a_move_up_has_read_its_source_and_is_before_later_work(side: Any, target: str, n: int) -> None:
    array, wrong = np.zeros(n, np.uint8), 0
    for value in range(1, 51):
        array[:] = value
        spin(side, 5_000_000)
        result = tb.convert(array, target, device="cuda:0")
        array[:] = 0
        read = result + 0
        del result
        junk = torch.full((n,), 99, device="cuda", dtype=torch.uint8)
        wrong += not bool((READ[target](read) == value).all())
        del junk
    assert wrong == 0


@pytest.mark.usefixtures("uninterrupted")
def test_the_host_does_not_wait_for_a_short_move_up(side: Any) -> None:
    array = np.ones(1000, np.float32)
    tb.to_torch(array, device="cuda:0")
    spin(side, 2_000_000_000)
    result = tb.to_torch(array, device="cuda:0")
    assert not side.done, "the stream still runs, so the host has not waited"
    assert bool((result == 1).all())


def test_other_threads_run_while_the_host_waits() -> None:
    """The stream waits for a flag that only another Python thread can set."""
    code = """
    extern "C" __global__ void wait(volatile int* flag, int* seen, long long limit) {
        long long start = clock64();
        while (*flag == 0 && clock64() - start < limit);
        *seen = *flag;
    }"""
    memory = cupy.cuda.alloc_pinned_memory(4)
    flag = np.frombuffer(memory, np.int32, 1)
    flag[0] = 0
    stream, seen = cupy.cuda.Stream(non_blocking=True), cupy.zeros(1, np.int32)
    kernel = cupy.RawKernel(code, "wait")
    cupy.cuda.Device().synchronize()
    began, result = threading.Event(), []

    def move() -> None:
        with stream:
            kernel((1,), (1,), (memory.ptr, seen, 20_000_000_000))
            began.set()
            result.append(int(tb.to_numpy(seen, device="cpu")[0]))

    thread = threading.Thread(target=move)
    thread.start()
    began.wait()
    flag[0] = 1
    thread.join()
    assert result == [1]


def test_a_captured_stream_moves_nothing() -> None:
    tensor = torch.ones(1000, device="cuda")
    tb.to_numpy(tensor, device="cpu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        kept = tensor * 2
        with pytest.raises(tb.BridgeError) as caught:
            tb.to_numpy(tensor, device="cpu")
    assert caught.value.kind == "captured"
    graph.replay()
    torch.cuda.synchronize()
    assert bool((kept == 2).all())


# --- devices and sizes


def test_memory_is_returned() -> None:
    tensor = torch.ones(64 << 20, device="cuda", dtype=torch.uint8)
    tb.to_tensorflow(tb.to_numpy(tensor, device="cpu"), device="cuda:0")
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(200):
        # Neither TensorFlow's results nor those of a strided source may keep what the driver's pool gave them.
        result = tb.to_tensorflow(tb.to_numpy(tensor[::2], device="cpu"), device="cuda:0")
        del result
    torch.cuda.synchronize()
    gc.collect()
    assert before - torch.cuda.mem_get_info()[0] < GIB


def test_more_than_two_gib() -> None:
    n = 3 * GIB + 1
    memory = {line.split(":")[0]: int(line.split()[1]) << 10 for line in open("/proc/meminfo")}
    if torch.cuda.mem_get_info()[0] < 8 * n or memory["MemAvailable"] < 4 * n:
        pytest.skip("too little memory")
    tensor = torch.empty(n, dtype=torch.uint8, device="cuda").random_()
    down = tb.to_numpy(tensor, device="cpu")
    up = tb.to_torch(down, device="cuda:0")
    assert torch.equal(up, tensor)
    del up
    strided = tb.to_numpy(tensor.view(-1)[: 3 * GIB].view(3, GIB).t(), device="cpu")
    assert np.array_equal(strided, down[: 3 * GIB].reshape(3, GIB).T)


@two_gpus
@pytest.mark.parametrize("target", ["torch", "cupy", "tensorflow"])
@pytest.mark.parametrize("view", STRIDED)
def test_between_two_devices(target: str, view: str) -> None:
    array = numbers((300, 411), "float32")
    tensor = STRIDED[view](torch.tensor(array, device="cuda:0"))
    result = tb.convert(tensor, target, device="cuda:1")
    assert tb.plan(result, target).device == "cuda:1"
    with cupy.cuda.Device(1):
        assert np.array_equal(READ[target](result), STRIDED[view](array))


@two_gpus
def test_between_two_devices_both_streams_are_ordered() -> None:
    wrong, n = 0, 1 << 22
    first, second = torch.cuda.Stream("cuda:0"), torch.cuda.Stream("cuda:1")
    for value in range(1, 51):
        with torch.cuda.stream(first), torch.cuda.stream(second):
            with torch.cuda.stream(first):
                spin(cupy.cuda.ExternalStream(first.cuda_stream), 5_000_000)
                tensor = torch.full((n,), value, device="cuda:0", dtype=torch.int32)
            result = tb.to_torch(tensor, device="cuda:1")
            del tensor
            with torch.cuda.stream(first):
                junk = torch.full((n,), -1, device="cuda:0", dtype=torch.int32)
            with torch.cuda.device(1), torch.cuda.stream(second):
                wrong += not bool((result == value).all())
            del junk
    assert wrong == 0


# ``progress=`` of moves between the host and a CUDA device.


#: A move of so many bytes takes several looks.
MANY = 1 << 31
HOST: Any = np.arange(MANY // 4, dtype=np.int32)


def down(progress: Any) -> Any:
    return tb.to_numpy(torch.from_numpy(HOST).cuda(), device="cpu", progress=progress)


def up(progress: Any) -> Any:
    return tb.to_torch(HOST, device="cuda", progress=progress).cpu().numpy()


def into(progress: Any) -> Any:
    return tb.copy(HOST, out=torch.zeros(len(HOST), dtype=torch.int32, device="cuda"), progress=progress).cpu().numpy()


@pytest.fixture
def told() -> list[tuple[float, float]]:
    """What a function was told: how much is done, and of how much."""
    return []


def whole(told: list[tuple[float, float]], total: int) -> bool:
    """Return whether a function was told of each step to the end of one total."""
    return told == sorted(told) and told[-1] == (total, total) and {each for _, each in told} == {total}


@pytest.mark.parametrize("move", [down, up, into])
def test_a_move_is_told_to_its_end(move: Callable[[Any], Any], told: Any) -> None:
    assert (move(lambda *step: told.append(step)) == HOST).all()
    assert whole(told, MANY)


@pytest.mark.usefixtures("leaks_nothing")
@pytest.mark.parametrize("move", [down, up, into])
def test_an_exception_ends_a_move_and_leaves_nothing(move: Callable[[Any], Any]) -> None:
    class Enough(Exception):
        """Of a user."""

    def stop(done: float, total: float) -> None:
        raise Enough(done)

    def stop_at_the_end(done: float, total: float) -> None:
        if done == total:
            raise StopIteration

    torch.cuda.empty_cache()
    for stops in (stop, stop_at_the_end):
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with pytest.raises((Enough, StopIteration)):
            move(stops)
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
    assert (move(None) == HOST).all()


def test_a_tree_has_one_total(told: Any) -> None:
    parts = {"a": HOST[: 1 << 28], "b": [HOST[1 << 28 :], 3]}
    moved = tb.to_torch(parts, device="cuda", progress=lambda *step: told.append(step))
    assert whole(told, MANY) and (moved["b"][0].cpu().numpy() == parts["b"][0]).all()


def test_a_copied_tree_has_one_total_and_tensors_in_place_are_not_of_it(told: Any) -> None:
    source = {"a": HOST[: 1 << 28], "b": torch.ones(8, device="cuda")}
    target = {"a": torch.zeros(1 << 28, dtype=torch.int32, device="cuda"), "b": torch.zeros(8, device="cuda")}
    tb.copy(source, out=target, progress=lambda *step: told.append(step))
    assert whole(told, 1 << 30)
    assert (target["a"].cpu().numpy() == source["a"]).all() and target["b"].sum() == 8


def test_the_function_may_move_tensors_itself(told: Any) -> None:
    def tell(*step: float) -> None:
        told.append(step)
        assert tb.to_torch(HOST[: 1 << 25], device="cuda")[-1] == (1 << 25) - 1

    assert (up(tell) == HOST).all() and whole(told, MANY)


def test_memory_that_is_pinned_is_one_step(told: Any) -> None:
    tb.to_torch(torch.ones(1 << 24).pin_memory(), device="cuda", progress=lambda *step: told.append(step))
    assert told == [(1 << 26, 1 << 26)]
