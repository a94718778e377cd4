"""Workers run under compute-sanitizer: what it finds fails the pair, and so does a sanitizer that saw nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import truebridge_conformance

pytest.importorskip("numpy")

SCRIPT = Path(truebridge_conformance.__file__).parents[1] / "conformance.py"

#: Stands for compute-sanitizer: runs the program after its own options, and reports what the test wants.
SANITIZER = """#!/bin/sh
# Each option has a value.
while [ "${{1#--}}" != "$1" ]; do
    [ "$1" = --log-file ] && log=$2
    shift 2
done
test "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 || exit 3
"$@"
{report}
"""

CLEAN = 'echo "========= ERROR SUMMARY: 0 errors" > "$log"'
FOUND = """echo "========= Invalid __global__ read of size 4 bytes" > "$log"
echo "========= ERROR SUMMARY: 1 error" >> "$log"
exit 86"""


def run(folder: Path, report: str) -> subprocess.CompletedProcess[str]:
    """Run a pair under a sanitizer that ends with these lines."""
    tool = folder / "bin/compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(SANITIZER.format(report=report))
    tool.chmod(0o755)
    options = ["--device", "cpu", "--pairs", "numpy:numpy", "--cases", "20", "--report", str(folder / "report")]
    environment = os.environ | {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
    command = [sys.executable, str(SCRIPT), *options, "--sanitizer", "memcheck"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_a_pair_of_which_nothing_is_found_passes(tmp_path: Path) -> None:
    ended = run(tmp_path, CLEAN)
    assert ended.returncode == 0 and ", 0 failed" in ended.stdout, ended


def test_what_is_found_fails_the_pair_and_is_quoted(tmp_path: Path) -> None:
    ended = run(tmp_path, FOUND)
    assert ended.returncode == 1, ended
    assert "the sanitizer found 1 error: Invalid __global__ read of size 4 bytes; all are in" in ended.stdout


def test_a_sanitizer_that_has_seen_nothing_is_not_taken_for_a_clean_run(tmp_path: Path) -> None:
    ended = run(tmp_path, "true")
    assert ended.returncode == 1 and "compute-sanitizer has seen no work" in ended.stdout, ended


def test_without_the_program_the_pair_says_so(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--pairs", "numpy:numpy", "--cases", "20", "--report", str(tmp_path)]
    command = [sys.executable, str(SCRIPT), *options, "--sanitizer", "initcheck"]
    environment = os.environ | {"PATH": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 1 and "the worker does not start" in ended.stdout, ended
