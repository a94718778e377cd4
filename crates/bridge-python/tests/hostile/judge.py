"""Runs cases from standard input, one JSON object a line, and writes a verdict for each: ``@`` and what is wrong."""

from __future__ import annotations

import gc
import json
import signal
import sys
import time
from typing import Any

import truebridge as tb
from hostile import copies, files, gradients, subjects, trees
from hostile.subjects import Subject

#: The longest message of an error, in characters.
LONGEST = 2000
#: Seconds of a case that mean a hang: the first one of a process imports frameworks.
PATIENCE = 300
ALLOWED = (tb.BridgeError, RecursionError)
MODULES = (subjects, copies, trees, files, gradients)


def convert(subject: Subject, case: dict[str, Any]) -> str:
    """Convert, read the result where that is safe, and return what is wrong with either."""
    try:
        result = subject.act(case["target"], case["copy"] if subject.safe_to_read else False)
    except ALLOWED as error:
        words, cause = "", error
        for _ in range(100):
            if isinstance(cause, ALLOWED) and len(str(cause)) > LONGEST:
                words = f"a message of {len(str(cause))} characters"
            if (cause := cause.__cause__) is None:  # type: ignore[assignment]
                break
        return words or (f"refused: {error}" if subject.must_convert else "")
    except BaseException as error:
        return "" if type(error).__name__ in subject.may_raise else f"raised {type(error).__name__}: {str(error)[:300]}"
    if subject.expected is not None and subject.safe_to_read:
        found = (result if hasattr(result, "tolist") else result.numpy()).tolist()
        if repr(found) != repr(subject.expected):
            return f"wrong values: {found!r:.100} instead of {subject.expected!r:.100}"
    return ""


def judge(case: dict[str, Any]) -> str:
    """Run a case and return what is wrong, or an empty text."""
    heard: list[Any] = []
    sys.unraisablehook = lambda unraisable: heard.append(unraisable.exc_type)
    make = next(getattr(module, case["kind"]) for module in MODULES if hasattr(module, case["kind"]))
    subject = make(case)
    words = convert(subject, case)
    stats, patience = tb.stats(), time.monotonic() + 10
    while stats["leased"] != stats["released"] and time.monotonic() < patience:
        # Cycles, and views that TensorFlow's threads leave to a thread of the package.
        gc.collect()
        time.sleep(0.001)
        stats = tb.stats()
    if not words and stats["leased"] != stats["released"]:
        words = f"{stats['leased'] - stats['released']} views were not released"
    unraisable = [kind for kind in heard if kind not in (MemoryError, *ALLOWED)]
    return words or subject.wrong_after() or (f"unraisable: {unraisable}" if unraisable else "")


if __name__ == "__main__":
    for line in sys.stdin:
        # Ends the process.
        signal.alarm(PATIENCE)
        print("@" + judge(json.loads(line)).replace("\n", " "), flush=True)
        signal.alarm(0)
    signal.alarm(PATIENCE)
