"""Reports of the benches: a table to read, and the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def publish(folder: str, name: str, table: str, data: dict[str, Any]) -> None:
    """Print the table, and write ``name.md`` and ``name.json`` into ``folder``."""
    print(table)
    report = Path(folder)
    report.mkdir(parents=True, exist_ok=True)
    (report / f"{name}.json").write_text(json.dumps({"schema": 1, **data}, indent=2) + "\n", encoding="utf-8")
    (report / f"{name}.md").write_text(table, encoding="utf-8")
