"""The bench has a floor, a row beside live views and one with threads for every pair."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
import torch

import truebridge as tb
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


def arrays() -> tuple[numpy.ndarray, dict[str, object]]:
    """Return memory that 64 divides, and the tensor of each framework over it."""
    memory = numpy.frombuffer(torch.arange(16, dtype=torch.float32).numpy(), numpy.float32).reshape(4, 4)
    tensor = torch.from_numpy(memory)
    return memory, {"torch": tensor, "numpy": memory, "jax": tb.to_jax(tensor, copy=False)}


@pytest.mark.parametrize(
    ("source", "target"), [("torch", "numpy"), ("numpy", "torch"), ("jax", "torch"), ("torch", "jax")]
)
def test_the_floor_makes_the_consumers_own_object(source: str, target: str) -> None:
    memory, tensors = arrays()
    made = _conformance.Floor(source, target, (memory.ctypes.data, (4, 4), -1), [], []).cross(tensors[source])
    assert type(made) is type(tensors[target])
    assert made.shape == (4, 4)
    memory[2, 3] = 77
    assert made[2, 3] == 77


def test_unknown_frameworks_have_no_floor() -> None:
    with pytest.raises(ValueError, match="no floor from mxnet"):
        _conformance.Floor("mxnet", "torch", (0, (0, 0), -1), [], [])
