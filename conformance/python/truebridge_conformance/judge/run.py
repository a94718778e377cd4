"""Runs a suite in separate processes, and goes on after tests that abort one."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truebridge_conformance.judge.errors import JudgeError
from truebridge_conformance.judge.suites import SUITES, Suite

#: The variable that names the order, a file for the plugin.
ORDER = "TRUEBRIDGE_JUDGE_ORDER"

#: Options of pytest. No file of the checkout configures the run.
PYTEST = (
    *("-q", "-p", "truebridge_conformance.judge.plugin", "-p", "no:cacheprovider"),
    *("-c", os.devnull, "--noconftest", "--import-mode", "importlib", "--continue-on-collection-errors"),
)

#: Variables of the user's that would change what pytest does.
IGNORED = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")

#: The exit codes of pytest where all has run: passed, failed, and no tests.
WHOLE = (0, 1, 5)

#: Tests that may abort the process: each time the frameworks are loaded again.
MOST_ABORTS = 20

#: Stands for a test where the process failed outside of any.
OUTSIDE = "outside of the tests"

#: The folder that this package lies in.
HOME = Path(__file__).parents[2]


@dataclass
class Run:
    """A checkout, and where its reports go."""

    suite: str
    path: Path
    folder: Path
    #: Seconds that a test may take.
    seconds: int = 300
    #: Options of pytest.
    options: list[str] = field(default_factory=list)
    #: Whether the tests see GPUs.
    hide_gpus: bool = False
    #: The folder of the module that the tests import and that must be built, where the suite has one.
    extension: Path | None = None

    @property
    def row(self) -> Suite:
        """The row of the suite."""
        return SUITES[self.suite]

    def check(self, gpus: list[str]) -> list[str]:
        """Return the test files of the checkout, as pytest takes them.

        Raises
        ------
        JudgeError
            The suite cannot run here.
        """
        files = [file for file in self.row.files if (self.path / file.partition("::")[0]).is_file()]
        if not files:
            names = " or ".join(self.row.files)
            raise JudgeError(f"{self.path} has no {names}: pass a checkout of {self.row.project} with --path")
        wanted = {self.row.framework: self.row.framework, "pytest": "pytest", **self.row.needs}
        missing = [package for module, package in wanted.items() if importlib.util.find_spec(module) is None]
        if missing:
            names = " ".join(missing)
            raise JudgeError(f"{self.suite} needs {names}: {sys.executable} -m pip install {names}")
        if self.row.gpu and not gpus:
            raise JudgeError(f"{self.suite} needs a CUDA device: the driver shows none")
        return [os.fspath(self.path / file) for file in files]

    def records(self, name: str, files: list[str], only: list[str] | None = None) -> list[dict[str, Any]]:
        """Run all tests, or some, with the package, or where ``name`` is ``native`` without it. Return the records.

        A test that aborts the process has failed; the others run in another process. So has the end of the process,
        where it aborts after the tests.

        Raises
        ------
        JudgeError
            There are no tests.
        """
        place = self.folder / f"{name}.jsonl"
        place.unlink(missing_ok=True)
        outside = "too many tests abort"
        for _ in range(MOST_ABORTS):
            status = self._pytest(name, files, only, _tests(_read(place)), place)
            running = _running(_read(place))
            if running is None:
                outside = "" if status in WHOLE else _ended(status, self.seconds)
                break
            _abort(place, running, _ended(status, self.seconds))
        if outside and _tests(_read(place)):
            _abort(place, OUTSIDE, outside)
        records = _read(place)
        if only is None and not _tests(records):
            lines = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise JudgeError("no test ran: " + (lines[-1] if lines else outside))
        return records

    def _pytest(self, name: str, files: list[str], only: list[str] | None, skip: list[str], place: Path) -> int:
        order = {
            "suite": self.suite,
            "native": name == "native",
            "only": only,
            "skip": skip,
            "records": os.fspath(place),
            "seconds": self.seconds,
        }
        written = self.folder / f"{name}.order.json"
        written.write_text(json.dumps(order), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", *PYTEST, "--rootdir", os.fspath(self.path), *self.options, *files]
        with (self.folder / f"{name}.log").open("a", encoding="utf-8") as log:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env={**self.environment(), ORDER: os.fspath(written)},
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            )
        return done.returncode

    def environment(self) -> dict[str, str]:
        """Return the environment of the tests."""
        own = {name: value for name, value in os.environ.items() if name not in IGNORED}
        folders = [HOME, *filter(None, [self.extension]), *(self.path / folder for folder in self.row.folders)]
        path = [os.fspath(folder) for folder in folders] + own.get("PYTHONPATH", "").split(os.pathsep)
        return {
            **self.row.environment,
            **own,
            **({"CUDA_VISIBLE_DEVICES": ""} if self.hide_gpus else {}),
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }


def _read(place: Path) -> list[dict[str, Any]]:
    if not place.is_file():
        return []
    return [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]


def _abort(place: Path, test: str, reason: str) -> None:
    """Append the record of a test that could not write its own."""
    with place.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"test": test, "outcome": "failed", "reason": reason, "calls": None}) + "\n")


def _tests(records: list[dict[str, Any]]) -> list[str]:
    return [record["test"] for record in records if "test" in record]


def _running(records: list[dict[str, Any]]) -> str | None:
    """Return the test that was running when the process ended, if one was."""
    test: str | None = records[-1].get("started") if records else None
    return test


def _ended(status: int, seconds: int) -> str:
    if status == -signal.SIGALRM:
        return f"no end within {seconds} s"
    if status < 0:
        return f"the process was ended by {signal.Signals(-status).name}"
    return f"the process exited with {status}"
