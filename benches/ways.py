"""Cost of the four paths from one framework to another, side by side: in place, host, file, another process.

Each path starts at a float32 tensor of the source and ends with a tensor of the target on the same device, ready to be
used; each ends with a wait for the device, and its result is dropped. *ours* and *theirs* take turns in every round:

- *in place*: ``tb.convert(x, target)``, compared with the frameworks' own exchange.
- *host*: to host memory and back, compared with NumPy. Only on a device: on the host a tensor is there already.
- *file*: ``tb.save`` and ``tb.load`` of a ``.npy`` file, compared with ``numpy.save`` and ``numpy.load``. The file
  stays in the page cache. On the host all elements are read (``copy=True``).
- *process*: ``tb.share`` here and ``tb.open`` there, compared with memory of the host that both have mapped: one copy
  into it here, a tensor of the target there. What carries the ticket is not measured. The other process has opened one
  before.

TensorFlow 1.15 has only ``feed_dict``, which ``bench_sessions`` measures. The other process is then
one of Python 3.7, if there is one.

    python bench.py --ways --device cuda:0 --report out
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.exchanges import THERE37, There, framework, native, settle
from benches.reports import conclude, page
from benches.rounds import options, per_call, sizes
from truebridge_conformance import host
from truebridge_conformance.others import Other, python37

MIB = 1 << 20
#: MiB of a tensor.
SIZES = [1.0, 64.0, 1024.0]
#: Nanoseconds of a batch of calls, and the most calls in one.
BATCH, MOST = 5_000_000, 50
#: Rounds that do not count.
WARM_UP = 2
#: The pairs: one for each of the questions in docs/howto.
PAIRS = (
    ("torch", "tensorflow1"),
    ("tensorflow", "torch"),
    ("cupy", "tensorflow"),
    ("torch", "tensorflow"),
    ("cupy", "torch"),
)
#: What the other way is called, where it is the same for all pairs.
BY = {"host": "NumPy", "file": "`numpy.save`, `numpy.load`", "process": "memory of the host"}

#: A way: returns nanoseconds of one use.
Way = Callable[[], float]


@dataclass
class Row:
    """One way of one pair at one size: medians in nanoseconds."""

    source: str
    target: str
    device: str
    mib: float
    way: str
    ours: float
    theirs: float | None
    #: What *theirs* measures.
    by: str | None


class Setting:
    """The paths of one pair, for tensors of one size."""

    def __init__(self, source: str, target: str, device: str, nbytes: int, folder: Path, shared: Path) -> None:
        """Make the tensor and the paths. ``shared`` is a folder in memory."""
        import numpy

        import truebridge as tb

        self.numpy, self.device, self.target = numpy, device, target
        self.tb: Any = tb
        self.array: Any = (numpy.arange(nbytes // 4) % 251).astype(numpy.float32)
        self.source = framework(source, device)
        # In memory of the framework's own: an array may begin where 64 does not divide the address.
        self.x = self.tb.convert(self.source.up(self.array), source, copy=True)
        if not self.tb.plan(self.x, target).zero_copy:
            raise RuntimeError(f"a tensor of {source} is not in place in {target}")
        self.file, self.memory = folder / "tensor.npy", shared / "tensor"
        self.other: Other | None = None
        on_host, copy = device == "cpu", True if device == "cpu" else None

        def file() -> Any:
            self.tb.save(self.file, self.x)
            return self.tb.load(self.file, target, device=device, copy=copy)

        self.ways: dict[str, tuple[Way, Way | None, str | None]] = {}
        self._add("in place", lambda: self.tb.convert(self.x, target))
        if not on_host:
            back = {"device": device}
            self._add("host", lambda: self.tb.convert(self.tb.to_numpy(self.x, device="cpu"), target, **back))
        self._add("file", file)
        if target != "tensorflow1":
            self._theirs(source, on_host)
        self._process()

    def _theirs(self, source: str, on_host: bool) -> None:
        own = framework(self.target, self.device)
        exchange, name = native(source, self.target)

        def file() -> Any:
            self.numpy.save(self.file, self.source.down(self.x))
            return own.up(self.numpy.load(self.file))

        theirs: dict[str, Callable[[], Any]] = {"in place": lambda: exchange(self.x), "file": file}
        if not on_host:
            theirs["host"] = lambda: own.up(self.source.down(self.x))
        for way, call in theirs.items():
            self._check(way, own.down(call()))
            self.ways[way] = (self.ways[way][0], self._batched(call), BY.get(way, name))

    def _add(self, way: str, call: Callable[[], Any]) -> None:
        self._check(way, self.tb.to_numpy(call(), device="cpu"))
        self.ways[way] = (self._batched(call), None, None)

    def _check(self, way: str, given: Any) -> None:
        if not self.numpy.array_equal(given, self.array):
            raise RuntimeError(f"the way {way} to {self.target} returned wrong elements")

    def _batched(self, call: Callable[[], Any]) -> Way:
        """Return a way that is used several times in a row, and drops each result."""
        settle(self.device)
        start = time.perf_counter_ns()
        call()
        settle(self.device)
        calls = max(1, min(MOST, BATCH // (time.perf_counter_ns() - start)))

        def settled() -> None:
            call()
            settle(self.device)

        return lambda: per_call(settled, calls, lambda: None)

    def _process(self) -> None:
        """Add the way to another process. There is none to TensorFlow 1.15 without Python 3.7."""
        if self.target != "tensorflow1":
            self.other = Other(PYTHONPATH=os.pathsep.join(sys.path))
            self.other.define(f"from {There.__module__} import There\nthere = There({self.target!r}, {self.device!r})")
            self.memory.write_bytes(bytes(self.array.nbytes))
            mapped: Any = self.numpy.memmap(self.memory, self.numpy.float32, "r+")

            def put() -> str:
                self.numpy.copyto(mapped, self.source.down(self.x).ravel())
                return str(self.memory)

            self.ways["process"] = self._across("ours", self._share), self._across("theirs", put), BY["process"]
        elif (python := python37()) is not None:
            # It finds nothing of this Python's.
            beside = next(path for path in sys.path if (Path(path) / "truebridge_tf1").is_dir())
            self.other = Other([python], "truebridge_tf1", PYTHONPATH=beside)
            self.other.define(f"{THERE37}\nthere = There()")
            self.ways["process"] = self._across("ours", self._share), None, None

    def _share(self) -> str:
        return str(self.tb.share(self.x, expires=60).text)

    def _across(self, way: str, share: Callable[[], str]) -> Way:
        other = self.other
        assert other is not None
        if self.target != "tensorflow1":
            total = float(other(f"there.total({way!r}, {share()!r})"))
            self._check("process", self.array if total == self.array.sum(dtype="float64") else None)

        def once() -> float:
            settle(self.device)
            start = time.perf_counter_ns()
            ticket = share()
            taken = time.perf_counter_ns() - start
            opened = float(other(f"there.opened({way!r}, {ticket!r})"))
            if way == "ours":
                self.tb.revoke(ticket)
            return taken + opened

        return once

    def rows(self, rounds: int) -> list[tuple[str, float, float | None, str | None]]:
        """Measure every path. Ours and theirs take turns."""
        taken: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in self.ways}
        for turn in range(rounds + WARM_UP):
            for way, (ours, theirs, _) in self.ways.items():
                figures = ours(), theirs() if theirs else 0.0
                if turn >= WARM_UP:
                    for side, figure in zip(taken[way], figures, strict=True):
                        side.append(figure)
        medians = {way: [statistics.median(side) for side in sides] for way, sides in taken.items()}
        return [
            (way, medians[way][0], medians[way][1] if theirs else None, by)
            for way, (_, theirs, by) in self.ways.items()
        ]

    def close(self) -> None:
        """End the other process."""
        if self.other is not None:
            self.other.kill()


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench_ways.json`` and ``.md``."""
    given = options(
        argv,
        "ways",
        __doc__,
        20,
        device={"default": "cpu", "help": "cpu or cuda:0 (default: cpu)"},
        sizes=sizes(SIZES, "the tensors"),
        only={"metavar": "FROM:TO,...", "help": "the pairs to measure (default: all five)"},
        folder={"default": tempfile.gettempdir(), "help": "where files are written (default: %(default)s)"},
    )
    warnings.filterwarnings("ignore", "The given NumPy array is not writ")
    about = host.describe()
    rows = measure(about, given, given.sizes)
    return conclude(given.report, "bench_ways", markdown(about, rows), about, rows, [])


def measure(about: dict[str, Any], given: argparse.Namespace, sizes: Sequence[float]) -> list[Row]:
    """Measure the pairs of the frameworks that are there and that have the device."""
    # PyTorch and CuPy before TensorFlow, which shows stubs of CUDA to libraries that are loaded later.
    for module in ("torch", "cupy"):
        if importlib.util.find_spec(module):
            importlib.import_module(module)
    known = {name for name in about["versions"] if name != "cupy" or given.device != "cpu"}
    if given.device != "cpu":
        known -= {*about["host_only"]}
    if "tensorflow1" in known:
        import truebridge as tb

        about["versions"]["tensorflow1"] = tb.tensorflow.v1.open()
    rows = []
    pairs = [tuple(pair.split(":")) for pair in given.only.split(",")] if given.only else PAIRS
    for source, target in pairs:
        if not {source, target} <= known:
            print(f"{source} → {target}: not here", file=sys.stderr)
            continue
        for mib in sizes:
            with (
                tempfile.TemporaryDirectory(dir=given.folder) as folder,
                tempfile.TemporaryDirectory(dir="/dev/shm") as shared,
            ):
                setting = Setting(source, target, given.device, int(mib * MIB), Path(folder), Path(shared))
                try:
                    rounds = given.rounds if mib <= 64 else max(given.rounds // 4, 1)
                    rows += [Row(source, target, given.device, mib, *found) for found in setting.rows(rounds)]
                finally:
                    setting.close()
    return rows


def markdown(about: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the report."""

    def line(row: Row) -> str:
        ours, theirs = ("–" if figure is None else f"{figure / 1000:,.1f}" for figure in (row.ours, row.theirs))
        where = f"{row.source} | {row.target} | {row.device} | {row.mib:g}"
        return f"{where} | {row.way} | {ours} | {theirs} | {row.by or '–'}"

    what = f"Tensors of float32, {about['cores']} cores. Medians."
    return page(about, what, "from|to|device|:size, MiB|way|:ours, µs|:theirs, µs|by", map(line, rows))
