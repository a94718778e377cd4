"""The errors of tensor_bridge, and of tensor_bridge_tf1, which ships this file as well (so it is Python 3.6).

Each is a ``BridgeError`` and also the built-in exception that fits, so both ``except BridgeError`` and
``except TypeError`` catch it. The attribute ``kind`` says what went wrong in one word, such as ``"copy_needed"``.
"""


class BridgeError(Exception):
    """The base of all errors of this package."""

    kind: str = "error"


class BridgeTypeError(BridgeError, TypeError):
    """Not a tensor."""


class BridgeDTypeError(BridgeTypeError, BufferError):
    """A dtype without a counterpart; also a ``BufferError``, as the array API wants where an export is impossible."""


class BridgeValueError(BridgeError, ValueError):
    """A wrong argument, or another device than the requested one."""


class BridgeLayoutError(BridgeValueError, BufferError):
    """A malformed layout, or one without a counterpart; also a ``BufferError``, as the array API wants."""


class BridgeBufferError(BridgeError, BufferError):
    """Memory that cannot be exported: read-only, in need of a copy, consumed, or part of autograd."""


class BridgeImportError(BridgeError, ImportError):
    """A framework, a driver or a library is missing."""


class BridgeMemoryError(BridgeError, MemoryError):
    """A framework or the device is out of memory."""


class BridgePermissionError(BridgeError, PermissionError):
    """Another process may not have what it asks for."""


class BridgeConnectionError(BridgeError, ConnectionError):
    """Another process has ended, has taken back what it shared, or is too busy to answer."""


class BridgeRuntimeError(BridgeError, RuntimeError):
    """A framework or the driver failed."""


#: The class for each kind; ``BridgeRuntimeError`` for the others (``driver``, ``framework``, ``captured``).
_CLASSES = {
    "not_a_tensor": BridgeTypeError,
    "dtype": BridgeDTypeError,
    "argument": BridgeValueError,
    "device": BridgeValueError,
    "layout": BridgeLayoutError,
    "read_only": BridgeBufferError,
    "copy_needed": BridgeBufferError,
    "requires_grad": BridgeBufferError,
    "refused": BridgeBufferError,
    "consumed": BridgeBufferError,
    "protocol": BridgeBufferError,
    "version": BridgeBufferError,
    "out_of_memory": BridgeMemoryError,
    "missing": BridgeImportError,
    "denied": BridgePermissionError,
    "gone": BridgeConnectionError,
    "busy": BridgeConnectionError,
}


def of_kind(kind: str, text: str) -> BridgeError:
    """Return the error of this kind with this message."""
    error = _CLASSES.get(kind, BridgeRuntimeError)(text)
    error.kind = kind
    return error
