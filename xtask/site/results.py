"""Read the reports in docs/results."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"


@cache
def report(name: str) -> Any:
    """Return a report, ``FOLDER/FILE`` without the suffix."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def about(name: str) -> str:
    """Return where and when a report was made."""
    host = report(name)["host"]
    gpu = ", ".join(sorted(set(host["gpus"]))) or host["cpu"]
    return f"{gpu}, {host['date'][:10]}"


def link(links: str, name: str) -> str:
    """Return a link to the text of a report."""
    return f"[{name.rpartition('/')[2]}]({links}/{name}.md)"


def micro(nanoseconds: float) -> str:
    """Return a time in microseconds."""
    return f"{nanoseconds / 1000:,.1f}"


def one(rows: Iterable[dict[str, Any]], **wanted: object) -> dict[str, Any]:
    """Return the one row that has these values."""
    (found,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return found


def latest(bench: str, **wanted: object) -> str:
    """Return the newest report of a bench that has a row with these values."""
    names = [str(path.relative_to(RESULTS).with_suffix("")) for path in sorted(RESULTS.glob(f"*/{bench}.json"))]
    found = [
        name
        for name in names
        if any(all(row.get(key) == value for key, value in wanted.items()) for row in report(name)["rows"])
    ]
    return found[-1]
