"""The bench of copies on the host compares what all three copied, and names a slower copy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import truebridge
from benches import host_copies


def test_a_row_for_both_kinds_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "NOISE", float("inf"))
    few = ["--rounds", "1", "--only", "512² .t()", "--report", str(tmp_path)]
    assert host_copies.main(few) == 0
    rows = json.loads((tmp_path / "bench_host_copies.json").read_text(encoding="utf-8"))["rows"]
    assert {row["memory"] for row in rows} == {"into", "fresh"} and 1 in {row["threads"] for row in rows}
    assert all(row["ours"] > 0 and row["of_numpy"] > 0 and row["of_torch"] > 0 for row in rows)
    monkeypatch.setattr(host_copies, "NOISE", 0.0)
    assert host_copies.main(few) == 1
    assert "MISSED" in (tmp_path / "bench_host_copies.md").read_text(encoding="utf-8")


def test_a_wrong_copy_is_no_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(src: Any, *, out: Any) -> Any:
        return out

    monkeypatch.setattr(truebridge, "copy", nothing)
    case = host_copies.CASES[-2]
    with pytest.raises(RuntimeError, match="other elements"):
        host_copies.contenders(case)
