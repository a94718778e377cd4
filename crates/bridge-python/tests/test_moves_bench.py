"""The bench of moves judges large moves by the pinned copy of the same round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("truebridge_conformance", reason="the suite's package is in the bundle")
bench: Any = pytest.importorskip("benches.moves")


def row(mib: float, part: float, direction: str = "down") -> Any:
    return bench.Row(direction, mib, 1e6 / part, 2e6, 1e6, 4e6, part, 0.5)


@pytest.mark.parametrize(
    ("rows", "passed"),
    [
        ([row(0.0625, 0.1), row(64, 0.5)], []),
        ([row(256, 0.9), row(1024, 0.95, "up")], [True, True]),
        ([row(256, 0.89), row(1024, 1.0)], [False, True]),
    ],
)
def test_large_moves_are_judged(rows: list[Any], passed: list[bool]) -> None:
    verdicts = bench.judge(rows)
    assert [verdict.passed for verdict in verdicts] == passed
    table = bench.markdown(bench.host.describe("torch"), rows, verdicts)
    assert table.count("MISSED") == passed.count(False)
    # 256 MiB in a millisecond.
    assert ("268.4" in table) == any(row.mib == 256 for row in rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_it_measures(tmp_path: Path) -> None:
    bench.main(["--sizes=0.0625,4", "--rounds=3", "--report", str(tmp_path)])
    report = json.loads((tmp_path / "bench_moves.json").read_text())
    assert [(row["direction"], row["mib"]) for row in report["rows"]] == [
        ("down", 0.0625),
        ("down", 4),
        ("up", 0.0625),
        ("up", 4),
    ]
    assert all(min(row["ours"], row["fresh"], row["pinned"], row["pageable"]) > 1000 for row in report["rows"])
