"""TensorFlow ↔ PyTorch and CuPy on a CUDA device: in place, in the order of the streams, and without waiting."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import memory
import truebridge as tb
from memory import resident
from programs import complaints

torch: Any = pytest.importorskip("torch")
cupy: Any = pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
tf: Any = pytest.importorskip("tensorflow")
if not tf.config.list_physical_devices("GPU"):
    pytest.skip("TensorFlow has no GPU", allow_module_level=True)

COUNT = 1 << 20


def settled() -> dict[str, int]:
    torch.cuda.synchronize()
    tf.test.experimental.sync_devices()
    return memory.settled()


def filled(value: float, count: int = COUNT) -> Any:
    """A tensor of TensorFlow on the GPU."""
    with tf.device("GPU:0"):
        return tf.fill([count], tf.constant(value, "float32"))


def address(tensor: Any) -> int:
    """TensorFlow's own word on where a tensor is."""
    return int(torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor)).data_ptr())


def busy(times: int = 10) -> Any:
    """Work in TensorFlow's stream, about 2.4 ms each on an H200, and its last result."""
    with tf.device("GPU:0"):
        x = tf.fill([COUNT], tf.constant(1e6, "float64"))
        for _ in range(times):
            result = tf.math.igamma(x, x)
    return result


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """Kernels are loaded, memory is reserved and streams are made the first time, which waits for the device."""
    for _ in range(2):
        tb.to_cupy(tb.to_tensorflow(tb.to_torch(busy(1)) + 1)).copy()
        (tb.to_tensorflow(cupy.ones(COUNT, "float32")) + filled(1)).numpy()
    settled()


# --- in place


def test_a_ring_of_three_is_the_same_memory() -> None:
    tensor = torch.arange(4096.0, device="cuda:0").reshape(64, 64)
    in_tensorflow = tb.to_tensorflow(tensor, copy=False)
    assert in_tensorflow.device.endswith("GPU:0")
    assert address(in_tensorflow) == tensor.data_ptr()
    array = tb.to_cupy(in_tensorflow, copy=False)
    back = tb.to_torch(array, copy=False)
    assert array.data.ptr == back.data_ptr() == tensor.data_ptr()
    assert back.equal(tensor)
    array[0, 0] = 7
    cupy.cuda.get_current_stream().synchronize()
    assert in_tensorflow[0, 0].numpy() == tensor[0, 0].item() == 7


def test_tensors_of_tensorflow_export_their_memory() -> None:
    tensor = filled(3) * 2
    at = address(tensor)
    for target in ("torch", "cupy"):
        plan = tb.plan(tensor, target)
        assert (plan.zero_copy, plan.reason, plan.device) == (True, None, "cuda:0")
    assert tb.to_torch(tensor, copy=False).data_ptr() == tb.to_cupy(tensor, copy=False).data.ptr == at
    assert (tb.to_torch(tensor) == 6).all()
    assert (tb.to_cupy(tensor) == 6).all()
    copy = tb.to_torch(tensor, copy=True)
    assert copy.data_ptr() != at
    assert (copy == 6).all()


def test_a_variable_on_the_device_exports_its_current_value() -> None:
    with tf.device("GPU:0"):
        variable = tf.Variable(tf.ones(COUNT))
    view = tb.to_torch(variable)
    assert view.is_cuda
    view.fill_(5)
    torch.cuda.synchronize()
    assert variable.numpy()[-1] == 5
    variable.assign_add(tf.ones(COUNT))
    assert (view == 5).all()
    assert (tb.to_torch(variable) == 6).all()


def test_unaligned_views_are_copied_on_the_device() -> None:
    tensor = torch.arange(1025.0, device="cuda")[1:]
    plan = tb.plan(tensor, "tensorflow")
    assert (plan.zero_copy, plan.reason, plan.nbytes, plan.device) == (False, "an unaligned address", 4096, "cuda:0")
    with pytest.raises(tb.BridgeBufferError, match="an unaligned address"):
        tb.to_tensorflow(tensor, copy=False)
    view = tb.to_tensorflow(tensor)
    assert view.device.endswith("GPU:0")
    assert (view.numpy() == tensor.cpu().numpy()).all()


def test_strided_views_are_copied_on_the_device() -> None:
    tensor = torch.arange(4096.0, device="cuda").reshape(64, 64).T
    assert tb.plan(tensor, "tensorflow").reason == "strides that are not compact"
    assert (tb.to_tensorflow(tensor).numpy() == tensor.cpu().numpy()).all()
    array = cupy.arange(4096.0)[::-1]
    assert tb.plan(array, "tensorflow").reason == "negative strides"
    assert (tb.to_tensorflow(array).numpy() == array.get()).all()


INT32: dict[str, Callable[[], Any]] = {
    "constant": lambda: tf.constant([1, 2, 3]),
    "range": lambda: tf.range(1, 4),
    "sum": lambda: tf.constant([0, 1, 2]) + 1,
    "shape": lambda: tf.shape(tf.zeros((1, 2, 3))),
}


@pytest.mark.parametrize("made", INT32)
def test_int32_that_tensorflow_made_is_on_the_host(made: str) -> None:
    with tf.device("GPU:0"):
        tensor = INT32[made]()
    assert tb.plan(tensor, "torch").device == "cpu"
    assert tb.to_numpy(tensor).tolist() == tb.to_torch(tensor).tolist() == [1, 2, 3]
    with pytest.raises(tb.BridgeValueError, match="cpu") as caught:
        tb.to_cupy(tensor)
    assert caught.value.kind == "device"


def test_int32_that_is_on_the_device_stays_there() -> None:
    tensor = torch.arange(64, device="cuda", dtype=torch.int32)
    view = tb.to_tensorflow(tensor, copy=False)
    assert tb.plan(view, "cupy").device == "cuda:0"
    assert tb.to_cupy(view, copy=False).data.ptr == tensor.data_ptr()


def test_nothing_moves_unless_asked_by_name() -> None:
    for call in (
        lambda: tb.to_numpy(filled(1)),
        lambda: tb.to_torch(filled(1), device="cpu", copy=False),
        lambda: tb.to_tensorflow(torch.ones(64), device="cuda:0", copy=False),
    ):
        with pytest.raises(tb.BridgeError) as caught:
            call()
        assert caught.value.kind in ("device", "copy_needed")


# --- order


@pytest.mark.usefixtures("uninterrupted")
@pytest.mark.parametrize("target", ["torch", "cupy"])
def test_the_host_does_not_wait_for_what_tensorflow_exports(target: str) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        # Whatever is set up at the first time is so now.
        tb.convert(busy(1), target, copy=False)
        result = busy()
        view = tb.convert(result, target, copy=False)
        done = stream.record_event()
        assert not done.query(), "the conversion has waited for TensorFlow's stream, or the reader will not"
        read = view.clone() if target == "torch" else view.copy()
    stream.synchronize()
    assert (tb.to_torch(read).cpu().numpy() == busy(1).numpy()).all()


@pytest.mark.usefixtures("uninterrupted")
@pytest.mark.parametrize("source", ["torch", "cupy"])
def test_tensorflow_reads_what_a_stream_is_yet_to_write(source: str) -> None:
    stream = torch.cuda.Stream()
    for value in range(1, 21):
        with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
            x = torch.zeros(COUNT, device="cuda") if source == "torch" else cupy.zeros(COUNT, "float32")
            stream.synchronize()
            torch.cuda._sleep(5_000_000)
            x[:] = value
            view = tb.to_tensorflow(x, copy=False)
            assert not stream.query(), "the conversion has waited for the writer"
        result = view * 2
        assert (result.numpy() == 2 * value).all()


EXPORTED: dict[str, Callable[[Any], Any]] = {
    "whole": lambda tensor: tensor,
    "shared": lambda tensor: tf.reshape(tensor, (1024, -1)),
}


@pytest.mark.parametrize("exported", EXPORTED)
@pytest.mark.parametrize("target", ["torch", "cupy"])
def test_a_tensor_of_tensorflow_that_others_still_read_may_be_dropped(target: str, exported: str) -> None:
    stream = torch.cuda.Stream()
    for value in range(20):
        tensor = filled(value)
        with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
            view = tb.convert(EXPORTED[exported](tensor), target, copy=False)
            torch.cuda._sleep(5_000_000)
            read = view.clone() if target == "torch" else view.copy()
            del view, tensor
        junk = [filled(-1) for _ in range(3)]
        stream.synchronize()
        assert (read == value).all()
        del junk


def test_a_ring_keeps_the_order_of_all_three() -> None:
    stream, other = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    for value in range(20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(3_000_000)
            tensor = torch.full((COUNT,), float(value), device="cuda")
            view = tb.to_tensorflow(tensor, copy=False)
        doubled = view * 2
        del view, tensor
        with other:
            array = tb.to_cupy(doubled, copy=False) + 1
        del doubled
        # What CuPy has written on a stream is exported under that stream.
        with torch.cuda.stream(stream), other:
            last = tb.to_torch(array, copy=False) - 1
        del array
        stream.synchronize()
        assert (last == 2 * value).all()


def test_kernels_do_not_reuse_the_memory_of_a_view() -> None:
    tensor = torch.arange(float(COUNT), device="cuda")
    function = tf.function(lambda x: tf.nn.relu(x * 2 + 1))
    for call in (function, lambda x: tf.nn.relu(x * 2 + 1)):
        result = call(tb.to_tensorflow(tensor, copy=False))
        assert result.numpy()[-1] == 2 * (COUNT - 1) + 1
        assert tensor.equal(torch.arange(float(COUNT), device="cuda"))


# --- memory


def test_memory_comes_back_to_the_baseline() -> None:
    pool = cupy.get_default_memory_pool()
    tensor, array, own = torch.ones(1 << 18, device="cuda"), cupy.ones(1 << 18, "float32"), filled(1, 1 << 18)

    def round_trips(count: int) -> None:
        for i in range(count):
            tb.to_tensorflow(tensor)
            tb.to_tensorflow(array)
            tb.to_torch(own)
            tb.to_cupy(own)
            if i % 10 == 0:
                tb.to_tensorflow(torch.empty(1 << 18, device="cuda"))
                tb.to_tensorflow(cupy.empty(1 << 18, "float32"))
                tb.to_torch(filled(1, 1 << 18))

    def used() -> tuple[int, int, int]:
        tensorflow = tf.config.experimental.get_memory_info("GPU:0")["current"]
        return torch.cuda.memory_allocated(), pool.used_bytes(), tensorflow

    round_trips(1000)
    settled()
    before, resident_before, lost_before, alive = used(), resident(), tb.stats()["leaked"], memory.views()
    round_trips(20000)
    counts = settled()
    assert memory.views() == alive
    assert counts["leaked"] == lost_before
    assert used() == before
    assert resident() - resident_before < 8 << 20


# --- other processes


SETUP = """
import sys
sys.modules["tensorflow.python.pywrap_dlopen_global_flags"] = None
import warnings, torch, cupy, tensorflow as tf, truebridge as tb
gpus = tf.config.list_physical_devices("GPU")
"""


def run(code: str, **settings: str | None) -> subprocess.CompletedProcess[str]:
    merged = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **settings}
    env = {name: value for name, value in merged.items() if value is not None}
    command = [sys.executable, "-c", SETUP + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


def test_a_device_that_tensorflow_does_not_show() -> None:
    done = run(
        """
tf.config.set_visible_devices([], "GPU")
for x in (torch.ones(64, device="cuda"), cupy.ones(64)):
    try:
        tb.to_tensorflow(x)
    except tb.BridgeValueError as error:
        assert error.kind == "device" and "set_visible_devices" in str(error), error
    else:
        raise SystemExit("no error")
assert tb.to_tensorflow(torch.ones(64)).numpy().sum() == 64
"""
    )
    assert done.returncode == 0, done.stderr


#: What TensorFlow 2 documents of how it takes memory.
ALLOCATORS = {
    "BFC": {},
    "stream-ordered": {"TF_GPU_ALLOCATOR": "cuda_malloc_async"},
    "managed": {"TF_FORCE_UNIFIED_MEMORY": "1"},
}


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_tensors_of_every_allocator_convert(allocator: str) -> None:
    done = run(
        """
def pointer(tensor):
    return tb.to_cupy(tensor, copy=False).data.ptr

for value in range(1, 21):
    with tf.device("GPU:0"):
        tensor = tf.fill([1 << 20], tf.constant(float(value))) * 2
    view = tb.to_torch(tensor, copy=False)
    assert view.is_cuda and view.data_ptr() == pointer(tensor)
    assert (view == 2 * value).all()
    array = tb.to_cupy(tensor, copy=True)
    assert array.data.ptr != view.data_ptr() and (array == 2 * value).all()
    back = tb.to_tensorflow(view, copy=False)
    assert (back + 1).numpy()[-1] == 2 * value + 1
    del tensor, view, back, array

# int32 is in host memory, mostly.
with tf.device("GPU:0"):
    numbers = tf.raw_ops.Cast(x=tf.fill([64], tf.constant(3.0)), DstT=tf.int32)
assert tb.to_torch(numbers).cpu().tolist() == [3] * 64
ints = tb.to_tensorflow(torch.arange(64, dtype=torch.int32, device="cuda"), copy=False)
assert tb.to_torch(ints, copy=False).is_cuda
assert tb.to_numpy(tf.range(4) + 1).tolist() == [1, 2, 3, 4]

# The edges of a graph.
@tf.function
def double(handle):
    with tf.device("GPU:0"):
        x = tb.tensorflow.external_input(tf.float32, [None], handle)
        return tb.tensorflow.external_output(2 * x), tb.tensorflow.external_output(x)

x = torch.arange(4096.0, device="cuda")
doubled, same = (tb.tensorflow.take(one, "torch") for one in double(tb.tensorflow.feed(x)))
assert torch.equal(same, x) and torch.equal(doubled, 2 * x)
""",
        **ALLOCATORS[allocator],
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_tensors_of_every_logical_device() -> None:
    done = run(
        """
half = tf.config.LogicalDeviceConfiguration(memory_limit=2048)
tf.config.set_logical_device_configuration(gpus[0], [half, half])
for i in range(2):
    for value in range(20):
        with tf.device(f"GPU:{i}"):
            tensor = tf.fill([1 << 20], tf.constant(float(value))) * 2
        assert tensor.device.endswith(f"GPU:{i}"), tensor.device
        view, array = tb.to_torch(tensor, copy=False), tb.to_cupy(tensor, copy=False)
        assert (view == 2 * value).all() and (array == 2 * value).all()
        assert view.data_ptr() == array.data.ptr
        back = tb.to_tensorflow(view, copy=False)
        assert (back + 1).numpy()[-1] == 2 * value + 1
        del tensor, view, array, back
""",
        TF_FORCE_GPU_ALLOW_GROWTH=None,
    )
    assert done.returncode == 0, done.stderr


GROWTH = {
    "nothing": (None, "", True),
    "the environment": ("true", "", False),
    "the configuration": (None, "for gpu in gpus: tf.config.experimental.set_memory_growth(gpu, True)", False),
    "a limit": (
        None,
        "for gpu in gpus: "
        "tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=1024)])",
        False,
    ),
}


@pytest.mark.parametrize("told", GROWTH)
def test_a_tensorflow_that_takes_all_memory_is_warned_of(told: str) -> None:
    environment, configuration, warns = GROWTH[told]
    done = run(
        f"""
{configuration}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        tb.to_tensorflow(torch.ones(64, device="cuda"))
texts = [str(w.message) for w in caught if w.category is RuntimeWarning]
assert len(texts) == {int(warns)}, texts
assert all("TF_FORCE_GPU_ALLOW_GROWTH=true" in text for text in texts), texts
""",
        TF_FORCE_GPU_ALLOW_GROWTH=environment,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("last", ["del views", "keep = views", "sys.keep = views"])
def test_a_process_ends_with_pending_work(last: str) -> None:
    done = run(
        f"""
tensor = torch.zeros(1 << 20, device="cuda")
with tf.device("GPU:0"):
    x = tf.fill([1 << 20], tf.constant(1e6, "float64"))
    for _ in range(20):
        result = tf.math.igamma(x, x)
promised = tb.to_torch(result, read_only=True), tb.to_cupy(result, read_only=True)
views = [tb.to_tensorflow(tensor), *promised, tb.to_tensorflow(cupy.zeros(64))]
views.append(views[0] + 1)
del tensor, result, promised
{last}
"""
    )
    assert (done.returncode, complaints(done.stderr)) == (0, [])
