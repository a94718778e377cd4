"""What a suite says of the package, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from truebridge_conformance.judge.verdicts import Expected, Judged, Verdict

#: The words of a report for a verdict.
WORDS: dict[Verdict, str] = {
    "passed": "passed",
    "failed": "failed",
    "expected": "failed, with a reason in the list",
    "not_applicable": "not applicable",
}


@dataclass(frozen=True)
class Report:
    """The verdicts of one run."""

    suite: str
    project: str
    #: The commit or tag of the checkout, as far as it is known.
    revision: str
    #: Of the package, Python and the frameworks.
    versions: dict[str, str]
    #: The variables that the suite reads.
    environment: dict[str, str]
    #: The names of the devices.
    gpus: list[str]
    date: str
    #: The functions in whose place the package was called.
    replaced: list[str]
    #: Test files that this version of the suite does not have.
    absent: list[str]
    judged: list[Judged]
    stale: list[Expected]

    @property
    def failed(self) -> list[Judged]:
        """The failures that no entry of the list excuses."""
        return [one for one in self.judged if one.verdict == "failed"]

    def counts(self) -> dict[Verdict, int]:
        """Return how many tests have each verdict."""
        counts = Counter(one.verdict for one in self.judged)
        return {verdict: counts[verdict] for verdict in get_args(Verdict)}

    def heading(self) -> str:
        """Return what ran, in one line."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.project} at {self.revision}; {'; '.join(self.gpus) or 'CPU'}; {versions}; {self.date}"

    def write(self, folder: Path) -> None:
        """Write ``report.json`` and ``report.md``."""
        whole: dict[str, Any] = {"counts": self.counts(), **asdict(self)}
        (folder / "report.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(self.markdown(), encoding="utf-8")

    def table(self) -> str:
        """Return the short table for a terminal."""
        rows = [(WORDS[verdict], count) for verdict, count in self.counts().items()]
        width = max(len(words) for words, _ in rows)
        lines = [f"{words:<{width}} {count:>6}" for words, count in rows]
        lines += [f"FAILED {one.test}: {_line(one.reason)}" for one in self.failed]
        lines += [f"stale: {_entry(entry)}" for entry in self.stale]
        return "\n".join(lines)

    def markdown(self) -> str:
        """Return the report for people."""
        counts = "\n".join(f"| {WORDS[verdict]} | {count} |" for verdict, count in self.counts().items())
        parts = [
            f"# {self.suite}",
            self.heading(),
            f"| verdict | tests |\n|---|--:|\n{counts}",
            f"The package was called instead of {_listed(self.replaced)}.",
        ]
        if self.environment:
            variables = [f"{name}={value}" for name, value in self.environment.items()]
            parts.append(f"Set for the tests: {_listed(variables)}.")
        if self.absent:
            parts.append(f"The checkout does not have {_listed(self.absent)}.")
        for verdict in get_args(Verdict)[1:]:
            rows = self._reasons(verdict)
            if rows:
                parts += [f"## {WORDS[verdict].capitalize()}", "| tests | reason | the first |\n|--:|---|---|\n" + rows]
        if self.stale:
            entries = "\n".join(f"- {_entry(entry)}" for entry in self.stale)
            parts += ["## Stale", f"Entries of the list that no failure matched:\n\n{entries}"]
        return "\n\n".join(parts) + "\n"

    def _reasons(self, verdict: Verdict) -> str:
        tests: dict[str, list[str]] = {}
        for one in self.judged:
            if one.verdict == verdict:
                tests.setdefault(_line(one.reason), []).append(one.test)
        order = sorted(tests.items(), key=lambda row: -len(row[1]))
        return "\n".join(f"| {len(names)} | {_cell(reason)} | `{_cell(names[0])}` |" for reason, names in order)


def _line(text: str) -> str:
    """Return a reason in one line that is not too long."""
    words = " ".join(text.split())
    return words if len(words) <= 300 else words[:300] + " …"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _entry(entry: Expected) -> str:
    return f"{entry.tests}: {entry.error!r} ({entry.reason})"
