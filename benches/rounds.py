"""What the benches have in common: their options, and calls that are timed in batches."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any


def options(argv: list[str], bench: str, about: str | None, rounds: int, **own: Any) -> argparse.Namespace:
    """Read the options of a bench. ``own`` are added to ``--rounds`` and ``--report``, as argparse takes them."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"bench --{bench}", description=about, formatter_class=formatter)
    for name, argument in own.items():
        parser.add_argument(f"--{name}", **argument)
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds that count (default: %(default)s)")
    parser.add_argument("--report", default="conformance-report", metavar="DIR", help="where to write the report")
    return parser.parse_args(argv)


def several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return what reads several values with commas between them."""
    return lambda line: [kind(value) for value in line.split(",")]


def sizes(default: Sequence[float], what: str) -> dict[str, Any]:
    """Return the option ``--sizes`` of a bench, in MiB."""
    told = ", ".join(f"{size:g}" for size in default)
    return {
        "type": several(float),
        "default": default,
        "metavar": "MIB,...",
        "help": f"MiB of {what} (default: {told})",
    }


def per_call(
    call: Callable[[], Any], calls: int, before: Callable[[], Any], after: Callable[[], Any] | None = None
) -> float:
    """Return nanoseconds per call, with the garbage collector off. ``after`` is part of the time, ``before`` is not."""
    before()
    gc.disable()
    try:
        started = time.perf_counter_ns()
        for _ in range(calls):
            call()
        if after is not None:
            after()
        return (time.perf_counter_ns() - started) / calls
    finally:
        gc.enable()
