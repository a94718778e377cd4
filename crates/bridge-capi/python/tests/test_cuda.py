"""TensorFlow 1.15 on a CUDA device: memory of the driver in and out, in place and in order.

Nothing else of Python 3.7 need be there: memory comes from the driver, by ``ctypes``, and goes by
``__cuda_array_interface__``. Of TensorFlow only float32 multiplication and addition of equal shapes are used.
"""

import ctypes
import gc
import subprocess
import sys
import weakref
from typing import Any, Iterator

import numpy as np
import pytest

import truebridge_tf1 as tb
from conftest import wait_until


class Driver:
    """The few calls of the driver that are needed, in the primary context, where TensorFlow works as well."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        count = ctypes.c_int()
        self("cuDeviceGetCount", ctypes.byref(count))
        if not count.value:
            raise OSError("there is no CUDA device")
        self.count = count.value
        self.context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)

    def __call__(self, name: str, *arguments: Any) -> None:
        """Make a call, on any thread."""
        if hasattr(self, "context") and self.context:
            self.cuda.cuCtxSetCurrent(self.context)
        result = getattr(self.cuda, name)(*arguments)
        if result:
            raise OSError(f"{name} failed with {result}")

    def stream(self, flags: int = 1) -> ctypes.c_void_p:
        """A stream, non-blocking unless said otherwise."""
        stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(stream), flags)
        return stream


@pytest.fixture(scope="module")
def driver() -> Driver:
    try:
        return Driver()
    except OSError as error:
        pytest.skip(f"no CUDA: {error}")
        raise


class Memory:
    """float32 memory of the device, written in a stream, and not freed before it is let go."""

    def __init__(self, driver: Driver, count: int, stream: Any = None, offset: int = 0) -> None:
        self.driver, self.count, self.stream = driver, count, stream
        pointer = ctypes.c_uint64()
        driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(4 * count + 64 + offset))
        self.base = pointer.value
        self.address = self.base + offset

    def fill(self, value: float, times: int = 1) -> "Memory":
        bits = ctypes.c_uint32.from_buffer_copy(ctypes.c_float(value))
        for _ in range(times):
            self.driver(
                "cuMemsetD32Async", ctypes.c_uint64(self.address), bits, ctypes.c_size_t(self.count), self.stream
            )
        return self

    def read(self) -> np.ndarray:
        self.driver("cuCtxSynchronize")
        return read(self.driver, self.address, self.count)

    @property
    def __cuda_array_interface__(self) -> Any:
        return {
            "shape": (self.count,),
            "typestr": "<f4",
            "data": (self.address, False),
            "version": 3,
            "stream": self.stream.value if self.stream else None,
        }

    def __del__(self) -> None:
        self.driver("cuMemFree_v2", ctypes.c_uint64(self.base))


def read(driver: Driver, address: int, count: int) -> np.ndarray:
    array = np.empty(count, np.float32)
    driver("cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(address), ctypes.c_size_t(4 * count))
    return array


@pytest.fixture
def gpu(tf: Any, driver: Driver) -> Iterator[Any]:
    """A session on the GPU that returns its input, and twice its input."""
    if not tf.test.is_built_with_cuda():
        pytest.skip("this TensorFlow was built without CUDA")
    with tf.Graph().as_default(), tf.device("/device:GPU:0"), tf.compat.v1.Session() as session:
        yield session


@pytest.fixture
def doubling(tf: Any, gpu: Any) -> Any:
    x = tb.external_input(tf.float32, [None])
    outputs = [tb.external_output(x), tb.external_output(x + x)]
    return lambda fed: [tb.take(one) for one in gpu.run(outputs, {tb.handle_of(x): fed})]


def values(driver: Driver, taken: Any) -> np.ndarray:
    interface = taken.__cuda_array_interface__
    driver("cuStreamSynchronize", ctypes.c_void_p(interface["stream"]))
    return read(driver, interface["data"][0], interface["shape"][0])


def test_memory_of_the_driver_converts_in_place(driver: Driver, doubling: Any) -> None:
    memory = Memory(driver, 1000).fill(3)
    same, twice = doubling(tb.feed(memory, copy=False))
    assert same.device == "cuda:0"
    assert same.__cuda_array_interface__["data"] == (memory.address, False)
    assert same.__cuda_array_interface__["shape"] == (1000,)
    assert (values(driver, twice) == 6).all()
    with pytest.raises(tb.BridgeValueError, match="copy it there") as caught:
        twice.numpy()
    assert caught.value.kind == "device"


@pytest.mark.parametrize("kind", ["non-blocking", "blocking", "legacy", "per thread"])
def test_work_in_any_stream_is_waited_for(driver: Driver, doubling: Any, kind: str) -> None:
    streams = {"legacy": ctypes.c_void_p(1), "per thread": ctypes.c_void_p(2)}
    stream = streams.get(kind) or driver.stream(1 if kind == "non-blocking" else 0)
    count = 1 << 24
    for value in range(1, 21):
        memory = Memory(driver, count, stream).fill(-1, times=40).fill(value)
        _, twice = doubling(tb.feed(memory, copy=False))
        assert (values(driver, twice) == 2 * value).all()


def test_the_memory_is_not_reused_before_tensorflow_has_read_it(tf: Any, driver: Driver, gpu: Any) -> None:
    x = tb.external_input(tf.float32, [None])
    y = x
    for _ in range(20):
        y = y + x
    output = tb.external_output(y)
    for value in range(10):
        memory = Memory(driver, 1 << 24).fill(value)
        alive = weakref.ref(memory)
        fed = tb.feed(memory, copy=False)
        fetched = gpu.run(output, {tb.handle_of(x): fed})
        del memory, fed
        wait_until(lambda: alive() is None)  # noqa: B023
        assert (values(driver, tb.take(fetched)) == 21 * value).all()


def test_unaligned_memory_is_copied_on_the_device_or_refused(driver: Driver, doubling: Any) -> None:
    memory = Memory(driver, 1000, offset=4).fill(5)
    with pytest.raises(tb.BridgeBufferError, match="unaligned") as caught:
        tb.feed(memory, copy=False)
    assert caught.value.kind == "copy_needed"
    same, twice = doubling(tb.feed(memory))
    assert (values(driver, twice) == 10).all()
    assert same.__cuda_array_interface__["data"][0] != memory.address

    same, _ = doubling(tb.feed(Memory(driver, 1000).fill(5), copy=True))
    assert (values(driver, same) == 5).all()


def test_capsules_of_what_was_taken_can_be_fed(driver: Driver, doubling: Any) -> None:
    memory = Memory(driver, 64).fill(1)
    _, taken = doubling(tb.feed(memory))
    for power in range(2, 6):
        stream = driver.stream()
        same, taken = doubling(tb.feed(taken.__dlpack__(stream=stream.value)))
        assert (values(driver, taken) == 2**power).all()


def test_views_outlive_their_session(tf: Any, driver: Driver) -> None:
    if not tf.test.is_built_with_cuda():
        pytest.skip("this TensorFlow was built without CUDA")
    memory = Memory(driver, 1 << 20).fill(4)
    with tf.Graph().as_default(), tf.device("/device:GPU:0"):
        session = tf.compat.v1.Session()
        x = tb.external_input(tf.float32, [None])
        y = tb.external_output(x + x)
        taken = tb.take(session.run(y, {tb.handle_of(x): tb.feed(memory)}))
        session.close()
        del session, x, y
    gc.collect()
    assert (values(driver, taken) == 8).all()


def test_memory_that_is_not_where_it_says_is_refused(driver: Driver, doubling: Any) -> None:
    memory = Memory(driver, 1000)
    interface = dict(memory.__cuda_array_interface__)

    class Liar:
        def __init__(self, **changes: Any) -> None:
            self.__cuda_array_interface__ = {**interface, **changes}

    host = np.zeros(1000, np.float32)
    for changes, kind in [
        ({"data": (host.ctypes.data, False)}, "protocol"),
        ({"shape": (1 << 30,)}, "layout"),
        ({"strides": (-4,)}, "layout"),
    ]:
        with pytest.raises(tb.BridgeError) as caught:
            tb.feed(Liar(**changes))
        assert caught.value.kind == kind


def test_the_place_of_an_input_is_checked(tf: Any, driver: Driver, gpu: Any) -> None:
    x = tb.external_input(tf.float32, [2])
    with pytest.raises(tf.errors.InvalidArgumentError, match="under tf.device"):
        gpu.run(x + x, {tb.handle_of(x): tb.feed(np.ones(2, np.float32))})


def test_eager_execution(tf: Any, driver: Driver) -> None:
    from tensorflow.python.eager import context

    if not tf.test.is_built_with_cuda():
        pytest.skip("this TensorFlow was built without CUDA")
    with context.eager_mode():
        memory = Memory(driver, 1000, driver.stream()).fill(7)
        x = tb.external_input(tf.float32, [None], tb.feed(memory))
        assert x.device.endswith("GPU:0")
        same, twice = tb.take(tb.external_output(x)), tb.take(tb.external_output(x + x))
        assert same.__cuda_array_interface__["data"][0] == memory.address
        assert (values(driver, twice) == 14).all()
        host = tb.external_input(tf.float32, [None], tb.feed(np.ones(8, np.float32)))
        assert host.device.endswith("CPU:0")
        del x, host


def test_eager_execution_on_the_second_device_alone(tf: Any, driver: Driver) -> None:
    """TensorFlow's GPU:0 is the driver's second there."""
    if not tf.test.is_built_with_cuda():
        pytest.skip("this TensorFlow was built without CUDA")
    if driver.count < 2:
        pytest.skip("one CUDA device")
    code = """
import ctypes, tensorflow as tf, truebridge_tf1 as tb
gpu_options = tf.compat.v1.GPUOptions(visible_device_list="1", allow_growth=True)
tf.compat.v1.enable_eager_execution(config=tf.compat.v1.ConfigProto(gpu_options=gpu_options))
cuda = ctypes.CDLL("libcuda.so.1")

class Memory:
    def __init__(self, ordinal):
        context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
        assert cuda.cuInit(0) == cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal) == 0
        assert cuda.cuCtxPushCurrent_v2(context) == 0
        assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4096)) == 0
        assert cuda.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
        self.address = pointer.value
        data = (self.address, False)
        self.__cuda_array_interface__ = {"shape": (1024,), "typestr": "<f4", "data": data, "version": 3, "stream": 1}

memory = Memory(1)
x = tb.external_input(tf.float32, [None], tb.feed(memory))
assert x.device.endswith("GPU:0"), x.device
taken = tb.take(tb.external_output(x))
assert (taken.device, taken.__cuda_array_interface__["data"][0]) == ("cuda:1", memory.address)
try:
    tb.external_input(tf.float32, [None], tb.feed(Memory(0)))
except tb.BridgeValueError as error:
    assert error.kind == "device" and "cuda:0" in str(error), error
else:
    raise SystemExit("no error")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_two_thousand_runs_leave_nothing(driver: Driver, doubling: Any) -> None:
    memory = Memory(driver, 1 << 18).fill(1)

    def free() -> int:
        amount = ctypes.c_size_t()
        driver("cuMemGetInfo_v2", ctypes.byref(amount), ctypes.byref(ctypes.c_size_t()))
        return amount.value

    for _ in range(50):
        doubling(tb.feed(memory))
    gc.collect()
    before, stats = free(), tb.stats()
    for _ in range(2000):
        same, twice = doubling(tb.feed(memory))
        assert twice.__cuda_array_interface__["stream"]
    del same, twice
    gc.collect()
    wait_until(lambda: tb.stats()["pending"] == 0)
    after = tb.stats()
    assert after["leased"] - stats["leased"] == after["released"] - stats["released"] == 4000
    assert after["leaked"] == stats["leaked"]
    assert before - free() < 16 << 20


def test_a_view_is_ordered_with_the_stream_that_is_named(driver: Driver, doubling: Any) -> None:
    memory = Memory(driver, 1 << 22).fill(2)
    _, twice = doubling(tb.feed(memory))
    stream = driver.stream()
    twice.record_stream(stream.value)
    address = twice.__cuda_array_interface__["data"][0]
    target = Memory(driver, 1 << 22, stream)
    for _ in range(50):
        driver(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(target.address),
            ctypes.c_uint64(address),
            ctypes.c_size_t(4 << 22),
            stream,
        )
    del twice
    # Whatever TensorFlow computes next into the same memory comes after the copies.
    for _ in range(5):
        doubling(tb.feed(Memory(driver, 1 << 22).fill(9)))
    assert (target.read() == 4).all()
