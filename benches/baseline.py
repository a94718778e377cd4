"""Compares a run of the bench of transfers with a stored one: which ratios got worse."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: What a path may get worse by, as a part of its figure in the kept run. Three runs of one code on an H100 (15 rounds
#: of 50 calls) differed by 0.27 at the most over 24 figures, and by 0.14 at the most over all but four.
TOLERANCE = 0.35

#: The compared figures, and how tables name them.
RATIOS = {"ratio": "ours / native", "over_floor": "ours / floor"}


@dataclass
class Worse:
    """A figure of a path that got worse: its medians over the sizes that both runs have."""

    path: str
    streams: str
    what: str
    before: float
    now: float


class Unfit(Exception):
    """A kept run cannot be compared."""


def read(file: str, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a kept run on the same kind of host as ``about`` describes."""
    try:
        report = json.loads(Path(file).read_text(encoding="utf-8"))
        rows, host = report["rows"], report["host"]
        kept = kind(host)
        for row in rows:
            _key(row)
            for name in RATIOS:
                float(row.get(name, 0))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise Unfit(f"{file} is not a bench.json of this bench: {type(error).__name__}: {error}") from error
    if kept != kind(about):
        raise Unfit(f"{file} is of another kind of host ({kept}): keep a run of this one ({kind(about)})")
    return list(rows)


def kind(host: dict[str, Any]) -> str:
    """Return what the ratios of a host depend on: its GPUs, or without one its processor."""
    return ", ".join(sorted(set(host["gpus"]))) or str(host["cpu"])


def worse(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]], tolerance: float) -> Iterator[Worse]:
    """Yield what got worse by more than ``tolerance``."""
    kept = {_key(row): row for row in before}
    pairs = [(kept[_key(row)], row) for row in now if _key(row) in kept]
    if not pairs:
        raise Unfit("the kept run and this one have no path in common: measure the same ones")
    for path, streams in dict.fromkeys((row["path"], row["streams"]) for _, row in pairs):
        own = [pair for pair in pairs if (pair[1]["path"], pair[1]["streams"]) == (path, streams)]
        for name, what in RATIOS.items():
            # A kept run may be older than a figure.
            both = [(old[name], new[name]) for old, new in own if name in old]
            if both:
                was, now_is = (statistics.median(figures) for figures in zip(*both, strict=True))
                if now_is > was * (1 + tolerance):
                    yield Worse(path, streams, what, was, now_is)


def markdown(found: Sequence[Worse], file: str, tolerance: float) -> list[str]:
    """Return the lines of the table of what got worse."""
    lines = ["", f"Beside {file}: {len(found)} of the ratios got worse by more than {tolerance:.0%}."]
    lines += ["", "| path | streams | figure | before | now |", "|---|---|---|--:|--:|"] if found else []
    return lines + [f"| {one.path} | {one.streams} | {one.what} | {one.before:.3f} | {one.now:.3f} |" for one in found]


def _key(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["path"], row["streams"], row["size"]
