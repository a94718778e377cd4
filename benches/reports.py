"""Reports of the benches: a table to read, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from truebridge_conformance import host


@dataclass
class Verdict:
    """A bar, and the measured figure."""

    what: str
    measured: float
    bar: float
    passed: bool

    @classmethod
    def at_most(cls, what: str, measured: float, bar: float) -> Verdict:
        """Return the verdict on a figure that must not be larger than the bar."""
        return cls(what, measured, bar, measured <= bar)

    @classmethod
    def at_least(cls, what: str, measured: float, bar: float) -> Verdict:
        """Return the verdict on a figure that must not be smaller than the bar."""
        return cls(what, measured, bar, measured >= bar)


def page(about: dict[str, Any], what: str, head: str, rows: Iterable[str], verdicts: Sequence[Verdict] = ()) -> str:
    """Return a report: the host, what was measured, a table, and the bars.

    ``head`` has the names of the columns, with a colon before those of numbers.
    """
    names = [name.strip() for name in head.split("|")]
    rule = "|".join("--:" if name.startswith(":") else "---" for name in names)
    lines = [host.heading(about), "", what, "", f"| {' | '.join(name.lstrip(':') for name in names)} |", f"|{rule}|"]
    return "\n".join([*lines, *(f"| {row} |" for row in rows), *bars(verdicts)]) + "\n"


def bars(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the lines of a table of bars, after an empty one."""
    lines = ["", "| bar | measured | bar | |", "|---|--:|--:|---|"] if verdicts else []
    for verdict in verdicts:
        word = "met" if verdict.passed else "MISSED"
        measured = f"{verdict.measured:,.0f}" if verdict.measured >= 100 else f"{verdict.measured:.3g}"
        lines.append(f"| {verdict.what} | {measured} | {verdict.bar:,g} | {word} |")
    return lines


def publish(folder: str, name: str, table: str, data: dict[str, Any]) -> None:
    """Print the table, and write ``name.md`` and ``name.json`` into ``folder``."""
    print(table)
    report = Path(folder)
    report.mkdir(parents=True, exist_ok=True)
    (report / f"{name}.json").write_text(json.dumps({"schema": 1, **data}, indent=2) + "\n", encoding="utf-8")
    (report / f"{name}.md").write_text(table, encoding="utf-8")


def conclude(
    folder: str, name: str, table: str, about: dict[str, Any], rows: Sequence[Any], verdicts: Sequence[Any]
) -> int:
    """Publish rows and verdicts, which are dataclasses, and say how many bars are met. Return 0 when all are."""
    rows, judged = [asdict(row) for row in rows], [asdict(verdict) for verdict in verdicts]
    publish(folder, name, table, {"host": about, "rows": rows, "verdicts": judged})
    missed = sum(not verdict.passed for verdict in verdicts)
    print(f"{len(verdicts) - missed} passed, {missed} failed")
    return 1 if missed else 0


def amount(nbytes: int) -> str:
    """Return a number of bytes for people."""
    units = ["B", "KiB", "MiB", "GiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes, units = nbytes // 1024, units[1:]
    return f"{nbytes} {units[0]}"
