"""The bench of many pieces compares what it copies, and names a bar that is missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import truebridge
from benches import lists, pieces

torch: Any = pytest.importorskip("torch")

FEW = ["--device", "cpu", "--count", "50", "--nbytes", "300", "--width", "16", "--rounds", "1"]


def test_a_row_for_each_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PART", 0.0)
    monkeypatch.setattr(pieces, "CALL", float("inf"))
    monkeypatch.setattr(pieces, "PREPARED", float("inf"))
    assert pieces.main([*FEW, "--report", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "bench_pieces.json").read_text(encoding="utf-8"))["rows"]
    counts = {"equal": 50, "of another process": 50, "weights": 291, "shards": 320}
    assert {row["pieces"]: row["count"] for row in rows} == counts
    ways = {"plain", "ours", "prepared", "unchecked", "one by one", "foreach"}
    assert {row["way"] for row in rows if row["pieces"] == "equal"} == ways | {"select"}
    assert {row["way"] for row in rows if row["pieces"] != "equal"} == ways
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
        pieces.measure("equal", lists.equal("cpu", "cpu", 5, 100), 1)
    with pytest.raises(RuntimeError, match="other elements"):
        pieces.between("up", "cpu", 5, 1)


def test_shards_are_the_parts_of_whole_tensors() -> None:
    copied = lists.shards("cpu", "cpu", 16)
    truebridge.copy(copied.sources, out=copied.targets)
    assert pieces.same(copied.sources, copied.targets)
    # Each element is in one piece: the targets are as long as the sources, and no two share memory.
    assert sum(tensor.numel() for tensor in copied.sources) == sum(tensor.numel() for tensor in copied.targets)
    shapes = [(16, 16), (4, 16), (4, 16), *[(56, 16)] * 16, (16, 16), *[(16, 56)] * 8, (8, 16), (16,), (16,)]
    assert 2 * sum(torch.Size(shape).numel() for shape in shapes) == sum(tensor.numel() for tensor in copied.sources)
