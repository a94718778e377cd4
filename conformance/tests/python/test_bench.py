"""The bench has a row beside live views and one with threads for every pair."""

from __future__ import annotations

import json
from pathlib import Path

from tensor_bridge_conformance import bench


def test_a_row_beside_views_and_one_with_threads(tmp_path: Path) -> None:
    few = ["--rounds", "1", "--batch", "2", "--max-size", "1024", "--views", "50", "--threads", "3"]
    assert bench.main(["--device", "cpu", "--only", "torch:numpy", "--report", str(tmp_path), *few]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["growth"]
    assert [(row["path"], row["crowd"]) for row in rows] == [
        ("torch→numpy", "50 live views"),
        ("torch→numpy→torch", "50 live views"),
        ("torch→numpy", "3 threads"),
    ]
    assert all(row["ratio"] > 0 and row["alone"] > 0 for row in rows)
    assert "50 live views" in (tmp_path / "bench.md").read_text(encoding="utf-8")
