"""Weights that a store keeps: the time until another process has them, compared with loading them from a file.

A process makes weights in the store's memory, puts them, and is killed. Fresh processes, whose device is up, attach
one after the other, each for the first time: *store*. Others load the same weights from a file whose pages are in
memory already: *file*. *put* is the time in which a store gets a copy of what is on the device, and *hand over* that
of memory which is the store's already.

    python bench.py --store --report out --sizes 1024,8192,61440
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benches.reports import Verdict, conclude, page
from benches.rounds import options, sizes
from truebridge_conformance import host
from truebridge_conformance.others import Other

MIB = 1 << 20
#: MiB of the weights, and the most that are also loaded from a file.
SIZES, FILED = (1024.0, 8192.0, 61440.0), 16384.0
#: Tensors of a model.
COUNT = 300
#: The bars: milliseconds until all weights are there, and how many times faster than from a file.
ATTACHED, THAN_FILE = 100.0, 10.0

#: What the other processes know.
KNOWS = """
import os, time, torch
torch.zeros(1, device=device)
def finished():
    torch.cuda.synchronize() if device != "cpu" else None
def timed(call):
    finished()
    start = time.perf_counter_ns()
    result = call()
    finished()
    taken = time.perf_counter_ns() - start
    if isinstance(result, dict):
        global held
        held = result
    return taken
def like(count, elements):
    return {f"layer {i}": torch.empty(elements, dtype=torch.bfloat16, device="meta") for i in range(count)}
def make(count, elements, path):
    global client, held
    client = tb.connect(path)
    held = client.empty(like(count, elements), "torch", device=device)
    for i, x in enumerate(held.values()):
        x.fill_(i % 251)
    finished()
def save(path):
    tb.save(path, held)
def copied(count, elements):
    held = {name: torch.zeros(x.shape, dtype=x.dtype, device=device) for name, x in like(count, elements).items()}
    finished()
    return timed(lambda: client.put("copied", held))
def attach(path):
    return tb.connect(path).get("weights", "torch")
def load(path):
    return tb.load(path, "torch", device=device)
def is_whole():
    return all(bool((x == i % 251).all()) for i, x in enumerate(held.values()))
"""


@dataclass
class Row:
    """One path and size: the median, in milliseconds, and whether all elements were right."""

    what: str
    mib: float
    milliseconds: float
    right: bool


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench_store.json`` and ``.md``. Return 0 when every bar is met."""
    usual = {"default": None, "help": "cpu or cuda:0 (default: a GPU, if there is one)"}
    given = options(argv, "store", __doc__, 5, device=usual, sizes=sizes(SIZES, "the weights"))
    device = given.device or ("cuda:0" if host.describe("torch")["gpus"] else "cpu")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        rows = [row for mib in given.sizes for row in measure(folder, mib, given.rounds, device)]
    verdicts, about = judge(rows), host.describe("torch")
    return conclude(given.report, "bench_store", markdown(about, rows, verdicts), about, rows, verdicts)


def measure(folder: str, mib: float, rounds: int, device: str) -> list[Row]:
    """Measure weights of one size, with a separate store."""
    names, file, elements = f"{folder}/names", f"{folder}/weights.safetensors", int(mib * MIB) // 2 // COUNT
    command = [sys.executable, "-m", "truebridge", "store", names]
    environment = {**os.environ, "TRUEBRIDGE_IPC": folder}
    store = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert store.stdout is not None
    store.stdout.readline()
    rows = []
    try:
        maker = _other(folder, device)
        try:
            maker(f"make({COUNT}, {elements}, {names!r})")
            taken = int(maker('timed(lambda: client.put("weights", held))'))
            rows.append(Row("hand over", mib, taken / 1e6, True))
            if mib <= FILED:
                maker(f"save({file!r})")
                rows.append(Row("put", mib, int(maker(f"copied({COUNT}, {elements})")) / 1e6, True))
                maker('client.remove("copied")')
        finally:
            maker.kill()
        ways = {"store": f"timed(lambda: attach({names!r}))"}
        if mib <= FILED:
            ways["file"] = f"timed(lambda: load({file!r}))"
        for way, call in ways.items():
            figures = [_fresh(folder, device, call) for _ in range(rounds)]
            milliseconds = statistics.median(figure for figure, _ in figures)
            rows.append(Row(way, mib, milliseconds, all(right for _, right in figures)))
    finally:
        store.kill()
        store.wait()
        store.stdout.close()
        if os.path.exists(file):
            os.remove(file)
    return rows


def _other(folder: str, device: str) -> Other:
    other = Other(TRUEBRIDGE_IPC=folder)
    other(f"device = {device!r}")
    other.define(KNOWS)
    return other


def _fresh(folder: str, device: str, call: str) -> tuple[float, bool]:
    """Return milliseconds of a call in a fresh process, and whether the weights are whole."""
    other = _other(folder, device)
    try:
        return int(other(call)) / 1e6, other("is_whole()") == "True"
    finally:
        other.kill()


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Compare with the bars."""
    largest = max(row.mib for row in rows)
    found = {(row.what, row.mib): row.milliseconds for row in rows}
    verdicts = [Verdict.at_most(f"{largest:,.0f} MiB attached: at most, ms", found["store", largest], ATTACHED)]
    for mib in sorted({row.mib for row in rows if row.what == "file"}):
        faster = found["file", mib] / found["store", mib]
        verdicts.append(Verdict.at_least(f"{mib:,.0f} MiB: times faster than a file, at least", faster, THAN_FILE))
    wrong = sum(not row.right for row in rows)
    return [*verdicts, Verdict.at_most("rows with a wrong element: at most", wrong, 0)]


def markdown(about: dict[str, Any], rows: Sequence[Row], verdicts: Sequence[Verdict]) -> str:
    """Return the report."""
    lines = [f"{row.what} | {row.mib:,.0f} | {row.milliseconds:,.2f}" for row in rows]
    return page(about, f"{COUNT} tensors of bfloat16.", "way | :MiB | :ms", lines, verdicts)
