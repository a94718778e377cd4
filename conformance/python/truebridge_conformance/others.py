"""Other processes, for what is converted between them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

#: Seconds for what another process does.
PATIENCE = 60.0

#: Seconds after which a process that does not answer hangs: to import a framework takes up to a minute.
HANGS = 240.0

#: Runs lines and prints the value of each expression. It runs in Python 3.7, too.
_LOOP = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR1)
import numpy as np
import {package} as tb
space = {{"np": np, "tb": tb}}
for line in sys.stdin:
    try:
        answer = eval(line, space)
    except SyntaxError:
        answer = exec(line, space)
    except tb.BridgeError as error:
        answer = error.kind
    except ValueError as error:
        answer = type(error).__name__
    print("answer", repr(answer), flush=True)
"""


def python37() -> str | None:
    """Return a Python 3.7 with TensorFlow 1.15 and this project's package for it, if there is one."""
    beside = Path(sys.prefix).with_name("venv37") / "bin/python"
    return os.environ.get("TRUEBRIDGE_PYTHON37") or (str(beside) if beside.exists() else None)


class Other:
    """Another Python process, which evaluates expressions and returns the text of each value.

    ``command`` is its interpreter, with a program that starts it where one is needed, ``package`` the package that it
    knows as ``tb``. An error of the bridge has its kind as the value.
    """

    def __init__(
        self, command: Sequence[str] = (sys.executable,), package: str = "truebridge", **environment: str
    ) -> None:
        """Start it."""
        # By another program, whose child it is.
        self._is_started = len(command) > 1
        self.process = subprocess.Popen(
            [*command, "-c", _LOOP.format(package=package)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def __call__(self, line: str) -> str:
        """Run a line, and return the text of its value."""
        self.begin(line)
        return self.end(line)

    def begin(self, line: str) -> None:
        """Send a line, whose answer ``end`` returns."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self, line: str = "") -> str:
        """Return the text of the next value. A process that hangs prints the stacks of its threads, and is ended."""
        assert self.process.stdout is not None
        watch = threading.Timer(HANGS, self._end_with_stacks)
        watch.start()
        try:
            while answer := self.process.stdout.readline():
                if answer.startswith("answer "):
                    return answer.removeprefix("answer ").rstrip()
        finally:
            watch.cancel()
        raise AssertionError(f"{line}: the process has ended")

    def _end_with_stacks(self) -> None:
        """Make it print the stacks of its threads, and end it."""
        pid = self.process.pid
        if self._is_started:
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        os.kill(pid, signal.SIGUSR1)
        time.sleep(3)
        self.process.kill()

    def text(self, line: str) -> str:
        """Run a line whose value is a ticket's text, and return that."""
        return self(line).strip("'")

    def define(self, code: str) -> None:
        """Run lines of code."""
        self(f"exec({code!r}, globals())")

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.process.kill()
        self.process.wait()


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it has not happened within {seconds:g} s"
        time.sleep(0.001)
