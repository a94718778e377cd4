"""Reports of the benches: a table to read, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any


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
