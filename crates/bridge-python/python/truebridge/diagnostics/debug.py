"""Look for races of this process.

In debug mode, memory that a converted tensor returns is overwritten first, and the driver is queried for streams that
nothing waits for::

    with tb.debug() as debug:
        step(tb.to_cupy(batch))
    print(debug)  # what was found

``TRUEBRIDGE_DEBUG=1`` in the environment turns it on for the whole process. What it can see, and what not, is
documented in docs/debug.md.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Literal, NamedTuple

from .. import _core
from ..errors import of_kind

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["BridgeDebugWarning", "Debug", "Finding", "debug"]

#: The environment variable that turns debug mode on for the whole process.
VARIABLE = "TRUEBRIDGE_DEBUG"

#: The most findings that one ``Debug`` keeps.
LIMIT = 10_000

#: Frames of these files are not the program's.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class BridgeDebugWarning(UserWarning):
    """Debug mode has found what may be a race, or a write to memory that must not be written to."""


class Finding(NamedTuple):
    """A stream with work that a transfer did not wait for, or a write to memory that must not be written to.

    The first is a possible race, and no proof of one.

    Attributes
    ----------
    kind
        ``"export"``: the stream was busy when a tensor was exported, and may write it. ``"return"``: it was busy when
        the last view was dropped, and may use it. ``"write"``: elements that no view may write to have changed while
        the view lived.
    source, target
        Frameworks of the tensor and of its view.
    device
        Device of the memory.
    stream
        The stream that does not wait, as the driver's handle: that of the tensor's owner. 1 is the legacy default
        stream. 0 for a write.
    busy
        The stream that has work pending, as the driver's handle. 0 for a write.
    file, line
        The call that made the view.
    """

    kind: Literal["export", "return", "write"]
    source: str
    target: str
    device: str
    stream: int
    busy: int
    file: str
    line: int

    def __str__(self) -> str:
        """Return what was found, and what to do."""
        if self.kind == "write":
            return (
                f"elements of {self.source} that must not be written to have changed while {self.target} had a view of "
                "them: pass copy=True to write to the result"
            )
        busy, own = _name(self.busy), _name(self.stream)
        if self.kind == "export":
            text = f"{busy} was busy when {self.source} exported a tensor on {self.device} as of {own}"
            advice = f"if it writes the tensor, make {own} wait for it, or convert with {busy} as the current stream"
        else:
            text = f"{busy} was busy when the last view in {self.target} of a tensor of {self.source} was dropped"
            advice = "if it uses the view, call record_stream(view, stream) before, so that the owner waits for it"
        return f"{text}, which does not wait for it: {advice}"


class Debug:
    """Debug mode while it is entered, and what was found meanwhile: see ``debug``.

    Examples
    --------
    >>> import numpy as np
    >>> import truebridge as tb
    >>> with tb.debug() as debug:
    ...     array = np.zeros(1000)
    ...     view = tb.to_numpy(array)
    ...     del array, view
    >>> print(debug)
    Pieces of memory that were overwritten before they were returned: 1
    """

    def __init__(self) -> None:
        """Make one that has found nothing."""
        self._findings: list[Finding] = []
        self._poisoned = [0, 0]
        self._open = False

    def __enter__(self) -> Debug:
        """Turn debug mode on."""
        if self._open:
            raise of_kind("argument", "this debug mode is on already: call debug() again for another")
        with _LOCK:
            self._open = True
            self._poisoned = [_core.debug_poisoned(), self._poisoned[1]]
            _OPEN.append(self)
            _core.debug_set(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Turn it off, unless others are on. The findings stay."""
        self.close()

    def close(self) -> None:
        """Turn it off, unless others are on. The findings stay."""
        with _LOCK:
            if self._open:
                self._poisoned = [0, self.poisoned]
                self._open = False
                _OPEN.remove(self)
                _core.debug_set(bool(_OPEN))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found, in order; at most ten thousand."""
        return tuple(self._findings)

    @property
    def poisoned(self) -> int:
        """How many pieces of memory of this process were overwritten before they were returned."""
        begin, so_far = self._poisoned
        return so_far + (_core.debug_poisoned() - begin if self._open else 0)

    def __str__(self) -> str:
        """Return a line for each finding that differs, with how often it was found."""
        counts: dict[str, int] = {}
        for found in self._findings:
            text = f"{found.file}:{found.line}: {found}"
            counts[text] = counts.get(text, 0) + 1
        lines = [f"{text} ({count} times)" if count > 1 else text for text, count in counts.items()]
        return "\n".join([*lines, f"Pieces of memory that were overwritten before they were returned: {self.poisoned}"])

    def __repr__(self) -> str:
        """Return how much was found."""
        return f"<Debug: {len(self._findings)} findings{', on' if self._open else ''}>"


#: Those that are on. The lock is not needed to read it.
_OPEN: list[Debug] = []
_LOCK = threading.Lock()

#: What was warned of in this process: once for each call of the program.
_WARNED: set[tuple[str, str, int]] = set()


def debug() -> Debug:
    """Look for races of this process while the result is entered.

    Memory that this package gives back as its last owner is overwritten with bytes of 255 first, which are NaN in
    floats, after all work that the package knows of. Work that it was never told of, or a pointer that was kept too
    long, then reads NaN instead of values that happen to be right.

    At each conversion of a tensor on a GPU, and when its last view is dropped, the driver is asked for streams with
    work pending that nothing waits for. Each is a finding, and a ``BridgeDebugWarning`` once for each line of the
    program. A busy stream is a possible race, and no proof of one: it may work on other tensors.

    On the host, elements that no view may write to, as those of TensorFlow, are compared when their last view is
    dropped: a change is a finding as well.

    Returns
    -------
    Debug
        A context manager, with the ``findings`` and the number of ``poisoned`` pieces of memory. It prints as a list.

    Warns
    -----
    BridgeDebugWarning
        For each line of the program with a finding.

    Examples
    --------
    >>> import numpy as np
    >>> import truebridge as tb
    >>> with tb.debug() as debug:
    ...     view = tb.to_torch(np.zeros(1000))
    ...     del view
    >>> debug.findings, debug.poisoned
    ((), 1)
    """
    return Debug()


def start() -> None:
    """Turn debug mode on for the whole process, as the environment variable says."""
    if os.environ.get(VARIABLE, "") not in ("", "0"):
        Debug().__enter__()


def _site() -> tuple[str, int]:
    """Return the line of the program that has called this package."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _found(
    kind: Literal["export", "return", "write"], streams: tuple[str, int, int], place: tuple[str, str, str, int]
) -> None:
    """Enter a finding, and warn of the first of its line."""
    (device, stream, busy), (source, target, file, line) = streams, place
    found = Finding(kind, source, target, device, stream, busy, file, line)
    for each in tuple(_OPEN):
        if len(each._findings) < LIMIT:
            each._findings.append(found)
    if (kind, file, line) not in _WARNED:
        _WARNED.add((kind, file, line))
        warnings.warn_explicit(BridgeDebugWarning(str(found)), BridgeDebugWarning, file, line)


def _name(handle: int) -> str:
    return "the legacy default stream" if handle == 1 else f"stream {handle:#x}"
