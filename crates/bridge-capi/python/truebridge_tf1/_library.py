"""The C library: its structures and functions, as ``truebridge.h`` describes them."""

import atexit
import ctypes
import os
import threading
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, Dict, List, Optional, Tuple

from .errors import of_kind

#: The version of the interface that this package speaks.
ABI = 3

#: Names the library where it is not the one of the package.
VARIABLE = "TRUEBRIDGE_TF1_LIBRARY"

MAX_NDIM = 64


class Dtype(ctypes.Structure):
    """An element type, by DLPack's numbers."""

    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class Device(ctypes.Structure):
    """A device, by DLPack's numbers."""

    _fields_ = [("kind", c_int32), ("index", c_int32)]


class Memory(ctypes.Structure):
    """A tensor in plain memory."""

    _fields_ = [
        ("size", c_size_t),
        ("data", c_void_p),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("ndim", c_int32),
        ("read_only", c_int32),
        ("dtype", Dtype),
        ("device", Device),
        ("stream", c_uint64),
        ("release", c_void_p),
        ("owner", c_void_p),
    ]

    def __init__(self, **fields: Any) -> None:
        """Set the fields, and the size, which the library compares with its own."""
        super().__init__(size=ctypes.sizeof(type(self)), **fields)


class Info(ctypes.Structure):
    """Description of a tensor at the edge of a graph."""

    _fields_ = [
        ("data", c_void_p),
        ("stream", c_uint64),
        ("dtype", Dtype),
        ("device", Device),
        ("ndim", c_int32),
        ("read_only", c_int32),
        ("shape", c_int64 * MAX_NDIM),
    ]


COUNTS = ("leased", "released", "pending", "leaked", "unclaimed", "reclaimed")


class Counts(ctypes.Structure):
    """Counts of views, over the whole process."""

    _fields_ = [(name, c_uint64) for name in COUNTS]


#: Functions of the interpreter that the library needs, in the order of ``tb_python``.
INTERPRETER = (
    "Py_IsInitialized",
    "PyGILState_Ensure",
    "PyGILState_Release",
    "PyGILState_GetThisThreadState",
    "PyErr_Fetch",
    "PyErr_Restore",
    "PyErr_Occurred",
    "PyErr_WriteUnraisable",
    "PyCapsule_New",
    "PyCapsule_IsValid",
    "PyCapsule_GetPointer",
    "PyCapsule_SetName",
)

Object = ctypes.py_object
Out = POINTER(c_void_p)

#: The functions that return a status, by their names without ``tb_``: whether they are called with the GIL, and the
#: types of the arguments.
FUNCTIONS: Dict[str, Tuple[bool, List[Any]]] = {
    "stats": (False, [POINTER(Counts)]),
    "runtime_loaded": (False, [c_int32, Out]),
    "tensor_memory": (False, [POINTER(Memory), Out]),
    "feed": (False, [c_void_p, c_void_p, c_int32, Out]),
    "take": (False, [c_void_p, POINTER(c_int32 * 2), Out]),
    "external_handle": (False, [c_void_p, POINTER(c_int32 * 2)]),
    "external_info": (False, [c_void_p, POINTER(Info)]),
    "external_view": (False, [c_void_p, c_uint64, Out]),
    "view_used": (False, [c_void_p, c_uint64]),
    "share": (False, [POINTER(c_void_p), c_size_t, c_char_p, c_double, c_int32, c_char_p]),
    "revoke": (False, [c_char_p]),
    "share_end": (False, [c_char_p]),
    "open": (False, [c_char_p, Out]),
    "opened_tensor": (False, [c_void_p, c_size_t, Out]),
    "tensor_info": (False, [c_void_p, POINTER(Memory)]),
    "python_open": (True, [POINTER(c_void_p * len(INTERPRETER))]),
    "python_close": (False, []),
    "python_tensor": (True, [Object, Out]),
    "python_capsule": (True, [c_void_p, c_uint64, c_int32, Out]),
}

#: The functions that return nothing. They are called with the GIL, so that Python objects are released at once.
DROPS = ("tensor_drop", "external_drop", "view_drop", "opened_drop")


class Library:
    """The loaded library: its functions without ``tb_``, which raise their errors."""

    def __init__(self, path: str) -> None:
        """Load the library and check its version."""
        try:
            unlocked, locked = ctypes.CDLL(path), ctypes.PyDLL(path)
            abi = unlocked.tb_abi
        except (OSError, AttributeError) as error:
            text = (
                "the library of truebridge_tf1 cannot be loaded ({}): install the package again, or name the "
                "library in {}"
            )
            raise of_kind("missing", text.format(error, VARIABLE)) from error
        abi.restype = c_uint32
        if abi() != ABI:
            text = "{} has version {} of the interface, and this package needs {}: install both from one version"
            raise of_kind("version", text.format(path, abi(), ABI))
        self._error, self._status_name = unlocked.tb_error, unlocked.tb_status_name
        self._error.restype = self._status_name.restype = c_char_p
        self._error.argtypes, self._status_name.argtypes = [], [c_int32]
        for name, (with_gil, arguments) in FUNCTIONS.items():
            function = getattr(locked if with_gil else unlocked, "tb_" + name)
            function.argtypes, function.restype, function.errcheck = arguments, c_int32, self._check
            setattr(self, name, function)
        for name in DROPS:
            function = getattr(locked, "tb_" + name)
            function.argtypes, function.restype = [c_void_p], None
            setattr(self, name, function)
        self.share_close = unlocked.tb_share_close
        self.share_close.argtypes, self.share_close.restype = [], None
        self.opened_count, self.opened_tree = unlocked.tb_opened_count, unlocked.tb_opened_tree
        self.opened_count.argtypes = self.opened_tree.argtypes = [c_void_p]
        self.opened_count.restype, self.opened_tree.restype = c_size_t, c_char_p
        addresses = [ctypes.cast(getattr(ctypes.pythonapi, name), c_void_p) for name in INTERPRETER]
        self.python_open((c_void_p * len(INTERPRETER))(*addresses))
        atexit.register(self.python_close)
        atexit.register(self.share_close)

    def __getattr__(self, name: str) -> Any:
        """Report a function that does not exist."""
        raise AttributeError(name)

    def _check(self, status: int, function: Any, arguments: Any) -> None:
        if status:
            name = self._status_name(status) or b"framework"
            raise of_kind(name.decode(), (self._error() or b"").decode(errors="replace"))


_loaded: Optional[Library] = None
_loading = threading.Lock()


def library() -> Library:
    """Return the library, loaded by the first call."""
    global _loaded
    if _loaded is None:
        with _loading:
            if _loaded is None:
                beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libtruebridge_tf1.so")
                _loaded = Library(os.environ.get(VARIABLE) or beside)
    return _loaded


class Owned:
    """An object of the library, dropped with this one, which stands for it as an argument."""

    def __init__(self, drop: str) -> None:
        """Start empty: the library writes the object to ``out``."""
        self._as_parameter_: Optional[c_void_p] = c_void_p()
        self._drop = getattr(library(), drop)

    @property
    def out(self) -> Any:
        """Where the library writes the object."""
        assert self._as_parameter_ is not None, "the object was dropped"
        return ctypes.byref(self._as_parameter_)

    def drop(self) -> None:
        """Drop the object now."""
        pointer, self._as_parameter_ = self._as_parameter_, None
        self._drop(pointer)

    def __enter__(self) -> "Owned":
        """Return this object, which the end of the block drops."""
        return self

    def __exit__(self, *_: Any) -> None:
        """Drop the object, also where an exception keeps this one alive."""
        self.drop()

    def __del__(self) -> None:
        """Drop the object."""
        if hasattr(self, "_drop"):
            self.drop()
