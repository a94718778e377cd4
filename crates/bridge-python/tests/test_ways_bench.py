"""The benches of the four ways and of training run on the host, check what they measure, and judge on devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("tensorflow")
pytest.importorskip("truebridge_conformance", reason="the suite's package is in the bundle")
ways: Any = pytest.importorskip("benches.ways")
training: Any = pytest.importorskip("benches.training")

TENSORFLOW1 = bool(os.environ.get("TRUEBRIDGE_TENSORFLOW1"))


def measured(bench: str, folder: Path, *options: str) -> tuple[Any, str]:
    """Run a bench, and return its report."""
    command = [sys.executable, "-m", "benches", f"--{bench.removeprefix('bench_')}", "--report", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    table = (folder / f"{bench}.md").read_text()
    assert table in done.stdout
    return json.loads((folder / f"{bench}.json").read_text()), table


def test_the_ways_are_measured_side_by_side(tmp_path: Path) -> None:
    report, table = measured("bench_ways", tmp_path, "--sizes=0.25", "--rounds=1", f"--folder={tmp_path}")
    rows = {(row["source"], row["target"], row["way"]): row for row in report["rows"]}
    for pair in (("torch", "tensorflow"), ("tensorflow", "torch")):
        for way in ("in place", "file", "process"):
            row = rows.pop((*pair, way))
            # Nothing of this takes less than 100 ns.
            assert min(row["ours"], row["theirs"]) > 100 and row["by"]
            assert f"| {row['ours'] / 1000:,.1f} | {row['theirs'] / 1000:,.1f} |" in table
    # TensorFlow 1.15 has no ways of its own here. Another process is one of Python 3.7.
    assert {key[:2] for key in rows} == ({("torch", "tensorflow1")} if TENSORFLOW1 else set())
    assert all(row["theirs"] is None for row in rows.values())
    assert not list(tmp_path.glob("**/*.npy"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_ways_are_measured_on_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    report, _ = measured("bench_ways", tmp_path, "--device=cuda:0", "--sizes=1", "--rounds=1", f"--folder={tmp_path}")
    rows = {(row["source"], row["target"], row["way"]): row for row in report["rows"]}
    for pair in (("torch", "tensorflow"), ("tensorflow", "torch"), ("cupy", "tensorflow"), ("cupy", "torch")):
        for way in ("in place", "host", "file", "process"):
            row = rows[(*pair, way)]
            assert min(row["ours"], row["theirs"]) > 100 and row["device"] == "cuda:0"


def test_wrong_elements_are_no_measurement() -> None:
    setting = ways.Setting.__new__(ways.Setting)
    setting.numpy, setting.array, setting.target = np, np.arange(4.0), "torch"
    setting._check("host", np.arange(4.0))
    with pytest.raises(RuntimeError, match="the way host to torch returned wrong elements"):
        setting._check("host", np.arange(4.0) + 1)


@pytest.mark.parametrize("layer", training.LAYERS)
def test_a_training_step_is_measured_beside_its_halves(layer: str, tmp_path: Path) -> None:
    _, framework, module = training.LAYERS[layer]
    pytest.importorskip(module)
    report, table = measured("bench_training", tmp_path, f"--layer={layer}", "--widths=32", "--batch=64", "--rounds=1")
    (row,) = report["rows"]
    assert row["framework"] == framework and f"| {framework}, µs |" in table
    # No step of either framework takes less than ten microseconds.
    assert min(row["whole"], row["torch"], row["layer"]) > 10_000
    assert 0 < row["difference"] < 1e-5 and f"{row['difference']:.1e}" in table
    assert [verdict["what"] for verdict in report["verdicts"]] == ["difference of gradients, at most"]


def step(width: int, part: float, difference: float = 1e-7, device: str = "cuda:0") -> Any:
    return training.Row("JAX", device, 64, width, 1e6 * part, 5e5, 5e5, part, difference)


@pytest.mark.parametrize(
    ("rows", "passed"),
    [
        ([step(64, 1.5), step(4096, 1.05)], [True, True]),
        ([step(64, 1.0), step(4096, 1.06)], [True, False]),
        ([step(64, 1.0, difference=1.1e-5), step(4096, 1.0)], [False, True]),
        ([step(64, 3.0, device="cpu")], [True]),
        ([step(64, 1.0, device="cpu"), step(65, 1.0, difference=float("nan"), device="cpu")], [False]),
    ],
)
def test_the_widest_step_and_every_gradient_are_judged(rows: list[Any], passed: list[bool]) -> None:
    assert [verdict.passed for verdict in training.judge(rows)] == passed
