"""Synchronise weights between a trainer and an engine, and kill either of them at random.

The trainer publishes a version after each step, the engine serves from the newest one. Each may be killed at any time,
and started again, while the other goes on. Without options it ends within half a minute::

    pip install . torch
    python examples/weight_sync/run.py
    python examples/weight_sync/run.py --updates 1000 --kills 10
    python examples/weight_sync/run.py --trainer jax
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import truebridge as tb

HERE = Path(__file__).parent


class Program:
    """A program of this folder that is started again after it was killed."""

    def __init__(self, name: str, *arguments: object) -> None:
        """Start it."""
        self.name, self.arguments = name, arguments
        #: The first and the last line that begins with each word, and how many there were.
        self.first, self.last, self.count = dict[str, list[str]](), dict[str, list[str]](), Counter[str]()
        self.process = self._start()

    def _start(self, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, HERE / f"{self.name}.py", *map(str, self.arguments), *more]
        environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true", **os.environ}
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=[process], daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            words = line.split()
            self.first.setdefault(words[0], words)
            self.last[words[0]] = words
            self.count[words[0]] += 1

    def kill(self, *more: str) -> None:
        """Kill it, and start it again."""
        self.end()
        self.process = self._start(*more)

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()

    def number(self, word: str) -> int:
        """Return the number in the last line that begins with a word; 0 without one."""
        return int(self.last[word][1]) if word in self.last else 0

    def wait(self, word: str, number: int, patience: float = 120) -> None:
        """Wait until a line that begins with a word has at least this number."""
        until = time.monotonic() + patience
        while self.number(word) < number:
            if self.process.poll() is not None:
                raise SystemExit(f"the {self.name} has stopped")
            if self.count["torn"]:
                raise SystemExit("torn: the engine has served parts of several versions")
            if time.monotonic() > until:
                raise SystemExit(f"the {self.name} is at {self.number(word)}, not at {number}")
            time.sleep(0.001)


def main() -> None:
    """Start both, kill either at random, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", choices=["torch", "jax", "tensorflow"], default="torch")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--count", type=int, default=100, help="tensors")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, tb.serve(Path(folder) / "names"):
        path, count = Path(folder) / "names", ("--count", options.count)
        start = time.monotonic()
        engine = Program("engine", path, *count)
        trainer = Program("trainer", path, *count, "--framework", options.trainer)
        between = options.updates // (options.kills + 1) + 1
        try:
            for kill in range(options.kills):
                # Both are up, and the engine has served what the trainer has made meanwhile.
                engine.wait("whole", engine.number("whole") + between)
                print(f"kill {kill + 1}, at version {engine.number('whole')}", flush=True)
                if draw.random() < 0.5:
                    engine.kill()
                else:
                    trainer.kill("--first", str(trainer.number("step")))
            engine.wait("whole", engine.number("whole") + between)
            took = time.monotonic() - start
            print(f"{trainer.number('step')} updates by {options.trainer}, {options.kills} kills, {took:.0f} s")
            print(f"versions served: {engine.count['whole']}, torn: {engine.count['torn']}")
            first, last = engine.first["whole"], engine.last["whole"]
            for index, what in ((2, "descriptors of the engine"), (3, "MiB free on the GPU")):
                print(f"{what}: {first[index]} at the first version, {last[index]} at the last")
            if engine.count["torn"]:
                raise SystemExit("torn: the engine has served parts of several versions")
        finally:
            engine.end()
            trainer.end()


if __name__ == "__main__":
    main()
