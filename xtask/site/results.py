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
    """Return where and when a report was made, and the commit that added it."""
    host = report(name)["host"]
    gpu = ", ".join(sorted(set(host["gpus"]))) or host["cpu"]
    return f"{gpu}, {host['date'][:10]}, commit {commit(name.partition('/')[0])}"


def commit(folder: str) -> str:
    """Return the commit that added a folder of reports."""
    commits = json.loads((RESULTS / "commits.json").read_text())
    if folder not in commits:
        raise ValueError(f"docs/results/commits.json does not name the commit of {folder}: add it")
    return str(commits[folder])


def link(links: str, name: str) -> str:
    """Return a link to a report."""
    return f"[{name.rpartition('/')[2]}]({links}/{name}.json)"


def micro(nanoseconds: float) -> str:
    """Return a time in microseconds."""
    return f"{nanoseconds / 1000:,.1f}"


def one(rows: Iterable[dict[str, Any]], **wanted: object) -> dict[str, Any]:
    """Return the one row that has these values."""
    (found,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return found


def reports(pattern: str) -> list[str]:
    """Return the reports of this name, which may have wildcards, the oldest first."""
    return [str(path.relative_to(RESULTS).with_suffix("")) for path in sorted(RESULTS.glob(f"*/{pattern}.json"))]


def latest(bench: str, **wanted: object) -> str:
    """Return the newest report of a bench that has a row with these values."""
    found = [
        name
        for name in reports(bench)
        if any(all(row.get(key) == value for key, value in wanted.items()) for row in report(name)["rows"])
    ]
    return found[-1]
