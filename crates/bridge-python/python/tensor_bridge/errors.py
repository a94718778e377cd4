"""The errors of tensor_bridge.

Each is a ``BridgeError`` and also the built-in exception that fits, so both ``except BridgeError`` and
``except TypeError`` catch it. The attribute ``kind`` says what went wrong in one word, such as ``"copy_needed"``.
"""

from __future__ import annotations


class BridgeError(Exception):
    """Something about a tensor or its frameworks keeps it from crossing."""

    kind: str = "error"


class BridgeTypeError(BridgeError, TypeError):
    """Not a tensor, or a dtype that the target does not have."""


class BridgeValueError(BridgeError, ValueError):
    """A wrong argument, a layout that makes no sense, or another device than asked."""


class BridgeBufferError(BridgeError, BufferError):
    """Memory that cannot be handed on: read-only, in need of a copy, used up, tied to autograd."""


class BridgeImportError(BridgeError, ImportError):
    """A framework or a driver is missing."""


class BridgeMemoryError(BridgeError, MemoryError):
    """A framework or the device has no memory left."""


class BridgeRuntimeError(BridgeError, RuntimeError):
    """A framework or the driver failed."""
