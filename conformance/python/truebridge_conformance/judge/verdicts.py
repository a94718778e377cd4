"""The verdict on each test, and the list of failures that are expected."""

from __future__ import annotations

import fnmatch
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from truebridge_conformance.judge.errors import BadList
from truebridge_conformance.judge.suites import SUITES

#: ``expected`` is a failure that the list names, as a limit of the package. What the list calls not applicable is a
#: test of something else than the package, such as the words of the framework's own error.
Verdict = Literal["passed", "failed", "expected", "not_applicable"]

#: The list of the repository.
LIST = Path(__file__).with_name("expected.json")

UNREACHED = "did not reach the package"


@dataclass
class Expected:
    """An entry of the list."""

    suite: str
    #: A pattern of the names of tests, after the file: ``Class::test`` with ``*`` and ``?``.
    tests: str
    #: A regular expression that is found in the failure. Its last line is the last call of the package.
    error: str
    verdict: Verdict
    reason: str
    #: The only place where this happens: variables of the environment, and ``device``, which is ``cpu`` or ``cuda``.
    where: dict[str, str] = field(default_factory=dict)
    #: The tests that it has excused.
    matched: int = field(default=0, compare=False)

    def concerns(self, suite: str, facts: dict[str, str]) -> bool:
        """Return whether this is about a suite, as it runs here."""
        return self.suite == suite and all(facts.get(name) == value for name, value in self.where.items())

    def matches(self, test: str, reason: str) -> bool:
        """Return whether this is the failure of a test."""
        of_it = fnmatch.fnmatchcase(test.partition("::")[2], self.tests)
        return of_it and re.search(self.error, reason, re.DOTALL) is not None


@dataclass(frozen=True)
class Judged:
    """A test, with its verdict and the reason."""

    test: str
    verdict: Verdict
    reason: str
    #: How often it called the package; unknown where the process was aborted.
    calls: int | None
    #: What the failure said.
    error: str = ""


def expected(place: Path) -> list[Expected]:
    """Return the entries of a list.

    Raises
    ------
    BadList
        Names the entry, and what is wrong with it.
    """
    try:
        rows = json.loads(place.read_text(encoding="utf-8"))
        return [_entry(row) for row in rows]
    except (OSError, ValueError, TypeError, re.error) as error:
        raise BadList(f"{place}: {error}") from error


def _entry(row: dict[str, Any]) -> Expected:
    entry = Expected(**row)
    if entry.suite not in SUITES:
        raise ValueError(f"{row}: there is no suite {entry.suite!r}")
    if entry.verdict not in get_args(Verdict)[2:]:
        raise ValueError(f"{row}: the verdict is 'expected' or 'not_applicable'")
    if not entry.reason.strip() or not entry.error:
        raise ValueError(f"{row}: an entry has a reason, and names the error")
    re.compile(entry.error)
    return entry


def judge(records: list[dict[str, Any]], natively: dict[str, str], entries: list[Expected]) -> list[Judged]:
    """Return a verdict for each record of a test.

    ``natively`` has the reasons of the tests that fail with the frameworks' own functions as well.
    """
    return [_verdict(record, natively, entries) for record in records if "test" in record]


def _verdict(record: dict[str, Any], natively: dict[str, str], entries: list[Expected]) -> Judged:
    test, outcome, reason, calls = (record[key] for key in ("test", "outcome", "reason", "calls"))
    if outcome == "passed":
        return Judged(test, "passed", "", calls) if calls else Judged(test, "not_applicable", UNREACHED, calls)
    if outcome == "skipped":
        return Judged(test, "not_applicable", f"the suite skips it: {reason}", calls)
    for entry in entries:
        if entry.matches(test, reason):
            entry.matched += 1
            return Judged(test, entry.verdict, entry.reason, calls, reason)
    if test in natively:
        own = natively[test].partition("\n")[0]
        return Judged(test, "not_applicable", f"fails with the framework's own function as well: {own}", calls, reason)
    return Judged(test, "failed", reason, calls, reason)
