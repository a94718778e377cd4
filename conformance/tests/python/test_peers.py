"""A library that is known by its protocol alone is a member of the suite, as a source."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import truebridge_conformance

pytest.importorskip("numpy")
pytest.importorskip("torch")

SCRIPT = Path(truebridge_conformance.__file__).parents[1] / "conformance.py"

#: Stands for tvm-ffi: tensors over NumPy's memory, whose producer copies on request, and badly.
LIBRARY = """
import numpy as np

class Tensor:
    def __init__(self, array):
        self.array = array
        self.dtype, self.shape = array.dtype.name, array.shape
        self.strides = tuple(stride // array.itemsize for stride in array.strides)

    def data_ptr(self):
        return self.array.__array_interface__["data"][0]

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, copy=None, **keywords):
        array = np.zeros_like(self.array) if copy else self.array
        return EXPORT

def from_dlpack(array):
    array.__dlpack__()
    return Tensor(array)
"""


def judged(folder: Path, pair: str, dlpack: str, cases: int = 150) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Run the suite with the library, whose ``__dlpack__`` returns ``dlpack``. Return the run, and the report."""
    (folder / "tvm_ffi.py").write_text(LIBRARY.replace("EXPORT", dlpack))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    line = [sys.executable, str(SCRIPT), "--device", "cpu", "--pairs", pair, "--cases", str(cases), "--seed", "3"]
    run = subprocess.run(
        [*line, "--report", str(folder / "report")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    report = folder / "report/report.json"
    return run, json.loads(report.read_text()) if report.exists() else None


@pytest.mark.parametrize("target", ["torch", "numpy"])
def test_its_tensors_cross_and_its_copies_are_not_asked_for(target: str, tmp_path: Path) -> None:
    run, report = judged(tmp_path, f"tvm_ffi:{target}", "array.__dlpack__(**keywords)")
    assert run.returncode == 0, run.stdout + run.stderr
    (pair,) = report["pairs"]
    assert {"values", "aliasing", "life", "copy"} <= {judged["name"] for judged in pair["properties"]}


def test_one_that_exports_other_memory_is_found(tmp_path: Path) -> None:
    run, _ = judged(tmp_path, "tvm_ffi:numpy", "array.copy().__dlpack__(**keywords)")
    assert run.returncode == 1
    assert "FAILED" in run.stdout


def test_it_is_not_a_target(tmp_path: Path) -> None:
    run, _ = judged(tmp_path, "numpy:tvm_ffi", "array.__dlpack__(**keywords)")
    assert run.returncode == 2
    assert "run tvm_ffi:numpy" in run.stderr
