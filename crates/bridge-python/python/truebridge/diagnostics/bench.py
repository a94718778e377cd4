"""Measures what a conversion costs here, next to the frameworks' own functions."""

from __future__ import annotations

import dataclasses
import platform
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from .. import _core
from .._frameworks.table import SPARING
from ..errors import of_kind
from . import doctor, host
from .progress import Progress, metered
from .report import Table, Written

__all__ = ["Bench", "Copies", "Handoff", "bench"]

#: Bytes that a copy reads and writes.
_TRAFFIC = 2 * (64 << 20)

#: The bar of the native function's time, and how many times as long the longest bar is.
_WHOLE, _LONGEST = "█" * 4, 3

#: What the figures of both kinds are, for JSON.
_UNITS = {
    "ours": "ns a call",
    "native": "ns a call",
    "host": "ns a call",
    "ratio": "ours as a part of native",
    "handoffs": "float32, 1 MiB",
    "copies": "float32, 64 MiB, transposed",
}


class Compared:
    """A row of figures: the less, the better."""

    ours: float | None
    native: float | None
    _figures: ClassVar[tuple[str, ...]] = ("ours", "native")

    @property
    def ratio(self) -> float | None:
        """``ours`` as a part of ``native``, and ``None`` where one is missing."""
        return self.ours / self.native if self.ours and self.native else None

    @property
    def winner(self) -> str | None:
        """The name of the smallest figure."""
        figures = {name: figure for name in self._figures if (figure := getattr(self, name)) is not None}
        return min(figures, key=lambda name: figures[name], default=None)


@dataclasses.dataclass(frozen=True)
class Handoff(Compared):
    """Cost of a conversion in place of a compact float32 tensor of 1 MiB, in nanoseconds of a call on the host.

    Attributes
    ----------
    source, target : str
        Names of frameworks, as ``convert`` takes them.
    device : str
        Where the tensor is, such as ``"cpu"`` or ``"cuda:0"``.
    ours : float or None
        ``convert``, in place. ``None`` if the call fails; also below.
    native : float or None
        The frameworks' own functions in place, by DLPack.
    host : float or None
        Conversion through an array of NumPy.
    """

    source: str
    target: str
    device: str
    ours: float | None
    native: float | None
    host: float | None
    _figures = ("ours", "native", "host")


@dataclasses.dataclass(frozen=True)
class Copies(Compared):
    """Cost of a transposed copy of a float32 matrix of 64 MiB, in nanoseconds of a copy.

    Attributes
    ----------
    source, target : str
        As in ``Handoff``.
    device : str
        Where the tensor is.
    ours : float or None
        ``convert(x, target, permute=(1, 0), order="C", copy=True)``, into fresh memory of the target.
    native : float or None
        The source's own copy, into fresh memory of the source, such as ``x.t().contiguous()``.
    """

    source: str
    target: str
    device: str
    ours: float | None
    native: float | None


@dataclasses.dataclass(frozen=True, repr=False)
class Bench(Written):
    """What ``bench`` has measured. ``str`` makes tables of it.

    Attributes
    ----------
    version, python : str
        Of this package, and of Python.
    date : str
        When it was measured, in UTC.
    system, processor : str
        The operating system, and the model of the processor.
    cores : int
        Processors that this process may use.
    driver : str or None
        The version of CUDA that the driver has, and ``None`` without a driver.
    gpus : tuple of str
        The names of the devices.
    frameworks : dict
        The version of each framework that was measured.
    broken : dict
        Why a framework that is installed could not be imported.
    handoffs : tuple of Handoff
        Tensors in place.
    copies : tuple of Copies
        Transposed copies.
    """

    version: str
    python: str
    date: str
    system: str
    processor: str
    cores: int
    driver: str | None
    gpus: tuple[str, ...]
    frameworks: dict[str, str]
    broken: dict[str, str]
    handoffs: tuple[Handoff, ...]
    copies: tuple[Copies, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON holds: the attributes, and the units, ratios and winners of the figures.

        Returns
        -------
        dict
            The attributes, in dicts and tuples.
        """
        found = super().as_dict()
        for kind in ("handoffs", "copies"):
            for row, measured in zip(found[kind], getattr(self, kind), strict=True):
                row.update(ratio=measured.ratio, winner=measured.winner)
        return {**found, "units": _UNITS}

    def _parts(self) -> Iterator[str | Table]:
        """Yield the machine, and a table for each kind of figure."""
        yield f"truebridge {self.version}, Python {self.python}, {self.date}"
        yield f"{self.system}; {self.processor}, {self.cores} in use"
        yield f"CUDA {self.driver}: {', '.join(self.gpus) or 'no device'}" if self.driver else "no CUDA driver"
        yield ", ".join(f"{name} {version}" for name, version in self.frameworks.items())
        for name, error in self.broken.items():
            yield f"{name} cannot be imported: {error}"
        yield ""
        if not self.handoffs:
            yield "No pair is in place here: `python -m truebridge doctor` says why."
            return
        yield f"1 MiB in place: ns a call on the host. A shorter bar is better, {_WHOLE} is DLPack."
        heads = ["pair", "on", "truebridge", "DLPack", "NumPy", "ratio", f"{_WHOLE} DLPack"]
        rows = [
            [*_names(row), *map(_time, (row.ours, row.native, row.host)), *_judged(row, row.ratio)]
            for row in self.handoffs
        ]
        yield Table([heads, *rows], range(2, 6))
        yield ""
        yield f"64 MiB copied transposed: GB/s. A shorter bar is better, {_WHOLE} is the source."
        heads = ["pair", "on", "truebridge", "source", "times", f"{_WHOLE} source"]
        copies = [
            [*_names(row), *map(_speed, (row.ours, row.native)), *_judged(row, row.ratio and 1 / row.ratio)]
            for row in self.copies
        ]
        yield Table([heads, *copies], range(2, 5))


def bench(*, seconds: float = 10.0, timeout: float = 120.0, progress: Progress = None) -> Bench:
    """Measure what a conversion costs on this machine, next to the frameworks' own functions.

    Every pair of frameworks that is in place is measured, on the host and on each GPU, in a separate process: no
    framework is imported in this one. All methods take turns, and each figure is a median over the rounds. A method
    that returns wrong elements is an error.

    Parameters
    ----------
    seconds : float
        Seconds to measure. The imports take additional time, and five rounds are always made.
    timeout : float
        Seconds that the process may take for everything else.
    progress : bool or function, optional
        Whether a line on standard error shows how far the call is. The default shows it on a terminal, after a second.
        A function is called with the part of ``seconds`` that is done, and ``seconds``.

    Returns
    -------
    Bench
        The figures, and the machine. ``str`` makes tables of it, and ``as_json`` JSON.

    Raises
    ------
    BridgeValueError
        If ``seconds`` or ``timeout`` is not a positive number.
    BridgeImportError
        If this program has no Python executable that can be started.
    BridgeRuntimeError
        If the process crashes or hangs: ``doctor`` finds the framework that causes it.

    Examples
    --------
    >>> import truebridge as tb
    >>> result = tb.bench(seconds=1)
    >>> print(result)
    truebridge ...
    >>> slower = [(row.source, row.target) for row in result.handoffs if row.native and row.ours > row.native]
    """
    doctor.check_seconds("seconds", seconds)
    doctor.check_seconds("timeout", timeout)
    doctor.check_executable("bench")
    with metered(progress, "bench", None) as meter:
        meter.expect(seconds)

        def hear(printed: str) -> None:
            shares = re.findall(r"^(\d\.\d{3})\n", printed, re.M)
            meter.step(float(shares[-1] if shares else 0) * seconds - meter.done)

        driver = doctor.ask({"driver": ["driver"]}, timeout)["driver"]
        measured = doctor.ask({"bench": ["bench", str(seconds)]}, timeout + seconds, SPARING, hear)["bench"]
        if "ended" not in measured:
            meter.step(seconds)
    if "ended" in measured:
        kind, how = measured["ended"]
        advice = "raise --timeout, or " if kind == "hang" else ""
        raise of_kind("framework", f"the process that measures {how}: {advice}run `python -m truebridge doctor`")
    return Bench(
        version=_core.__version__,
        python=platform.python_version(),
        date=host.date(),
        system=host.system(),
        processor=host.processor(),
        cores=host.cores(),
        driver=driver.get("version"),
        gpus=tuple(gpu["name"] for gpu in driver.get("devices", [])),
        frameworks=measured["versions"],
        broken=measured["broken"],
        handoffs=tuple(Handoff(**row) for row in measured["handoffs"]),
        copies=tuple(Copies(**row) for row in measured["copies"]),
    )


def _names(row: Handoff | Copies) -> list[str]:
    return [f"{row.source} → {row.target}", row.device]


def _judged(row: Handoff | Copies, ratio: float | None) -> list[str]:
    """Return the cells of the ratio and of the chart: the time next to the native function's."""
    part = "" if row.ratio is None else _WHOLE[0] * max(1, round(len(_WHOLE) * min(row.ratio, _LONGEST)))
    more = " …" if row.ratio and row.ratio > _LONGEST else ""
    return [_part(ratio), part + more]


def _time(nanoseconds: float | None) -> str:
    return "-" if nanoseconds is None else f"{nanoseconds:,.0f}"


def _part(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _speed(nanoseconds: float | None) -> str:
    return "-" if nanoseconds is None else f"{_TRAFFIC / nanoseconds:,.1f}"
