"""The extension module that a suite's tests import: built outside of the checkout, where the user has not built it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from truebridge_conformance.judge.errors import JudgeError
from truebridge_conformance.judge.suites import Suite

#: What a build needs: the programs of which one must be there, and what provides it.
TOOLS = {
    "cmake": (("cmake",), f"{sys.executable} -m pip install cmake ninja"),
    "a C++ compiler": (("c++", "g++", "clang++"), "install g++, or name one in CXX"),
}

#: Lines of a failed build that are shown.
SHOWN = 15


def extension(row: Suite, checkout: Path, built: Path | None, out: Path) -> Path | None:
    """Return the folder that the tests import their module from, if they have one: ``built``, or a build in ``out``.

    Raises
    ------
    JudgeError
        The folder has no such module, a tool is missing, or the build fails.
    """
    if not row.extension:
        return None
    if built is None:
        return _build(row, checkout, out)
    if not any(built.glob(f"{row.extension}.*")):
        raise JudgeError(
            f"{built} has no {row.extension}: pass the folder that the build of {row.project} puts it into"
        )
    return built.resolve()


def _build(row: Suite, checkout: Path, out: Path) -> Path:
    # pip puts programs next to the interpreter.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    for name, (programs, advice) in TOOLS.items():
        named = os.environ.get("CXX") if name != "cmake" else None
        if not any(shutil.which(program, path=path) for program in filter(None, (named, *programs))):
            raise JudgeError(
                f"the tests of {row.project} import {row.extension}, which must be built, and {name} is missing: "
                f"{advice}; or pass the folder of one that is built with --extension"
            )
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=path) else []
    python = f"-DPython_EXECUTABLE={sys.executable}"
    configure = ["-S", os.fspath(checkout), "-B", os.fspath(out), *generator, "-DCMAKE_BUILD_TYPE=Release", python]
    for arguments in (configure, ["--build", os.fspath(out), "--target", row.extension]):
        done = subprocess.run(
            ["cmake", *arguments],
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            lines = "\n".join(done.stdout.strip().splitlines()[-SHOWN:])
            raise JudgeError(
                f"{row.extension} of {checkout} did not build (are its submodules there? "
                f"git submodule update --init):\n{lines}"
            )
    return out / row.built_in
