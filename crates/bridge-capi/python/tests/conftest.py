"""What every test here is held to: whatever it does, no view is left behind."""

import gc
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest

from truebridge_tf1 import _calls

# For ``capsules`` and ``docstrings``, which are one for both packages.
sys.path.append(str(Path(__file__).parents[3] / "bridge-python" / "tests"))

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
# TensorFlow 1.15 is older than what it stands on.
warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", category=DeprecationWarning)


@pytest.fixture(scope="session")
def tf() -> Any:
    """TensorFlow 1.15."""
    module = pytest.importorskip("tensorflow")
    if not module.__version__.startswith("1.15."):
        pytest.skip("this is TensorFlow " + module.__version__)
    module.compat.v1.logging.set_verbosity("ERROR")
    return module


@pytest.fixture
def session(tf: Any) -> Iterator[Any]:
    """A session on a new graph."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        yield session


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    before = alive()
    # The frameworks hold hundreds of thousands of objects. No test makes garbage of them, so no collection visits them.
    gc.freeze()
    yield
    # What ends on TensorFlow's threads is released by one of the library's.
    wait_until(lambda: alive() == before)


def alive() -> Any:
    gc.collect()
    stats = _calls.counts()
    return stats["leased"] - stats["released"], stats["unclaimed"]


def wait_until(done: Any) -> None:
    """Ask for ten seconds at most."""
    patience = time.time() + 10
    while not done() and time.time() < patience:
        time.sleep(0.001)
    assert done()


def aligned(shape: Any, dtype: Any = np.float32) -> Any:
    """An array of zeros where TensorFlow takes it in place."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def resident() -> int:
    """Bytes of host memory that this process has in use."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
