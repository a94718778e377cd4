"""The warning for a writable view of memory that its framework never changes."""

from __future__ import annotations

import os
import sys
import warnings

from ..errors import ImmutableWarning

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_MEMORY = "the memory of this tensor of {source} must not change, because other tensors may share it, and "
_RESULT = (
    "{target} lets you write to it: pass read_only=True to promise that you write nothing, or copy=True to write to a "
    "copy"
)
_LOAN = (
    "the library that takes the loan may write to it: pass read_only=True to lend to promise that it writes nothing, "
    "or copy=True to lend a copy"
)
_ONCE = " (one warning for each pair of frameworks)"


def warn(source: str, target: str | None) -> None:
    """Warn the program of a pair of frameworks, at its line that has called this package.

    Parameters
    ----------
    source, target : str
        The names of the frameworks; no target for a loan.
    """
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    text = _MEMORY + (_RESULT if target else _LOAN) + _ONCE
    warnings.warn(text.format(source=source, target=target), ImmutableWarning, stacklevel=level)
