"""What every call of the package begins with, and how one is refused."""

import ctypes
import warnings
from typing import Any, Dict

from ._common.operations import shown
from ._graph import Operations
from ._library import COUNTS, Counts, library
from .errors import BridgeError, of_kind


def stats() -> Dict[str, int]:
    """Return counts of this process.

    Returns
    -------
    dict of str to int
        ``leased`` views were made and ``released`` ones returned to their owners. Of these, ``pending`` ones wait for
        the device, and the memory of ``leaked`` ones is never reused, because the driver cannot tell when it may be.
        ``unclaimed`` results wait for ``take``; ``reclaimed`` ones were dropped with their session.

    Examples
    --------
    >>> import truebridge_tf1 as tb
    >>> tb.stats()["leaked"]
    0
    """
    _warn_of_reclaimed()
    return counts()


def counts() -> Dict[str, int]:
    counts = Counts()
    library().stats(ctypes.byref(counts))
    return {name: getattr(counts, name) for name in COUNTS}


_reclaimed = 0


def _warn_of_reclaimed() -> None:
    """Warn, once, of each result that was dropped with its session before it was taken."""
    global _reclaimed
    reclaimed = counts()["reclaimed"]
    lost, _reclaimed = reclaimed - _reclaimed, reclaimed
    if lost > 0:
        text = (
            "{} results of external_output were never taken, and were dropped with their session: "
            "call take on each, or do not fetch it"
        )
        warnings.warn(text.format(lost), ResourceWarning, stacklevel=4)


def ready() -> Operations:
    _warn_of_reclaimed()
    return Operations.get()


def no_handle(object: Any, advice: str) -> BridgeError:
    return argument(f"{shown(object)} is not a handle: {advice}")


def argument(text: str) -> BridgeError:
    return of_kind("argument", text)
