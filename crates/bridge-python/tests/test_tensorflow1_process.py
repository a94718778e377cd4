"""TensorFlow 1.15 in separate processes: folders that hold it or not, orders of imports, the end of a program."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import truebridge as tb
from graphs import FOLDER, compiled, line, tf
from programs import Warm
from truebridge import processes
from truebridge_conformance.others import Other, python37, wait_until

torch: Any = pytest.importorskip("torch")


SETUP = """
import os, sys
import truebridge as tb
FOLDER = os.environ.pop("TRUEBRIDGE_TENSORFLOW1")
HOST = b"\\x0a\\x07\\x0a\\x03GPU\\x10\\x00"  # device_count { key: "GPU" value: 0 }

def refused(call, kind, *words):
    try:
        call()
    except tb.BridgeError as error:
        assert error.kind == kind, (error.kind, str(error))
        assert all(word in str(error) for word in words), str(error)
    else:
        raise SystemExit("no error")

def works():
    import numpy
    x = numpy.arange(32, dtype="float32")
    with tb.tensorflow.v1.Session(LINE, {"x": ("float32", [None])}, ["y"], config=HOST) as session:
        assert session.run({"x": x}, "numpy")[0].tolist() == (2 * x + 1).tolist()
"""


def succeeds(code: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", f"LINE = {line()!r}\n{SETUP}\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


# --- folders


def test_without_a_folder_it_is_told_what_to_do() -> None:
    succeeds(
        """
import numpy
for call in (
    lambda: tb.tensorflow.v1.open(),
    lambda: tb.convert(numpy.ones(3), "tensorflow1"),
    lambda: tb.profile("tensorflow1"),
    lambda: tb.tensorflow.v1.Session(LINE, {}, ["y"]),
):
    refused(call, "missing", "truebridge.tensorflow.v1.open(folder)", "TRUEBRIDGE_TENSORFLOW1")
tb.tensorflow.v1.open(FOLDER)
works()
"""
    )


@pytest.mark.parametrize("use", ["tb.tensorflow.v1.open()", "works()", "tb.profile('tensorflow1')"])
def test_the_environment_names_the_folder(use: str) -> None:
    succeeds(f"os.environ['TRUEBRIDGE_TENSORFLOW1'] = FOLDER; {use}; works()")


def test_it_is_opened_once() -> None:
    succeeds(
        """
from pathlib import Path
import threading
versions = []
threads = [threading.Thread(target=lambda: versions.append(tb.tensorflow.v1.open(FOLDER))) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for folder in (FOLDER, FOLDER + "/", Path(FOLDER), Path(FOLDER).parent, os.path.relpath(FOLDER), None):
    versions.append(tb.tensorflow.v1.open(folder))
(version,) = set(versions)
assert version.startswith("1.15."), version
works()
"""
    )


def test_no_memory_becomes_writable_code() -> None:
    """Where a library asks for it, or does not say that it need not, loading makes the stacks executable."""
    succeeds(
        """
def executable():
    return [line for line in open("/proc/self/maps") if "rwx" in line]
before = executable()
tb.tensorflow.v1.open(FOLDER)
works()
assert executable() == before, executable()
"""
    )


def test_two_folders_are_one_too_many(tmp_path: Path) -> None:
    (tmp_path / "python").mkdir()
    for name in ("libtensorflow_framework.so.1", "python/_pywrap_tensorflow_internal.so"):
        (tmp_path / name).symlink_to(Path(FOLDER) / name)
    (tmp_path / "same").symlink_to(FOLDER, target_is_directory=True)
    succeeds(
        f"""
tb.tensorflow.v1.open(FOLDER)
refused(lambda: tb.tensorflow.v1.open({str(tmp_path)!r}), "argument", "has loaded", os.path.realpath(FOLDER))
tb.tensorflow.v1.open({str(tmp_path / "same")!r})
works()
"""
    )


def package(path: Path, version: str) -> None:
    """A package whose libraries say that they are this version, and can do nothing else."""
    (path / "python").mkdir(parents=True)
    for name in ("libtensorflow_framework.so.1", "python/_pywrap_tensorflow_internal.so"):
        compiled(path / name, f'const char *TF_Version(void) {{ return "{version}"; }}')


#: What the libraries of a package say, and words of the error.
VERSIONS = {
    "1.14.0": ("1.14.0", "supported are", "1.15"),
    "1.1.5": ("1.1.5", "1.15"),
    "2.21.0": ("2.21.0", "1.15"),
    "1": ("is 1:", "1.15"),
    "": ("1.15",),
    # The right one, by its word; but it has no functions.
    "1.15.5": ("has no function TF_", "supported is TensorFlow 1.15"),
}


def test_other_versions_are_named(tmp_path: Path) -> None:
    folders = {str(tmp_path / str(number)): version for number, version in enumerate(VERSIONS)}
    for folder, version in folders.items():
        package(Path(folder), version)
    succeeds(
        f"""
for folder, words in {[(folder, VERSIONS[version]) for folder, version in folders.items()]!r}:
    refused(lambda: tb.tensorflow.v1.open(folder), "version", *words)
tb.tensorflow.v1.open(FOLDER)
works()
"""
    )


def test_what_is_no_tensorflow_1_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "text" / "python").mkdir(parents=True)
    for name in ("libtensorflow_framework.so.1", "python/_pywrap_tensorflow_internal.so"):
        (tmp_path / "text" / name).write_text("no library")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "libtensorflow_framework.so.1").symlink_to(Path(FOLDER) / "libtensorflow_framework.so.1")
    two = str(Path(tf.__file__).resolve().parent)
    succeeds(
        f"""
os.chdir({str(tmp_path)!r})
for folder, words in [
    ("nowhere", ["nowhere", "site-packages/tensorflow_core"]),
    ("empty", ["empty holds no libraries", "site-packages/tensorflow_core"]),
    ("file", ["file is a file: unpack a wheel", "zipfile"]),
    ("text", ["_pywrap_tensorflow_internal.so cannot be loaded", "file too short"]),
    ("half", ["_pywrap_tensorflow_internal.so cannot be loaded", "No such file"]),
    ("", ["site-packages/tensorflow_core"]),
    ("nul\\0", ["site-packages/tensorflow_core"]),
]:
    refused(lambda: tb.tensorflow.v1.open(folder), "missing", *words)
refused(lambda: tb.tensorflow.v1.open({two!r}), "version", {two!r}, "must be TensorFlow 1.15")
tb.tensorflow.v1.open(FOLDER)
works()
for folder, kind in [({two!r}, "version"), ("empty", "missing")]:
    refused(lambda: tb.tensorflow.v1.open(folder), kind)
works()
"""
    )


def test_another_one_that_the_process_has_loaded_is_named(tmp_path: Path) -> None:
    """Half of a package cannot be used. A folder that the environment names does not replace it."""
    compiled(tmp_path / "libtensorflow_framework.so.1", "int of_another_program;")
    succeeds(
        f"""
import ctypes
ctypes.CDLL({str(tmp_path / "libtensorflow_framework.so.1")!r})
words = {str(tmp_path)!r}, "has not loaded python/_pywrap_tensorflow_internal.so", "supported is TensorFlow 1.15"
refused(lambda: tb.tensorflow.v1.open(), "version", *words)
os.environ["TRUEBRIDGE_TENSORFLOW1"] = FOLDER
refused(lambda: tb.tensorflow.v1.open(), "version", *words)
refused(lambda: tb.tensorflow.v1.open(FOLDER), "argument", "has loaded the TensorFlow in", {str(tmp_path)!r})
"""
    )


def test_an_object_of_any_other_type_opens_nothing() -> None:
    succeeds(
        """
os.environ["TRUEBRIDGE_TENSORFLOW1"] = FOLDER
refused(lambda: tb.to_numpy(object()), "not_a_tensor")
assert "libtensorflow_framework.so.1" not in open("/proc/self/maps").read()
works()
assert "libtensorflow_framework.so.1" in open("/proc/self/maps").read()
"""
    )


# --- with other frameworks


def test_it_needs_no_other_framework() -> None:
    succeeds(
        """
import numpy
for name in ("tensorflow", "torch", "cupy", "ml_dtypes"):
    sys.modules[name] = None
tb.tensorflow.v1.open(FOLDER)
works()
memory = numpy.empty(4 * 64 + 64, numpy.uint8)
array = memory[-memory.ctypes.data % 64:][:4 * 64].view(numpy.float32)
array[:] = numpy.arange(64)
with tb.tensorflow.v1.Session(LINE, {"x": (numpy.float32, [None])}, ["y", "x"], config=HOST) as session:
    y, x = session.run({"x": array}, "numpy", copy=False)
assert x.tolist() == array.tolist()
assert y.tolist() == (2 * array + 1).tolist()
assert not [name for name in sys.modules if name.split(".")[0] in ("tensorflow", "torch") and sys.modules[name]]
"""
    )


#: Between them each is imported before each other one. TensorFlow 2 shows its symbols to both of the others or to
#: neither. One that hides them is in the process of the tests.
ORDERS = [("tensorflow", "torch", "tensorflow1"), ("tensorflow1", "torch", "tensorflow")]

ORDER = """
for name in {order}:
    tb.tensorflow.v1.open(FOLDER) if name == "tensorflow1" else __import__(name)
works()
import numpy, tensorflow as tf, torch
with tf.device("CPU:0"):
    x = torch.arange(64.0)
    with tb.tensorflow.v1.Session(LINE, {{"x": ("float32", [None])}}, ["y", "x"], config=HOST) as session:
        fed = tb.convert(tb.to_tensorflow(x, copy=False), "tensorflow1", copy=False)
        y, same = session.run({{"x": fed}})
    back = tb.to_torch(tb.to_numpy(tb.to_tensorflow(fed, copy=False), copy=False), copy=False)
    assert back.data_ptr() == x.data_ptr()
    assert tf.reduce_sum(tb.to_tensorflow(y, copy=False)).numpy() == (2 * x + 1).sum().item()
    assert (torch.ones(64, 64) @ torch.ones(64, 64)).sum().item() == 64**3
    assert tf.reduce_sum(tf.ones((64, 64)) @ tf.ones((64, 64))).numpy() == 64**3
"""


@pytest.mark.parametrize("order", ORDERS, ids=",".join)
def test_any_order_of_imports_works(order: tuple[str, ...]) -> None:
    succeeds(ORDER.format(order=order))


def test_a_second_copy_of_the_package_is_told(tmp_path: Path) -> None:
    copy = tmp_path / "_core.abi3.so"
    shutil.copy(tb._core.__file__, copy)
    succeeds(
        f"""
import importlib.util, numpy
tb.tensorflow.v1.open(FOLDER)
works()
spec = importlib.util.spec_from_file_location("second._core", {str(copy)!r})
second = importlib.util.module_from_spec(spec)
spec.loader.exec_module(second)
assert second.tensorflow1_open(FOLDER)[0].startswith("1.15.")
refused(lambda: second.Session(LINE, [("x", "float32", None, None)], ["y"], True, None, None, HOST),
    "argument", "another copy")
refused(lambda: second.convert(numpy.ones(3), "tensorflow1"), "argument", "another copy")
works()
"""
    )


# --- the end


ENDS = ["pass", "sys.keep = (session, views, results)", "views.append(views); sys.keep = views", "session.close()"]


@pytest.mark.parametrize("end", ENDS)
def test_views_and_sessions_that_are_alive_at_exit(end: str, beside_torch: Warm) -> None:
    done = beside_torch.run(
        f"""
LINE = {line()!r}
{SETUP}
import numpy, torch, threading
tb.tensorflow.v1.open(FOLDER)
session = tb.tensorflow.v1.Session(LINE, {{"x": ("float32", [None])}}, ["y", "x"], config=HOST)
others = [tb.tensorflow.v1.Session(LINE, {{"x": ("float32", [None])}}, ["y"], config=HOST) for _ in range(3)]
tensor = torch.arange(1000.0)
results = session.run({{"x": tensor}}) + others[0].run({{"x": numpy.ones(64, "float32")}})
views = [tb.to_torch(y) for y in results] + [tb.to_numpy(y) for y in results]
del tensor
{end}
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_tensors_but_no_sessions(beside_torch: Warm) -> None:
    """TensorFlow's threads are not in it."""
    done = beside_torch.run(
        f"LINE = {line()!r}\n{SETUP}"
        """
import torch
tb.tensorflow.v1.open(FOLDER)
tensor = torch.arange(4.0)
session = tb.tensorflow.v1.Session(LINE, {"x": ("float32", [None])}, ["y", "x"], config=HOST)
y, x = session.run({"x": tensor})
child = os.fork()
if child == 0:
    try:
        refused(lambda: session.run({"x": tensor}), "argument", "started, not forked")
        other = lambda: tb.tensorflow.v1.Session(LINE, {"x": ("float32", [None])}, ["y"], config=HOST)
        refused(other, "argument", "started, not forked")
        session.close()
        assert tb.to_torch(x).tolist() == [0, 1, 2, 3] and tb.to_torch(y).tolist() == [1, 3, 5, 7]
        del session, x, y
    except BaseException as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert session.run({"x": tensor}, "numpy")[0].tolist() == [1, 3, 5, 7]
works()
"""
    )
    assert done.returncode == 0, done.stderr[-3000:]


# Tensors of PyTorch in the sessions of TensorFlow 1.15 in a Python 3.7, and back: two processes, one memory.


PYTHON37 = python37()
with_python37 = pytest.mark.skipif(PYTHON37 is None, reason="there is no Python 3.7 with TensorFlow 1.15")

#: On the device of both, where both have one.
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

#: Rounds of the tests of order, and of the test of memory.
ROUNDS, MANY = (int(os.environ.get(f"TRUEBRIDGE_{name}", usual)) for name, usual in (("ROUNDS", 20), ("MANY", 200)))

COUNT = 1 << 20

#: Doubles what a ticket opens, and shares the result. The kernels are only those of addition and multiplication.
DOUBLE = """
import gc, os, warnings
warnings.simplefilter("ignore")
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
tf.compat.v1.logging.set_verbosity("ERROR")
sessions = {}
def session_on(device):
    if device not in sessions:
        with tf.Graph().as_default(), tf.device("/cpu:0" if device == "cpu" else "/device:GPU:0"):
            options = tf.compat.v1.ConfigProto(gpu_options=tf.compat.v1.GPUOptions(allow_growth=True))
            session = tf.compat.v1.Session(config=options)
            x = tb.external_input(tf.float32, [None])
            y = x + x
            for _ in range(8):
                y = y * 1.0
            sessions[device] = session, tb.handle_of(x), tb.external_output(y)
    return sessions[device]
taken = ticket = None
def run(device, tensor):
    global taken, ticket
    session, handle, output = session_on(device)
    taken = tb.take(session.run(output, {handle: tb.feed(tensor, copy=False)}))
    if ticket is not None:
        tb.revoke(ticket)
    ticket = tb.share(taken)
    return ticket
"""


@pytest.fixture(scope="module")
def tensorflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Other]:
    """Return a process of Python 3.7 that doubles."""
    folder = tmp_path_factory.mktemp("ipc")
    folder.chmod(0o700)
    processes.configure(folder=folder)
    assert PYTHON37 is not None
    other = Other([PYTHON37], "truebridge_tf1", TRUEBRIDGE_IPC=str(folder))
    other.define(DOUBLE)
    yield other
    other.kill()


@with_python37
@pytest.mark.parametrize("device", DEVICES)
def test_a_session_computes_on_the_memory_of_pytorch(tensorflow: Other, device: str) -> None:
    x = torch.arange(COUNT, dtype=torch.float32, device=device)
    ticket = tb.share(x)
    y = tb.open(tensorflow.text(f"run({device!r}, tb.open({ticket.text!r}))"), "torch")
    assert y.device == x.device and torch.equal(y, 2 * x)
    if device == "cuda":
        # Conversions in place in both directions: what is written here is there.
        x.fill_(5)
        y = tb.open(tensorflow.text(f"run({device!r}, tb.open({ticket.text!r}))"), "torch")
        assert (y == 10).all().item()
        y.fill_(7)
        y = tb.open(tensorflow.text(f"run({device!r}, taken)"), "torch")
        assert (y == 14).all().item()
    tb.revoke(ticket)


@with_python37
@pytest.mark.skipif(DEVICES == ["cpu"], reason="no CUDA device")
def test_the_work_of_each_is_after_that_of_the_other(tensorflow: Other) -> None:
    """Each side works after a delay, and the other must wait; results are read late, and their memory reused."""
    there = back = 0
    side = torch.cuda.Stream()
    x = torch.zeros(COUNT, device="cuda")
    kept: list[tuple[int, Any]] = []
    for i in range(1, ROUNDS + 1):
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            x.fill_(i)
            ticket = tb.share(x, copy=False)
        text = tensorflow.text(f"run('cuda', tb.open({ticket.text!r}))")
        with torch.cuda.stream(side):
            y = tb.open(text, "torch")
            first = y[:16].clone()
            torch.cuda._sleep(10_000_000)
            # Read late: TensorFlow's next result must not take this memory before.
            late = y.clone()
            del y
        tensorflow("taken = None")
        tb.revoke(ticket)
        with torch.cuda.stream(side):
            kept.append((i, first))
            there += not (first == 2 * i).all().item()
            back += not (late == 2 * i).all().item()
    assert (there, back) == (0, 0), f"{there} and {back} of {ROUNDS}"


@with_python37
@pytest.mark.parametrize("device", DEVICES)
def test_the_memory_of_many_rounds_comes_back(tensorflow: Other, device: str) -> None:
    def resident() -> tuple[int, ...]:
        gc.collect()
        tensorflow("taken = None; gc.collect()")
        wait_until(lambda: processes.held()["leases"] == 0)
        if device == "cpu":
            return (processes.held()["nbytes"],)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), processes.held()["nbytes"]

    def rounds(count: int) -> None:
        for i in range(count):
            ticket = tb.share(torch.full((1000,), float(i), device=device), expires=600)
            y = tb.open(tensorflow.text(f"run({device!r}, tb.open({ticket.text!r}))"), "torch")
            assert y[-1].item() == 2 * i
            tb.revoke(ticket)

    rounds(20)
    before, leased = resident(), tensorflow("tb.stats()['leased'] - tb.stats()['released']")
    rounds(MANY)
    # What may still be read is kept for a moment.
    wait_until(lambda: resident() == before)
    assert tensorflow("tb.stats()['leased'] - tb.stats()['released']") == leased
