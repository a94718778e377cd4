"""NumPy under test."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from truebridge_conformance.subjects import Bench, Capabilities, Observed, Spec, Subject, shape
from truebridge_conformance.subjects.arrays import Arrays
from truebridge_conformance.subjects.common import SingleStream, placed


class NumPy(Arrays, SingleStream):
    """NumPy. The device has no streams."""

    def __init__(self, device: str) -> None:
        import numpy

        super().__init__(numpy)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            tuple(self.named), negative_strides=True, read_only=True, unaligned=True, gigabytes=True, parts=True
        )

    def address(self, array: Any) -> int:
        start: int = array.__array_interface__["data"][0]
        return start

    def upload(self, memory: Any, data: Any) -> None:
        memory[...] = data

    def view(self, memory: Any, dtype: Any, shape: list[int], offset: int, strides: list[int]) -> Any:
        return self.numpy.ndarray(shape, dtype, memory, offset, strides)

    def create(self, spec: Spec, data: bytes) -> Any:
        array = super().create(spec, data)
        array.flags.writeable = not spec.read_only
        return array

    def observe(self, array: Any) -> Observed:
        read_only = not array.flags.writeable
        return Observed(array.dtype.name, list(array.shape), self.strides(array), self.address(array), read_only, "cpu")

    def read(self, array: Any) -> bytes:
        data: bytes = array.tobytes()
        return data

    def write(self, array: Any, data: bytes) -> None:
        array[...] = self.elements(data, array)

    def delay(self) -> None:
        pass

    def settle(self) -> int | None:
        gc.collect()
        return None


subject: Callable[[str], Subject] = NumPy


def bench(device: str) -> Bench | None:
    """Return what the benches need."""
    import numpy

    def make(nbytes: int) -> Any:
        memory = placed(lambda length: numpy.empty(length, numpy.uint8), lambda array: array.ctypes.data, nbytes, 0)
        return memory.view(numpy.float32).reshape(shape(nbytes))

    return Bench(make, {("torch", "host"): None, ("tensorflow", "host"): None}, ("torch",)) if device == "cpu" else None
