"""Conversions on the host that copy into fresh memory, with huge pages and without, compared with PyTorch's own copy.

A transposed array of NumPy becomes a tensor of PyTorch by ``to_torch(array.T, copy=True)``, and by
``from_numpy(array.T).contiguous()``. The system clears each page of fresh memory at its first use, which costs more
than the copy where pages are small. Each setting runs in a separate process:

- *as set*: as the system is set, which the report names. Ours asks for huge pages, PyTorch does not.
- *never*: the process may have no huge pages (``PR_SET_THP_DISABLE``), so that all pages are small.
- *allocator*: the C library asks for huge pages itself (``glibc.malloc.hugetlb=1``), as for a system set to ``always``.

The two take turns. Page faults and processor time are those of one call on all threads; a figure is the least of the
rounds, because other processes only add to them.

    python bench.py --pages --report out
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benches.reports import Verdict, conclude, page
from benches.rounds import options, sizes
from truebridge_conformance import host

MIB = 1 << 20
SIZES = [1, 2, 4, 8, 16, 64, 256]
#: The settings: what the environment of a process has, and whether it gives up huge pages.
SETTINGS: dict[str, tuple[dict[str, str], bool]] = {
    "as set": ({}, False),
    "never": ({}, True),
    "allocator": ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, False),
}
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
#: Of ``prctl``, in ``linux/prctl.h``.
PR_SET_THP_DISABLE = 41
#: The most page faults and processor time of ours, as parts of those with small pages, and from how many MiB on: the C
#: library keeps smaller memory, whose pages are there already.
FAULTS, CPU, FROM = 0.1, 0.75, 64


@dataclass
class Cost:
    """What one call takes: page faults, and milliseconds of all processors and of the clock."""

    faults: int
    cpu: float
    wall: float


@dataclass
class Row:
    """One size under one setting."""

    setting: str
    mib: float
    ours: Cost
    torch: Cost


def once(call: Callable[[], Any]) -> Cost:
    """Return what a call takes, with the drop of its result."""
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    call()
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(after.ru_minflt - before.ru_minflt, 1e3 * cpu, 1e3 * wall)


def least(costs: Sequence[Cost]) -> Cost:
    """Return the least of each figure."""
    return Cost(*(min(figures) for figures in zip(*((c.faults, c.cpu, c.wall) for c in costs), strict=True)))


def measured(setting: str, mib: float, rounds: int) -> Row:
    """Measure one size in this process."""
    import numpy
    import torch

    import truebridge as tb

    columns = int(mib * MIB) // 4 // 1024
    array = numpy.arange(1024 * columns, dtype=numpy.float32).reshape(1024, columns).T
    tensor = torch.from_numpy(array)
    ways = {"ours": lambda: tb.to_torch(array, copy=True), "torch": tensor.contiguous}
    if not torch.equal(ways["ours"](), tensor):
        raise RuntimeError("the copy has other elements than the source")
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, call in ways.items():
            cost = once(call)
            if turn > 0:
                costs[name].append(cost)
    return Row(setting, mib, least(costs["ours"]), least(costs["torch"]))


def child(setting: str, mibs: Sequence[float], rounds: int) -> None:
    """Measure under a setting, and print the rows as JSON."""
    if SETTINGS[setting][1] and ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0):
        raise OSError("the process may not give up huge pages")
    print(json.dumps([asdict(measured(setting, mib, rounds)) for mib in mibs]))


def started(setting: str, mibs: Sequence[float], rounds: int) -> list[Row]:
    """Measure under a setting in a separate process."""
    code = f"from benches.pages import child; child({setting!r}, {[*mibs]!r}, {rounds})"
    environment = {**os.environ, **SETTINGS[setting][0], "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True)
    rows = json.loads(run.stdout)
    return [Row(row["setting"], row["mib"], Cost(**row["ours"]), Cost(**row["torch"])) for row in rows]


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Return the bars: what huge pages leave of the page faults and the processor time of small ones."""
    ours = {(row.setting, row.mib): row.ours for row in rows}
    judged = []
    for mib in sorted({row.mib for row in rows if row.mib >= FROM}):
        huge, small = ours["as set", mib], ours["never", mib]
        for what, part, bar in (
            ("page faults", huge.faults / small.faults, FAULTS),
            ("processor time", huge.cpu / small.cpu, CPU),
        ):
            judged.append(Verdict.at_most(f"{mib:g} MiB: {what}, as a part of that with small pages", part, bar))
    return judged


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench_pages.json`` and ``.md``. Return 0 when every bar is met."""
    given = options(argv, "pages", __doc__, 15, sizes=sizes(SIZES, "the tensors"))
    rows = [row for setting in SETTINGS for row in started(setting, given.sizes, given.rounds)]
    about = {**host.describe("numpy", "torch"), "transparent_hugepage": SETTING.read_text().strip()}
    judged = verdicts(rows) if "[never]" not in about["transparent_hugepage"] else []
    return conclude(given.report, "bench_pages", markdown(about, rows, judged), about, rows, judged)


def markdown(about: dict[str, Any], rows: Sequence[Row], judged: Sequence[Verdict]) -> str:
    """Return the report."""

    def line(row: Row) -> str:
        figures = (f"{cost.faults:,} | {cost.cpu:.2f} | {cost.wall:.2f}" for cost in (row.ours, row.torch))
        return f"{row.setting} | {row.mib:g} | {' | '.join(figures)} | {row.ours.cpu / row.torch.cpu:.2f}"

    what = (
        "A transposed float32 array of NumPy as a tensor of PyTorch, copied into fresh memory of the host. "
        f"The system's setting: `{about['transparent_hugepage']}`."
    )
    head = (
        "setting|:MiB|:ours, page faults|:processor ms|:ms|:PyTorch, page faults|:processor ms|:ms"
        "|:processor time, ours / PyTorch"
    )
    return page(about, what, head, map(line, rows), judged)
