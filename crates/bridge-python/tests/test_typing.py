"""The types of the package: what type checkers read in it once it is installed, over stubs of the frameworks."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import typing
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import truebridge as tb
from truebridge import _frameworks, errors

numpy = pytest.importorskip("numpy")

FOLDER = Path(__file__).parent / "typed"
FILES = [FOLDER / "stated.py", FOLDER / "refused.py"]

#: The oldest Python that the package is for.
OLDEST = "3.10"

#: The lines of a file that a checker refuses.
Refused = dict[str, set[int]]


def run(python: Path, *arguments: str, cwd: Path) -> str:
    """Run a type checker as a program of an environment sees it, and return what it prints."""
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    # What the tests run over is not to be found, and no newer version is looked for.
    kept = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH", "VIRTUAL_ENV")}
    env = {**kept, "PATH": path, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=env, cwd=cwd)
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package into an environment of its own, and return the Python of that.

    The package is the one that the tests run over, or the wheel that ``TRUEBRIDGE_WHEEL`` names.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    if wheel := os.environ.get("TRUEBRIDGE_WHEEL"):
        zipfile.ZipFile(wheel).extractall(packages)
    else:
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(Path(tb.__file__).parent, packages / "truebridge", ignore=ignored)
    (packages / "numpy").symlink_to(Path(numpy.__file__).parent)
    for stubs in (FOLDER / "stubs").iterdir():
        shutil.copytree(stubs, packages / f"{stubs.name}-stubs")
    for row in _frameworks.ALL.values():
        module, _, name = row.tensor.rpartition(".")
        stub = packages / f"{module}-stubs"
        if module != "numpy" and not stub.exists():
            stub.mkdir()
            (stub / "__init__.pyi").write_text(f"class {name}: ...\n")
    return folder / "bin/python"


def mypy(python: Path, folder: Path) -> Refused:
    options = ["--strict", "--no-error-summary", "--python-version", OLDEST, "--config-file", ""]
    paths = ["--python-executable", str(python), "--cache-dir", str(folder / "cache")]
    lines = run(python, "mypy", *options, *paths, *(file.name for file in FILES), cwd=folder)
    return refused(re.findall(r"^(.*?):(\d+): error: ", lines, re.M), lines)


def pyright(python: Path, folder: Path) -> Refused:
    settings = {
        "include": [file.name for file in FILES],
        "pythonVersion": OLDEST,
        "typeCheckingMode": "strict",
        # The frameworks are stubs alone.
        "reportMissingModuleSource": False,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    text = run(python, "pyright", "--outputjson", "--project", str(folder), cwd=folder)
    found = json.loads(text)["generalDiagnostics"]
    places = [(one["file"], one["range"]["start"]["line"] + 1) for one in found if one["severity"] == "error"]
    return refused(places, json.dumps(found, indent=1))


def refused(places: list[tuple[str, Any]], text: str) -> Refused:
    """Return the refused lines by the names of their files."""
    # For the report of a test that fails.
    print(text)
    found: Refused = {file.name: set() for file in FILES}
    for file, line in places:
        found[Path(file).name].add(int(line))
    return found


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_checker_reads_the_types_that_the_page_names(
    checker: Callable[[Path, Path], Refused], installed: Path, tmp_path: Path
) -> None:
    pytest.importorskip(checker.__name__)
    for file in FILES:
        shutil.copy(file, tmp_path)
    lines = (FOLDER / "refused.py").read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# refused")}
    assert checker(installed, tmp_path) == {"stated.py": set(), "refused.py": marked}


def test_every_public_type_is_known(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    # NumPy's and Python's own types have unknown parts.
    options = ["--verifytypes", "truebridge", "--ignoreexternal", "--outputjson"]
    found = json.loads(run(installed, "pyright", *options, cwd=tmp_path))["typeCompleteness"]
    assert Path(found["packageRootDirectory"]).is_relative_to(installed.parents[1])
    unknown = [symbol["name"] for symbol in found["symbols"] if symbol["isExported"] and not symbol["isTypeKnown"]]
    ambiguous = [symbol["name"] for symbol in found["symbols"] if symbol["isExported"] and symbol["isTypeAmbiguous"]]
    assert unknown == ambiguous == []
    assert found["completenessScore"] == 1
    names = {symbol["name"] for symbol in found["symbols"]}
    assert {f"truebridge.{name}" for name in ("to_torch", "convert_tf_to_pytorch", "names.Client.watch")} <= names


#: Names of the stub alone: types, and the functions whose keywords are one type, which another test compares. And a
#: method that is a slot in the module, which has no signature.
STUB_ALONE = [
    "__all__",
    "CastTo",
    "Copier.__call__",
    "Device",
    "Keywords",
    "Order",
    "Profile",
    "Rank",
    "Stats",
    "T",
    "Target",
    "convert",
    "plan",
]


def test_the_stub_says_what_the_extension_module_has(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "alone").write_text("".join(f"truebridge._core.{name}\n" for name in STUB_ALONE))
    (tmp_path / "mypy.ini").write_text("[mypy]\nfollow_imports = skip\nignore_missing_imports = True\n")
    files = ["--allowlist", str(tmp_path / "alone"), "--mypy-config-file", str(tmp_path / "mypy.ini")]
    command = [sys.executable, "-m", "mypy.stubtest", "--concise", "--ignore-disjoint-bases", *files]
    packages = str(Path(tb.__file__).parent.parent)
    env = {**os.environ, "MYPYPATH": packages, "PYTHONPATH": os.pathsep.join(sys.path)}
    command.append("truebridge._core")
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_keywords_of_the_stub_are_those_of_conversions() -> None:
    tree = ast.parse(Path(tb.__file__).with_name("_core.pyi").read_text())
    (keywords,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Keywords")
    names = [ast.unparse(node.target) for node in keywords.body if isinstance(node, ast.AnnAssign)]
    for function in (tb.to_torch, tb.to_cupy, tb.to_numpy, tb.to_tensorflow):
        assert list(inspect.signature(function).parameters) == ["x", *names]
    for function in (tb.convert, tb.plan):
        assert list(inspect.signature(function).parameters) == ["x", "target", *names]


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
