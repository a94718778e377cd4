"""The command line: which suite, where it lies, and where the reports go."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from truebridge_conformance.judge import verdicts
from truebridge_conformance.judge.build import extension
from truebridge_conformance.judge.errors import JudgeError
from truebridge_conformance.judge.report import Report
from truebridge_conformance.judge.run import Run
from truebridge_conformance.judge.suites import SUITES

#: The exit code where the suite could not judge.
UNJUDGED = 2


def main(argv: list[str]) -> int:
    """Let a suite judge the package. Return the exit code: 1 for a failure that the list does not excuse."""
    options = _parser().parse_args(argv)
    try:
        report = judge(options)
    except JudgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNJUDGED
    report.write(options.report / options.suite)
    print(report.heading(), report.table(), options.report / options.suite / "report.md", sep="\n")
    return int(bool(report.failed))


def judge(options: argparse.Namespace) -> Report:
    """Run a suite.

    Raises
    ------
    JudgeError
        The suite cannot run here.
    """
    import truebridge
    from truebridge.diagnostics.host import date
    from truebridge_conformance import host

    gpus = [] if options.device == "cpu" else host.gpus()
    run = Run(
        options.suite,
        options.path.resolve(),
        (options.report / options.suite).resolve(),
        seconds=options.seconds,
        options=["-k", options.tests] if options.tests else [],
        hide_gpus=options.device == "cpu",
    )
    facts = {**run.environment(), "device": "cuda" if gpus else "cpu"}
    entries = [entry for entry in verdicts.expected(options.expected) if entry.concerns(options.suite, facts)]
    files = run.check(gpus)
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as built:
        run.extension = extension(run.row, run.path, options.extension, Path(built))
        records = run.records("package", files)
        judged = verdicts.judge(records, _natively(run, files, records), entries)
    about: dict[str, Any] = records[0]
    return Report(
        suite=options.suite,
        project=run.row.project,
        revision=options.revision or _revision(run.path),
        versions={"truebridge": truebridge.__version__, "Python": platform.python_version(), **about["versions"]},
        environment={name: facts[name] for name in run.row.environment},
        gpus=gpus,
        date=date(),
        replaced=about["replaced"],
        absent=[file for file in run.row.files if os.fspath(run.path / file) not in files],
        judged=judged,
        # Of tests that were left out nothing is known.
        stale=[] if options.tests else [entry for entry in entries if not entry.matched],
    )


def _natively(run: Run, files: list[str], records: list[dict[str, Any]]) -> dict[str, str]:
    """Return the reasons of the failed tests that fail with the frameworks' own functions as well."""
    failed = [record["test"] for record in records if record.get("outcome") == "failed"]
    if not failed:
        return {}
    again = run.records("native", files, failed)
    return {record["test"]: record["reason"] for record in again if record.get("outcome") == "failed"}


def _revision(path: Path) -> str:
    """Return the tag or commit of a checkout."""
    unknown = "an unknown revision"
    if not (path / ".git").exists():
        return unknown
    command = ["git", "-C", os.fspath(path), "describe", "--tags", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return unknown
    return done.stdout.strip() or unknown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="judge", description="Let a framework's own interchange tests judge truebridge."
    )
    parser.add_argument("--suite", required=True, choices=sorted(SUITES), help="which suite")
    parser.add_argument("--path", required=True, type=Path, metavar="DIR", help="your checkout of it")
    parser.add_argument(
        "--extension", type=Path, metavar="DIR", help="where the module of the tests is built (default: build it)"
    )
    parser.add_argument("--report", type=Path, default=Path("judge-report"), metavar="DIR", help="where the reports go")
    parser.add_argument("--revision", help="what the reports call the checkout (default: what git says)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cpu hides the GPUs (default: what there is)")
    parser.add_argument("--tests", metavar="EXPRESSION", help="run only these, as pytest's -k")
    parser.add_argument("--seconds", type=int, default=300, help="how long a test may take (default: 300)")
    parser.add_argument(
        "--expected", type=Path, default=verdicts.LIST, metavar="FILE", help="the list of failures with reasons"
    )
    return parser
