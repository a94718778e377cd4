"""The types of the package: what a type checker reads in it, over stubs of the frameworks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import tensor_bridge as tb
from tensor_bridge import errors

pytest.importorskip("mypy")
pytest.importorskip("numpy")

FOLDER = Path(__file__).parent / "typed"


def checked(file: str, cache: Path) -> list[str]:
    """Return what mypy says of a file that uses the package that the tests run over."""
    package = Path(tb.__file__).parent.parent
    path = os.pathsep.join([str(FOLDER / "stubs"), str(package)])
    options = ["--strict", "--no-error-summary", "--python-version", "3.10", "--config-file", ""]
    command = [sys.executable, "-m", "mypy", *options, "--cache-dir", str(cache), str(FOLDER / file)]
    env = {**os.environ, "MYPYPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=env)
    assert not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if ": error: " in line]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


def test_types_are_what_the_page_says(cache: Path) -> None:
    assert checked("stated.py", cache) == []


def test_misuse_is_refused_where_it_stands(cache: Path) -> None:
    lines = (FOLDER / "refused.py").read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# refused")}
    found = {
        int(match[1]) for line in checked("refused.py", cache) if (match := re.search(r"refused\.py:(\d+):", line))
    }
    assert found == marked


def test_every_kind_is_in_the_type() -> None:
    kinds = set(typing.get_args(errors.Kind))
    assert set(errors._CLASSES) < kinds
    for kind in kinds - {"error"}:
        made = errors.of_kind(kind, "text")
        assert made.kind == kind
        assert type(made) is errors._CLASSES.get(kind, tb.BridgeRuntimeError)


def test_the_kinds_of_core_are_in_the_type() -> None:
    source = Path(__file__).parents[2] / "bridge-core/src/error.rs"
    if not source.is_file():
        pytest.skip("the sources of the crates are not here")
    (body,) = re.findall(r"pub enum ErrorKind \{(.*?)\n\}", source.read_text(), re.S)
    names = re.findall(r"^    ([A-Z]\w+),$", body, re.M)
    assert {re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower() for name in names} <= set(typing.get_args(errors.Kind))
