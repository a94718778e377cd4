"""The errors of tensor_bridge.

Each is a ``BridgeError`` and also the built-in exception that fits, so both ``except BridgeError`` and
``except TypeError`` catch it. The attribute ``kind`` says what went wrong in one word, such as ``"copy_needed"``.
"""

from __future__ import annotations


class BridgeError(Exception):
    """Something about a tensor or its frameworks keeps it from crossing."""

    kind: str = "error"


class BridgeTypeError(BridgeError, TypeError):
    """Not a tensor."""


class BridgeDTypeError(BridgeTypeError, BufferError):
    """A dtype that has no counterpart: also a ``BufferError``, as the array API wants of what cannot be exported."""


class BridgeValueError(BridgeError, ValueError):
    """A wrong argument, or another device than asked."""


class BridgeLayoutError(BridgeValueError, BufferError):
    """A layout that makes no sense or has no counterpart: also a ``BufferError``, as the array API wants."""


class BridgeBufferError(BridgeError, BufferError):
    """Memory that cannot be handed on: read-only, in need of a copy, used up, tied to autograd."""


class BridgeImportError(BridgeError, ImportError):
    """A framework or a driver is missing."""


class BridgeMemoryError(BridgeError, MemoryError):
    """A framework or the device has no memory left."""


class BridgeRuntimeError(BridgeError, RuntimeError):
    """A framework or the driver failed."""
