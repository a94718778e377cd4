"""Graphs as programs of TensorFlow 1.x save them, for the tests of ``truebridge.tensorflow.v1``."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb

#: The folder of TensorFlow 1.15's package.
FOLDER = os.environ.get("TRUEBRIDGE_TENSORFLOW1", "")
if not FOLDER:
    pytest.skip("TRUEBRIDGE_TENSORFLOW1 names no folder of TensorFlow 1.15", allow_module_level=True)
tf: Any = pytest.importorskip("tensorflow")
v1: Any = tf.compat.v1

#: An input as nearly every graph here has it.
FLOATS = ("float32", [None])
#: Sessions that use no GPU, also where there is one.
HOST = v1.ConfigProto(device_count={"GPU": 0})


def saved(build: Callable[[], Any]) -> bytes:
    """What ``build`` puts into a graph, without the attributes that operations have got since 1.15."""
    with tf.Graph().as_default() as graph:
        build()
        meta = v1.train.export_meta_graph(graph=graph, strip_default_attrs=True)
    message: bytes = meta.graph_def.SerializeToString()
    return message


def placeholder(dtype: Any = "float32", shape: Any = None, name: str = "x") -> Any:
    """The place where a program of 1.x feeds what a session here takes in place."""
    return v1.placeholder(dtype, shape, name)


@functools.cache
def line() -> bytes:
    """y = 2 x + 1."""
    return saved(lambda: tf.add(2 * placeholder(shape=[None]), 1, name="y"))


#: ``ConfigProto``: ``graph_options.rewrite_options.disable_meta_optimizer`` and ``allow_soft_placement``.
AS_BUILT = bytes([0x52, 5, 0x52, 3, 0x98, 1, 1, 0x38, 1])


@functools.cache
def double() -> bytes:
    """y = x + x, for which a GPU that is newer than TensorFlow 1.15 gets kernels in a bearable time."""

    def build() -> None:
        x = placeholder(shape=[None])
        tf.add(x, x, name="y")

    return saved(build)


@functools.cache
def has_gpu() -> bool:
    """Whether TensorFlow 1.15 sees a GPU."""
    with tb.tensorflow.v1.Session(double(), {"x": FLOATS}, ["y"], config=AS_BUILT) as session:
        return any("/device:GPU:" in name for name in session.devices)


def on_host(graph: Any, inputs: Mapping[str, Any], outputs: Sequence[str], **options: Any) -> tb.tensorflow.v1.Session:
    """A session on the host."""
    return tb.tensorflow.v1.Session(graph, inputs, outputs, config=HOST, **options)


def aligned(array: Any) -> Any:
    """The same array where TensorFlow takes it in place."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def compiled(path: Path, source: str, *options: str) -> None:
    """Compile a shared library from source text of C."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), *options]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
