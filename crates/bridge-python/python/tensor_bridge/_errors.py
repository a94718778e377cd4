"""The errors that the Python modules raise themselves."""

from __future__ import annotations

from .errors import BridgeError, BridgeValueError


def of_kind(kind_of_error: type[BridgeError], kind: str, text: str) -> BridgeError:
    """Return an error of this kind, to be raised."""
    error = kind_of_error(text)
    error.kind = kind
    return error


def argument(text: str) -> BridgeError:
    """Return the error for a wrong argument, to be raised."""
    return of_kind(BridgeValueError, "argument", text)
