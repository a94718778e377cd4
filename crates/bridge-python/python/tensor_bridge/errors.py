"""The errors of tensor_bridge.

Each is a ``BridgeError`` and also the built-in exception that fits, so both ``except BridgeError`` and
``except TypeError`` catch it. The attribute ``kind`` says what went wrong in one word, such as ``"copy_needed"``.
"""

from __future__ import annotations


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
    """A framework or a driver is missing."""


class BridgeMemoryError(BridgeError, MemoryError):
    """A framework or the device is out of memory."""


class BridgeRuntimeError(BridgeError, RuntimeError):
    """A framework or the driver failed."""
