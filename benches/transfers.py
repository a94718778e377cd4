"""Cost of a transfer on the host, compared with the frameworks' own method in the same run.

Each contender is called in batches. In every round all sizes and contenders of a pair take turns, so that a change of
the host's speed affects all. A figure is the median over the rounds, a ratio the median of the ratios within a round.
A call includes dropping the view that it returned. The floor is what no conversion can avoid: the producer's own
export, the consumer's own import, and the events that order them, called without the bridge.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any

from benches import baseline, growth, settings
from benches.reports import amount, publish
from benches.settings import Setting
from truebridge._frameworks.table import ALL
from truebridge.diagnostics.measure import batch
from truebridge_conformance import host

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
    floor: float
    ratio: float
    over_floor: float


@dataclass
class Verdict:
    """The rows of one pair, compared with the bars."""

    path: str
    streams: str
    worst_ratio: float
    bar: float | None
    worst_over_floor: float
    floor_bar: float | None
    spread: float
    passed: bool

    @property
    def is_judged(self) -> bool:
        """Whether there is a bar."""
        return self.bar is not None or self.floor_bar is not None


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench.json`` and ``bench.md``. Return 0 when every bar is met.

    With ``--check`` the bars decide nothing: return 0 when nothing got worse.
    """
    options = _options(argv)
    about = host.describe(*ALL)
    try:
        kept = baseline.read(options.check, about) if options.check else None
    except baseline.Unfit as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    measured = settings.all_on(options.device)
    if options.only:
        measured = [setting for setting in measured if setting.path in options.only]
    if not measured:
        print("nothing to measure: install torch and NumPy, or on a CUDA device torch and CuPy")
        return 2
    rows = [row for setting in measured for row in _measure(setting, options)]
    verdicts = [_judge(setting, rows) for setting in measured]
    grown = [row for setting in measured for row in growth.measure(setting, options)]
    table = "\n".join([_markdown(about, rows, verdicts), *growth.markdown(grown), ""])
    data = {
        "host": about,
        "rows": [asdict(row) for row in rows],
        "verdicts": [asdict(v) for v in verdicts],
        "growth": [asdict(row) for row in grown],
    }
    if kept is not None:
        return _check(options, kept, table, data)
    publish(options.report, "bench", table, data)
    judged: list[Verdict | growth.Growth] = [v for v in verdicts if v.is_judged]
    judged += [row for row in grown if row.bar is not None]
    missed = sum(not verdict.passed for verdict in judged)
    print(f"{len(judged) - missed} passed, {missed} failed")
    return 1 if missed else 0


def _check(options: argparse.Namespace, kept: list[dict[str, Any]], table: str, data: dict[str, Any]) -> int:
    """Publish the run with what is worse than in the kept one. Return 1 where something is."""
    try:
        found = list(baseline.worse(kept, data["rows"], options.tolerance))
    except baseline.Unfit as error:
        publish(options.report, "bench", table, data)
        print(f"error: {error}", file=sys.stderr)
        return 2
    table += "\n".join(baseline.markdown(found, options.check, options.tolerance)) + "\n"
    publish(options.report, "bench", table, {**data, "worse": [asdict(one) for one in found]})
    return 1 if found else 0


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: cuda where there is one"
    )
    parser.add_argument("--rounds", type=int, default=60, help="rounds per size (default: 60)")
    parser.add_argument("--batch", type=int, default=100, help="calls per round (default: 100)")
    parser.add_argument("--max-size", type=int, default=SIZES[-1], metavar="BYTES", help="leave out larger tensors")
    parser.add_argument("--views", type=int, default=100_000, help="live views during a transfer (default: 100000)")
    parser.add_argument("--threads", type=int, default=8, help="threads that transfer at once (default: 8)")
    parser.add_argument("--only", type=_paths, metavar="FROM:TO,...", help="measure only these pairs")
    parser.add_argument(
        "--check", metavar="FILE", help="fail where a ratio is worse than in this bench.json of the same kind of host"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=baseline.TOLERANCE,
        metavar="PART",
        help="what --check allows, as a part of the ratio (default: %(default)s)",
    )
    parser.add_argument("--report", default="conformance-report", metavar="DIR", help="where to write bench.json")
    return parser.parse_args(argv)


def _paths(line: str) -> list[str]:
    return [path.replace(":", "→") for path in line.split(",")]


def _measure(setting: Setting, options: argparse.Namespace) -> list[Row]:
    sizes = [size for size in SIZES if size <= options.max_size]
    with setting.inside():
        tensors = [setting.make(size) for size in sizes]
        floors = [setting.floor(tensor) for tensor in tensors]
        rounds = []
        for _ in range(options.rounds + WARM_UP):
            times = []
            for tensor, floor in zip(tensors, floors, strict=True):
                contenders = (setting.ours, setting.native, floor)
                times.append([batch(call, tensor, options.batch, setting.before) for call in contenders])
            rounds.append(times)
        del tensors, tensor, floors, floor, contenders
        setting.before()
    rows = []
    for index, size in enumerate(sizes):
        taken = [times[index] for times in rounds[WARM_UP:]]
        figures = zip(*((o, n, f, o / n, o / f) for o, n, f in taken), strict=True)
        rows.append(Row(setting.path, setting.streams, size, *map(statistics.median, figures)))
    return rows


def _judge(setting: Setting, rows: list[Row]) -> Verdict:
    own = [row for row in rows if (row.path, row.streams) == (setting.path, setting.streams)]
    worst = max(row.ratio for row in own)
    spread = max(row.ours for row in own) / min(row.ours for row in own)
    over_floor, floor_bar = max(row.over_floor for row in own), setting.floor_bar
    passed = setting.bar is None or (worst <= setting.bar and spread <= FLAT)
    passed = passed and (floor_bar is None or over_floor <= floor_bar)
    return Verdict(setting.path, setting.streams, worst, setting.bar, over_floor, floor_bar, spread, passed)


def _markdown(about: dict[str, Any], rows: list[Row], verdicts: list[Verdict]) -> str:
    lines = [host.heading(about), ""]
    lines += ["| path | streams | size | ours, ns | native, ns | floor, ns | ours / native | ours / floor |"]
    lines += ["|---|---|--:|--:|--:|--:|--:|--:|"]
    for row in rows:
        figures = f"{row.ours:,.0f} | {row.native:,.0f} | {row.floor:,.0f} | {row.ratio:.3f} | {row.over_floor:.2f}"
        lines.append(f"| {row.path} | {row.streams} | {amount(row.size)} | {figures} |")
    lines += [
        "",
        "| path | streams | worst / native | bar | worst / floor | bar | slowest / fastest size | verdict |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for verdict in verdicts:
        bar, floor_bar = ("none" if bar is None else f"{bar:.2f}" for bar in (verdict.bar, verdict.floor_bar))
        word = "no bar" if not verdict.is_judged else "met" if verdict.passed else "MISSED"
        ratios = f"{verdict.worst_ratio:.3f} | {bar} | {verdict.worst_over_floor:.2f} | {floor_bar}"
        lines.append(f"| {verdict.path} | {verdict.streams} | {ratios} | {verdict.spread:.2f} | {word} |")
    return "\n".join(lines) + "\n"
