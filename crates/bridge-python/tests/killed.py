"""A trainer and an engine that are killed at random, while the test receives versions as well."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from random import Random
from typing import Any

import truebridge as tb
from truebridge_conformance.others import wait_until

#: Processes that are killed in a test, and the seed of the times.
KILLS, SEED = (int(os.environ.get(f"TRUEBRIDGE_{name}", usual)) for name, usual in (("KILLS", 6), ("SEED", 7)))


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program, and return it when it says that it is up."""
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def at_random(path: str, programs: dict[str, str], out: list[Any], is_whole: Callable[[], bool]) -> None:
    """Kill one of the programs after another, and start it again. Every version that is received must be whole."""
    random = Random(SEED)
    with tb.serve(path) as names:
        subscription = names.subscribe("weights", out=out)
        sides = {name: started(program, path) for name, program in programs.items()}
        try:
            for _ in range(KILLS):
                until, versions = time.monotonic() + random.uniform(0.05, 0.3), 0
                while time.monotonic() < until or versions == 0:
                    assert time.monotonic() < until + 60, "no version arrives"
                    if subscription.refresh() is not None:
                        versions += 1
                        assert is_whole(), "torn"
                for name, process in sides.items():
                    assert process.poll() is None, f"the {name} has stopped"
                victim = random.choice(list(sides))
                sides[victim].kill()
                sides[victim].wait()
                subscription.refresh()
                sides[victim] = started(programs[victim], path)
        finally:
            for process in sides.values():
                process.kill()
                process.wait()
        wait_until(lambda: not names.list())
        assert subscription.refresh() is None
