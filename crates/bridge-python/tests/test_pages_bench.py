"""The bench of fresh pages measures each setting in a process of its own, and judges what huge pages save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benches import pages


def test_a_row_for_each_setting_and_size(tmp_path: Path) -> None:
    few = ["--rounds", "1", "--sizes", "0.25,8", "--report", str(tmp_path)]
    assert pages.main(few) == 0
    data = json.loads((tmp_path / "bench_pages.json").read_text(encoding="utf-8"))
    assert [(row["setting"], row["mib"]) for row in data["rows"]] == [(s, m) for s in pages.SETTINGS for m in (0.25, 8)]
    assert all(row[way]["wall"] > 0 for row in data["rows"] for way in ("ours", "torch"))
    assert "madvise" in data["host"]["transparent_hugepage"]


@pytest.mark.parametrize(("faults", "cpu", "passed"), [(40, 1.0, True), (4000, 1.0, False), (40, 2.9, False)])
def test_the_bars_are_parts_of_what_small_pages_take(faults: int, cpu: float, passed: bool) -> None:
    small = pages.Cost(16384, 3.0, 3.0)
    rows = [
        pages.Row("as set", 64, pages.Cost(faults, cpu, 1.0), small),
        pages.Row("never", 64, small, small),
        pages.Row("as set", 1, small, small),
    ]
    assert all(verdict.passed for verdict in pages.verdicts(rows)) == passed
