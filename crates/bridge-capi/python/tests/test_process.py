"""Beginnings and ends of processes, with whatever is wrong about them."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import truebridge_tf1 as tb
from truebridge_tf1 import _library


def library() -> str:
    """The file of the library that is tested."""
    return os.environ.get(_library.VARIABLE) or str(Path(tb.__file__).parent / "libtruebridge_tf1.so")


def run(code: str, **environment: str) -> Any:
    return subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=300,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
    )


def succeeds(code: str, **environment: str) -> None:
    done = run(code, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    complaints = [line for line in done.stderr.splitlines() if "Exception ignored" in line or "panicked" in line]
    assert not complaints, done.stderr[-3000:]


LIVE = """
import threading, time
import numpy as np
import tensorflow as tf
import truebridge_tf1 as tb
memory = np.zeros(1064, np.uint8)
array = memory[-memory.ctypes.data % 64:][:1000].view(np.float32)
session = tf.compat.v1.Session()
x = tb.external_input(tf.float32, [None])
y = tb.external_output(x)
fed = tb.feed(array, copy=False)
unclaimed = session.run(y, {tb.handle_of(x): fed})
taken = tb.take(session.run(y, {tb.handle_of(x): fed}))
views = [taken.numpy(), taken.__dlpack__(), np.asarray(taken)[3:]]
"""


def test_the_interpreter_ends_with_everything_alive(tf: Any) -> None:
    succeeds(LIVE)


def test_the_interpreter_ends_with_views_of_torch_alive(tf: Any) -> None:
    pytest.importorskip("torch")
    succeeds(LIVE + "import torch\nviews.append(torch.utils.dlpack.from_dlpack(taken))\n")


def test_the_interpreter_ends_in_a_cycle(tf: Any) -> None:
    succeeds(LIVE + "class Knot: pass\nknot = Knot(); knot.all = [knot, fed, taken, views, session]\n")


def test_the_interpreter_ends_while_threads_run(tf: Any) -> None:
    succeeds(
        LIVE
        + """
def work():
    while True:
        tb.take(session.run(y, {tb.handle_of(x): tb.feed(array)})).numpy()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""
    )


def test_memory_that_a_run_still_has_when_its_feed_goes_is_given_back(tf: Any) -> None:
    """The last reference ends on a thread of TensorFlow's, while Python holds the GIL or waits without."""
    succeeds(
        """
import threading, time, weakref
import numpy as np
import tensorflow as tf
import truebridge_tf1 as tb
memory = np.zeros(1064, np.uint8)
session = tf.compat.v1.Session(config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4))
x = tb.external_input(tf.float32, [None])
waited = tf.compat.v1.py_func(lambda a: (time.sleep(0.2), a)[1], [tf.reduce_sum(x)], tf.float32)
with tf.control_dependencies([waited]):
    y = tf.reduce_sum(x * 2)
for round in range(5):
    array = memory[-memory.ctypes.data % 64:][:1000].view(np.float32)
    alive = weakref.ref(array)
    fed = tb.feed(array, copy=False)
    numbers = np.asarray(fed).copy()
    thread = threading.Thread(target=session.run, args=(y, {tb.handle_of(x): numbers.tolist()}))
    thread.start()
    time.sleep(0.1)
    del fed, array
    assert alive() is not None
    thread.join()
    patience = time.time() + 10
    while alive() is not None and time.time() < patience:
        time.sleep(0.001)
    assert alive() is None
"""
    )


def test_a_fork_can_still_end(tf: Any) -> None:
    succeeds(
        LIVE
        + """
import os
child = os.fork()
if not child:
    del fed, taken, views
    raise SystemExit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    )


def test_a_second_copy_of_the_library_is_told(tf: Any, tmp_path: Path) -> None:
    copy = tmp_path / "copy.so"
    shutil.copy(library(), str(copy))
    code = f"""
import ctypes
import numpy as np, tensorflow as tf, truebridge_tf1 as tb
from truebridge_tf1 import _library
fed = tb.feed(np.ones(3))
second = _library.Library({str(copy)!r})
try:
    second.runtime_loaded(1, ctypes.byref(ctypes.c_void_p()))
except tb.BridgeValueError as error:
    assert "another copy" in str(error), error
else:
    raise SystemExit("no error")
"""
    succeeds(code)


FEED = """
import numpy as np, truebridge_tf1 as tb
try:
    tb.feed(np.ones(3))
except tb.{} as error:
    assert error.kind == "{}" and "{}" in str(error), (error.kind, error)
else:
    raise SystemExit("no error")
"""


def test_a_missing_library_is_told(tmp_path: Path) -> None:
    succeeds(
        "import truebridge_tf1 as tb\n" + FEED.format("BridgeImportError", "missing", "cannot be loaded"),
        TRUEBRIDGE_TF1_LIBRARY=str(tmp_path / "none.so"),
    )


def test_a_library_that_is_another_is_told() -> None:
    import ctypes.util

    other = ctypes.util.find_library("m")
    assert other
    succeeds(FEED.format("BridgeImportError", "missing", "cannot be loaded"), TRUEBRIDGE_TF1_LIBRARY=other)


def test_a_library_with_another_interface_is_told() -> None:
    code = "from truebridge_tf1 import _library\n_library.ABI = 77\n"
    succeeds(code + FEED.format("BridgeBufferError", "version", "this package needs 77"))


@pytest.mark.parametrize("version", ["2.21.0", "1.14.0", "1.2.0"])
def test_an_unsupported_tensorflow_is_named(version: str) -> None:
    code = f"""
import sys, types
sys.modules["tensorflow"] = tensorflow = types.ModuleType("tensorflow")
tensorflow.__version__ = "{version}"
"""
    succeeds(code + FEED.format("BridgeBufferError", "version", f"{version}: supported is TensorFlow 1.15"))


def test_a_tensorflow_that_is_not_installed_is_told() -> None:
    code = 'import sys\nsys.modules["tensorflow"] = None\n'
    succeeds(code + FEED.format("BridgeImportError", "missing", "pip install tensorflow==1.15.5"))


def test_the_installed_tensorflow_is_named_if_it_is_another() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    if tensorflow.__version__.startswith("1.15."):
        pytest.skip("this one is supported")
    succeeds(FEED.format("BridgeBufferError", "version", tensorflow.__version__))


def test_counts_need_no_tensorflow() -> None:
    succeeds("import truebridge_tf1 as tb; assert set(tb.stats().values()) == {0}")


# The wheel: one for every Python, with everything in it and nothing that wants more.


PACKAGE = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("wheel")
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "-e", str(out), "build", "-b", str(out / "build")]
        + ["bdist_wheel", "-d", str(out), "-b", str(out / "bdist")],
        cwd=str(PACKAGE),
        env={**os.environ, "TRUEBRIDGE_TF1_LIBRARY": library()},
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=300,
    )
    (made,) = out.glob("*.whl")
    return made


def test_the_name_says_what_it_is_for(wheel: Path) -> None:
    cargo = PACKAGE.parent.parent.parent / "Cargo.toml"
    version = re.findall(r'^version = "(.+)"', cargo.read_text(), re.MULTILINE)[0]
    assert wheel.name == f"truebridge_tf1-{version}-py3-none-linux_x86_64.whl"


def test_everything_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(str(wheel)) as contents:
        names = {name for name in contents.namelist() if ".dist-info/" not in name}
        (tags,) = [name for name in contents.namelist() if name.endswith(".dist-info/WHEEL")]
        described = contents.read(tags).decode()
    sources = {str(path.relative_to(str(PACKAGE))) for path in (PACKAGE / "truebridge_tf1").rglob("*.py")}
    assert names == sources | {"truebridge_tf1/py.typed", "truebridge_tf1/libtruebridge_tf1.so"}
    assert "Tag: py3-none-linux_x86_64" in described
    assert "Root-Is-Purelib: false" in described


def test_it_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            "--target",
            str(tmp_path),
            str(wheel),
        ],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop("TRUEBRIDGE_TF1_LIBRARY", None)
    code = "import truebridge_tf1 as tb; assert tb.stats()['leased'] == 0; print(tb.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=str(tmp_path), env=environment, stdout=subprocess.PIPE, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.decode().startswith(str(tmp_path))


def test_the_library_wants_no_python(wheel: Path) -> None:
    with zipfile.ZipFile(str(wheel)) as contents:
        binary = contents.read("truebridge_tf1/libtruebridge_tf1.so")
    assert b"libpython" not in binary
    assert b"libcudart" not in binary
