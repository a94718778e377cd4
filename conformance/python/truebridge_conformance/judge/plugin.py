"""The plugin of pytest: replaces the functions, and writes down what came of each test.

An order, a file of JSON, says which suite runs and which of its tests. The records are lines of JSON, written at once:
they remain if a test aborts the process.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from truebridge_conformance.judge import replace
from truebridge_conformance.judge.run import ORDER
from truebridge_conformance.judge.suites import FUNCTIONS, SUITES

#: Characters of a reason that are kept.
LONGEST = 2000


class Recorder:
    """Runs an order, and records it."""

    def __init__(self, order: dict[str, Any]) -> None:
        """Take an order."""
        self.skip = set(order["skip"])
        self.only = None if order["only"] is None else set(order["only"])
        self.seconds: int = order["seconds"]
        self.records = Path(order["records"])
        self.outcome: dict[str, Any] = {}

    def write(self, **record: Any) -> None:
        """Append a record."""
        with self.records.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def chosen(self, test: str) -> bool:
        """Return whether this run is to have a test."""
        return test not in self.skip and (self.only is None or test in self.only)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record files that cannot be loaded, and that are skipped as a whole."""
        if report.outcome != "passed" and self.chosen(report.nodeid):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.write(test=report.nodeid, outcome=report.outcome, reason=reason[-LONGEST:], calls=0)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the tests that are not chosen."""
        items[:] = [item for item in items if self.chosen(item.nodeid)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Run a test between two records. The process ends, by a signal, where the test does not."""
        self.outcome = {"outcome": "passed", "reason": ""}
        before = replace.calls()
        self.write(started=item.nodeid)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(self.seconds)
        done = yield
        signal.alarm(0)
        calls = replace.calls() - before
        if calls and self.outcome["outcome"] == "failed":
            self.outcome["reason"] += f"\n{replace.last()}"
        self.write(test=item.nodeid, calls=calls, **self.outcome)
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Keep the worst of a test's phases."""
        report = yield
        if report.outcome != "passed" and self.outcome["outcome"] != "failed":
            self.outcome = {"outcome": report.outcome, "reason": _reason(report, call)[:LONGEST]}
        return report


def _reason(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    expected = getattr(report, "wasxfail", None)
    if expected is not None:
        return f"expected to fail: {expected}"
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return call.excinfo.exconly() if call.excinfo else str(report.longrepr)


def pytest_configure(config: pytest.Config) -> None:
    """Replace the functions before any test file is loaded."""
    order = json.loads(Path(os.environ[ORDER]).read_text(encoding="utf-8"))
    recorder = Recorder(order)
    frameworks = [name for name in SUITES[order["suite"]].frameworks if importlib.util.find_spec(name)]
    modules = {name: importlib.import_module(name) for name in frameworks}
    replaced = [] if order["native"] else replace.install(row for name in frameworks for row in FUNCTIONS[name])
    versions = {name: str(getattr(module, "__version__", "unknown")) for name, module in modules.items()}
    recorder.write(versions=versions, replaced=replaced)
    config.pluginmanager.register(recorder, "truebridge-judge")
