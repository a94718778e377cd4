"""A copy on the host asks for huge pages in the memory that it allocates, and never in memory of the caller."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

import truebridge as tb

if not Path("/sys/kernel/mm/transparent_hugepage").exists():
    pytest.skip("the system has no transparent huge pages", allow_module_level=True)

NBYTES = 64 << 20
HUGE = 2 << 20
SOURCE = np.zeros((4096, NBYTES // 4096), np.uint8).T


def asks(address: int) -> bool:
    """Return whether the mapping of an address asks for huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        start, dash, end = first.partition("-")
        if dash:
            inside = int(start, 16) <= address < int(end, 16)
        elif first == "VmFlags:" and inside:
            return "hg" in rest
    raise ValueError(f"{address:#x} is not mapped")


def mapped() -> torch.Tensor:
    """Return memory that is mapped for itself: the heap may have asked for huge pages, for an earlier tensor."""
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, NBYTES), np.uint8))


def test_a_fresh_copy_asks_for_whole_huge_pages() -> None:
    # NumPy asks for them itself.
    copy = tb.to_torch(SOURCE, copy=True)
    assert asks(copy.data_ptr() + HUGE) and asks(copy.data_ptr() + NBYTES - 2 * HUGE)


def test_memory_of_the_caller_is_left_as_it_is() -> None:
    out = mapped().view(SOURCE.shape)
    tb.copy(SOURCE, out=out)
    assert not asks(out.data_ptr() + HUGE)


def test_what_is_not_copied_is_left_as_it_is() -> None:
    tensor = mapped()
    assert tb.to_numpy(tensor).ctypes.data == tensor.data_ptr()
    assert not asks(tensor.data_ptr() + HUGE)
