"""Use tensors of one framework in another, in place.

``to_torch``, ``to_cupy``, ``to_numpy`` and ``to_tensorflow`` take a tensor of any framework that this package knows, a
DLPack capsule, or any object with ``__dlpack__`` or an array interface. The result shares the memory and is safe to use
in the target's current stream. When its last view is dropped, the owner reuses the memory in stream order.
"""

import importlib
from typing import TYPE_CHECKING

from ._core import (
    Plan,
    __version__,
    convert,
    copy,
    plan,
    profile,
    record_stream,
    stats,
    to_cupy,
    to_numpy,
    to_tensorflow,
    to_torch,
)
from .errors import (
    BridgeBufferError,
    BridgeConnectionError,
    BridgeDTypeError,
    BridgeError,
    BridgeImportError,
    BridgeLayoutError,
    BridgeMemoryError,
    BridgePermissionError,
    BridgeRuntimeError,
    BridgeTypeError,
    BridgeValueError,
)
from .names import connect, serve
from .processes import Ticket, open, revoke, share

__all__ = [
    "BridgeBufferError",
    "BridgeConnectionError",
    "BridgeDTypeError",
    "BridgeError",
    "BridgeImportError",
    "BridgeLayoutError",
    "BridgeMemoryError",
    "BridgePermissionError",
    "BridgeRuntimeError",
    "BridgeTypeError",
    "BridgeValueError",
    "Plan",
    "Ticket",
    "__version__",
    "connect",
    "convert",
    "copy",
    "doctor",
    "matrix",
    "open",
    "plan",
    "profile",
    "record_stream",
    "revoke",
    "serve",
    "share",
    "stats",
    "to_cupy",
    "to_numpy",
    "to_tensorflow",
    "to_torch",
]


if TYPE_CHECKING:
    from . import tensorflow as tensorflow
    from . import tensorflow1 as tensorflow1
    from ._doctor import doctor, matrix
else:
    #: Imported at first use, to keep the import short: modules, and the modules that names are in. ``tensorflow`` needs
    #: NumPy, as TensorFlow does.
    _MODULES = ("tensorflow", "tensorflow1")
    _LATER = {"doctor": "_doctor", "matrix": "_doctor"}

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        if name in _LATER:
            found = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
            globals()[name] = found
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES, *_LATER})
