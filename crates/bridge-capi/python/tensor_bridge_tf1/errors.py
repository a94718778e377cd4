"""The errors of tensor_bridge_tf1, with the names of those of tensor_bridge.

Each is a ``BridgeError`` and also the built-in exception that fits, so both ``except BridgeError`` and
``except TypeError`` catch it. The attribute ``kind`` says what went wrong in one word, such as ``"copy_needed"``.
"""

from typing import Dict, Type


class BridgeError(Exception):
    """A tensor cannot cross, because of the tensor or of a framework."""

    kind: str = "error"


class BridgeTypeError(BridgeError, TypeError):
    """Not a tensor, or a dtype that the target does not have."""


class BridgeValueError(BridgeError, ValueError):
    """A wrong argument, an invalid layout, or another device than requested."""


class BridgeBufferError(BridgeError, BufferError):
    """Memory that cannot be exported: read-only, in need of a copy, consumed, tied to autograd."""


class BridgeImportError(BridgeError, ImportError):
    """A framework, a driver or the library of this package is missing."""


class BridgeMemoryError(BridgeError, MemoryError):
    """TensorFlow or the device has no memory left."""


class BridgeRuntimeError(BridgeError, RuntimeError):
    """A framework or the driver failed."""


_CLASSES: Dict[str, Type[BridgeError]] = {
    "not_a_tensor": BridgeTypeError,
    "dtype": BridgeTypeError,
    "argument": BridgeValueError,
    "layout": BridgeValueError,
    "device": BridgeValueError,
    "read_only": BridgeBufferError,
    "copy_needed": BridgeBufferError,
    "requires_grad": BridgeBufferError,
    "consumed": BridgeBufferError,
    "protocol": BridgeBufferError,
    "version": BridgeBufferError,
    "missing": BridgeImportError,
    "refused": BridgeBufferError,
    "out_of_memory": BridgeMemoryError,
}


def of_kind(kind: str, text: str) -> BridgeError:
    """Return the error of this kind with this message."""
    error = _CLASSES.get(kind, BridgeRuntimeError)(text)
    error.kind = kind
    return error
