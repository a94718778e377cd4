"""NumPy under test."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from truebridge_conformance.subjects import Bench, Capabilities, Observed, Raising, Spec, Subject, Usual, shape
from truebridge_conformance.subjects.common import Arrays, SingleStream, collect, elements, placed, raising


class NumPy(Arrays, SingleStream):
    """NumPy. The device has no streams."""

    def __init__(self, device: str) -> None:
        import numpy

        super().__init__(numpy)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            tuple(self.named),
            negative_strides=True,
            read_only=True,
            unaligned=True,
            gigabytes=True,
            parts=True,
            imports=1,
        )

    def address(self, array: Any) -> int:
        return int(array.__array_interface__["data"][0])

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
        return bytes(array.tobytes())

    def write(self, array: Any, data: bytes) -> None:
        array[...] = self.elements(data, array)

    def own(self, seed: int, dtype: str = "float32", shape: tuple[int, ...] = (4, 6)) -> Any:
        """Return an array that owns its memory, and has no base."""
        numpy = self.numpy
        array = numpy.empty(shape, dtype)
        array[...] = numpy.frombuffer(elements(seed, array.nbytes), dtype).reshape(shape)
        return array

    def records(self, seed: int, align: bool) -> Any:
        """Return records of a byte and a number, without gaps or with those that C has."""
        records = self.numpy.zeros((4, 6), self.numpy.dtype([("tag", "u1"), ("value", "f4")], align=align))
        records["value"] = self.own(seed)
        return records

    def constant(self, seed: int) -> Any:
        array = self.own(seed)
        array.flags.writeable = False
        return array

    def mapped(self, seed: int) -> Any:
        with tempfile.TemporaryFile() as file:
            array = self.numpy.memmap(file, "float32", "w+", shape=(4, 6))
        array[...] = self.own(seed)
        return array

    def grown(self, seed: int) -> Any:
        """Return an array whose memory has moved."""
        array = self.own(seed)
        array.resize((400, 6), refcheck=False)
        return array

    def usual(self) -> list[Usual]:
        numpy, own = self.numpy, self.own

        class Tagged(numpy.ndarray):  # type: ignore[misc, name-defined]
            pass

        noted = numpy.dtype("float32", metadata={"unit": "m"})
        dates = numpy.array(["2026-01-01"], "datetime64[D]")
        return [
            Usual("an array that owns its memory", own),
            Usual("an array in the order of Fortran", lambda seed: own(seed).copy(order="F")),
            Usual("a number in an array", lambda seed: own(seed, shape=())),
            Usual("an array without elements", lambda seed: own(seed, shape=(3, 0))),
            Usual("an array that has grown", self.grown),
            Usual("a part of an array", lambda seed: own(seed)[1:, ::2]),
            Usual("an array from its end", lambda seed: own(seed)[::-1]),
            Usual("a constant", self.constant),
            Usual("a broadcast row", lambda seed: numpy.broadcast_to(own(seed, shape=(6,)), (4, 6))),
            Usual("bytes that do not change", lambda seed: numpy.frombuffer(elements(seed, 96), "int16")),
            Usual("bytes that change", lambda seed: numpy.frombuffer(bytearray(elements(seed, 96)), "int16")),
            Usual("a file", self.mapped),
            Usual("a matrix", lambda seed: own(seed).view(numpy.matrix)),
            Usual("an array of a subclass", lambda seed: own(seed).view(Tagged)),
            Usual("a field of records", lambda seed: self.records(seed, False)["value"], pending="packing"),
            Usual("a field, from its end", lambda seed: self.records(seed, False)["value"][::-1], pending="packing"),
            Usual("a field of records with gaps", lambda seed: self.records(seed, True)["value"]),
            Usual("the real parts", lambda seed: own(seed, "complex64").real),
            Usual("elements with notes", lambda seed: own(seed).view(noted)),
            Usual("records", lambda seed: self.records(seed, True), "dtype"),
            Usual("the other byte order", lambda seed: own(seed).astype(">f4"), "dtype"),
            Usual("bytes of the other byte order", lambda seed: own(seed).view(">i2"), "dtype"),
            Usual("texts", lambda _: numpy.array(["a", "b"]), "dtype"),
            Usual("objects", lambda _: numpy.array([object(), None]), "dtype"),
            Usual("dates", lambda _: dates.copy(), "dtype"),
            Usual("long doubles", lambda seed: own(seed).astype(numpy.longdouble), "dtype"),
            Usual("a mask over an array", lambda seed: numpy.ma.masked_array(own(seed), own(seed) > 1), "not a tensor"),
            Usual("an array with an empty mask", lambda seed: numpy.ma.asarray(own(seed)), "not a tensor"),
            # The package makes an array of it.
            Usual("a number", lambda seed: own(seed)[0, 0], "not a tensor", public=False),
            Usual("a list", lambda seed: own(seed).tolist(), "not a tensor"),
        ]

    def raising(self) -> Sequence[Raising]:
        return raising((self.numpy, "empty"), (self.numpy, "copyto"))

    def delay(self) -> None:
        pass

    def settle(self) -> int | None:
        collect()
        return None


subject: Callable[[str], Subject] = NumPy


def bench(device: str) -> Bench | None:
    """Return what the benches need."""
    import numpy

    def make(nbytes: int) -> Any:
        memory = placed(lambda length: numpy.empty(length, numpy.uint8), lambda array: array.ctypes.data, nbytes, 0)
        return memory.view(numpy.float32).reshape(shape(nbytes))

    return Bench(make, {("torch", "host"): None, ("tensorflow", "host"): None}, ("torch",)) if device == "cpu" else None
