"""Runs cases from standard input, one JSON object a line, and writes a verdict for each: ``@`` and what is wrong."""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import copies
import files
import gradients
import subjects
import trees
from subjects import Subject

import truebridge as tb

LONGEST = 2000
MAKERS = {**subjects.MAKERS, **copies.MAKERS, **trees.MAKERS, **files.MAKERS, **gradients.MAKERS}
ALLOWED = (tb.BridgeError, RecursionError)


def chain(error: BaseException | None) -> list[BaseException]:
    """An exception and its causes."""
    errors: list[BaseException] = []
    while error is not None and len(errors) < 100:
        errors.append(error)
        error = error.__cause__
    return errors


def convert(subject: Subject, case: dict[str, Any]) -> str:
    """Converts, reads the result where that is safe, and returns what is wrong with either."""
    copy = case["copy"] if subject.safe_to_read else False
    try:
        result = subject.act(case["target"], copy)
    except ALLOWED as error:
        longest = max(len(str(each)) for each in chain(error) if isinstance(each, ALLOWED))
        if longest > LONGEST:
            return f"a message of {longest} characters"
        if subject.must_convert:
            return f"refused: {error}"
        return ""
    except BaseException as error:
        return "" if type(error).__name__ in subject.may_raise else f"raised {type(error).__name__}: {str(error)[:300]}"
    if subject.expected is not None and subject.safe_to_read:
        found = (result if hasattr(result, "tolist") else result.numpy()).tolist()
        if repr(found) != repr(subject.expected):
            return f"wrong values: {found!r:.100} instead of {subject.expected!r:.100}"
    return ""


def judge(case: dict[str, Any]) -> str:
    """Runs a case and returns what is wrong, or an empty text."""
    heard: list[object] = []
    sys.unraisablehook = lambda unraisable: heard.append(unraisable.exc_type)
    subject = MAKERS[case["kind"]](case)
    words = convert(subject, case)
    stats, patience = tb.stats(), time.monotonic() + 10
    while stats["leased"] != stats["released"] and time.monotonic() < patience:
        # Cycles, and TensorFlow's threads, which leave it to one of the package's to release what needs Python.
        gc.collect()
        time.sleep(0.001)
        stats = tb.stats()
    if not words and stats["leased"] != stats["released"]:
        words = f"{stats['leased'] - stats['released']} views were not released"
    if not words and (wrong := subject.wrong_after()):
        words = wrong
    if not words and [kind for kind in heard if kind not in (MemoryError, *ALLOWED)]:
        words = f"unraisable: {heard}"
    return words


def main() -> None:
    """Reads cases until the input ends."""
    out = sys.stdout
    for line in sys.stdin:
        words = judge(json.loads(line)).replace("\n", " ")
        out.write(f"@{words}\n")
        out.flush()


if __name__ == "__main__":
    main()
