"""Programs for test_hosts.py: one shares with other hosts, one opens what it shares."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from truebridge import _hosts, processes

#: It shares again when it is told so, and prints how many leases there are for any other line.
LENDS = """
import sys
import numpy as np
import truebridge as tb
tb.processes.configure(address=sys.argv[1])
big = np.arange(int(sys.argv[2]) << 18, dtype=np.int32)
small = [np.full((3, 5), number, dtype=np.int16).T for number in range(300)]
def share():
    return tb.share({"big": big, "small": small, "step": 7}, reach="hosts", expires=600).text
print(share(), flush=True)
for line in sys.stdin:
    print(share() if line == "share\\n" else tb.processes.held()["leases"], flush=True)
"""

READS = """
import sys
import numpy as np
import truebridge as tb
print("up", flush=True)
for text in sys.stdin:
    try:
        tree = tb.open(text, "numpy")
        big = np.array_equal(tree["big"], np.arange(tree["big"].size, dtype=np.int32))
        small = all(bool((tensor == number).all()) for number, tensor in enumerate(tree["small"]))
        shapes = {tensor.shape for tensor in tree["small"]} == {(5, 3)}
        print("right" if big and small and shapes and tree["step"] == 7 else "wrong", flush=True)
        del tree
    except tb.BridgeError as error:
        print(error.kind, flush=True)
"""


@contextlib.contextmanager
def listening(folder: Path) -> Iterator[None]:
    """Let this process share at 127.0.0.1, with its sockets in a folder."""
    folder.chmod(0o700)
    processes._core.ipc_close()
    processes.configure(folder=folder)
    if not _hosts._here.port:
        processes.configure(address="127.0.0.1")
    yield
    processes._core.ipc_close()


def carriers_of(pid: int) -> list[int]:
    """Return the carriers of a process that are running."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if len(arguments) > 5 and b"truebridge._carrier" in arguments[2] and arguments[5] == str(pid).encode():
            found.append(int(folder.name))
    return found


def descriptors_of(pid: int) -> int:
    """Return how many files a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def over_tcp() -> dict[str, str]:
    """Return an environment in which UCX does not find that both ends are on one host."""
    # NIXL asks for a way to memory of GPUs where there are some.
    ways = "tcp,cuda_copy" if Path("/dev/nvidiactl").exists() else "tcp"
    return {**os.environ, "UCX_TLS": ways, "UCX_LOG_LEVEL": "fatal"}


class Program:
    """A program, perhaps in a network namespace."""

    def __init__(self, code: str, *arguments: str, namespace: str | None = None) -> None:
        before = [] if namespace is None else ["ip", "netns", "exec", namespace]
        self.process = subprocess.Popen(
            [*before, sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=over_tcp(),
        )
        self.first = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def begin(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str) -> str:
        self.begin(line)
        return self.line()

    def end(self, how: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal, and return how the process ended."""
        self.process.send_signal(how)
        code = self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        return code

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.end()
