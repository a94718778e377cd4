"""The bench of tensors for other hosts runs on the host, and its report has every way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl_cu12")

from benches import hosts


def test_every_way_is_measured_and_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--one", "2", "--many", "20", "--rounds", "1", "--report", str(tmp_path)]
    hosts.main(arguments)
    rows = json.loads((tmp_path / "bench_hosts.json").read_text(encoding="utf-8"))["rows"]
    ways = {(what, count) for what in ("ours", "NIXL", "NIXL, first") for count in (1, 20)}
    assert {(row["what"], row["count"]) for row in rows} == {*ways, ("ours, rows", 20)}
    assert all(row["right"] and row["milliseconds"] > 0 for row in rows)
    assert "20 pieces: times faster" in capsys.readouterr().out
