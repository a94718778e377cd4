"""A producer that speaks only DLPack, with all that the specification allows and few libraries do."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D105, D107
from __future__ import annotations

import ctypes
import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, ClassVar

from truebridge_conformance.subjects import Capabilities, Observed, Raising, Spec, Usual
from truebridge_conformance.subjects.common import elements, raising, row_major
from truebridge_conformance.subjects.peers import Peer

#: The code of a dtype by the beginning of its name (``DLDataTypeCode``).
CODES = {
    **{"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5, "bool": 6},
    **{"float8_e3m4": 7, "float8_e4m3": 8, "float8_e4m3b11fnuz": 9, "float8_e4m3fn": 10},
    **{"float8_e4m3fnuz": 11, "float8_e5m2": 12, "float8_e5m2fnuz": 13, "float8_e8m0fnu": 14},
}

READ_ONLY, IS_COPIED = 1, 2


class DLTensor(ctypes.Structure):
    """A tensor, its device and its dtype (``dlpack.h``)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *(("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32)),
        *(("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64)),
    )


class Legacy(ctypes.Structure):
    """``DLManagedTensor``."""

    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned``."""

    _fields_ = (
        *(("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)),
        *(("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64)),
        ("tensor", DLTensor),
    )


#: What each managed tensor keeps until its deleter is called, by its address, and what was deleted that was not there.
exported: dict[int, tuple[Any, ...]] = {}
deleted_twice: list[int] = []

# Not `ctypes.pythonapi`, whose functions other libraries give other signatures.
python = ctypes.PyDLL(None)
new, is_valid, pointer = (getattr(python, f"PyCapsule_{name}") for name in ("New", "IsValid", "GetPointer"))
new.restype, pointer.restype = ctypes.py_object, ctypes.c_void_p
new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
is_valid.argtypes = pointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)


def release(managed: int) -> None:
    """Release a managed tensor, on any thread."""
    if exported.pop(managed, None) is None:
        deleted_twice.append(managed)


def release_unclaimed(capsule: int) -> None:
    """Release what no consumer has taken."""
    for name in (b"dltensor", b"dltensor_versioned"):
        if is_valid(capsule, name):
            release(pointer(capsule, name))


delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(release)
destroy = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(release_unclaimed)


class Described:
    """A tensor over memory of the suite. A number chooses what else its capsules say."""

    lanes = 1

    def __init__(self, memory: Any, start: int, spec: Spec, size: int, choice: int) -> None:
        self.memory, self.spec, self.size = memory, spec, size
        self.address = memory.__array_interface__["data"][0] + start
        copied, offset, plain = choice & 1, choice >> 1 & 3, choice >> 3 & 1
        self.flags = (READ_ONLY if spec.read_only else 0) | (IS_COPIED if copied else 0)
        # Nothing, all of the view's offset, or what is beyond a multiple of 256 bytes, which DLPack wants of `data`.
        self.byte_offset = (0, spec.offset * size, self.address % 256, self.address % 256)[offset]
        self.strides = None if plain and spec.strides == row_major(spec.shape) else spec.strides

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def capsule(self, is_versioned: bool) -> Any:
        spec = self.spec
        kind = spec.dtype if spec.dtype in CODES else spec.dtype.rstrip("0123456789")
        shape = (ctypes.c_int64 * len(spec.shape))(*spec.shape)
        strides = None if self.strides is None else (ctypes.c_int64 * len(self.strides))(*self.strides)
        managed = (Versioned if is_versioned else Legacy)(deleter=ctypes.cast(delete, ctypes.c_void_p))
        managed.tensor = DLTensor(
            *(self.address - self.byte_offset, 1, 0, len(spec.shape), CODES[kind], int(8 * self.size), self.lanes),
            *(ctypes.addressof(shape), None if strides is None else ctypes.addressof(strides), self.byte_offset),
        )
        if is_versioned:
            managed.major, managed.flags = 1, self.flags
        address = ctypes.addressof(managed)
        exported[address] = (managed, shape, strides, self.memory)
        name = b"dltensor_versioned" if is_versioned else b"dltensor"
        return new(address, name, ctypes.cast(destroy, ctypes.c_void_p))


class Tensor(Described):
    """A tensor of a producer that knows DLPack 1.0."""

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None, **_: Any) -> Any:
        return self.capsule(max_version is not None and max_version >= (1, 0))


class WithoutVersion(Described):
    """A tensor of a producer from before DLPack 1.0, which knows no argument of the later ones."""

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        return self.capsule(is_versioned=False)


class DLPack(Peer):
    """Tensors that nothing but DLPack says anything of."""

    known: ClassVar[dict[int, Any]] = {}
    made: ClassVar[type[Described]] = Tensor

    def capabilities(self) -> Capabilities:
        return Capabilities(self.dtypes, negative_strides=True, read_only=True, unaligned=True, copies=False)

    def makes(self, dtype: str) -> bool:
        return True

    def allocate(self, nbytes: int) -> Any:
        return self.over(self.lens.allocate(nbytes), "uint8", [nbytes], [1], 0)

    def over(self, memory: Any, dtype: str, shape: list[int], strides: list[int], offset: int) -> Any:
        memory = memory.memory if isinstance(memory, Described) else memory
        return self.made(memory, offset, Spec(dtype, shape, strides, 0, 0), self.size(dtype), 0)

    def create(self, spec: Spec, data: bytes) -> Any:
        made = super().create(spec, data)
        start = made.address - made.memory.__array_interface__["data"][0]
        return self.made(made.memory, start, spec, made.size, zlib.crc32(repr(spec).encode() + data[:8]))

    def seen(self, tensor: Any) -> tuple[str, list[int], list[int], int]:
        return tensor.spec.dtype, tensor.spec.shape, tensor.spec.strides, tensor.address

    def observe(self, tensor: Any) -> Observed:
        return super().observe(tensor)._replace(read_only=tensor.spec.read_only)

    def own(self, seed: int, **claimed: Any) -> Any:
        """Return a tensor that claims these things."""
        made = self.create(Spec("float32", [4, 6], [6, 1], 0, 24), elements(seed, 96))
        vars(made).update(claimed)
        return made

    def usual(self) -> list[Usual]:
        return [
            Usual("a tensor", self.own),
            Usual("vectors", lambda seed: self.own(seed, lanes=2), "dtype"),
            Usual("elements of four bits", lambda seed: self.own(seed, size=0.5), "dtype"),
        ]

    def raising(self) -> Sequence[Raising]:
        return raising((self.made, "__dlpack__"), (self.made, "__dlpack_device__"))

    def settle(self) -> int | None:
        self.lens.settle()
        if deleted_twice:
            raise RuntimeError(f"{len(deleted_twice)} managed tensors were deleted twice")
        return sum(int(memory.nbytes) for *_, memory in exported.values())


class LegacyDLPack(DLPack):
    """Capsules without flags: nothing says that the memory may be written to."""

    made = WithoutVersion

    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities(), read_only=False, immutable=True)


subject, legacy = DLPack, LegacyDLPack
