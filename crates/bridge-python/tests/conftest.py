"""Hold every test to one rule: whatever it does, it leaves no view behind."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import memory
import truebridge as tb
from programs import Warm

# TensorFlow shows its symbols, among them stubs of CUDA, to libraries that are loaded later. Where this module cannot
# be imported, it does not.
sys.modules.setdefault("tensorflow.python.pywrap_dlopen_global_flags", None)  # type: ignore[arg-type]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
# Threads of PyTorch that spin while they wait take the cores of other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    before = memory.views()
    # The frameworks hold hundreds of thousands of objects. No test makes garbage of them, so no collection visits them.
    gc.freeze()
    yield
    # Owners that need Python are not released on TensorFlow's threads but on one of the package's.
    patience = time.monotonic() + 10
    while memory.views() != before and time.monotonic() < patience:
        time.sleep(0.001)
    assert memory.views() == before


@pytest.fixture(scope="module", autouse=True)
def shares_end() -> Iterator[None]:
    """Let no module find that this process shares already: the folder of the sockets is set before the first share."""
    yield
    from truebridge import _core

    _core.ipc_close()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """Return the path for names, in the folder that has the sockets of this process during the test."""
    from truebridge import _core, processes

    tmp_path.chmod(0o700)
    _core.ipc_close()
    processes.configure(folder=tmp_path)
    yield str(tmp_path / "names")
    gc.collect()
    _core.ipc_close()


@pytest.fixture(scope="module")
def ipc_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Share through a folder of the tests of a module."""
    from truebridge import processes

    folder = tmp_path_factory.mktemp("ipc")
    folder.chmod(0o700)
    processes.configure(folder=folder)


@pytest.fixture
def other() -> Iterator[Any]:
    """Return another process, which ends with the test."""
    from truebridge_conformance.others import Other

    process = Other()
    yield process
    process.kill()


@pytest.fixture(scope="session")
def beside_torch() -> Iterator[Warm]:
    """Runs programs where NumPy and PyTorch are imported already."""
    warm = Warm("numpy", "torch")
    yield warm
    warm.close()


@pytest.fixture(scope="session")
def beside_tensorflow() -> Iterator[Warm]:
    """Runs programs where NumPy, TensorFlow and PyTorch are imported already."""
    warm = Warm("numpy", "tensorflow", "torch")
    yield warm
    warm.close()


@pytest.fixture
def program(beside_torch: Warm) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Return a function that runs a program, whose exit is not tested, where NumPy and PyTorch are imported."""
    return functools.partial(beside_torch.run, frozen=True)


@pytest.fixture
def namespaces() -> list[str]:
    """Return the command that starts a program in a new mount and PID namespace, as containers do."""
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], check=False).returncode != 0:
        pytest.skip("this user may make no namespaces")
    return command


@pytest.fixture
def leaks_nothing() -> Iterator[None]:
    """Check that no memory was given up because its readers could not be waited for."""
    leaked = memory.settled()["leaked"]
    yield
    assert memory.settled()["leaked"] == leaked


@pytest.fixture
def uninterrupted() -> Iterator[None]:
    """Keep the garbage collector, which takes 0.2 s with these frameworks, out of a test that measures time."""
    gc.disable()
    yield
    gc.enable()


def kind_of(call: Callable[[], Any]) -> str | None:
    """Return the kind of the error of the package that a call raises; ``None`` if it raises none."""
    try:
        call()
    except tb.BridgeError as error:
        return error.kind
    return None
