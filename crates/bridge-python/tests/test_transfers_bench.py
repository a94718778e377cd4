"""The bench has a floor, a row beside live views and one with threads for every pair."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
import torch

from benches import transfers
from truebridge_conformance import _conformance


def test_a_row_beside_views_and_one_with_threads(tmp_path: Path) -> None:
    few = ["--rounds", "1", "--batch", "2", "--max-size", "1024", "--views", "50", "--threads", "3"]
    assert transfers.main(["--device", "cpu", "--only", "torch:numpy", "--report", str(tmp_path), *few]) == 0
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert all(row["floor"] > 0 and row["over_floor"] > 0 for row in report["rows"])
    assert [row["streams"] for row in report["relay"]] == ["host"]
    rows = report["growth"]
    assert [(row["path"], row["crowd"]) for row in rows] == [
        ("torch→numpy", "50 live views"),
        ("torch→numpy→torch", "50 live views"),
        ("torch→numpy", "3 threads"),
    ]
    assert all(row["ratio"] > 0 and row["alone"] > 0 for row in rows)
    assert "50 live views" in (tmp_path / "bench.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("source", "target"), [("torch", "numpy"), ("numpy", "torch")])
def test_the_floor_makes_the_consumers_own_object(source: str, target: str) -> None:
    memory = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
    tensor = torch.from_numpy(memory) if source == "torch" else memory
    made = _conformance.Floor(source, target, (memory.ctypes.data, (3, 4), -1), [], []).cross(tensor)
    assert type(made) is (torch.Tensor if target == "torch" else numpy.ndarray)
    assert made.shape == (3, 4)
    memory[2, 3] = 77
    assert made[2, 3] == 77


def test_unknown_frameworks_have_no_floor() -> None:
    with pytest.raises(ValueError, match="no floor from jax"):
        _conformance.Floor("jax", "torch", (0, (0, 0), -1), [], [])
