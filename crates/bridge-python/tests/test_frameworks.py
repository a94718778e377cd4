"""The table of frameworks, and the lists that are written from it because type checkers read them."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import truebridge as tb
from truebridge import _core, _frameworks

ROOT = Path(__file__).parents[3]
LISTS = ROOT / "xtask/site/frameworks.py"
NAMES = list(_frameworks.ALL)


def test_the_table_is_that_of_rust() -> None:
    assert {name for name, variable in _core.FRAMEWORKS.items() if variable is None} == {*NAMES}
    assert [name for name in _core.FRAMEWORKS if name in _frameworks.ALL] == NAMES
    files = {file.stem for file in Path(_frameworks.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {*_core.FRAMEWORKS} == {*NAMES, *_frameworks.FOLDERS}


@pytest.mark.skipif(not LISTS.exists(), reason="not a checkout")
def test_the_lists_for_type_checkers_are_those_of_the_table() -> None:
    command = [sys.executable, str(LISTS), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.skipif(not LISTS.exists(), reason="not a checkout")
def test_a_list_that_is_stale_is_found_and_written(tmp_path: Path) -> None:
    """The new framework of this test has a row in Rust's table and in Python's, and nothing else."""
    for part in ("crates/bridge-python/python", "crates/bridge-python/src/docs", "crates/bridge-frameworks/src"):
        shutil.copytree(ROOT / part, tmp_path / part)
    script = tmp_path / "xtask/site/frameworks.py"
    script.parent.mkdir(parents=True)
    shutil.copy(LISTS, script)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run("--check").returncode == 0
    table = tmp_path / "crates/bridge-frameworks/src/table.rs"
    rows = table.read_text()
    start = rows.index("    NumPy {")
    row = rows[start : rows.index("    }", start)]
    table.write_text(rows.replace(row, f"{row}    }}\n{row.replace('NumPy', 'Made').replace('numpy', 'made')}"))
    package = tmp_path / "crates/bridge-python/python/truebridge"
    made = (package / "_frameworks/numpy.py").read_text().replace("numpy", "made").replace("NumPy", "Made")
    (package / "_frameworks/made.py").write_text(made)

    stale = run("--check")
    assert stale.returncode == 1
    assert {"__init__.py", "_core.pyi", "pairs.py"} == {Path(line).name for line in stale.stdout.splitlines()[:-1]}
    assert run().returncode == 0
    assert run("--check").returncode == 0
    stub, public = (package / "_core.pyi").read_text(), (package / "__init__.py").read_text()
    assert "to_made: _To[made.typing.NDArray[Any]]" in stub
    assert 'def convert(x: Any, target: Literal["made"]' in stub
    assert '"to_made",' in public and '"convert_made_to_tf",' in public and "        convert_tf_to_made,\n" in public


def test_a_program_can_list_the_targets() -> None:
    assert typing.get_args(tb.Target) == tuple(_core.FRAMEWORKS)


def test_every_framework_has_its_functions() -> None:
    # ONNX Runtime has values for sessions, and no adapter in Python.
    named = {name for name in tb.__all__ if name.startswith("to_")} - {"to_onnxruntime"}
    assert {f"to_{name}" for name in NAMES} == named
    pairs = itertools.permutations((row.alias for row in _frameworks.ALL.values()), 2)
    expected = {f"convert_{source}_to_{target}" for source, target in pairs}
    assert expected == {name for name in tb.__all__ if name.startswith("convert_")}


@pytest.mark.parametrize("name", NAMES)
def test_a_row_says_what_is(name: str) -> None:
    row, module = _frameworks.ALL[name], pytest.importorskip(name)
    if not row.on_host:
        pytest.skip("it needs a GPU")
    tensor = row.small(module, "cpu", 0)
    assert (type(tensor).__module__, type(tensor).__qualname__) == row.kind
    assert tb.to_numpy(tensor).shape == (_frameworks.SMALL,)
    assert tb.to_numpy(tensor).ctypes.data % _frameworks.ALIGNMENT == 0
    side = row.side(module, None)
    array = _frameworks.numpy.aligned(tb.to_numpy(tensor) + 1)  # type: ignore[attr-defined]
    assert side.to_host(side.of_host(array)).tolist() == array.tolist()
