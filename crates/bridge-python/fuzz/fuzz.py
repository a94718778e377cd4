"""Feeds hostile input to the installed package, and judges what it does.

A case is plain data, drawn from a seed and its number, so it can be written down and replayed. Each batch of cases runs
in a process of its own: a crash, a hang and a wrong answer are verdicts. A case that fails is shrunk towards the
simplest of its kind and printed as JSON; put it into ``fixtures/fuzz/python.json`` under its kind, with a name that
says what is hostile about it. Every run replays these first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases

BATCH = 2000
# Seconds without a word from a worker that mean a hang. A case takes milliseconds, and the import of a framework
# seconds, or a minute and more on a busy machine.
PATIENCE = 300
SHRINKING = 40

Case = dict[str, Any]


def run(batch: list[Case]) -> Iterator[str]:
    """Yields the verdict of each case, which is empty where nothing is wrong, until one brings the worker down."""
    worker = Path(__file__).with_name("worker.py")
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", str(worker)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert process.stdin and process.stdout and process.stderr
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or []))
    reader.start()
    feeder = threading.Thread(target=feed, args=(process.stdin, batch))
    feeder.start()
    done, heard, hung = 0, time.monotonic(), False

    def watch() -> None:
        nonlocal hung
        while process.poll() is None:
            time.sleep(0.5)
            if time.monotonic() - heard > PATIENCE:
                hung = True
                process.kill()

    watchdog = threading.Thread(target=watch)
    watchdog.start()
    try:
        for line in process.stdout:
            heard = time.monotonic()
            if line.startswith("@"):
                done += 1
                yield line[1:].strip()
    finally:
        if done >= len(batch):
            process.wait(PATIENCE)
        else:
            process.kill() if sys.exc_info()[0] is GeneratorExit else process.wait()
        for thread in (feeder, watchdog, reader):
            thread.join()
    if hung:
        yield "hang"
    elif done < len(batch):
        yield f"crash: exit status {process.returncode}\n{''.join(errors[-12:])}"
    elif process.returncode != 0:
        yield f"crash at exit: exit status {process.returncode}\n{''.join(errors[-12:])}"


def feed(pipe: Any, batch: list[Case]) -> None:
    """Writes the cases to a worker, which may die before it has read them all."""
    try:
        with pipe:
            for case in batch:
                pipe.write(json.dumps(case) + "\n")
    except BrokenPipeError:
        pass


def verdict(case: Case) -> str:
    """The verdict of a case in a process of its own."""
    return next((words for words in run([case]) if words), "")


def shrink(case: Case, words: str) -> tuple[Case, str]:
    """Replaces every field that the failure does not need by that of the simplest case of the kind."""
    ends = time.monotonic() + SHRINKING
    for field, plain in cases.KINDS[case["kind"]].simplest.items():
        if case[field] != plain and time.monotonic() < ends:
            simpler = {**case, field: plain}
            if found := verdict(cases.settled(simpler)):
                case, words = cases.settled(simpler), found
    return case, words


def report(case: Case, words: str, name: str) -> None:
    """Prints what failed, alone and small if it fails alone."""
    alone = verdict(case)
    if alone:
        case, words = shrink(case, alone)
    else:
        words += "\n(It passes in a process of its own: the cases before it matter.)"
    print(f"FAILED {name}: {words}\n    {json.dumps(case)}", flush=True)


def play(batch: list[Case], names: list[str]) -> int:
    """Runs all cases, also after one that fails, and returns how many failed."""
    failed, at = 0, 0
    while at < len(batch):
        for words in run(batch[at:]):
            if words:
                failed += 1
                last = min(at, len(batch) - 1)
                report(batch[last], words, names[last])
            at += 1
    return failed


def replayed(place: Path) -> dict[str, Case]:
    """The cases of a file, by their names there: a JSON list or one case."""
    read = json.loads(place.read_text())
    rows = [read] if isinstance(read, dict) else read
    return {row.get("name", f"case {i} of the file"): cases.settled(row) for i, row in enumerate(rows)}


def main() -> int:
    """Replays the corpora, then draws cases until the time is up."""
    parser = argparse.ArgumentParser(prog="cargo xtask fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="how long new cases are drawn (default: 120)")
    parser.add_argument("--seed", type=int, default=None, help="the seed of the run (default: a new one)")
    parser.add_argument("--to", default="numpy,torch", help="what is converted to (default: numpy,torch)")
    parser.add_argument("--target", default=",".join(cases.KINDS), help="what is drawn (default: all of %(default)s)")
    parser.add_argument(
        "--replay", type=Path, help="only the cases of this file, a JSON list or one case with its kind"
    )
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    kinds = options.target.split(",")
    if unknown := set(kinds) - set(cases.KINDS):
        parser.error(f"--target is one of {', '.join(cases.KINDS)}, not {', '.join(sorted(unknown))}")
    kept = replayed(options.replay) if options.replay else cases.corpus(kinds)
    failed = play(list(kept.values()), list(kept))
    print(f"{len(kept)} kept cases replayed, {failed} failed", flush=True)
    if options.replay:
        return 1 if failed else 0
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    ends, count = time.monotonic() + options.seconds, 0
    while time.monotonic() < ends and failed < 10:
        numbers = range(count, count + BATCH)
        failed += play(
            [cases.draw(seed, at, options.to.split(","), kinds) for at in numbers],
            [f"case {number} of seed {seed}" for number in numbers],
        )
        count += BATCH
    print(f"{count} cases drawn, {failed} failed in all", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
