"""Reports what this package can do here, and what prevents the rest."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import IO

from .. import _core
from .._frameworks.table import ALL, FOLDERS, SPARING
from ..errors import of_kind
from . import findings, probe
from .findings import Facts
from .progress import PERIOD
from .report import Framework, Gpu, Matrix, Pair, Report

__all__ = ["doctor"]

#: Runs a probe with the caller's path, so that it finds the caller's frameworks, and nothing else.
_PROGRAM = "import os, sys; sys.path[:] = sys.argv.pop(1).split(os.pathsep); "
_PROGRAM += "from truebridge.diagnostics import probe; probe.main(sys.argv[1:])"


def doctor(*, timeout: float = 120.0) -> Report:
    """Report what this package can do on this machine, and what prevents the rest.

    Each framework is imported in a separate process, and none in this one, so that a framework that crashes or hangs is
    a finding too. The memory settings of a framework that this process has already imported are read here.

    Parameters
    ----------
    timeout : float
        Seconds that each process may take. Two rounds of processes are started, or three if the frameworks do not work
        together.

    Returns
    -------
    Report
        Versions, devices, which pairs of frameworks are in place (``matrix``, for a compact tensor of float32 at an
        address that 64 divides), and ``findings``. ``str`` makes a page of it, and ``as_json`` JSON.

    Raises
    ------
    BridgeValueError
        If ``timeout`` is not a positive number.
    BridgeImportError
        If this program has no Python executable that can be started.

    Examples
    --------
    >>> import truebridge as tb
    >>> report = tb.doctor()
    >>> print(report)
    truebridge ...
    >>> todo = [finding.advice for finding in report.findings]
    >>> wanted = ("torch", "numpy", "cpu")
    >>> [pair.method for pair in report.matrix.pairs if (pair.source, pair.target, pair.device) == wanted]
    ['in place']
    """
    facts = _probed(timeout)
    driver, gpus = facts["driver"], len(facts["driver"].get("devices", []))
    healthy = [name for name in ALL if "profile" in facts[name]]
    modules = _imported()
    imported = list(modules)
    tried = _paired(healthy, imported, timeout)
    found = [*findings.of_driver(driver)]
    frameworks = []
    for name in (*ALL, *FOLDERS):
        known = facts.get(name, {"installed": False})
        if not known["installed"]:
            continue
        here = probe.settings(name, modules[name]) if gpus and name in modules else {}
        settings = {"allocator": None, **known, **here}
        columns = (known.get("version"), known.get("build"), known.get("devices"), settings["allocator"])
        frameworks.append(Framework(name, *columns, name in imported))
        if name in FOLDERS:
            found += findings.of_folder(name, known)
            continue
        found += findings.of_framework(name, known, gpus)
        if gpus and known.get("devices"):
            found += findings.of_settings(name, settings)
    found += findings.of_none(frameworks)
    found += findings.of_imports(imported, gpus)
    found += findings.of_pairs(tried)
    return Report(
        version=_core.__version__,
        python=platform.python_version(),
        executable=sys.executable,
        driver=driver.get("version"),
        module=driver.get("module"),
        gpus=tuple(
            Gpu(gpu["name"], gpu["memory"], (gpu["capability"][0], gpu["capability"][1]))
            for gpu in driver.get("devices", [])
        ),
        frameworks=tuple(frameworks),
        missing=tuple(name for name in ALL if not facts[name]["installed"]),
        matrix=_matrix(tried),
        findings=tuple(found),
    )


def _probed(timeout: float) -> dict[str, Facts]:
    """Return the facts of the driver and of each framework."""
    check_seconds("timeout", timeout)
    check_executable("doctor")
    named = [name for name in FOLDERS if os.environ.get(_core.FRAMEWORKS[name] or "")]
    probes = {name: [probe, name] for probe, names in (("framework", ALL), ("folder", named)) for name in names}
    return ask({"driver": ["driver"], **probes}, timeout)


def check_seconds(name: str, seconds: float) -> None:
    """Refuse a time that is not a positive number."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise of_kind("argument", f"{name} must be a positive number of seconds, not {seconds!r:.80}")


def check_executable(command: str) -> None:
    """Refuse to start a process if there is no Python executable."""
    if not os.access(sys.executable or "", os.X_OK) or getattr(sys, "frozen", False):
        text = f"cannot start a Python from this program: run `python -m truebridge {command}` with the Python"
        raise of_kind("missing", f"{text} that has the frameworks")


def _imported() -> dict[str, ModuleType]:
    """Return the frameworks that this process has imported, in that order."""
    loaded = [(name, sys.modules.get(name)) for name in list(sys.modules) if name in ALL]
    return {name: module for name, module in loaded if module is not None}


def _paired(healthy: list[str], imported: list[str], timeout: float) -> list[tuple[list[str], Facts]]:
    """Return the orders in which the frameworks were imported into one process, and the results.

    The first is the caller's. Others are tried only after one that does not work.
    """
    own = [*(name for name in imported if name in healthy), *(name for name in healthy if name not in imported)]
    tried = []
    for order in dict.fromkeys(map(tuple, (own, healthy, healthy[::-1]))):
        if len(order) < 2:
            break
        # Without the variables a framework may take the whole GPU, and this process needs little of it.
        found = ask({"pairs": ["pairs", *order]}, timeout, SPARING)
        tried.append((list(order), found["pairs"]))
        if "pairs" in tried[-1][1]:
            break
    return tried


def _matrix(tried: Sequence[tuple[Sequence[str], Facts]]) -> Matrix:
    found = (facts["pairs"] for _, facts in tried if "pairs" in facts)
    return Matrix(tuple(Pair(**pair) for pair in next(found, [])))


def ask(
    probes: Mapping[str, Sequence[str]],
    timeout: float,
    environment: Mapping[str, str] | None = None,
    hear: Callable[[str], None] | None = None,
) -> dict[str, Facts]:
    """Return what each probe prints, or under ``"ended"`` how its process ended without printing it.

    ``hear`` takes what the first of them has printed so far, again and again.
    """
    ended = _run(list(probes.values()), timeout, environment or {}, hear)
    return {name: _read(*one, timeout) for name, one in zip(probes, ended, strict=True)}


def _read(code: int | None, out: str, error: str, timeout: float) -> Facts:
    try:
        facts = json.loads(out.rpartition("\n")[2]) if code == 0 else None
    except ValueError:
        facts = None
    if isinstance(facts, dict):
        return facts
    if code is None:
        return {"installed": True, "ended": ("hang", f"has not ended after {timeout:g} s")}
    how = f"is killed by {signal.Signals(-code).name}" if code < 0 else f"ends the process with status {code}"
    last = [line.strip()[:300] for line in error.splitlines() if line.strip()][-1:]
    return {"installed": True, "ended": ("crash", ": ".join([how, *last]))}


def _run(
    probes: Sequence[Sequence[str]],
    timeout: float,
    environment: Mapping[str, str],
    hear: Callable[[str], None] | None = None,
) -> list[tuple[int | None, str, str]]:
    """Run probes side by side. Return the exit status of each, ``None`` if it took too long, and what it printed."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    env = {**os.environ, **environment}
    with contextlib.ExitStack() as stack:
        started = []
        for arguments in probes:
            # Files, which no process waits for as for a pipe that is full.
            out, error = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            command = [sys.executable, "-c", _PROGRAM, path, *arguments]
            # In its own group: what it has started ends with it.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=error, env=env, start_new_session=True
            )
            stack.callback(_end, process)
            started.append((process, out, error))
        deadline = time.monotonic() + timeout
        while hear and started[0][0].poll() is None and time.monotonic() < deadline:
            hear(_text(started[0][1]))
            _status(started[0][0], min(deadline, time.monotonic() + PERIOD))
        return [(_status(process, deadline), _text(out), _text(error)) for process, out, error in started]


def _status(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _text(file: IO[bytes]) -> str:
    # Its position is that of the process, which may still write.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
