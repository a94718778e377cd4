"""The package's conversions on the host, for ``cargo xtask counts``, which runs this script under callgrind.

It prints the name of each path, in the order in which they are counted, and the calls.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import truebridge as tb
from truebridge import _core

#: Calls before those that are counted, which fill caches and pools, and those that are counted.
WARM_UP, CALLS = 50, 100


def borrows(library: str, tensor: object) -> Callable[[], Any]:
    """Return what borrows a tensor 100 times, as C code does."""
    find = ctypes.pythonapi.PyCapsule_GetPointer
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    table = ctypes.c_void_p(find(_core.borrow, b"truebridge._core.borrow"))
    # It holds the GIL.
    borrowed = ctypes.PyDLL(library).truebridge_borrowed
    kept, often = ctypes.py_object(tensor), ctypes.c_size_t(100)

    def borrow() -> None:
        if borrowed(table, kept, often):
            raise RuntimeError("a borrow failed")

    return borrow


def paths(library: str) -> dict[str, Callable[[], Any]]:
    """Return each path by its name."""
    array: Any = np.ones((4, 16), np.float32)
    tensor = torch.ones(4, 16)
    other, transposed = torch.zeros(4, 16), torch.ones(16, 4).T
    leaves: dict[str, Any] = {f"leaf {index}": np.ones(8, np.float32) for index in range(100)}
    weights: dict[str, Any] = {f"weight {index}": torch.ones(4, 16) for index in range(100)}
    rows, into = list(torch.ones(100, 16)), list(torch.zeros(100, 16))
    served = {name: torch.zeros(4, 16) for name in weights}
    return {
        "NumPy to torch": lambda: tb.to_torch(array),
        "torch to NumPy": lambda: tb.to_numpy(tensor),
        "convert, NumPy to torch": lambda: tb.convert(array, "torch"),
        "torch to torch": lambda: tb.to_torch(tensor),
        "torch to NumPy and back": lambda: tb.to_torch(tb.to_numpy(tensor)),
        "a capsule of torch to NumPy": lambda: tb.to_numpy(torch.utils.dlpack.to_dlpack(tensor)),
        "100 arrays of a dict to torch": lambda: tb.to_torch(leaves),
        "100 tensors of a dict to NumPy": lambda: tb.to_numpy(weights),
        "100 borrows of an array": borrows(library, array),
        "100 borrows of a tensor": borrows(library, tensor),
        "100 borrows of a tensor of uint8": borrows(library, tensor.to(torch.uint8)),
        "plan, torch to NumPy": lambda: tb.plan(tensor, "numpy"),
        "loan of a tensor": lambda: tb.lend(tensor),
        "copy into a tensor": lambda: tb.copy(transposed, out=other),
        "copy of 100 rows into rows": lambda: tb.copy(rows, out=into),
        "copier of 100 tensors": tb.copier(weights, out=served),
        "copier of 100 tensors, unchecked": tb.copier(weights, out=served, check=False),
    }


def main(library: str) -> None:
    """Count every path."""
    functions = ctypes.CDLL(library)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_size_t)
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    ready = paths(library)
    functions.truebridge_instrument()
    for name, path in ready.items():

        def often(calls: int, path: Callable[[], Any] = path) -> None:
            for _ in range(calls):
                path()

        often(WARM_UP)
        functions.truebridge_counted(kind(often), ctypes.c_size_t(CALLS))
        print(CALLS, name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
