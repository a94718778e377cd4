"""Time to load a safetensors file onto a CUDA device, compared with safetensors' own loader.

The file holds tensors of float16, 64 MiB each, with random bits. Its pages are in the system's memory, as they are for
every process but the first. Three paths take turns in one process:

- *ours*: ``tb.load(path, "torch", device="cuda:0")``.
- *safetensors*: ``safetensors.torch.load_file(path, device="cuda:0")``.
- *parts*: the file is read into pinned memory that is there, and one ``cuMemcpyAsync`` takes it to memory of the device
  that is there. The bar is on ours as a part of this one's speed.

A load ends when the elements are on the device. Results are dropped in the time that counts, and their memory stays
with PyTorch, which gives it to the next load.

    python bench.py --files --report out
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.reports import Verdict, conclude, page
from benches.rounds import options, sizes
from truebridge_conformance import host

MIB = 1 << 20
#: MiB of a file, and of a tensor in it.
SIZES = [256, 1024, 4096]
TENSOR = 64
#: Rounds that warm caches and pools up, and do not count.
WARM_UP = 2

#: The least part of the speed of reading and one pinned copy, and from how many MiB on.
PART, FROM = 0.9, 4096


@dataclass
class Row:
    """One size: medians over the rounds in nanoseconds, and the median of a part within a round."""

    mib: float
    ours: float
    safetensors: float
    parts: float
    #: Of the time of the parts, what reading takes.
    read: float
    #: The speed of ours, as a part of that of the parts.
    part: float


class Setting:
    """The three paths for a file of one size."""

    def __init__(self, folder: Path, mib: float) -> None:
        """Write the file, and check that ours and safetensors' load its elements."""
        import torch
        from safetensors.torch import load_file, save_file

        import truebridge as tb

        self.torch, self.tb, self.load_file = torch, tb, load_file
        self.path = folder / f"{mib:g}.safetensors"
        count = max(1, int(mib / TENSOR))
        elements = int(mib * MIB) // count // 2
        made = {f"layer.{i}": torch.randint(-(1 << 15), 1 << 15, (elements,), dtype=torch.int16) for i in range(count)}
        save_file({name: tensor.view(torch.float16) for name, tensor in made.items()}, self.path)
        for load in (self.ours, self.theirs):
            loaded = load()
            if not all(torch.equal(loaded[name].view(torch.int16).cpu(), tensor) for name, tensor in made.items()):
                raise RuntimeError(f"{load.__name__} loaded wrong elements")
        nbytes = self.path.stat().st_size
        self.pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.there = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
        self.memory = memoryview(self.pinned.numpy())
        self.reading: list[float] = []

    def ours(self) -> Any:
        """Load by this package."""
        return self.tb.load(self.path, "torch", device="cuda:0")

    def theirs(self) -> Any:
        """Load by safetensors."""
        return self.load_file(self.path, device="cuda:0")

    def parts(self) -> Any:
        """Read the file into pinned memory, and copy that to the device."""
        started, read = time.perf_counter_ns(), 0
        with open(self.path, "rb", buffering=0) as file:
            while read < len(self.memory):
                read += file.readinto(self.memory[read:])
        self.reading.append(time.perf_counter_ns() - started)
        return self.there.copy_(self.pinned, non_blocking=True)

    def once(self, way: Callable[[], Any]) -> float:
        """Return the nanoseconds of a load, with its wait and its drop."""
        self.torch.cuda.synchronize()
        started = time.perf_counter_ns()
        way()
        self.torch.cuda.synchronize()
        return time.perf_counter_ns() - started


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench_files.json`` and ``.md``. Return 0 when every bar is met."""
    given = options(
        argv,
        "files",
        __doc__,
        7,
        sizes=sizes(SIZES, "the files"),
        folder={"metavar": "DIR", "help": "where to write the files"},
    )
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        rows = [measure(Path(folder), size, given.rounds) for size in given.sizes]
    verdicts = judge(rows)
    about = host.describe("torch")
    return conclude(given.report, "bench_files", markdown(about, rows, verdicts), about, rows, verdicts)


def measure(folder: Path, mib: float, rounds: int) -> Row:
    """Measure. The paths take turns in every round."""
    setting = Setting(folder, mib)
    ways = (setting.ours, setting.theirs, setting.parts)
    turns = [[setting.once(way) for way in ways] for _ in range(rounds + WARM_UP)][WARM_UP:]
    ours, theirs, parts = (statistics.median(figures) for figures in zip(*turns, strict=True))
    part = statistics.median(turn[2] / turn[0] for turn in turns)
    setting.path.unlink()
    return Row(mib, ours, theirs, parts, statistics.median(setting.reading[WARM_UP:]), part)


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Compare with the bar."""
    large = [row for row in rows if row.mib >= FROM]
    what = "{:g} MiB: part of reading and one pinned copy"
    return [Verdict.at_least(what.format(row.mib), row.part, PART) for row in large]


def markdown(about: dict[str, Any], rows: Sequence[Row], verdicts: Sequence[Verdict]) -> str:
    """Return the report."""

    def line(row: Row) -> str:
        taken = (row.ours, row.safetensors, row.parts, row.read)
        speeds = " | ".join(f"{row.mib * MIB / figure:.1f}" for figure in taken)
        return f"{row.mib:g} | {row.ours / 1e6:,.1f} | {speeds} | {row.part:.2f}"

    what = "A safetensors file to a CUDA device, as tensors of PyTorch. Speeds in GB/s."
    head = ":size, MiB|:ours, ms|:ours|:safetensors|:reading and one pinned copy|:reading alone|:part"
    return page(about, what, head, map(line, rows), verdicts)
