"""What a run saw, as data: ``scoreboard.json``, one line for each verdict."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from truebridge_conformance.scoreboard.frameworks import ENVIRONMENT, ON_THE_HOST, labels
from truebridge_conformance.scoreboard.properties import PROPERTIES
from truebridge_conformance.scoreboard.run import Judged
from truebridge_conformance.scoreboard.sentences import EVERY, Sentence


@dataclass(frozen=True)
class Row:
    """A verdict."""

    source: str
    target: str
    #: The kind of device, and who exchanges.
    on: str
    by: str
    property: str
    verdict: str
    #: The number of the sentence, in the report's list.
    rests_on: int
    text: str = ""
    #: What ran: it is kept where the verdict is not that all is right.
    program: str = ""
    #: What a first run saw, in a process with other programs, where it is another verdict.
    before: str = ""


@dataclass(frozen=True)
class Report:
    """The verdicts of a run."""

    #: The machine: GPUs, driver, processor, Python.
    host: dict[str, Any]
    #: Of the frameworks, by name, and of this package.
    versions: dict[str, str]
    missing: list[str]
    date: str
    #: Seconds that it took, and rounds of each race.
    seconds: float
    repeat: int
    #: The snippets that fail on the framework's own tensors, by framework, kind of device and property.
    controls: list[Row]
    rows: list[Row]
    sentences: list[Sentence] = field(default_factory=lambda: list(EVERY))
    environment: dict[str, str] = field(default_factory=lambda: dict(ENVIRONMENT))
    on_the_host: dict[str, str] = field(default_factory=lambda: dict(ON_THE_HOST))

    def text(self) -> str:
        """Return the report as JSON, with a line for each verdict."""
        head = {name: value for name, value in asdict(self).items() if name not in ("rows", "controls")}
        head["labels"] = labels()
        head["properties"] = {row.name: row.doc for row in PROPERTIES if row.shown}
        lines = [f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}," for name, value in head.items()]
        return "\n".join(["{", *lines, _listed("controls", self.controls) + ",", _listed("rows", self.rows), "}", ""])

    @classmethod
    def read(cls, path: Path) -> Report:
        """Return the report of a file."""
        found = json.loads(path.read_text(encoding="utf-8"))
        fields = {name: value for name, value in found.items() if name not in ("labels", "properties")}
        fields["sentences"] = [Sentence(**one) for one in fields["sentences"]]
        for name in ("controls", "rows"):
            fields[name] = [Row(**row) for row in fields[name]]
        return cls(**fields)


def row(judged: Judged) -> Row:
    """Return a verdict as data."""
    cell, outcome, before = judged.cell, judged.outcome, judged.before
    changed = before is not None and before.verdict != outcome.verdict
    return Row(
        *(cell.source.name, cell.target.name, cell.on, cell.by, cell.asked.name, outcome.verdict),
        rests_on=EVERY.index(cell.sentence),
        text=outcome.text,
        program="" if outcome.verdict in ("right", "not offered") else judged.program,
        before=f"{before.verdict}: {before.text}" if before is not None and changed else "",
    )


def _listed(name: str, rows: Iterable[Row]) -> str:
    lines = [
        json.dumps({key: value for key, value in asdict(one).items() if value != ""}, ensure_ascii=False)
        for one in rows
    ]
    return f"  {json.dumps(name)}: [\n" + ",\n".join(f"    {line}" for line in lines) + "\n  ]"
