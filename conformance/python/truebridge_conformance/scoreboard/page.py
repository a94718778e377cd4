"""The page: what a run says first, the matrices, and the programs of what is wrong."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence

from truebridge_conformance.scoreboard.frameworks import GPU, HOST, labels
from truebridge_conformance.scoreboard.programs import OURS, OWN
from truebridge_conformance.scoreboard.properties import PROPERTIES
from truebridge_conformance.scoreboard.report import Report, Row
from truebridge_conformance.scoreboard.sentences import EXPECTATION, Sentence
from truebridge_conformance.scoreboard.verdicts import WORDS

#: What stands for a verdict in a matrix.
SIGNS = {
    "right": "✓",
    "waits": "◷",
    "refused": "r",
    "wrong": "**✗**",
    "not offered": "–",
    "could not run": "?",
    "not run": "…",
}

#: What readers look for first.
FIRST = ("order", "release order")
#: What frameworks without a device in common are asked.
APART = ("no such device", "to the host")

DEVICES = {GPU: "On a GPU", HOST: "On the host"}
SUBJECT = {OWN: "**The frameworks' own functions**", OURS: "**truebridge**"}
WHO = {OWN: "the frameworks' own functions", OURS: "truebridge"}


def whole(report: Report) -> str:
    """Return the page of a run."""
    return f"# Scoreboard\n\n{body(report)}\n"


def body(report: Report) -> str:
    """Return the page without its title."""
    parts = [
        summary(report),
        _at_a_glance(report),
        f"{about(report)}\n\nThese are experiments. They prove errors, and never their absence: ✓ says that a program "
        "saw no error, not that there is none.",
        _counts(report),
        f"{'; '.join(f'{sign} {WORDS[verdict]}' for verdict, sign in SIGNS.items())}; an empty field: the question has "
        "no meaning for the pair, for example strides where the producer has none.",
        *(_matrix(report, on, by) for on in DEVICES for by in WHO),
        _properties(report),
        *(_wrong(report, by) for by in WHO),
        _unrun(report),
        "## How it was run",
        _method(report),
    ]
    return "\n\n".join(part for part in parts if part)


def summary(report: Report) -> str:
    """Return what the run says, in a few lines."""
    lines = []
    for by, who in SUBJECT.items():
        rows = [row for row in report.rows if row.by == by]
        wrong = [row for row in rows if row.verdict == "wrong"]
        expected = sum(report.sentences[row.rests_on].text.startswith(EXPECTATION) for row in wrong)
        pairs = {(row.source, row.target) for row in rows}
        at = len({(row.source, row.target) for row in wrong})
        waits = sum(row.verdict == "waits" for row in rows)
        words = f"- {who}: {len(wrong)} of {len(rows):,} verdicts are *wrong*"
        words += f", in {at} of {len(pairs)} ordered pairs" if wrong else f", over {len(pairs)} ordered pairs"
        words += (
            f"; {expected} of these are only against what users expect, and against no sentence" if expected else ""
        )
        lines.append(f"{words}. In {waits} the host waits." if waits else f"{words}.")
    return "\n".join(lines)


def about(report: Report) -> str:
    """Return where, when and with which versions."""
    host, names = report.host, labels()
    where = f"{host['gpus'][0]}, driver {host['driver']}" if host["gpus"] else "No GPU: GPUs are not judged here"
    versions = ", ".join(f"{names.get(name, name)} {version}" for name, version in report.versions.items())
    missing = f" Not installed: {', '.join(names[name] for name in report.missing)}." if report.missing else ""
    return f"{where}; {host['cpu']}; Python {host['python']}; {versions}; {report.date[:10]}.{missing}"


def _at_a_glance(report: Report) -> str:
    """Return for each property that something gets wrong in how many pairs, and in which."""
    names = labels()
    lines = []
    for one in sorted(PROPERTIES, key=lambda one: one.name not in FIRST):
        cells = []
        for by in WHO:
            judged = {(row.source, row.target) for row in report.rows if row.property == one.name and row.by == by}
            rows = [row for row in report.rows if row.property == one.name and row.by == by and row.verdict == "wrong"]
            wrong = dict.fromkeys((row.source, row.target) for row in rows)
            pairs = ", ".join(f"{names[source]} → {names[target]}" for source, target in wrong)
            cells.append(f"{len(wrong)} of {len(judged)}" + (f": {pairs}" if wrong else ""))
        if ":" in "".join(cells):
            lines.append((f"**{one.name}**", *cells))
    return _table(("wrong in", *WHO.values()), lines) if lines else ""


def _counts(report: Report) -> str:
    used = [verdict for verdict in WORDS if any(row.verdict == verdict for row in report.rows)]
    lines = []
    for on, where in DEVICES.items():
        for by, who in WHO.items():
            counts = Counter(row.verdict for row in report.rows if row.on == on and row.by == by)
            if counts:
                lines.append((f"{where}, {who}", *(f"{counts[verdict]:,}" for verdict in used)))
    return _table(("verdicts", *(WORDS[verdict] for verdict in used)), lines)


def _matrix(report: Report, on: str, by: str) -> str:
    rows = [row for row in report.rows if row.on == on and row.by == by]
    if not rows:
        return ""
    named = sorted(PROPERTIES, key=lambda one: one.name not in FIRST)
    columns = [one.name for one in named if any(row.property == one.name for row in rows)]
    found = {(row.source, row.target, row.property): row.verdict for row in rows}
    names = labels()
    lines: list[tuple[str, ...]] = []
    apart: list[tuple[str, ...]] = []
    for one, other in dict.fromkeys((row.source, row.target) for row in rows):
        verdicts = [found.get((one, other, name), "") for name in columns]
        cells = (f"{names[one]} → {names[other]}", *(SIGNS.get(verdict, "") for verdict in verdicts))
        asked = {name for name, verdict in zip(columns, verdicts, strict=True) if verdict}
        (apart if asked <= set(APART) else lines).append(cells)
    head = ("", *columns)
    parts = [f"## {DEVICES[on]}: {WHO[by]}", _table(head, lines)]
    if apart:
        used = [0, *(i for i in range(1, len(head)) if any(cells[i] for cells in apart))]
        table = _table([head[i] for i in used], ([cells[i] for i in used] for cells in apart))
        parts.append(
            f"<details>\n<summary>Pairs without a device in common: {len(apart)}</summary>\n\n{table}\n\n</details>"
        )
    return "\n\n".join(parts)


def _properties(report: Report) -> str:
    asked = {row.property for row in report.rows}
    lines = []
    for one in PROPERTIES:
        if one.name in asked:
            found = dict.fromkeys(report.sentences[row.rests_on] for row in report.rows if row.property == one.name)
            lines.append((one.name, one.doc, "<br>".join(_sentence(sentence) for sentence in found)))
    return f"## The properties\n\n{_table(('property', 'what it states', 'what it rests on'), lines)}"


def _wrong(report: Report, by: str) -> str:
    rows = [row for row in report.rows if row.by == by and row.verdict == "wrong"]
    if not rows:
        return ""
    parts = [f"## Wrong: {WHO[by]}"]
    for one in PROPERTIES:
        found = [row for row in rows if row.property == one.name]
        if found:
            texts = dict.fromkeys(report.sentences[row.rests_on] for row in found)
            words = "\n".join(f"> {_sentence(text)}" for text in texts)
            parts += [f"### {one.name} ({by})", f"{one.doc[0].upper()}{one.doc[1:]}.\n\n{words}"]
            parts += [_folded(row) for row in found]
    return "\n\n".join(parts)


def _folded(row: Row) -> str:
    names = labels()
    where = "on a GPU" if row.on == GPU else "on the host"
    words = html.escape(f"{names[row.source]} → {names[row.target]}, {where}: {row.text or 'wrong'}")
    # What looks like a link of Markdown is none.
    program = html.escape(row.program).replace("](", "]&#40;")
    return f"<details data-search-exclude><summary>{words}</summary><pre><code>{program}</code></pre></details>"


def _unrun(report: Report) -> str:
    """Return what could not be judged, by reason."""
    names = labels()
    reasons: dict[str, list[str]] = {}
    for row in report.rows:
        if row.verdict == "could not run":
            reasons.setdefault(_cell(row.text), []).append(f"{names[row.source]} → {names[row.target]}, {row.property}")
    if not reasons:
        return ""
    lines = [(reason, len(cells), cells[0]) for reason, cells in sorted(reasons.items(), key=lambda one: -len(one[1]))]
    head = "## What could not run\n\nA line failed that is not the exchange: this says nothing of the pair."
    return f"{head}\n\n{_table(('reason', 'programs', 'the first'), lines)}"


def _method(report: Report) -> str:
    first = {
        on: " ".join(f"`{name}={value}`" for name, value in values.items())
        for on, values in (("all", report.environment), ("host", report.on_the_host))
    }
    return (
        "Every verdict is that of a program which is shown here or printed by `cargo xtask scoreboard --print`; it "
        "needs nothing of this project. truebridge is judged by the same programs, with its call instead of the "
        "framework's. Programs of one pair run one after another in a process. One that came out *wrong* ran again "
        "in a separate process, and that run is the verdict. Each framework's lines were tried on its own tensors "
        "first: where they fail on those, no pair is judged by them. A line that raises is *refused* "
        "where it is the exchange, *wrong* where it uses the result, and *could not run* elsewhere.\n\n"
        f"Races had {report.repeat} rounds. Set for all programs: {first['all']}; for those on the host also "
        f"{first['host']}. The run took {report.seconds / 60:.0f} min.{_changed(report)}"
    )


def _changed(report: Report) -> str:
    count = sum(bool(row.before) for row in report.rows)
    said = f" {count} of them came to another verdict there than in the first run: the data has both."
    return said if count else ""


def _sentence(sentence: Sentence) -> str:
    words = sentence.text if sentence.text.startswith(EXPECTATION) else f"“{sentence.text}”"
    return f"{words} ([{sentence.source}]({sentence.link}))" if sentence.link else words


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    every = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(str(cell)) for cell in row)} |" for row in every)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
