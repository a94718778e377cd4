"""Cost of a transfer on the host, compared with the frameworks' own way in the same run.

Each contender is called in batches. In every round all sizes and contenders of a pair take turns, so that a change of
the host's speed affects all. A figure is the median over the rounds, a ratio the median of the ratios within a round.
A call includes dropping the view that it returned.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from tensor_bridge_conformance import growth, host, settings
from tensor_bridge_conformance.growth import batch
from tensor_bridge_conformance.reports import publish
from tensor_bridge_conformance.settings import Setting

#: Bytes of the tensors: 1 KiB to 4 GiB.
SIZES = [1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26, 1 << 30, 1 << 32]
#: Rounds that warm caches and pools up, and do not count.
WARM_UP = 2
#: The most that the slowest size costs, as a multiple of the fastest: above it, cost depends on size.
FLAT = 1.5


@dataclass
class Row:
    """One size of one pair: medians, of the times in nanoseconds."""

    path: str
    streams: str
    size: int
    ours: float
    native: float
    ratio: float


@dataclass
class Verdict:
    """The rows of one pair, compared with the bars."""

    path: str
    streams: str
    worst_ratio: float
    bar: float | None
    spread: float
    passed: bool


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench.json`` and ``bench.md``. Return 0 when every bar is met."""
    options = _options(argv)
    measured = settings.all_on(options.device)
    if options.only:
        measured = [setting for setting in measured if setting.path in options.only]
    if not measured:
        print("nothing to measure: install torch and NumPy, or on a CUDA device torch and CuPy")
        return 2
    rows = [row for setting in measured for row in _measure(setting, options)]
    verdicts = [_judge(setting, rows) for setting in measured]
    grown = [row for setting in measured for row in growth.measure(setting, options)]
    about = host.describe(*FRAMEWORKS)
    table = _markdown(about, rows, verdicts) + "\n" + "\n".join(growth.markdown(grown)) + "\n"
    data = {
        "host": about,
        "rows": [asdict(row) for row in rows],
        "verdicts": [asdict(v) for v in verdicts],
        "growth": [asdict(row) for row in grown],
    }
    publish(options.report, "bench", table, data)
    judged: list[Verdict | growth.Growth] = [v for v in verdicts if v.bar is not None]
    judged += [row for row in grown if row.bar is not None]
    missed = sum(not verdict.passed for verdict in judged)
    print(f"{len(judged) - missed} passed, {missed} failed")
    return 1 if missed else 0


#: The frameworks whose versions the report names.
FRAMEWORKS = ("torch", "cupy", "numpy", "tensorflow")


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="--bench", description=__doc__)
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: cuda where there is one"
    )
    parser.add_argument("--rounds", type=int, default=60, help="rounds per size (default: 60)")
    parser.add_argument("--batch", type=int, default=100, help="calls per round (default: 100)")
    parser.add_argument("--max-size", type=int, default=SIZES[-1], metavar="BYTES", help="leave out larger tensors")
    parser.add_argument("--views", type=int, default=100_000, help="live views beside a transfer (default: 100000)")
    parser.add_argument("--threads", type=int, default=8, help="threads that transfer at once (default: 8)")
    parser.add_argument("--only", type=_paths, metavar="FROM:TO,...", help="measure these pairs alone")
    parser.add_argument("--report", default="conformance-report", metavar="DIR", help="where to write bench.json")
    return parser.parse_args(argv)


def _paths(line: str) -> list[str]:
    return [path.replace(":", "→") for path in line.split(",")]


def _measure(setting: Setting, options: argparse.Namespace) -> list[Row]:
    sizes = [size for size in SIZES if size <= options.max_size]
    contenders = (setting.ours, setting.native)
    with setting.inside():
        tensors = [setting.make(size) for size in sizes]
        rounds = []
        for _ in range(options.rounds + WARM_UP):
            times = []
            for tensor in tensors:
                times.append([batch(call, tensor, options.batch, setting.before) for call in contenders])
            rounds.append(times)
        del tensors, tensor
        setting.before()
    rows = []
    for index, size in enumerate(sizes):
        taken = [times[index] for times in rounds[WARM_UP:]]
        ours, native, ratio = (
            statistics.median(figures) for figures in zip(*((o, n, o / n) for o, n in taken), strict=True)
        )
        rows.append(Row(setting.path, setting.streams, size, ours, native, ratio))
    return rows


def _judge(setting: Setting, rows: list[Row]) -> Verdict:
    own = [row for row in rows if (row.path, row.streams) == (setting.path, setting.streams)]
    worst = max(row.ratio for row in own)
    spread = max(row.ours for row in own) / min(row.ours for row in own)
    passed = setting.bar is None or (worst <= setting.bar and spread <= FLAT)
    return Verdict(setting.path, setting.streams, worst, setting.bar, spread, passed)


def _markdown(about: dict[str, Any], rows: list[Row], verdicts: list[Verdict]) -> str:
    lines = [host.heading(about), ""]
    lines += ["| path | streams | size | ours, ns | native, ns | ratio |", "|---|---|--:|--:|--:|--:|"]
    for row in rows:
        figures = f"{row.ours:,.0f} | {row.native:,.0f} | {row.ratio:.3f}"
        lines.append(f"| {row.path} | {row.streams} | {_words(row.size)} | {figures} |")
    lines += [
        "",
        "| path | streams | worst ratio | bar | slowest / fastest size | verdict |",
        "|---|---|--:|--:|--:|---|",
    ]
    for verdict in verdicts:
        bar = "none" if verdict.bar is None else f"{verdict.bar:.2f}"
        word = "no bar" if verdict.bar is None else "met" if verdict.passed else "MISSED"
        figures = f"{verdict.worst_ratio:.3f} | {bar} | {verdict.spread:.2f}"
        lines.append(f"| {verdict.path} | {verdict.streams} | {figures} | {word} |")
    return "\n".join(lines) + "\n"


def _words(size: int) -> str:
    units = ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size // 1024, units[1:]
    return f"{size} {units[0]}"
