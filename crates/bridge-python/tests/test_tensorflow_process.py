"""TensorFlow in separate processes: executors, contexts, clusters, the end of a program, no TensorFlow at all."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import truebridge as tb
from programs import Warm, complaints
from truebridge import _core

torch = pytest.importorskip("torch")

tf = pytest.importorskip("tensorflow")

SETUP = """
import sys
sys.modules["tensorflow.python.pywrap_dlopen_global_flags"] = None
import gc, threading, time, warnings, numpy, tensorflow as tf, torch, truebridge as tb
warnings.simplefilter("ignore", tb.ImmutableWarning)
# The frameworks hold hundreds of thousands of objects that stay.
gc.freeze()

def settle():
    # Where Python is needed, a thread of the package's gives views back.
    patience = time.monotonic() + 20
    while (stats := tb.stats())["leased"] != stats["released"]:
        assert time.monotonic() < patience, stats
        gc.collect()
        time.sleep(0.01)
"""


Run = Callable[..., None]


@pytest.fixture
def run(beside_tensorflow: Warm) -> Run:
    """Runs a program, after what they all begin with, which must succeed and complain of nothing."""

    def run(code: str, *, may_complain: bool = False, **environment: str) -> None:
        done = beside_tensorflow.run(SETUP + code, **environment)
        assert done.returncode == 0 and (may_complain or not complaints(done.stderr)), done.stderr

    return run


def started(code: str, *path: str) -> None:
    """Start a program, which finds modules in a folder first and must succeed."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *sys.path])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("owner", ["pass", "sys.keep = views", "views.append(views); sys.keep = tf.function(abs)"])
def test_views_that_are_alive_at_exit(owner: str, run: Run) -> None:
    run(
        f"""
gc.unfreeze()
source = torch.arange(64.0)
view = tb.to_tensorflow(source)
variable = tf.Variable(view)
views = [view, view * 2, tb.to_torch(view), tb.to_torch(tf.range(4.0)), tb.to_numpy(variable)]
{owner}
"""
    )


def test_tensors_of_an_eager_context_that_is_gone(run: Run) -> None:
    run(
        """
from tensorflow.python.eager import context
source = torch.arange(64.0)
old, view, array = tf.range(64.0), tb.to_tensorflow(source), tb.to_numpy(tf.range(3.0))
for is_made in (False, True, False):
    context._reset_context()
    if is_made:
        context.context()  # without a handle until TensorFlow first needs one
    for tensor in (old, view):
        assert tb.to_torch(tensor).tolist() == source.tolist()
        assert tb.to_numpy(tensor, copy=True).tolist() == source.tolist()
    assert array.tolist() == [0, 1, 2]
    assert tb.to_torch(view).data_ptr() == source.data_ptr()
    new = tb.to_tensorflow(source, copy=False)
    assert (new + 1).numpy().tolist() == (source + 1).tolist()
    assert tb.to_torch(tf.range(3.0) + 1).tolist() == [1, 2, 3]
del old, view, array, new, tensor
gc.collect()
stats = tb.stats()
assert stats["leased"] == stats["released"], stats
"""
    )


def test_tensors_that_an_asynchronous_executor_is_yet_to_make(run: Run) -> None:
    run(
        """
tf.config.experimental.set_synchronous_execution(False)

released, waited = threading.Event(), []

def wait(x):
    waited.append(released.wait(20))
    return x * 2

late = tf.function(lambda x: tf.numpy_function(wait, [x], tf.float32))
released.set()
late(tf.ones(4)).numpy()
released.clear()
tensor = late(tf.ones(4))
threading.Timer(0.3, released.set).start()
assert tb.to_torch(tensor).tolist() == [2, 2, 2, 2]
assert waited == [True, True], "it is not asynchronous"
variable = tf.Variable([1.0, 2.0])
for i in range(100):
    variable.assign_add([1.0, 1.0])
    assert tb.to_numpy(variable).tolist() == [i + 2, i + 3]
    x = tf.random.normal((64, 64))
    y = x @ x + 1
    assert (tb.to_numpy(y) == y.numpy()).all()
    assert tb.to_numpy(tf.range(10.0) * i, copy=True)[-1] == 9 * i
"""
    )


def test_an_asynchronous_failure_is_told(run: Run) -> None:
    run(
        """
tf.config.experimental.set_synchronous_execution(False)
failed = tf.raw_ops.CheckNumerics(tensor=[float("nan")], message="no number")
for call in (tb.to_numpy, lambda x: tb.to_torch(x, copy=True), lambda x: tb.plan(x, "numpy")):
    try:
        call(failed)
    except tb.BridgeRuntimeError as error:
        assert error.kind == "framework" and "no number" in str(error), error
    else:
        raise SystemExit("no error")
tf.experimental.async_clear_error()
assert tb.to_numpy(tf.range(3.0) + 1).tolist() == [1, 2, 3]
"""
    )


def test_a_full_memory_is_what_tensorflow_says_it_is(run: Run) -> None:
    """128 TiB, for which TensorFlow finds no memory when it is about to compute.

    Its own allocator would wait 10 s for others to free some.
    """
    run(
        """
tf.config.experimental.set_synchronous_execution(False)
for call in (tb.to_numpy, lambda x: tb.to_torch(x, copy=True), lambda x: tb.plan(x, "numpy")):
    failed = tf.fill([1 << 45], 1.0)
    try:
        call(failed)
    except tf.errors.ResourceExhaustedError as error:
        assert "OOM" in str(error), error
    else:
        raise SystemExit("no error")
    tf.experimental.async_clear_error()
assert tb.to_numpy(tf.range(3.0) + 1).tolist() == [1, 2, 3]
""",
        may_complain=True,
        TF_ONEDNN_USE_SYSTEM_ALLOCATOR="1",
    )


def test_an_interrupt_is_not_swallowed(run: Run) -> None:
    run(
        """
from tensorflow.python.eager import context
array = numpy.arange(3.0)

class Interrupted:
    @property
    def _context_handle(self):
        raise interrupt("on purpose")

tb.to_tensorflow(array)
for interrupt in (KeyboardInterrupt, SystemExit, MemoryError):
    whole, context._context = context._context, Interrupted()
    try:
        tb.to_tensorflow(array)
    except BaseException as error:
        assert type(error) is interrupt, repr(error)
    else:
        raise AssertionError("no error")
    context._context = whole
    assert tb.to_tensorflow(array).numpy().tolist() == [0, 1, 2]
""",
        may_complain=True,
    )


def test_owners_that_need_python_are_released_by_an_executor(run: Run) -> None:
    """The executor's thread drops the last reference, while this thread holds the GIL and waits for the executor."""
    run(
        """
from tensorflow.python.eager import context
tf.config.experimental.set_synchronous_execution(False)
released_on = []

class Owner(numpy.ndarray):
    def __del__(self):
        released_on.append(threading.get_ident())

def owned():
    return tb.to_tensorflow(torch.ones(1 << 12).numpy().view(Owner), copy=False)

big = tf.ones((500, 500))
for i in range(100):
    slow = tf.linalg.matmul(big, big)[0, 0]
    result = tf.add(owned(), slow)
    if i % 3 == 0:
        assert (tb.to_numpy(result) == 501).all()
del slow, result
context.async_wait()
settle()
assert len(released_on) == 100, released_on
assert set(released_on) - {threading.get_ident()}, "every owner was released by this thread"
"""
    )


def test_a_change_of_the_executor_waits_for_releases(run: Run) -> None:
    """TensorFlow joins the executor's thread with the GIL held, and that thread has an owner to release."""
    run(
        """
class Owner(numpy.ndarray):
    def __del__(self):
        pass

big = tf.ones((1500, 1500))
for _ in range(3):
    tf.config.experimental.set_synchronous_execution(False)
    view = tb.to_tensorflow(torch.ones(1 << 12).numpy().view(Owner), copy=False)
    result = tf.add(view, tf.linalg.matmul(big, big)[0, 0])
    del view
    tf.config.experimental.set_synchronous_execution(True)
del result
settle()
"""
    )


def test_a_copy_after_a_busy_executor(run: Run) -> None:
    run(
        """
tf.config.experimental.set_synchronous_execution(False)

def sleep(x):
    time.sleep(0.3)
    return x

late = tf.function(lambda x: tf.numpy_function(sleep, [x], tf.float64))
late(tf.ones(4, "float64")).numpy()
tensor = tf.range(10.0) * 1
pending = late(tf.ones(4, "float64"))
assert tb.to_numpy(tensor, copy=True).tolist() == list(range(10))
"""
    )


def test_writing_through_a_view_writes_to_the_tensor_whoever_has_it() -> None:
    """TensorFlow shares constants and takes them for unchanging: docs/tensorflow.md, Limits."""
    constants = tf.function(lambda: tf.constant([1.0, 2.0, 3.0]))
    tb.to_torch(constants())[0] = 9
    assert constants().numpy().tolist() == [9, 2, 3]
    assert tb.to_numpy(constants(), copy=True).flags.writeable


def test_several_processors_of_the_host(run: Run) -> None:
    run(
        """
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
with tf.device("CPU:1"):
    tensor = tf.range(3.0) + 1
assert "CPU:1" in tensor.device, tensor.device
assert tb.to_numpy(tensor).tolist() == [1, 2, 3]
assert tb.to_numpy(tensor, copy=True).tolist() == [1, 2, 3]
"""
    )


def test_a_cluster_that_is_joined_after_the_first_conversion(run: Run) -> None:
    run(
        """
import socket
from tensorflow.core.protobuf import tensorflow_server_pb2 as protocol
from tensorflow.python.eager import context
assert tb.to_numpy(tb.to_tensorflow(torch.ones(3))).tolist() == [1, 1, 1]
with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
cluster = tf.train.ClusterSpec({"chief": [f"localhost:{port}"]}).as_cluster_def()
server = protocol.ServerDef(cluster=cluster, job_name="chief", task_index=0, protocol="grpc")
context.set_server_def(server)
made = tf.ones(3) + 1
assert "/job:chief" in made.device, made.device
assert tb.to_numpy(made).tolist() == [2, 2, 2]
assert tb.to_numpy(tb.to_tensorflow(torch.ones(3)) + 1).tolist() == [2, 2, 2]
""",
        may_complain=True,
    )


def test_a_tensor_on_a_device_of_another_server_is_refused(run: Run) -> None:
    run(
        """
import socket
with socket.socket() as free:
    free.bind(("localhost", 0))
    place = f"localhost:{free.getsockname()[1]}"
server = tf.distribute.Server({"worker": [place]}, job_name="worker", task_index=0)
tf.config.experimental_connect_to_host(place)
with tf.device("/job:worker/replica:0/task:0/device:CPU:0"):
    there = tf.ones(3) + 1
assert "/job:worker" in there.backing_device, there.backing_device
for convert in (tb.to_numpy, tb.to_torch):
    try:
        convert(there)
    except tb.BridgeError as error:
        assert error.kind == "device" and "tf.identity under tf.device" in str(error), repr(error)
    else:
        raise AssertionError("no error")
with tf.device("/job:localhost/replica:0/task:0/device:CPU:0"):
    here = tf.identity(there)
assert tb.to_numpy(here).tolist() == [2, 2, 2]
""",
        may_complain=True,
    )


def test_a_program_that_builds_graphs_only(run: Run) -> None:
    """Without eager execution a view is an eager tensor all the same; it goes into a graph by a feed."""
    run(
        """
tf.compat.v1.disable_eager_execution()
source = torch.arange(4.0)
view = tb.to_tensorflow(source)
assert tb.to_torch(view).data_ptr() == source.data_ptr()
x = tf.compat.v1.placeholder(tf.float32)
with tf.compat.v1.Session() as session:
    assert tb.to_torch(session.run(x + 1, {x: view.numpy()})).tolist() == [1, 2, 3, 4]
for graph in (x, tf.compat.v1.get_variable("variable", [3])):
    try:
        tb.to_numpy(graph)
    except tb.BridgeTypeError as error:
        assert error.kind == "not_a_tensor", error
    else:
        raise SystemExit("no error")
"""
    )


def test_a_second_copy_of_the_package_is_told(run: Run, tmp_path: Path) -> None:
    copy = shutil.copy(_core.__file__, tmp_path / "_core.abi3.so")
    run(
        f"""
import importlib.util
fed = tb.tensorflow.feed(torch.ones(3))
spec = importlib.util.spec_from_file_location("second._core", {str(copy)!r})
second = importlib.util.module_from_spec(spec)
spec.loader.exec_module(second)
try:
    second.tensorflow_operations()
except tb.BridgeValueError as error:
    assert "another copy" in str(error), error
else:
    raise SystemExit("no error")
""",
        may_complain=True,
    )


REFUSED_TWICE = """
import numpy, truebridge as tb
for call in (lambda: tb.to_tensorflow(numpy.ones(3)), lambda: tb.profile("tensorflow")):
    try:
        call()
    except tb.BridgeError as error:
        assert error.kind == {kind!r}, error.kind
        assert "tensorflow" in str(error).lower(), error
    else:
        raise SystemExit("no error")
assert tb.to_numpy(numpy.ones(3)).tolist() == [1, 1, 1]
"""
#: What the module ``tensorflow`` does, and the kind of the error.
FAKES = {
    "too old": ("__version__ = '1.15.0'", "version"),
    "broken": ("raise ImportError('libcuda is broken')", "missing"),
    "failing": ("raise ValueError('out of tune')", "framework"),
    "without a file": ("del __file__", "version"),
    "with other libraries": ("", "version"),
}


@pytest.mark.parametrize("fake", FAKES)
def test_what_is_no_tensorflow_2(fake: str, tmp_path: Path) -> None:
    import _ctypes

    package = tmp_path / "tensorflow"
    package.mkdir()
    code, kind = FAKES[fake]
    (package / "__init__.py").write_text(code)
    if fake == "with other libraries":
        for name in ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2"):
            (package / name).symlink_to(_ctypes.__file__)
    started(REFUSED_TWICE.format(kind=kind), str(tmp_path))


# The frameworks may be imported in any order, on machines with a GPU and without.


CUDA = torch.cuda.is_available()
if CUDA:
    pytest.importorskip("cupy")
ORDERS = set(itertools.permutations(["torch", "tensorflow", "truebridge", *(["cupy"] if CUDA else [])]))
# The package imports TensorFlow itself there.
ORDERS -= {("truebridge", "tensorflow", "torch")}
if not CUDA:
    # It looks at the frameworks when a tensor is converted: between two imports it has nothing to meet.
    ORDERS = {order for order in ORDERS if order[1] != "truebridge"}

IMPORTS = """
import sys
sys.modules["tensorflow.python.pywrap_dlopen_global_flags"] = None
import {order}
"""
ROUNDS = """
import tensorflow, torch, truebridge as tb

def same(first, *targets):
    \"\"\"Sends a tensor round, and looks at its address and its values at each stop.\"\"\"
    x = first
    for target in targets:
        x = tb.convert(x, target, copy=False)
        assert tb.to_torch(x).data_ptr() == tb.to_torch(first).data_ptr(), (first, target)
        assert (tb.to_torch(x) * 2).tolist() == [0, 2, 4, 6], (first, target)

same(torch.arange(4.0), "tensorflow", "numpy", "tensorflow", "torch")
with tensorflow.device("CPU:0"):
    same(tensorflow.range(4.0), "torch", "numpy", "tensorflow")
"""
ROUNDS_CUDA = """
import cupy
with tensorflow.device("GPU:0"):
    same(tensorflow.range(4.0), "torch", "cupy", "tensorflow", "cupy", "torch")
    assert (tb.to_tensorflow(cupy.arange(4.0)) * 2).numpy().tolist() == [0, 2, 4, 6]
same(torch.arange(4.0, device="cuda"), "tensorflow", "cupy", "torch", "cupy", "tensorflow")
a = torch.ones(64, 64, device="cuda")
assert (a @ a).sum().item() == 64**3
b = tb.to_tensorflow(a)
assert tensorflow.reduce_sum(b * b).numpy() == 64**2
c = tb.to_cupy(b)
assert (c @ c).sum() == 64**3
"""


@pytest.mark.parametrize("order", sorted(ORDERS), ids=",".join)
def test_any_order_of_imports_works(order: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    code = IMPORTS.format(order=", ".join(order)) + ROUNDS + (ROUNDS_CUDA if CUDA else "")
    # A process that has imported what an order begins with is as good as a new one.
    warm = {("torch", "tensorflow"): "beside_torch", ("tensorflow", "torch"): "beside_tensorflow"}.get(order[:2])
    if warm and not CUDA:
        done = request.getfixturevalue(warm).run(code)
        assert done.returncode == 0, done.stderr
    else:
        started(code)


def test_a_tensorflow_that_the_package_imports_keeps_its_symbols_to_itself() -> None:
    started(
        """
import ctypes, sys
import numpy, truebridge as tb
assert tb.to_tensorflow(numpy.ones(3)).numpy().tolist() == [1, 1, 1]
assert not hasattr(ctypes.CDLL(None), "TF_Version"), "libraries that are loaded later take its stubs of CUDA"
assert "tensorflow.python.pywrap_dlopen_global_flags" not in sys.modules, "it was to be kept from one import"
"""
        + ROUNDS
    )
