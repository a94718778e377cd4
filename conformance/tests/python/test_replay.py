"""A case that the runner has kept runs first from then on, whatever the name of the adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import truebridge_conformance
from truebridge_conformance import host

SCRIPT = Path(truebridge_conformance.__file__).parents[1] / "conformance.py"

#: The index of a case that comes from a regression (``REPLAYED`` in ``conformance/src/engine.rs``).
REPLAYED = 2**32 - 1

CASE = {
    "spec": {"dtype": "float32", "shape": [2], "strides": [1], "offset": 0, "base": 2, "read_only": False},
    "seed": 7,
}


def messages(*options: str) -> list[dict[str, Any]]:
    """Returns the messages of a worker."""
    worker = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, errors="replace", timeout=300
    )
    lines = [json.loads(line) for line in worker.stdout.splitlines()]
    assert lines and lines[-1] == "done", worker.stderr
    return lines


def refused(*options: str) -> str:
    """Runs the suite with options that it refuses, and returns why."""
    run = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=300)
    assert run.returncode == 2 and run.stdout == "", run.stdout + run.stderr
    return run.stderr


def test_a_file_that_is_no_case_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "nofile.json", tmp_path, binary):
        assert refused("--device", "cpu", "--replay", str(file)).startswith(f"error: the case cannot be read: {file}: ")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, Path("/proc/reports")):
        reason = refused("--device", "cpu", "--pairs", "numpy:numpy", "--report", str(folder))
        assert reason.startswith(f"error: reports cannot be written to {folder} ("), reason
        assert reason.endswith("name another folder with --report\n"), reason


@pytest.mark.parametrize("name", [adapter["name"] for adapter in host.adapters()])
def test_a_kept_case_is_replayed(name: str, tmp_path: Path) -> None:
    about = host.describe()
    if name not in about["versions"]:
        pytest.skip(about["refused"].get(name, "not installed"))
    device = "cpu"
    if name == "cupy":
        if not about["gpus"]:
            pytest.skip("no CUDA device")
        device = "cuda"
    folder = tmp_path / "regressions"
    folder.mkdir()
    kept = {"from": name, "to": name, "property": "values", "case": CASE}
    (folder / f"{name}-{name}-values-1.json").write_text(json.dumps(kept), encoding="utf-8")
    said = messages(
        *("--worker", f"{name}:{name}", "--device", device, "--report", os.fspath(tmp_path)),
        *("--properties", "values", "--cases", "1", "--seed", "1"),
    )
    indices = [message["started"]["index"] for message in said if "started" in message]
    assert indices == [REPLAYED, 0]
    judged = [message["finished"] for message in said if "finished" in message]
    assert [(report["verdict"], report["cases"]) for report in judged] == [("passed", 2)]
