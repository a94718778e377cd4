"""Hostile input: Hypothesis draws cases of each kind, and another process judges them.

A crash, a hang, a leak and a wrong answer are verdicts like any other, so Hypothesis shrinks what causes them. Put the
case that a failure prints into ``fixtures/fuzz/python.json``, under its kind and a name that says what is hostile.
Every run begins with the cases there. A few hundred of each kind follow, the same ones in each run; with the variable
``TRUEBRIDGE_FUZZ`` new ones for as many seconds, from the seed ``TRUEBRIDGE_SEED`` if that is set.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, seed, settings

pytest.importorskip("torch")

from hostile.cases import KINDS, Case, stored  # noqa: E402

SECONDS = float(os.environ.get("TRUEBRIDGE_FUZZ", 0))
SEED = int(os.environ.get("TRUEBRIDGE_SEED") or random.SystemRandom().getrandbits(32))
#: Packages that a kind needs.
NEEDS = {"file": "safetensors", "gradients": "tensorflow"}

#: How many cases of a kind are drawn, if not 500: these take longer.
COUNTS = {"file": 200, "gradients": 100}


class Judge:
    """A process that judges cases. After a failure there is a new one, so that no case bears the blame of another."""

    process: subprocess.Popen[str] | None = None

    def verdict(self, case: Case) -> str:
        """Return what is wrong, or an empty text."""
        process = self.process = self.process or self.start()
        assert process.stdin and process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
        line = next((line for line in process.stdout if line.startswith("@")), None)
        words = line and line[1:].strip()
        if words != "":
            words = words or self.end() or "the process ended"
            self.end()
        return words

    def start(self) -> subprocess.Popen[str]:
        self.errors = tempfile.TemporaryFile("w+", errors="replace")
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "hostile.judge"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            errors="replace",
        )

    def end(self) -> str:
        """End the process, and return how it crashed, if it did."""
        if self.process is None:
            return ""
        process, self.process = self.process, None
        process.communicate()
        self.errors.seek(0)
        what = "hang" if process.returncode == -signal.SIGALRM else f"crash: exit status {process.returncode}"
        return f"{what}\n{self.errors.read()[-3000:]}" if process.returncode else ""


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    judge = Judge()
    yield judge
    assert judge.end() == "", "at the exit"


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_input(kind: str, judge: Judge) -> None:
    """A result with the right values, or an error of the package; nothing is left."""
    # To import TensorFlow takes seconds, and only the judge needs it.
    if importlib.util.find_spec(NEEDS.get(kind, "numpy")) is None:
        pytest.skip(f"needs {NEEDS[kind]}")

    def holds(case: Case) -> None:
        words = judge.verdict({"kind": kind, **case})
        assert words == "", f"{words}\n{json.dumps(case)}"

    holds = given(KINDS[kind].drawn)(holds)
    for case in stored(kind):
        holds = example(case)(holds)
    holds = settings(
        derandomize=not SECONDS,
        max_examples=COUNTS.get(kind, 500),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )(holds)
    ends = time.monotonic() + SECONDS
    for number in itertools.count(SEED):
        (seed(number)(holds) if SECONDS else holds)()
        if time.monotonic() >= ends:
            return
