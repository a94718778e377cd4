"""The bench of updates runs on the host, and every way brings the weights that the trainer has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benches import updates


def test_every_way_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert updates.main(["--device", "cpu", "--rounds", "3", "--report", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "bench_updates.json").read_text(encoding="utf-8"))["rows"]
    assert [row["what"] for row in rows] == ["published", "in place", "plain"]
    assert all(row["right"] for row in rows)
    assert "MISSED" not in capsys.readouterr().out
