"""Shows how far a long call has come: in one line of standard error, or by a function of the caller."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from ..errors import of_kind
from .report import size

#: What ``progress=`` takes.
Progress = bool | Callable[[float, float], object] | None

#: Seconds after which a call is shown by default, and between two looks at it.
PATIENCE, PERIOD = 1.0, 0.1


class Meter:
    """What there is to do in a call, and how much of it is done."""

    def __init__(self, tell: Callable[[float, float], object] | None) -> None:
        """Pass both numbers to ``tell`` after each step."""
        self.done: float = 0
        self.total: float = 0
        self._tell = tell

    def expect(self, amount: float) -> None:
        """Add to what there is to do."""
        self.total += amount

    def step(self, amount: float) -> None:
        """Add to what is done."""
        self.tell(min(self.done + amount, self.total), self.total)

    def tell(self, done: float, total: float) -> None:
        """Say what is done of what there is to do."""
        self.done, self.total = done, total
        if self._tell is not None:
            self._tell(done, total)


@contextlib.contextmanager
def metered(progress: Progress, what: str, size: Callable[[float], str] | None, ago: float = 0.0) -> Iterator[Meter]:
    """Yield the meter of a call that began ``ago`` seconds before.

    ``what`` names the call in the line, and ``size`` makes words of its total. Without ``size`` the steps take
    different times: the line has the time that has passed, and no estimate of what is left.
    """
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        text = f"progress is {progress!r:.80}: pass True, False, or a function that takes what is done and the total"
        raise of_kind("argument", text)
    if callable(progress):
        yield Meter(progress)
    elif progress or (progress is None and _is_terminal()):
        line = _Line(what, size, 0.0 if progress else PATIENCE, ago)
        try:
            yield Meter(line.show)
        finally:
            line.end()
    else:
        yield Meter(None)


def of_moves(progress: Progress, ago: float) -> AbstractContextManager[Meter]:
    """Return the meter of a call that moves tensors."""
    return metered(progress, "move", size, ago)


def _is_terminal() -> bool:
    # Programs without a console have no standard error, and others may have closed it.
    with contextlib.suppress(AttributeError, ValueError):
        return sys.stderr.isatty()
    return False


class _Line:
    """A line that is written again and again."""

    def __init__(self, what: str, size: Callable[[float], str] | None, patience: float, ago: float) -> None:
        # The name of a file may hold what moves the cursor.
        self._what = "".join(letter if letter.isprintable() else "?" for letter in what)
        self._size = size
        self._file = sys.stderr
        self._start = time.monotonic() - ago
        self._next = self._start + patience
        self._first: tuple[float, float] | None = None
        self._width = 0

    def show(self, done: float, total: float) -> None:
        """Write the line, unless it was just written."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, done
        if now < self._next and not (self._width and done >= total):
            return
        self._next = now + PERIOD
        words = f"{self._what}: {done / total if total else 1:.0%}"
        words += f" of {self._size(total)}" if self._size else ""
        begun, before = self._first
        if done >= total or self._size is None:
            words += f", {now - self._start:.1f} s"
        elif done > before:
            words += f", {(now - begun) * (total - done) / (done - before):.0f} s left"
        self._write("\r" + words[: self._columns()].ljust(self._width))
        self._width = min(len(words), self._columns())

    def end(self) -> None:
        """Leave the line to what comes next."""
        if self._width:
            self._write("\n")

    def _columns(self) -> int:
        # In the last column some terminals begin a new line.
        with contextlib.suppress(OSError, ValueError):
            return max(os.get_terminal_size(self._file.fileno()).columns - 1, 1)
        return 79

    def _write(self, text: str) -> None:
        # The call goes on where the line cannot be seen.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._file.write(text)
            self._file.flush()
