"""The bench of sessions runs on any machine, and judges on devices alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphs import FOLDER

pytest.importorskip("torch")
pytest.importorskip("truebridge_conformance", reason="the suite's package is in the bundle")
bench: Any = pytest.importorskip("benches.sessions")


def test_it_measures_on_the_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benches", "--sessions", "--report", str(tmp_path)]
    settings = {"PYTHONPATH": os.pathsep.join(sys.path), "TRUEBRIDGE_TENSORFLOW1": FOLDER}
    done = subprocess.run(
        [*command, "--device=cpu", "--sizes=0.25,16", "--rounds=3"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "bench_sessions.json").read_text())
    small, large = report["rows"]
    assert (small["mib"], large["mib"], report["verdicts"]) == (0.25, 16, [])
    assert report["host"]["versions"]["tensorflow1"].startswith("1.15.")
    for row in (small, large):
        assert row["device"] == "cpu"
        # No run of a session takes less than a microsecond.
        assert min(row["bare"], row["ours"], row["host"]) > 1000
    # 64 times the work.
    assert large["bare"] > small["bare"]
    table = (tmp_path / "bench_sessions.md").read_text()
    assert table in done.stdout
    assert f"| {large['ours'] / 1000:,.1f} |" in table


def row(mib: float, *, faster: float = 30.0, overhead: float = 20e3, device: str = "cuda:0") -> Any:
    return bench.Row(device, mib, 100e3, 100e3 * faster, 100e3 - overhead, faster, overhead)


@pytest.mark.parametrize(
    ("rows", "passed"),
    [
        ([row(1, faster=2), row(64, faster=20), row(1024)], [True, True]),
        ([row(1), row(64, faster=19.9), row(1024)], [False, True]),
        ([row(1), row(64), row(1024, overhead=50_001)], [True, False]),
        ([row(1, overhead=50_001), row(16)], [False]),
        ([row(1, overhead=-1), row(16)], [True]),
        ([row(64, faster=1, overhead=1e6, device="cpu")], []),
    ],
)
def test_the_bars_are_those_of_devices(rows: list[Any], passed: list[bool]) -> None:
    assert [verdict.passed for verdict in bench.judge(rows)] == passed


@pytest.mark.parametrize("faster", [19.0, 21.0])
def test_a_missed_bar_fails(faster: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure", lambda *_: [row(64, faster=faster)])
    assert bench.main(["--report", str(tmp_path)]) == (1 if faster < 20 else 0)
    word = "MISSED" if faster < 20 else "met"
    assert f"| times faster at 64 MiB | {faster:g} | 20 | {word} |" in (tmp_path / "bench_sessions.md").read_text()
