"""The errors of truebridge, and of truebridge_tf1, which ships this file as well (so it is Python 3.6).

Each is a ``BridgeError`` and also the built-in exception that fits, so both ``except BridgeError`` and
``except TypeError`` catch it. The attribute ``kind`` names what went wrong in one word, such as ``"copy_needed"``.
"""


# ruff: noqa: UP036

import sys

if sys.version_info >= (3, 8):
    from typing import Literal

    #: What can go wrong. ``"error"`` is the kind of an error that this package has not made.
    Kind = Literal[
        "not_a_tensor",
        "dtype",
        "argument",
        "device",
        "layout",
        "read_only",
        "copy_needed",
        "requires_grad",
        "refused",
        "consumed",
        "protocol",
        "version",
        "out_of_memory",
        "missing",
        "denied",
        "gone",
        "busy",
        "captured",
        "driver",
        "framework",
        "file",
        "error",
    ]


class BridgeError(Exception):
    """The base of all errors of this package.

    Attributes
    ----------
    kind : str
        What went wrong, in one word: one of ``Kind``.
    """

    kind: "Kind" = "error"


class BridgeTypeError(BridgeError, TypeError):
    """Not a tensor."""


class BridgeDTypeError(BridgeTypeError, BufferError):
    """A dtype without a counterpart; also a ``BufferError``, as the array API requires if an export is impossible."""


class BridgeValueError(BridgeError, ValueError):
    """A wrong argument, another device than the requested one, or a malformed file."""


class BridgeLayoutError(BridgeValueError, BufferError):
    """A malformed layout, or one without a counterpart; also a ``BufferError``, as the array API requires."""


class BridgeBufferError(BridgeError, BufferError):
    """Memory that cannot be exported: read-only, in need of a copy, consumed, or part of autograd."""


class BridgeImportError(BridgeError, ImportError):
    """A framework, a driver or a library is missing."""


class BridgeMemoryError(BridgeError, MemoryError):
    """A framework or the device is out of memory."""


class BridgePermissionError(BridgeError, PermissionError):
    """Another process is not allowed to have what it requests."""


class BridgeConnectionError(BridgeError, ConnectionError):
    """Another process has ended, has revoked what it shared, or is too busy to answer."""


class BridgeRuntimeError(BridgeError, RuntimeError):
    """A framework or the driver failed."""


class BridgeWarning(UserWarning):
    """What works, and may not be what the caller wants."""


class ImmutableWarning(BridgeWarning):
    """A result that can be written to shares memory which its framework never changes.

    ``read_only=True`` promises not to write to the result, and ``copy=True`` copies: neither warns.
    """


#: The class for each kind; ``BridgeRuntimeError`` for the others (``driver``, ``framework``, ``captured``).
_CLASSES = {
    "not_a_tensor": BridgeTypeError,
    "dtype": BridgeDTypeError,
    "argument": BridgeValueError,
    "device": BridgeValueError,
    "file": BridgeValueError,
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
    """Return the error of this kind with this message.

    Parameters
    ----------
    kind : str
        One of ``Kind``.
    text : str
        The message.

    Returns
    -------
    BridgeError
        Of the class that fits.
    """
    error = _CLASSES.get(kind, BridgeRuntimeError)(text)
    # One of those above, whatever the caller knows of its type.
    error.kind = kind  # type: ignore[assignment]
    return error
