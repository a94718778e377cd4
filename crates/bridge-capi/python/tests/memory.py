"""Memory, as the tests make it and count it."""

import os
from typing import Any

import numpy as np


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
