"""Record the transfers of this process.

A trace shows each transfer: source, target, in place or copied, why, and how long it took::

    with tb.trace() as trace:
        model(tb.to_torch(batch))
    print(trace)  # a table
    trace.save("transfers.json")  # for https://ui.perfetto.dev, or chrome://tracing

``TRUEBRIDGE_TRACE=1`` in the environment records the whole process, and prints the table to its standard error when
it exits; with a path instead of ``1`` it writes the file. ``%p`` in the path stands for the process's number.
"""

from __future__ import annotations

import atexit
import glob
import importlib.machinery
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core
from ..errors import BridgeError, of_kind
from .events import Event
from .report import Shown, Table, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

__all__ = ["Event", "Row", "Trace", "trace"]

#: The environment variable that records the whole process.
VARIABLE = "TRUEBRIDGE_TRACE"

#: The most events that a trace keeps, where the caller does not say: about 30 MB.
LIMIT = 100_000

#: Libraries with NVTX's functions, by the names that the loader finds, and by their places in NVIDIA's packages.
_NVTX = ("libnvToolsExt.so.1", "libnvtx3interop.so.1")


class Row(NamedTuple):
    """Events with the same source, target, path and reason.

    Attributes
    ----------
    source, target, path, reason
        Those of the events. ``path`` names who made a copy, and ``reason`` is the kind of the error where they failed.
    tensors
        Number of tensors.
    nbytes
        Bytes of their elements, together.
    median
        Median of their host time, in nanoseconds. A tensor of a tree has its equal part of the call's.
    """

    source: str
    target: str
    path: str
    reason: str
    tensors: int
    nbytes: int
    median: int


class Trace(Shown):
    """Transfers of this process, recorded while the trace is entered, as ``trace`` returns it. ``str`` makes a table.

    Parameters
    ----------
    limit : int
        The most events to keep.

    Raises
    ------
    BridgeValueError
        If ``limit`` is not a positive number.

    Examples
    --------
    >>> import numpy as np
    >>> import truebridge as tb
    >>> with tb.trace() as trace:
    ...     _ = tb.to_numpy([np.zeros((2, 3)), np.zeros(3)], order="F")
    >>> [(row.path, row.tensors, row.nbytes) for row in trace.rows()]
    [('copy by host', 1, 48), ('in place', 1, 24)]
    """

    def __init__(self, limit: int) -> None:
        """Open a trace that keeps the newest ``limit`` events."""
        if not isinstance(limit, int) or isinstance(limit, bool) or not 0 < limit < 1 << 32:
            raise of_kind("argument", f"limit is a number of events, at least 1, not {limit!r}")
        self._limit = limit
        self._id: int | None = None
        self._read: tuple[int, tuple[Event, ...]] = (0, ())
        self._names: dict[int, str] = {}

    def __enter__(self) -> Trace:
        """Begin to record."""
        if self._id is not None:
            raise of_kind("argument", "this trace is open already: call trace() again for another")
        _load_nvtx()
        self._id = _core.trace_open(self._limit)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop recording. The events stay."""
        self.close()

    def close(self) -> None:
        """Stop recording. The events stay."""
        self._look()
        if self._id is not None:
            _core.trace_close(self._id)
            self._id = None

    def _look(self) -> tuple[int, tuple[Event, ...]]:
        """Return how many events were dropped, and the others: while the trace is open, those until now."""
        if self._id is not None:
            dropped, events = _core.trace_read(self._id)
            self._read = dropped, tuple(Event(**event) for event in events)
            # A thread has no name after its end.
            self._names.update({thread.native_id or 0: thread.name for thread in threading.enumerate()})
        return self._read

    @property
    def events(self) -> tuple[Event, ...]:
        """The events, in the order in which their calls ended."""
        return self._look()[1]

    @property
    def dropped(self) -> int:
        """How many events were dropped, the oldest first, because there were more than ``limit``."""
        return self._look()[0]

    def rows(self) -> list[Row]:
        """Count the events by source, target, path and reason.

        Returns
        -------
        list of Row
            Most bytes first.
        """
        groups: dict[tuple[str, str, str, str], list[Event]] = {}
        for event in self.events:
            groups.setdefault((event.source or "?", event.target or "?", event.method, event.why), []).append(event)
        rows = [
            Row(*key, len(events), sum(event.nbytes for event in events), _median(events))
            for key, events in groups.items()
        ]
        return sorted(rows, key=lambda row: (-row.nbytes, row[:4]))

    def _parts(self) -> Iterator[str | Table]:
        """Yield a table of the rows."""
        dropped = self.dropped
        rows = [[*row[:4], str(row.tensors), size(row.nbytes), _time(row.median)] for row in self.rows()]
        if rows:
            yield Table([["from", "to", "path", "reason", "tensors", "bytes", "median"], *rows], range(4, 7))
        else:
            yield "No transfers were recorded."
        if dropped:
            yield f"{dropped} older events were dropped: pass limit= to keep more."

    def chrome(self) -> dict[str, Any]:
        """Return the calls as trace events of Chrome, which Perfetto reads.

        Returns
        -------
        dict
            One slice for each call of a thread. Times are in microseconds of ``time.monotonic_ns``, so that files of
            several processes of a machine fit together.
        """
        from .perfetto import timeline

        dropped, events = self._look()
        return timeline(events, self._names, dropped)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``chrome()`` as a JSON file, for https://ui.perfetto.dev or chrome://tracing.

        The file is replaced in one step, so that no reader finds half of it.

        Parameters
        ----------
        path : str or path
            The file.

        Raises
        ------
        OSError
            If the file cannot be written.
        """
        import json

        from ..files import replaced

        with replaced(os.path.realpath(os.fsdecode(path))) as part, open(part, "w", encoding="utf-8") as file:
            json.dump(self.chrome(), file)


def trace(*, limit: int = LIMIT) -> Trace:
    """Record the transfers of this process while the result is entered.

    Every tensor of a call of ``convert``, ``to_torch`` and the like, ``copy``, ``save``, ``load``, ``share``, ``open``
    and the functions for TensorFlow's graphs is an event, in any thread and task. ``Event`` of this module
    documents its fields. Traces may be nested and may overlap: each records every event while it lasts.

    Where the environment names a profiler's library in ``NVTX_INJECTION64_PATH``, as Nsight Systems does, each call
    that is recorded is also a range of NVTX.

    Parameters
    ----------
    limit : int, optional
        The most events to keep. After that the oldest are dropped: ``Trace.dropped`` counts them.

    Returns
    -------
    Trace
        A context manager, with the table (``print(trace)``), the ``events`` and ``save(path)``.

    Raises
    ------
    BridgeValueError
        If ``limit`` is not a positive number.

    Examples
    --------
    >>> import numpy as np
    >>> import truebridge as tb
    >>> with tb.trace() as trace:
    ...     _ = tb.to_numpy(np.zeros((2, 3), np.float32))
    >>> [(event.source, event.path, event.shape, event.nbytes) for event in trace.events]
    [('numpy', 'in place', (2, 3), 24)]
    """
    return Trace(limit)


def start() -> None:
    """Record the whole process, as the environment variable says."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted in ("", "0"):
        return
    whole = Trace(LIMIT)
    whole.__enter__()
    atexit.register(_end, whole, wanted)


def _end(whole: Trace, wanted: str) -> None:
    """Print or write what was recorded, if anything was. The program ends as it would without."""
    whole.close()
    if not whole.events:
        return
    try:
        if wanted == "1":
            print(whole, file=sys.stderr)
        else:
            whole.save(wanted.replace("%p", str(os.getpid())))
    except (OSError, BridgeError) as error:
        print(f"truebridge: {VARIABLE} cannot be written: {error}", file=sys.stderr)


def _load_nvtx() -> None:
    """Mark NVTX ranges, if a profiler runs: it is that which sets the variable."""
    if os.environ.get("NVTX_INJECTION64_PATH"):
        spec = importlib.machinery.PathFinder.find_spec("nvidia")
        places: Sequence[str] = list(spec.submodule_search_locations or ()) if spec else ()
        packaged = [found for name in _NVTX for place in places for found in glob.glob(f"{place}/*/lib/{name}")]
        _core.trace_nvtx([*_NVTX, *packaged])


def _median(events: list[Event]) -> int:
    """Return the median host time of a tensor, the lower one of two."""
    times = sorted(event.duration // max(event.tensors, 1) for event in events)
    return times[(len(times) - 1) // 2]


def _time(nanoseconds: float) -> str:
    for length, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if nanoseconds >= length:
            return f"{nanoseconds / length:.1f} {unit}"
    return f"{nanoseconds:.0f} ns"
