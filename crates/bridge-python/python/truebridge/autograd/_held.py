"""Records of runs that tensors hold: a framework passes on only tensors. A record is dropped with its tensor."""

from __future__ import annotations

import weakref
from typing import Any

from .. import _core

#: The objects that hold a record, by the address of their tensors.
_HELD: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()

_CUDA = 2


class Held:
    """Eight bytes of memory, which a framework takes in place as a tensor of the type of NumPy ``typestr``."""

    def __init__(self, record: Any, memory: Any, typestr: str) -> None:
        self.record = record
        self.memory = memory
        name, self.address = _place(memory)
        shape = (8 // int(typestr[-1]),)
        setattr(self, name, {"version": 3, "shape": shape, "typestr": typestr, "data": (self.address, False)})
        _HELD[self.address] = self


def record_in(tensor: Any) -> Any:
    """Return the record that a tensor holds, or ``None`` if it is a copy of one that does."""
    held = _HELD.get(_place(tensor)[1])
    return None if held is None else held.record


def _place(tensor: Any) -> tuple[str, int]:
    """Return the name of the interface that describes the memory of a tensor, and its address."""
    loan = _core.lend(tensor, read_only=True)
    name = "__cuda_array_interface__" if loan.__dlpack_device__()[0] == _CUDA else "__array_interface__"
    return name, getattr(loan, name)["data"][0]
