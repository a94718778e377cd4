"""The bench of many pieces compares what it copies, and names a bar that is missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import truebridge
from benches import pieces

FEW = ["--device", "cpu", "--count", "50", "--nbytes", "300", "--width", "16", "--rounds", "1"]


def test_a_row_for_each_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PART", 0.0)
    monkeypatch.setattr(pieces, "CALL", float("inf"))
    monkeypatch.setattr(pieces, "PREPARED", float("inf"))
    assert pieces.main([*FEW, "--report", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "bench_pieces.json").read_text(encoding="utf-8"))["rows"]
    assert {(row["pieces"], row["count"]) for row in rows} == {("equal", 50), ("weights", 291)}
    assert {row["way"] for row in rows} == {"plain", "ours", "prepared", "unchecked", "one by one", "foreach"}
    assert all(row["seconds"] > 0 and row["call"] > 0 and row["part"] > 0 for row in rows)
    monkeypatch.setattr(pieces, "CALL", 0.0)
    assert pieces.main([*FEW, "--report", str(tmp_path)]) == 1
    assert "MISSED" in (tmp_path / "bench_pieces.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_row_for_each_way_between_memories(direction: str) -> None:
    rows = pieces.between(direction, "cpu", 20, 1)
    assert {row.way for row in rows} == {"plain", "ours", "prepared", "loop"}
    assert all(row.count == 20 and 20 * pieces.SHORTEST <= row.nbytes <= 20 * pieces.LONGEST for row in rows)
    assert all(row.seconds > 0 and row.call > 0 and row.part > 0 for row in rows)


def test_a_piece_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = truebridge.copy

    def all_but_one(src: Any, *, out: Any) -> Any:
        return copy(src[:-1], out=out[:-1])

    monkeypatch.setattr(truebridge, "copy", all_but_one)
    with pytest.raises(RuntimeError, match="other elements"):
        pieces.measure("equal", pieces.equal("cpu", 5, 100), "cpu", 1)
    with pytest.raises(RuntimeError, match="other elements"):
        pieces.between("up", "cpu", 5, 1)
