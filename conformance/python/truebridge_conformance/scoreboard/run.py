"""Runs the programs: those of a pair one after another in a process, and what came out wrong again by itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from truebridge_conformance.scoreboard import verdicts
from truebridge_conformance.scoreboard.frameworks import ENVIRONMENT, HOST, ON_THE_HOST
from truebridge_conformance.scoreboard.programs import OURS, Cell, Program
from truebridge_conformance.scoreboard.verdicts import Outcome, Ran

#: The folder that this package lies in.
HOME = Path(__file__).parents[2]

BATCH = Path(__file__).with_name("batch.py")

#: What an error of the driver says: what runs after it in the same process is not judged by itself.
BROKEN = re.compile(r"CUDA error|CUDA_ERROR|cudaError|illegal memory|misaligned address|device-side assert")


@dataclass(frozen=True)
class Judged:
    """A cell with its verdict."""

    cell: Cell
    outcome: Outcome
    program: str = ""
    #: What the first run saw, where a second one decides.
    before: Outcome | None = None


@dataclass(frozen=True)
class Task:
    """A program to run, and the cell that it judges."""

    cell: Cell
    program: Program
    #: Its file in the folder of its group.
    name: str


@dataclass
class Run:
    """How programs are run."""

    folder: Path
    #: Rounds of a race.
    repeat: int = 10
    #: Seconds that a program may take, without the imports of a batch.
    seconds: float = 60
    #: Seconds more for a program in a separate process, which imports the frameworks.
    start: float = 30
    #: Processes side by side.
    jobs: int = 2
    #: When no program is started any more, as ``time.monotonic`` has it.
    deadline: float = float("inf")
    #: The modules and distributions that the programs find: those of this interpreter.
    python: Sequence[str] = field(default_factory=lambda: [sys.executable])

    def judge(self, cells: Sequence[Cell]) -> list[Judged]:
        """Judge cells. Those of one pair, device and exchange share a process where they can."""
        self.folder.mkdir(parents=True, exist_ok=True)
        judged: dict[int, Judged] = {}
        groups: dict[tuple[str, ...], list[tuple[int, Task]]] = {}
        for number, cell in enumerate(cells):
            program = cell.program(self.repeat)
            if program is None:
                judged[number] = Judged(cell, Outcome("not offered", "no function for it is documented"))
                continue
            name = re.sub(r"\W+", "_", cell.asked.name) + ".py"
            groups.setdefault(cell.key[:4], []).append((number, Task(cell, program, name)))
        # The longest start and races come first, so that no process is left over at the end.
        order = sorted(groups, key=lambda group: _rank(groups[group][0][1].cell))
        with ThreadPoolExecutor(self.jobs) as pool:
            futures = [(group, pool.submit(self._group, group, [task for _, task in groups[group]])) for group in order]
            for group, future in futures:
                for (number, _), one in zip(groups[group], future.result(), strict=True):
                    judged[number] = one
        return [judged[number] for number in range(len(cells))]

    def _group(self, group: tuple[str, ...], tasks: list[Task]) -> list[Judged]:
        folder = self.folder / "-".join(group)
        folder.mkdir(parents=True, exist_ok=True)
        for task in tasks:
            (folder / task.name).write_text(task.program.text, encoding="utf-8")
        outcomes: list[Outcome] = []
        while len(outcomes) < len(tasks) and time.monotonic() < self.deadline:
            outcomes += self._batch(folder, tasks[len(outcomes) :])
        judged = []
        for task, first in zip(tasks, outcomes, strict=False):
            doubtful = first.verdict in ("wrong", "could not run") or BROKEN.search(first.text)
            if doubtful and time.monotonic() < self.deadline:
                judged.append(Judged(task.cell, self.alone(folder, task), task.program.text, first))
            else:
                judged.append(Judged(task.cell, first, task.program.text))
        rest = tasks[len(judged) :]
        return judged + [Judged(task.cell, Outcome("not run"), task.program.text) for task in rest]

    def _batch(self, folder: Path, tasks: list[Task]) -> list[Outcome]:
        """Run programs in one process up to the first that ends it, or breaks its device. Return their outcomes."""
        for task in tasks:
            for end in ("out", "err", "done"):
                (folder / f"{task.name}.{end}").unlink(missing_ok=True)
        command = [*self.python, os.fspath(BATCH), os.fspath(folder), str(self.seconds), *(task.name for task in tasks)]
        # All of them take a fraction of this; the process watches each of them itself.
        limit = min(self.seconds * 4, max(self.deadline - time.monotonic(), 1) + self.seconds)
        ran = self._process(command, tasks[0].cell, folder, limit)
        outcomes: list[Outcome] = []
        for task in tasks:
            path = folder / task.name
            if not Path(f"{path}.err").is_file():
                break
            is_done = Path(f"{path}.done").is_file()
            out, err = (_read(Path(f"{path}.{end}")) for end in ("out", "err"))
            hung = not is_done and (ran.hung or "Timeout (" in err)
            outcome = self._judged(task, path, Ran(out, err, 1 if is_done else ran.status, hung))
            outcomes.append(outcome)
            if BROKEN.search(outcome.text):
                break
        # A process that does not even start a program is the failure of the first.
        return outcomes or [Outcome("could not run", verdicts.shortened(ran.err) or f"exit {ran.status}")]

    def alone(self, folder: Path, task: Task) -> Outcome:
        """Run a program as a reader does: in a separate process."""
        path = folder / task.name
        command = [*self.python, "-X", "faulthandler", os.fspath(path)]
        return self._judged(task, path, self._process(command, task.cell, folder, self.seconds + self.start))

    def _judged(self, task: Task, path: Path, ran: Ran) -> Outcome:
        return verdicts.judge(task.program, os.fspath(path), ran, task.cell.asked.refusal, self.seconds)

    def _process(self, command: list[str], cell: Cell, folder: Path, limit: float) -> Ran:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(cell),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        try:
            out, err = process.communicate(timeout=limit)
            return Ran(out, err, process.returncode)
        except subprocess.TimeoutExpired:
            # `faulthandler` says where it is.
            process.send_signal(signal.SIGABRT)
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        return Ran(out, err, process.returncode, hung=True)


def _rank(cell: Cell) -> tuple[bool, int]:
    """Return a key by which cells with GPUs, and frameworks that take long to start, come first."""
    return cell.on == HOST, -(cell.source.starts + cell.target.starts)


def environment(cell: Cell) -> dict[str, str]:
    """Return the environment of a program. Only those of this package find it."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and not _has_package(one)]
    if cell.by == OURS:
        path.insert(0, os.fspath(HOME))
        path += [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and _has_package(one)]
    return {
        **own,
        **ENVIRONMENT,
        **(ON_THE_HOST if cell.on == HOST else {}),
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _has_package(folder: str) -> bool:
    return (Path(folder) / "truebridge").is_dir()


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
