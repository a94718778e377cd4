"""What memory is in use, as the tests count it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable

import truebridge as tb


def resident() -> int:
    """Bytes of host memory that this process has in use."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def counts() -> dict[str, int]:
    """The counts of the process, once garbage, which may be another test's, is dropped."""
    gc.collect()
    return dict(tb.stats())


def views() -> int:
    """The number of live views. A test that fails keeps its own, in its traceback: compare with the number before."""
    stats = counts()
    return stats["leased"] - stats["released"]


def eventually(done: Callable[[], bool]) -> None:
    """Wait for ten seconds at most: TensorFlow's threads leave what needs Python to one of the package's."""
    patience = time.monotonic() + 10
    while not done():
        assert time.monotonic() < patience
        gc.collect()
        time.sleep(0.001)


def settled() -> dict[str, int]:
    """The counts once nothing waits for the device any more, which has done its work."""
    gc.collect()
    patience = time.monotonic() + 5
    while tb.stats()["pending"] and time.monotonic() < patience:
        time.sleep(0.01)
    return dict(tb.stats())
