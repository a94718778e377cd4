"""The bench of the keeper runs on the host, and its report has every way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benches import keeper


def test_every_way_is_measured_and_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keeper.main(["--device", "cpu", "--sizes", "1,2", "--rounds", "1", "--report", str(tmp_path)])
    rows = json.loads((tmp_path / "bench_keeper.json").read_text(encoding="utf-8"))["rows"]
    assert {(row["what"], row["mib"]) for row in rows} == {
        (what, mib) for what in ("hand over", "put", "keeper", "file") for mib in (1, 2)
    }
    assert all(row["right"] and row["milliseconds"] > 0 for row in rows)
    assert "2 MiB attached" in capsys.readouterr().out
