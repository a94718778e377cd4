"""What memory is in use, as the tests count it."""

from __future__ import annotations

import gc
import os
import time

import tensor_bridge as tb


def resident() -> int:
    """Bytes of host memory that this process has in use."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def views() -> int:
    """The number of live views. A test that fails keeps its own, in its traceback: compare with the number before."""
    stats = tb.stats()
    return stats["leased"] - stats["released"]


def settled() -> dict[str, int]:
    """The counts once nothing waits for the device any more, which has done its work."""
    gc.collect()
    patience = time.monotonic() + 5
    while tb.stats()["retired"] and time.monotonic() < patience:
        time.sleep(0.01)
    return dict(tb.stats())
