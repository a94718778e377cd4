"""Leaks: very many transfers each way, with the memory of host and device before and after.

Every transfer makes a view and drops it. Every run of a session of TensorFlow 1.x makes two: of its input and of its
output. The first transfers run before memory is read, so that caches and pools have grown to what they keep.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path as File
from typing import Any

from benches.reports import publish
from truebridge_conformance import host, subjects
from truebridge_conformance._conformance import FRAMEWORKS
from truebridge_conformance.subjects import Bench

#: Bytes of the tensors (float32).
NBYTES = 1 << 20
#: Transfers that warm caches and pools up.
WARM_UP = 20_000
#: The most growth of resident host memory, in bytes for all transfers of a pair: the noise of allocators, and at a
#: million transfers four bytes each.
SLACK = 4 << 20


@dataclass
class Row:
    """One path: bytes after the transfers less bytes before, and the views made and released."""

    path: str
    transfers: int
    seconds: float
    host_bytes: int
    framework_bytes: dict[str, int]
    made: int
    returned: int
    #: Views that a transfer makes.
    each: int

    @property
    def passed(self) -> bool:
        """Whether every transfer made its views, and all memory was released."""
        counted = self.made == self.returned == self.each * self.transfers
        return self.host_bytes <= SLACK and not any(self.framework_bytes.values()) and counted


@dataclass
class Path:
    """A path: how its tensor is made, what is repeated with that tensor, and how often."""

    name: str
    make: Callable[[], Any]
    take: Callable[[Any], Any]
    times: int
    #: Views that each repetition makes.
    each: int = 1


def main(argv: list[str]) -> int:
    """Run, print a table, write ``soak.json`` and ``soak.md``. Return 0 when all memory was released."""
    parser = argparse.ArgumentParser(prog="bench --soak", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--transfers", type=int, default=1_000_000, help="for each pair (default: 1,000,000)")
    parser.add_argument("--runs", type=int, default=100_000, help="of a session of TensorFlow 1.x (default: 100,000)")
    parser.add_argument("--only", metavar="PATH", help="the one path to run, such as session or torch:numpy")
    parser.add_argument("--report", default="conformance-report", metavar="DIR", help="where to write soak.json")
    options = parser.parse_args(argv)
    device = options.device
    known = {name: bench for name in FRAMEWORKS if (bench := subjects.bench(name, device)) is not None}
    paths = _pairs(known, options.transfers) + _paths(known, options.runs)
    if options.only:
        paths = [path for path in paths if path.name == options.only.replace(":", "→")]
    rows = [_soak(path, known) for path in paths]
    about = host.describe(*FRAMEWORKS)
    table = _markdown(about, rows)
    data = {"host": about, "rows": [asdict(row) | {"passed": row.passed} for row in rows]}
    publish(options.report, "soak", table, data)
    return 0 if rows and all(row.passed for row in rows) else 1


def _pairs(known: dict[str, Bench], times: int) -> list[Path]:
    """Return every pair of two frameworks."""
    import truebridge

    def path(source: str, target: str) -> Path:
        make = functools.partial(known[source].make, NBYTES)

        def take(tensor: Any) -> Any:
            return truebridge.convert(tensor, target)  # type: ignore[call-overload]

        return Path(f"{source}→{target}", make, take, times)

    return [path(source, target) for source in known for target in known if source != target]


def _paths(known: dict[str, Bench], times: int) -> list[Path]:
    """Return what is repeated in addition to the pairs."""
    paths = [bench.path for bench in known.values() if bench.path is not None]
    return [Path(path.name, functools.partial(path.make, NBYTES), path.take, times, path.views) for path in paths]


def _soak(path: Path, known: dict[str, Bench]) -> Row:
    def memory() -> tuple[int, dict[str, int], int, int]:
        made, alive = _settled()
        return _resident(), {name: bench.used() for name, bench in known.items()}, made, alive

    def run(times: int) -> None:
        for _ in range(times):
            path.take(tensor)

    tensor = path.make()
    run(min(WARM_UP, path.times))
    memory()
    host_before, before, made_before, alive_before = memory()
    started = time.perf_counter()
    run(path.times)
    seconds = time.perf_counter() - started
    host_after, after, made_after, alive_after = memory()
    differences = {name: after[name] - before[name] for name in before}
    made = made_after - made_before
    returned = made - (alive_after - alive_before)
    return Row(path.name, path.times, seconds, host_after - host_before, differences, made, returned, path.each)


def _settled() -> tuple[int, int]:
    """Return the views made, and those alive after garbage was collected and no release waits for the device."""
    bridge = importlib.import_module("truebridge")
    gc.collect()
    patience = time.monotonic() + 10
    while bridge.stats()["pending"] and time.monotonic() < patience:
        time.sleep(0.01)
    stats = bridge.stats()
    return stats["leased"], stats["leased"] - stats["released"] + stats["pending"] + stats["leaked"]


def _resident() -> int:
    pages = int(File("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _markdown(about: dict[str, Any], rows: list[Row]) -> str:
    lines = [host.heading(about), ""]
    lines += [
        "| path | transfers | s | host, bytes | device, bytes | views made | released | verdict |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        device = sum(row.framework_bytes.values())
        memory = f"{row.seconds:.1f} | {row.host_bytes:+,} | {device:+,}"
        counts = f"{row.made:,} | {row.returned:,} | {'back' if row.passed else 'NOT BACK'}"
        lines.append(f"| {row.path} | {row.transfers:,} | {memory} | {counts} |")
    return "\n".join(lines) + "\n"
