"""What NumPy and CuPy share."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import gc
import importlib
from typing import Any

from truebridge_conformance.subjects import Spec
from truebridge_conformance.subjects.common import NAMES, placed, taken


class Arrays:
    """A framework whose arrays are those of NumPy, with strides in bytes."""

    def __init__(self, module: Any) -> None:
        import numpy

        self.numpy = numpy
        self.module = module
        self.named = {name: dtype for name in NAMES if (dtype := self.dtype(name)) is not None}
        # Objects that exist now stay: garbage collection need not visit them.
        gc.collect()
        gc.freeze()

    def address(self, array: Any) -> int:
        """Return the address of the first element."""
        raise NotImplementedError

    def upload(self, memory: Any, data: Any) -> None:
        """Copy bytes, a NumPy array, into memory of the framework. Wait until they are there."""
        raise NotImplementedError

    def view(self, memory: Any, dtype: Any, shape: list[int], offset: int, strides: list[int]) -> Any:
        """Return an array over ``memory``. Offset and strides are in bytes."""
        raise NotImplementedError

    def dtype(self, name: str) -> Any:
        try:
            return self.numpy.dtype(name)
        except TypeError:
            pass
        try:
            # The package names them for NumPy.
            return self.numpy.dtype(getattr(importlib.import_module("ml_dtypes"), name))
        except (ImportError, AttributeError, TypeError):
            return None

    def bits(self, array: Any) -> Any:
        """Return the same memory as integers, which no kernel changes; elements of 16 bytes stay what they are."""
        return array.view(f"i{array.itemsize}") if array.itemsize <= 8 else array

    def elements(self, data: bytes, like: Any) -> Any:
        return self.numpy.frombuffer(data, dtype=like.dtype).reshape(like.shape)

    def strides(self, array: Any) -> list[int]:
        # Those of a field of records need not be whole elements.
        return [stride // array.itemsize for stride in array.strides]

    def create(self, spec: Spec, data: bytes) -> Any:
        memory = placed(self.allocate, self.address, len(data), spec.align)
        self.upload(memory, self.numpy.frombuffer(data, dtype="uint8"))
        return self.over(memory, spec)

    def create_unwritten(self, spec: Spec) -> Any:
        nbytes = spec.base * self.named[spec.dtype].itemsize
        return self.over(placed(self.allocate, self.address, nbytes, spec.align), spec)

    def over(self, memory: Any, spec: Spec) -> Any:
        dtype = self.named[spec.dtype]
        size = dtype.itemsize
        return self.view(memory, dtype, spec.shape, spec.offset * size, [stride * size for stride in spec.strides])

    def fill(self, array: Any, byte: int) -> None:
        bits = self.bits(array)
        bits[...] = self.numpy.frombuffer(bytes([byte]) * bits.itemsize, dtype=bits.dtype)[0]

    def part(self, array: Any, start: int) -> Any:
        return array[start:]

    def allocate(self, nbytes: int) -> Any:
        return self.module.empty(nbytes, dtype="uint8")

    def snapshot(self, source: Any, into: Any) -> None:
        bits = self.bits(source)
        into.view(bits.dtype).reshape(bits.shape)[...] = bits

    def import_natively(self, other: Any) -> Any:
        return taken(self.module.from_dlpack, other)
