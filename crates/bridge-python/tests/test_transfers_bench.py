"""The bench has a floor, a row beside live views and one with threads for every pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import truebridge as tb
from benches import baseline, transfers
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


def measured(**ratios: float) -> list[dict[str, Any]]:
    sizes = (1 << 10, 1 << 20, 1 << 26)
    return [
        {"path": path, "streams": "one", "size": size, "ratio": ratio, "over_floor": 1.5}
        for path, ratio in ratios.items()
        for size in sizes
    ]


def test_what_got_worse_is_found_and_nothing_else() -> None:
    before = measured(a=0.2, b=0.4, gone=0.1)
    found = list(baseline.worse(before, measured(a=0.25, b=0.6, new=9.0), 0.35))
    assert [(one.path, one.what, one.before, one.now) for one in found] == [("b", "ours / native", 0.4, 0.6)]
    assert "| b | one | ours / native | 0.400 | 0.600 |" in baseline.markdown(found, "old.json", 0.35)
    # One size that is slower is noise, two of three are not.
    noisy = measured(a=0.2)
    noisy[0]["ratio"] = 5.0
    assert list(baseline.worse(before, noisy, 0.35)) == []
    noisy[1]["ratio"] = 5.0
    assert [one.now for one in baseline.worse(before, noisy, 0.35)] == [5.0]
    # A kept run may lack a figure.
    old = [{name: value for name, value in row.items() if name != "over_floor"} for row in before]
    assert list(baseline.worse(old, before, 0.35)) == []
    with pytest.raises(baseline.Unfit, match="no path in common"):
        list(baseline.worse(before, measured(other=1.0), 0.35))


def test_a_run_is_checked_against_itself_and_a_faster_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--rounds", "1", "--batch", "2", "--max-size", "1024", "--views", "50", "--threads", "2"]
    call = ["--device", "cpu", "--only", "torch:numpy", "--report", str(tmp_path / "now"), *few]
    transfers.main(call)
    kept = json.loads((tmp_path / "now/bench.json").read_text(encoding="utf-8"))
    file = tmp_path / "kept.json"

    def checked(**changed: Any) -> int:
        file.write_text(json.dumps({**kept, **changed}), encoding="utf-8")
        return transfers.main([*call, "--check", str(file), "--tolerance", "1000"])

    assert checked() == 0
    faster = [{**row, "ratio": row["ratio"] / 1e9} for row in kept["rows"]]
    assert checked(rows=faster) == 1
    assert json.loads((tmp_path / "now/bench.json").read_text(encoding="utf-8"))["worse"][0]["path"] == "torch→numpy"
    assert "1 of the ratios got worse by more than" in capsys.readouterr().out
    assert checked(host={**kept["host"], "gpus": ["NVIDIA H200"]}) == 2
    assert "another kind of host (NVIDIA H200)" in capsys.readouterr().err
    (tmp_path / "now/bench.json").unlink()
    assert checked(rows=measured(other=1.0)) == 2
    assert "no path in common" in capsys.readouterr().err and (tmp_path / "now/bench.json").is_file()
    unfit = [{"path": "a", "streams": "b", "size": 1, "ratio": "fast"}]
    host = {"gpus": [], "cpu": "x"}
    for content in ("", [], {}, {"rows": [{}], "host": host}, {"rows": unfit, "host": host}):
        file.write_text(json.dumps(content) if content != "" else "", encoding="utf-8")
        assert transfers.main([*call, "--check", str(file)]) == 2
        assert f"{file} is not a bench.json" in capsys.readouterr().err


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
