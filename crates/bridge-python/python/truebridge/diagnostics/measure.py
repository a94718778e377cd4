"""Measures for ``bench``, in a separate process.

Each contender is called in batches. In every round all of them take turns, so that a change of the machine's speed
affects all. A figure is the median over the rounds. A call includes dropping what it returned.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .. import _core
from .._frameworks.numpy import aligned
from .._frameworks.table import ALL, Side
from .report import told

#: Shapes of the tensors of float32: 1 MiB to hand on, and 64 MiB to copy.
HANDED, COPIED = (512, 512), (4096, 4096)
#: Rounds that warm caches and pools up, and do not count; the fewest and the most that do.
WARM_UP, FEWEST, MOST = 2, 5, 500
#: The parts of the work that importing takes, and of a table that finding the sizes of the batches takes.
IMPORTS, SIZING = 0.25, 0.3
#: The most calls of a batch, and the nanoseconds that one is to take.
CALLS, BATCH = 100, 1_000_000

Call = Callable[[Any], Any]
#: Takes the part of the work that is done.
Tell = Callable[[float], None]


def batch(
    call: Call, tensor: Any, calls: int, before: Callable[[], Any], after: Callable[[], Any] | None = None
) -> float:
    """Return nanoseconds per call, with the garbage collector off. ``after`` is part of the time, ``before`` is not."""
    before()
    gc.disable()
    try:
        started = time.perf_counter_ns()
        for _ in range(calls):
            call(tensor)
        if after is not None:
            after()
        return (time.perf_counter_ns() - started) / calls
    finally:
        gc.enable()


class Pair(NamedTuple):
    """Two frameworks on one device."""

    source: str
    target: str
    device: str
    sides: tuple[Side, Side]

    def wait(self) -> None:
        """Wait for the device."""
        for side in self.sides:
            side.wait()


class Contender(NamedTuple):
    """One method for one pair: the cell of its figure, and the call."""

    row: dict[str, Any]
    method: str
    call: Call
    tensor: Any
    pair: Pair


class Kind(NamedTuple):
    """What is measured: the shape of the tensors, and the methods."""

    shape: tuple[int, int]
    #: Whether the elements are copied, so that the device has to be waited for.
    copies: bool
    #: Returns the methods of a pair, by column, and the framework of the pair that has the result.
    methods: Callable[[Pair], dict[str, tuple[Call, Side]]]


def native(sides: tuple[Side, Side]) -> Call:
    """Return the frameworks' own functions, by DLPack: by a capsule if one of the two supports nothing else."""
    source, target = sides
    lend, take = source.capsule, target.of_dlpack
    by_capsule = (source.capsules_only or target.capsules_only) and target.takes_capsules
    return (lambda x: take(lend(x))) if by_capsule else take


def through_host(sides: tuple[Side, Side]) -> Call:
    """Return the conversion through an array of the host."""
    to_host, of_host = sides[0].to_host, sides[1].of_host
    return lambda x: of_host(to_host(x))


def _handoffs(pair: Pair) -> dict[str, tuple[Call, Side]]:
    target = pair.sides[1]
    return {
        "ours": (lambda x: _core.convert_inside(x, pair.target), target),
        "native": (native(pair.sides), target),
        "host": (through_host(pair.sides), target),
    }


def _copies(pair: Pair) -> dict[str, tuple[Call, Side]]:
    source, target = pair.sides

    def ours(x: Any) -> Any:
        return _core.convert_inside(x, pair.target, permute=(1, 0), order="C", copy=True)

    return {"ours": (ours, target), "native": (source.transposed, source)}


#: What is measured, by the names of the tables.
KINDS = {"handoffs": Kind(HANDED, False, _handoffs), "copies": Kind(COPIED, True, _copies)}


def bench(seconds: str, tell: Tell) -> dict[str, Any]:
    """Measure for this time, and return the rows of each table, the versions, and what could not be imported."""
    modules, broken = {}, {}
    found = [name for name in ALL if importlib.util.find_spec(name) is not None]
    for count, name in enumerate(found):
        tell(IMPORTS * count / len(found))
        try:
            modules[name] = importlib.import_module(name)
        except BaseException as error:
            broken[name] = told(error)
    pairs = list(_pairs(modules))
    each = (1 - IMPORTS) / len(KINDS)
    tables: dict[str, list[dict[str, Any]]] = {}
    for name, kind in KINDS.items():
        before = IMPORTS + each * len(tables)
        tell(before)
        tables[name] = _rows(kind, pairs, float(seconds) / len(KINDS), _part_of(tell, before, each))
    versions = {name: str(getattr(module, "__version__", "unknown")) for name, module in modules.items()}
    return {"versions": versions, "broken": broken, **tables}


def _part_of(tell: Tell, before: float, part: float) -> Tell:
    """Return what takes the share of a part, of which so much comes before."""
    return lambda share: tell(before + part * share)


def _pairs(modules: dict[str, Any]) -> Iterator[Pair]:
    """Yield the pairs of frameworks that have tensors on one device, for the host and each GPU."""
    counts = dict.fromkeys(modules, 0)
    for name, module in modules.items():
        # The error is for ``doctor`` to explain.
        with contextlib.suppress(Exception):
            counts[name] = ALL[name].devices(module)
    for index in (None, *range(max(counts.values(), default=0))):
        here = [name for name in modules if (ALL[name].on_host if index is None else index < counts[name])]
        sides = {name: ALL[name].side(modules[name], index) for name in here}
        device = "cpu" if index is None else f"cuda:{index}"
        for source in here:
            for target in here:
                if source != target:
                    yield Pair(source, target, device, (sides[source], sides[target]))


def _rows(kind: Kind, pairs: list[Pair], seconds: float, tell: Tell) -> list[dict[str, Any]]:
    """Return a row for each pair in place: the nanoseconds of each method that works."""
    rows: list[dict[str, Any]] = []
    contenders: list[Contender] = []
    tensors: dict[Side, Any] = {}
    values: Any = _values(kind.shape) if pairs else None
    for pair in pairs:
        source = pair.sides[0]
        try:
            if source not in tensors:
                tensors[source] = source.of_host(aligned(values))
            tensor = tensors[source]
            if not _core.plan(tensor, pair.target).zero_copy:  # type: ignore[call-overload]
                continue
        except Exception:
            # No tensor, or no pair: ``doctor`` says why.
            continue
        methods = kind.methods(pair)
        rows.append({"source": pair.source, "target": pair.target, "device": pair.device, **dict.fromkeys(methods)})
        right = values.T if kind.copies else values
        own = [Contender(rows[-1], method, call, tensor, pair) for method, (call, side) in methods.items()]
        contenders += [one for one in own if _works(one, methods[one.method][1], right)]
    for contender, figure in zip(contenders, _medians(kind, contenders, seconds, tell), strict=True):
        contender.row[contender.method] = figure
    return rows


def _values(shape: tuple[int, int]) -> Any:
    """Return an array of which no two elements are equal."""
    import numpy

    return numpy.arange(shape[0] * shape[1], dtype=numpy.int32).view(numpy.float32).reshape(shape)


def _works(contender: Contender, side: Side, right: Any) -> bool:
    """Return whether a method works. One that returns wrong elements is an error."""
    try:
        result = contender.call(contender.tensor)
    except Exception:
        return False
    contender.pair.wait()
    if side.to_host(result).tobytes() != right.tobytes():
        raise RuntimeError(f"{contender.method}, {contender.row}: the elements differ")
    return True


def _medians(kind: Kind, contenders: list[Contender], seconds: float, tell: Tell) -> list[float]:
    """Return the nanoseconds of each contender."""
    calls = []
    for count, contender in enumerate(contenders):
        tell(SIZING * count / len(contenders))
        calls.append(_calls(kind, contender))
    taken: list[list[float]] = [[] for _ in contenders]
    began = time.monotonic()
    for turn in range(WARM_UP + MOST if contenders else 0):
        elapsed = time.monotonic() - began
        if turn >= WARM_UP + FEWEST and elapsed > seconds:
            break
        # The time and the fewest rounds have to be over, both.
        tell(SIZING + (1 - SIZING) * min(elapsed / seconds, turn / (WARM_UP + FEWEST), 1.0))
        for contender, count, times in zip(contenders, calls, taken, strict=True):
            figure = _batch(kind, contender, count)
            if turn >= WARM_UP:
                times.append(figure)
    return [statistics.median(times) for times in taken]


def _calls(kind: Kind, contender: Contender) -> int:
    """Return the calls of a batch: by the fastest of three, because other processes only add to them."""
    return max(1, min(CALLS, int(BATCH / min(_batch(kind, contender, 1) for _ in range(3)))))


def _batch(kind: Kind, contender: Contender, calls: int) -> float:
    wait = contender.pair.wait
    return batch(contender.call, contender.tensor, calls, wait, wait if kind.copies else None)
