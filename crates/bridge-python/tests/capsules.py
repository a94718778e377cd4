"""DLPack capsules made by hand, good and hostile.

The tests of ``truebridge_tf1`` import this as well, with Python 3.7.
"""

from __future__ import annotations

import ctypes
from typing import Any

CPU, CUDA = 1, 2
FLOAT, UINT = 2, 1


class Wrapper:
    """An object of no framework that passes the calls of the protocol on to a tensor, and counts the exports."""

    asked = 0

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **keywords: Any) -> Any:
        self.asked += 1
        return self.tensor.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Legacy(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


# Not `ctypes.pythonapi.PyCapsule_New`, which all share: `jax.ffi.pycapsule` changes its argument types.
new_capsule: Any = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)

is_valid = ctypes.pythonapi.PyCapsule_IsValid
is_valid.restype = ctypes.c_int
is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]

Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


CurrentStream: Any = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class Exchange(ctypes.Structure):
    """An exchange table (``DLPackExchangeAPI``) that says the current stream, and no more."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("others", ctypes.c_void_p * 4),
        ("current_work_stream", CurrentStream),
    ]


def with_current_stream(base: type, current: Any) -> type:
    """Return a class of producers with an exchange table.

    ``current(kind, index)`` returns the handle of the stream, or ``None`` to fail.
    """

    def answer(kind: int, index: int, stream: Any) -> int:
        handle = current(kind, index)
        if handle is None:
            return -1
        stream[0] = handle
        return 0

    table = Exchange(major=1, minor=3, current_work_stream=CurrentStream(answer))
    capsule = new_capsule(ctypes.addressof(table), b"dlpack_exchange_api", None)
    return type(base.__name__, (base,), {"__dlpack_c_exchange_api__": capsule, "table": table})


class Producer:
    """A float32 vector 0, 1, …, 7 as a DLPack capsule; ``tensor`` and ``managed`` may be spoilt before ``capsule``.

    Its memory goes on to 15, at an address that 64 divides.
    """

    def __init__(self, *, legacy: bool = False, deleter: bool = True) -> None:
        self.deleted = 0
        self._memory = (ctypes.c_char * 128)()
        self.address = -(-ctypes.addressof(self._memory) // 64) * 64
        self.data = (ctypes.c_float * 16).from_address(self.address)
        self.data[:] = range(16)
        self.shape = (ctypes.c_int64 * 3)(8, 1, 1)
        self.strides = (ctypes.c_int64 * 3)(1, 1, 1)
        self._deleter = Deleter(self._delete)
        self.managed: Any = Legacy() if legacy else Versioned(major=1, minor=0)
        self.name = b"dltensor" if legacy else b"dltensor_versioned"
        if deleter:
            self.managed.deleter = ctypes.cast(self._deleter, ctypes.c_void_p)
        self.tensor = self.managed.tensor
        self.tensor.data = self.address
        self.tensor.device_type, self.tensor.ndim = CPU, 1
        self.tensor.code, self.tensor.bits, self.tensor.lanes = FLOAT, 32, 1
        self.tensor.shape, self.tensor.strides = self.shape, self.strides

    def _delete(self, managed: int) -> None:
        assert managed == ctypes.addressof(self.managed)
        self.deleted += 1

    def capsule(self) -> Any:
        return new_capsule(ctypes.addressof(self.managed), self.name, None)
