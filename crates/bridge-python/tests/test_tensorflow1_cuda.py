"""Tensors on a CUDA device in sessions of TensorFlow 1.15: in place, in the order of the streams, next to other users.

TensorFlow 1.15 compiles each kernel for a newer GPU at first use, which takes long. So the tests compute only sums
and products of two float32 tensors of one shape, of more than one element, and graphs are run as they were built: the
optimiser would make other operations of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import memory
import truebridge as tb
from graphs import AS_BUILT, FLOATS, double, has_gpu, placeholder, saved, tf
from memory import resident

torch: Any = pytest.importorskip("torch")
cupy: Any = pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

COUNT = 1 << 20
X = {"x:0": FLOATS}

if not has_gpu():
    pytest.skip("TensorFlow 1.15 has no GPU", allow_module_level=True)


def on_device(graph: bytes, inputs: Mapping[str, Any], outputs: Sequence[str]) -> tb.tensorflow.v1.Session:
    """A session that uses the GPU."""
    return tb.tensorflow.v1.Session(graph, inputs, outputs, config=AS_BUILT)


@pytest.fixture(scope="module")
def session() -> Iterator[tb.tensorflow.v1.Session]:
    """Gives x + x and x. Kernels are compiled, and memory is reserved, the first time."""
    with on_device(double(), X, ["y:0", "x:0"]) as session:
        for _ in range(2):
            for result in session.run({"x": torch.ones(COUNT, device="cuda")}):
                tb.to_cupy(result).copy()
                tb.to_tensorflow(result)
                tb.to_torch(result, copy=True)
        del result
        settled()
        yield session


@pytest.fixture(autouse=True)
def everything_is_taken() -> Iterator[None]:
    before = memory.counts()["unclaimed"]
    yield
    memory.eventually(lambda: tb.stats()["unclaimed"] == before)


def settled() -> dict[str, int]:
    torch.cuda.synchronize()
    return memory.settled()


# --- in place


def test_a_session_works_on_the_memory_of_torch_and_cupy(session: Any) -> None:
    for x in (torch.rand(4096, device="cuda"), cupy.random.rand(4096).astype("float32")):
        computed, same = session.run({"x": x})
        assert tb.convert(x, "tensorflow1", copy=False).address == pointer(x) != same.address
        assert (same.device, computed.device) == ("cuda:0", "cuda:0")
        for target in ("torch", "cupy"):
            assert pointer(tb.convert(same, target, copy=False)) == same.address
            assert pointer(tb.convert(computed, target, copy=False)) == computed.address
            assert bool((tb.convert(computed, target) == tb.convert(x, target) * 2).all())


def pointer(x: Any) -> int:
    return int(x.data.ptr if isinstance(x, cupy.ndarray) else x.data_ptr())


def test_a_product_and_a_sum_of_tensors_of_three_frameworks() -> None:
    def build() -> None:
        two, x, one = (placeholder(shape=[64, 64], name=name) for name in ("two", "x", "one"))
        tf.add(two * x, one, name="y")

    inputs = {name: ("float32", [64, 64]) for name in ("two", "x", "one")}
    with on_device(saved(build), inputs, ["y"]) as session:
        x = torch.rand(64, 64, device="cuda")
        with tf.device("GPU:0"):
            one = tf.ones([64, 64])
        (y,) = session.run({"one": one, "two": cupy.full((64, 64), 2, "float32"), "x": x}, "torch")
    assert torch.equal(y, 2 * x + 1)


@pytest.mark.parametrize("name", tb.profile("tensorflow1")["dtypes"])
def test_every_dtype_converts_in_place(name: str) -> None:
    bits = (torch.arange(192) % (2 if name == "bool" else 251)).to(torch.uint8)
    tensor = bits.cuda().view(getattr(torch, name))
    graph = saved(lambda: placeholder(name, [None]))
    with on_device(graph, {"x": (name, [None])}, ["x"]) as session:
        (result,) = session.run({"x": tensor})
    assert tb.convert(tensor, "tensorflow1", copy=False).address == tensor.data_ptr() != result.address
    assert (result.device, result.dtype) == ("cuda:0", name)
    back = tb.to_torch(result, copy=False)
    assert (back.data_ptr(), back.dtype, back.device) == (result.address, tensor.dtype, tensor.device)
    assert back.view(torch.uint8).cpu().equal(bits)
    copy = tb.to_torch(result, copy=True)
    assert copy.data_ptr() != result.address
    assert (copy.dtype, copy.device) == (tensor.dtype, tensor.device)
    assert copy.view(torch.uint8).cpu().equal(bits)


@pytest.mark.parametrize("shape", [[], [0], [2, 0, 3], [1, 1], [2, 3, 4]])
def test_every_shape_converts(shape: list[int]) -> None:
    graph = saved(lambda: tf.add(placeholder(shape=shape), placeholder(shape=shape, name="z"), name="y"))
    tensor = torch.rand(shape, device="cuda")
    inputs = {name: ("float32", shape) for name in ("x", "z")}
    with on_device(graph, inputs, ["x"] if tensor.numel() == 1 else ["x", "y"]) as session:
        same, *computed = session.run({"x": tensor, "z": tensor}, "torch")
    assert (same.device, list(same.shape)) == (tensor.device, shape)
    assert torch.equal(same, tensor)
    for result in computed:
        assert result.device == tensor.device
        assert torch.equal(result, 2 * tensor)


#: Tensors that TensorFlow cannot take as they are, and why.
COPIED: dict[str, tuple[Callable[[], Any], str]] = {
    "unaligned": (lambda: torch.arange(1025.0, device="cuda")[1:], "an unaligned address"),
    "every other": (lambda: torch.arange(2048.0, device="cuda")[::2], "strides that are not compact"),
    "broadcast": (lambda: torch.ones(1, device="cuda").expand(1024), "strides that are not compact"),
    "backwards": (lambda: cupy.arange(1024, dtype="float32")[::-1], "negative strides"),
}


@pytest.mark.parametrize("case", COPIED)
def test_what_does_not_fit_is_copied_on_the_device(session: Any, case: str) -> None:
    make, reason = COPIED[case]
    x = make()
    plan = tb.plan(x, "tensorflow1")
    assert (plan.zero_copy, plan.reason, plan.nbytes, plan.device) == (False, reason, 4096, "cuda:0")
    with pytest.raises(tb.BridgeBufferError, match=reason):
        session.run({"x": x}, copy=False)
    computed, same = session.run({"x": x}, "cupy")
    values = cupy.asarray(x)
    assert bool((computed == 2 * values).all()) and bool((same == values).all())


def test_copies_are_made_on_the_device(session: Any) -> None:
    tensor = torch.arange(float(COUNT), device="cuda")
    computed, same = session.run({"x": tensor}, copy=True)
    assert same.address not in (tensor.data_ptr(), computed.address)
    again = tb.convert(computed, "tensorflow1", copy=True)
    views = {target: tb.convert(computed, target, copy=True) for target in ("torch", "cupy", "tensorflow")}
    kept = tb.to_torch(computed)
    assert len({again.address, computed.address, pointer(views["torch"]), pointer(views["cupy"])}) == 4
    kept.zero_()
    expected = 2 * torch.arange(float(COUNT), device="cuda")
    for copy in (again, *views.values()):
        assert tb.to_torch(copy).is_cuda
        assert torch.equal(tb.to_torch(copy), expected)
    assert torch.equal(tb.to_torch(same), tensor)


def test_the_place_of_an_input_is_checked(session: Any) -> None:
    on_host = on_device(double(), {"x": ("float32", [None], "/device:CPU:0")}, ["x"])
    for wrong, tensor in [(session, torch.ones(64)), (on_host, torch.ones(64, device="cuda"))]:
        with pytest.raises(tb.BridgeRuntimeError, match="truebridge/input/x_0"):
            wrong.run({"x": tensor})
    tensor = torch.ones(64)
    assert torch.equal(on_host.run({"x": tensor}, "torch")[0], tensor)
    with pytest.raises(tb.BridgeValueError, match="cuda") as caught:
        tb.to_numpy(session.run({"x": tensor.cuda()})[0])
    assert caught.value.kind == "device"


# --- order


@pytest.mark.usefixtures("uninterrupted")
def test_a_run_waits_for_the_work_on_what_is_fed(session: Any) -> None:
    pending = 0
    for value in range(1, 21):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            tensor = torch.zeros(COUNT, device="cuda")
            side.synchronize()
            torch.cuda._sleep(20_000_000)
            tensor += value
            fed = tb.convert(tensor, "tensorflow1", copy=False)
            pending += not side.query()
        computed, same = session.run({"x": fed}, "torch")
        assert bool((computed == 2 * value).all()) and bool((same == value).all())
    # The writer sleeps for 10 ms. Loading a kernel takes longer, the first time.
    assert pending > 10, "the conversion waits for the writer"


def test_a_run_waits_for_cupy_as_well(session: Any) -> None:
    for value in range(1, 21):
        side = cupy.cuda.Stream(non_blocking=True)
        with side, torch.cuda.stream(torch.cuda.ExternalStream(side.ptr)):
            array = cupy.zeros(COUNT, "float32")
            torch.cuda._sleep(20_000_000)
            array += value
            (computed, _) = session.run({"x": array})
        assert bool((tb.to_torch(computed) == 2 * value).all())


@pytest.mark.parametrize("target", ["torch", "cupy"])
@pytest.mark.parametrize("exported", ["computed", "passed on"])
def test_memory_is_not_reused_before_others_have_read_it(session: Any, target: str, exported: str) -> None:
    side = torch.cuda.Stream()
    for value in range(20):
        # PyTorch has the block for its default stream, and will reuse it there.
        x = torch.full((COUNT,), float(value), device="cuda")
        with torch.cuda.stream(side), cupy.cuda.ExternalStream(side.cuda_stream):
            view = tb.convert(session.run({"x": x})[exported == "passed on"], target, copy=False)
            del x
            torch.cuda._sleep(20_000_000)
            read = view.clone() if target == "torch" else view.copy()
            del view
        junk = [torch.full((COUNT,), -1.0, device="cuda") for _ in range(3)]
        results = [session.run({"x": each}) for each in junk]
        side.synchronize()
        assert bool((read == (value if exported == "passed on" else 2 * value)).all())
        del junk, results


def test_threads_with_streams_of_their_own(session: Any) -> None:
    wrong = []

    def work(seed: int) -> None:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for i in range(25):
                value = 100.0 * seed + i
                tensor = torch.zeros(COUNT, device="cuda")
                torch.cuda._sleep(1_000_000)
                tensor += value
                computed, same = session.run({"x": tensor}, "torch")
                if not bool((same == value).all() and (computed == 2 * value).all()):
                    wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- all four


def test_a_ring_of_all_four_is_the_same_memory(session: Any) -> None:
    tensor = torch.arange(4096.0, device="cuda")
    computed, in_one = session.run({"x": tensor})
    array = tb.to_cupy(in_one, copy=False)
    in_two = tb.to_tensorflow(array, copy=False)
    back = tb.to_torch(in_two, copy=False)
    assert in_one.address == array.data.ptr == back.data_ptr() != tensor.data_ptr()
    assert in_two.device.endswith("GPU:0")
    assert torch.equal(tb.to_torch(computed), 2 * tensor)
    assert (array * 2).get().tolist() == (in_two * 2).numpy().tolist() == tb.to_torch(computed).tolist()
    array[0] = 7
    cupy.cuda.get_current_stream().synchronize()
    assert (in_two[0].numpy(), back[0].item(), tensor[0].item()) == (7, 7, 0)
    assert tb.to_torch(session.run({"x": in_two})[0])[0].item() == 14


def test_a_graph_of_two_takes_what_one_gives(session: Any) -> None:
    tensor = torch.arange(4096.0, device="cuda")
    computed, same = session.run({"x": tensor})
    with tf.Graph().as_default(), tf.device("GPU:0"), tf.compat.v1.Session() as graph:
        x = tb.tensorflow.external_input(tf.float32, [None])
        outputs = tb.tensorflow.external_output(x), tb.tensorflow.external_output(x * 2)
        for fed, factor in ((same, 1), (computed, 2)):
            fetched = graph.run(outputs, {tb.tensorflow.handle_of(x): tb.tensorflow.feed(fed, copy=False)})
            passed, doubled = (tb.tensorflow.take(each, "tensorflow1") for each in fetched)
            assert torch.equal(tb.to_torch(passed), tb.to_torch(fed))
            assert torch.equal(tb.to_torch(session.run({"x": doubled})[0]), 4 * factor * tensor)


def test_a_ring_keeps_the_order_of_all_four(session: Any) -> None:
    stream, other = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    for value in range(20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(3_000_000)
            tensor = torch.full((COUNT,), float(value), device="cuda")
            doubled = session.run({"x": tensor})[0]
            del tensor
        with other:
            array = tb.to_cupy(doubled, copy=False) + 1
            in_two = tb.to_tensorflow(array, copy=False)
        del doubled, array
        four = in_two * 2
        with torch.cuda.stream(stream):
            computed, _ = session.run({"x": four}, "torch")
            last = computed - 4
        del in_two, four, computed
        stream.synchronize()
        assert bool((last == 8 * value).all())


# --- life


def test_results_outlive_their_session() -> None:
    tensor = torch.arange(float(COUNT), device="cuda")
    session = on_device(double(), X, ["y", "x"])
    computed, same = session.run({"x": tensor}, "torch")
    kept, _ = session.run({"x": tensor})
    session.close()
    with on_device(double(), X, ["y"]) as other:
        junk = [other.run({"x": torch.zeros(COUNT, device="cuda")}) for _ in range(8)]
        assert torch.equal(computed, 2 * tensor)
        assert torch.equal(other.run({"x": kept}, "torch")[0], 4 * tensor)
    assert torch.equal(same, tensor)
    assert torch.equal(tb.to_torch(kept), 2 * tensor)
    del junk


def test_what_nobody_takes_goes_with_its_session() -> None:
    def build() -> None:
        x = placeholder(shape=[None])
        tb.tensorflow.external_output(x + x, name="y")

    before = settled()
    session = on_device(saved(build), X, ["y:0"])
    fed = torch.ones(COUNT, device="cuda")
    handles = [tb.to_torch(session.run({"x": fed})[0]).cpu().numpy() for _ in range(10)]
    assert tb.stats()["unclaimed"] - before["unclaimed"] == 10
    session.close()
    after = settled()
    assert (after["unclaimed"] - before["unclaimed"], after["reclaimed"] - before["reclaimed"]) == (0, 10)
    with pytest.raises(tb.BridgeBufferError, match="its session is closed"):
        tb.tensorflow.take(handles[0], "torch")


def test_thousands_of_runs_leave_memory_as_it_was(session: Any) -> None:
    tensor, array = torch.ones(1 << 18, device="cuda"), cupy.ones(1 << 18, "float32")
    pool = cupy.get_default_memory_pool()

    def runs(count: int) -> None:
        for i in range(count):
            session.run({"x": tensor if i % 2 else array}, "cupy" if i % 3 else "torch")
            if i % 10 == 0:
                computed, _ = session.run({"x": torch.ones(1 << 18, device="cuda")}, copy=True)
                tb.to_torch(computed, copy=True)
                del computed

    def used() -> tuple[int, int, int]:
        return torch.cuda.memory_allocated(), pool.used_bytes(), torch.cuda.mem_get_info()[0]

    runs(300)
    before, used_before, resident_before = settled(), used(), resident()
    runs(2000)
    after, used_after = settled(), used()
    assert used_after[:2] == used_before[:2]
    assert used_before[2] - used_after[2] < 64 << 20, "TensorFlow has taken more of the device"
    assert after["leased"] - before["leased"] == after["released"] - before["released"] > 3 * 2000
    assert (after["leaked"], after["pending"], after["unclaimed"]) == (before["leaked"], 0, before["unclaimed"])
    assert resident() - resident_before < 8 << 20


NO_GPU: dict[str, dict[str, Any]] = {
    "no visible devices": {"visible_devices": []},
    "the configuration": {"config": tf.compat.v1.ConfigProto(device_count={"GPU": 0})},
}


@pytest.mark.parametrize("options", NO_GPU.values(), ids=NO_GPU)
def test_the_host_stays_what_it_is(session: Any, options: dict[str, Any]) -> None:
    """A session on the host, next to one on the device."""
    with tb.tensorflow.v1.Session(double(), X, ["y", "x"], **options) as on_host:
        assert not any("/device:GPU:" in name for name in on_host.devices)
        tensor = torch.arange(64.0)
        computed, same = on_host.run({"x": tensor})
        assert (same.device, computed.device) == ("cpu", "cpu")
        assert torch.equal(tb.to_torch(same), tensor)
        assert np.array_equal(tb.to_numpy(computed), 2 * tensor.numpy())
    assert session.run({"x": torch.ones(64, device="cuda")})[0].device == "cuda:0"
