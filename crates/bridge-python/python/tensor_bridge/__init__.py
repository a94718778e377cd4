"""GPU tensors of one framework, used in another in place.

``to_torch``, ``to_cupy``, ``to_numpy`` and ``to_tensorflow`` take a tensor of any framework that this package knows, a
DLPack capsule, or any object with ``__dlpack__``. The result shares the memory, is safe to use in the target's current
stream, and keeps the memory alive; when the last view goes, the memory is given back in stream order.
"""

import importlib
from typing import TYPE_CHECKING

from ._core import (
    Plan,
    __version__,
    convert,
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
    BridgeDTypeError,
    BridgeError,
    BridgeImportError,
    BridgeLayoutError,
    BridgeMemoryError,
    BridgeRuntimeError,
    BridgeTypeError,
    BridgeValueError,
)

__all__ = [
    "BridgeBufferError",
    "BridgeDTypeError",
    "BridgeError",
    "BridgeImportError",
    "BridgeLayoutError",
    "BridgeMemoryError",
    "BridgeRuntimeError",
    "BridgeTypeError",
    "BridgeValueError",
    "Plan",
    "__version__",
    "convert",
    "plan",
    "profile",
    "record_stream",
    "stats",
    "to_cupy",
    "to_numpy",
    "to_tensorflow",
    "to_torch",
]


if TYPE_CHECKING:
    from . import tensorflow as tensorflow
    from . import tensorflow1 as tensorflow1
else:

    def __getattr__(name: str) -> object:
        # Imported when they are first named: the first needs NumPy, as TensorFlow does.
        if name in ("tensorflow", "tensorflow1"):
            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
