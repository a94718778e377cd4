"""What came of a program, and what it says of the pair."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Literal, get_args

from truebridge_conformance.scoreboard.programs import Program

#: ``right`` to ``not offered`` are verdicts. ``could not run`` says nothing of the pair: a line failed that is not the
#: exchange. ``not run`` had no time.
Verdict = Literal["right", "waits", "refused", "wrong", "not offered", "could not run", "not run"]

#: The words of the reports.
WORDS: dict[str, str] = {
    "right": "right",
    "waits": "right, but the host waits",
    "refused": "refused",
    "wrong": "wrong",
    "not offered": "not offered",
    "could not run": "could not run",
    "not run": "not run: the time was up",
}

#: Characters of a text that are kept.
LONGEST = 240

#: What a program prints last, with what it saw.
SAID = re.compile(r"^(right|waits|refused|wrong)(?:: (.*))?$")

#: How Python and ``faulthandler`` name a line of a file, and the end of an exception.
LINE = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.M)
RAISED = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?([A-Za-z_]\w*)(?:: .*)?$")

#: The words with which a missing keyword or method is an error of Python's.
MISSING = re.compile(
    r"unexpected keyword argument|has no attribute|takes no keyword arguments|invalid keyword argument"
)


@dataclass(frozen=True)
class Ran:
    """What a process left: its output, and how it ended."""

    out: str
    err: str
    #: The exit status, negative for a signal.
    status: int
    #: Whether it was stopped because it did not end.
    hung: bool = False


@dataclass(frozen=True)
class Outcome:
    """A verdict, with what was seen."""

    verdict: Verdict
    text: str = ""


def judge(program: Program, file: str, ran: Ran, refusal: tuple[str, ...] = (), seconds: float = 0) -> Outcome:
    """Return the verdict of a program that ran as ``file``.

    ``refusal`` names the exceptions by which the interchange may be refused, and still be right.
    """
    said = [match for line in ran.out.splitlines() if (match := SAID.match(line))]
    if said and ran.status >= 0:
        verdict = next(one for one in get_args(Verdict) if one == said[-1][1])
        return Outcome(verdict, shortened(said[-1][2] or ""))
    if said:
        return Outcome("wrong", shortened(f"{_ended(ran)}, after it had said: {said[-1][0]}"))
    line = _line(file, ran.err)
    ended = f"no end within {seconds:g} s" if ran.hung else _ended(ran)
    if line not in program.takes | program.checks:
        return Outcome("could not run", shortened(ended))
    if ran.hung or ran.status < 0:
        return Outcome("wrong", ended)
    if line in program.checks:
        return Outcome("wrong", shortened(f"the result cannot be used: {ended}"))
    if MISSING.search(ended) and ended.startswith(("TypeError", "AttributeError")):
        return Outcome("not offered", shortened(ended))
    # Libraries name their own kinds of an error after it, such as ``BridgeBufferError``.
    if "Exception" in refusal or ended.partition(":")[0].endswith(refusal):
        return Outcome("right", shortened(f"refused: {ended}"))
    return Outcome("refused", shortened(ended))


def _line(file: str, err: str) -> int | None:
    """Return the line of the program that was running, as the last traceback says."""
    # The traceback of an exception has the program's line first; that of `faulthandler` has it last, as the outermost.
    start = err.rfind("Traceback (most recent call last)")
    fatal = max(err.rfind("Fatal Python error"), err.rfind("Timeout ("))
    lines = [int(number) for name, number in LINE.findall(err[max(start, fatal, 0) :]) if name == file]
    if not lines:
        return None
    return lines[-1] if fatal > start else lines[0]


def _ended(ran: Ran) -> str:
    """Return how a process ended without a word: by a signal, or an exception."""
    if ran.status < 0:
        said = [line for line in ran.err.splitlines() if line.strip()]
        first = next((line for line in said if not line.startswith(("Fatal Python error", "WARNING", "W0", "I0"))), "")
        native = "" if first.startswith(("Current thread", "Thread", "Stack", "  ")) else f": {first.strip()}"
        return f"the process is aborted by {signal.Signals(-ran.status).name}{native}"
    rows = ran.err[max(ran.err.rfind("Traceback (most recent call last)"), 0) :].splitlines()
    for number, row in enumerate(rows):
        match = RAISED.match(row)
        if match and number and not row.startswith(("Traceback", "File")):
            name, _, words = row.partition(": ")
            return f"{name.rpartition('.')[2]}: {words}" if words else name.rpartition(".")[2]
    return f"the process exited with {ran.status}" + (f": {rows[-1]}" if rows else "")


def shortened(text: str) -> str:
    """Return a text in one line that is not too long."""
    words = " ".join(text.split())
    return words if len(words) <= LONGEST else words[: LONGEST - 2] + " …"
