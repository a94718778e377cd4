"""Programs that start where frameworks are imported already.

To import PyTorch, TensorFlow and JAX takes seconds, and most programs of the tests run for a fraction of one. A
``Warm`` process imports frameworks once, does nothing else, and is forked for each program. It has a single thread
then, no device that was started, and no truebridge: a child is what a fresh process is after these imports. A program
has ``__main__``, the environment and the standard streams to itself, and ends as an interpreter does.

Start a process with ``subprocess`` where the start itself matters: flags of Python, the order of imports, a framework
that must be absent, or a variable that Python, the loader or a framework reads early.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

#: Seconds that a program may take.
PATIENCE = 300

#: Reads a line for each program, forks, and answers with the child's exit code. The last program is not forked.
SERVER = """
import gc, json, os, sys
sys.modules["tensorflow.python.pywrap_dlopen_global_flags"] = None

def next_program():
    while line := sys.stdin.readline():
        program = json.loads(line)
        if program["last"]:
            return program
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, "a process with threads must not be forked"
        if (child := os.fork()) == 0:
            return program
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)

def begin(program):
    if program["frozen"]:
        gc.freeze()
    for number, path in enumerate([os.devnull, program["stdout"], program["stderr"]]):
        file = os.open(path, os.O_RDWR)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(program["environment"])
    return compile(program["code"], "<string>", "exec")

for name in sys.argv[1:]:
    __import__(name)
program = begin(next_program())
del sys.argv[1:], gc, json, os, sys, next_program, begin, name
exec(globals().pop("program"))
"""


class Warm:
    """A process that has imported frameworks, in this order, and runs programs one after the other.

    It is started where a program needs it, and again after ``end``.
    """

    def __init__(self, *imports: str) -> None:
        self._imports = imports
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()

    def close(self) -> None:
        """End the process."""
        if self._process:
            self._process.communicate()
        self._folder.cleanup()

    def run(self, code: str, *, frozen: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program, with these variables, in a child.

        At its exit the garbage collector visits all objects of the frameworks, which takes up to two seconds. It does
        not visit what is ``frozen``: use that where the exit is not what the program tests.
        """
        return self._run(code, environment, last=False, frozen=frozen)

    def end(self, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program in the process itself, without a fork."""
        return self._run(code, environment, last=True, frozen=False)

    def _run(self, code: str, environment: dict[str, str], **how: bool) -> subprocess.CompletedProcess[str]:
        process = self._process = self._process or self._started()
        streams = {name: self._path(name) for name in ("stdout", "stderr")}
        for path in streams.values():
            path.write_text("")
        program = {name: str(path) for name, path in streams.items()} | {"code": textwrap.dedent(code), **how}
        program |= {"environment": {**os.environ, **environment}}
        patience = threading.Timer(PATIENCE, os.killpg, [process.pid, signal.SIGKILL])
        patience.start()
        try:
            status = self._answer(process, json.dumps(program), how["last"])
        finally:
            patience.cancel()
        return subprocess.CompletedProcess(code, status, *(path.read_text() for path in streams.values()))

    def _answer(self, process: subprocess.Popen[str], line: str, last: bool) -> int:
        """Send a line. Return the exit code of the program."""
        assert process.stdin and process.stdout
        print(line, file=process.stdin, flush=True)
        if not last and (answer := process.stdout.readline()):
            return int(answer)
        self._process = None
        status = process.wait()
        process.communicate()
        if not last:
            raise RuntimeError(f"the process of {self._imports} has ended: {status}\n{self._path('log').read_text()}")
        return status

    def _started(self) -> subprocess.Popen[str]:
        # OpenBLAS would start threads for NumPy.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        with self._path("log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-c", SERVER, *self._imports],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,
            )

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name


def complaints(stderr: str) -> list[str]:
    """The lines that are not XLA's or TensorFlow's log, some of which no setting turns off."""
    logged = re.compile(r"WARNING: All log messages before absl|[IWE]\d{4} |To enable the following instructions|\s*$")
    return [line for line in stderr.splitlines() if not logged.match(line)]
