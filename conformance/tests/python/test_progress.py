"""A run prints one plain line for each pair, and on a terminal a bar that the line replaces."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import truebridge_conformance

SCRIPT = Path(truebridge_conformance.__file__).parents[1] / "conformance.py"

PAIR = re.compile(r"numpy → numpy  passed +\d+ cases +0 failed +\d+\.\d s")
MATRIX = re.compile(r"numpy        (\d+) of \1 \(\d+ not applicable\), \d+ cases")


def command(report: Path, *options: str) -> list[str]:
    line = ["--device", "cpu", "--pairs", "numpy:numpy", "--cases", "20", "--seed", "1", "--report", str(report)]
    return [sys.executable, str(SCRIPT), *line, *options]


def test_without_a_terminal_a_pair_is_one_plain_line(tmp_path: Path) -> None:
    run = subprocess.run(command(tmp_path), capture_output=True, text=True, timeout=300)
    lines = run.stdout.splitlines()
    assert run.returncode == 0, run.stderr
    assert lines[0] == "device cpu, seed 1" and PAIR.fullmatch(lines[1]) and lines[2] == "", lines[:3]
    assert lines[3] == "from ↓ to →  numpy" and MATRIX.fullmatch(lines[4]), lines[3:]
    assert re.fullmatch(r"\d+ passed, 0 failed", lines[-1]), lines[-1]
    assert "\x1b" not in run.stdout + run.stderr and "\r" not in run.stdout + run.stderr


def test_details_have_a_line_for_each_property(tmp_path: Path) -> None:
    run = subprocess.run(command(tmp_path, "-v"), capture_output=True, text=True, timeout=300)
    lines = run.stdout.splitlines()
    assert re.fullmatch(r"numpy → numpy  subject +\d+ cases  passed", lines[1]), lines[1]
    assert "numpy → numpy  order               0 cases  not applicable: the device has no streams" in lines
    last = [line for line in lines if line.startswith("numpy → numpy")][-1]
    assert PAIR.fullmatch(last), last


def on_terminal(line: list[str], environment: dict[str, str]) -> str:
    """Runs a program on a terminal, and returns what it prints."""
    parent, child = pty.openpty()
    with subprocess.Popen(line, stdin=child, stdout=child, stderr=child, env=environment) as run:
        os.close(child)
        printed = b""
        while True:
            try:
                some = os.read(parent, 1 << 16)
            except OSError:
                # The program has closed the terminal.
                break
            if not some:
                break
            printed += some
    os.close(parent)
    assert run.returncode == 0, printed
    return printed.decode()


def test_on_a_terminal_a_bar_stands_in_the_place_of_the_line(tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")} | {"TERM": "xterm"}
    printed = on_terminal(command(tmp_path), plain)
    assert re.search(r"/3\d cases", printed) and "\x1b[2K" in printed and PAIR.search(printed)
    assert "\x1b" not in on_terminal(command(tmp_path), plain | {"CI": "true"})
