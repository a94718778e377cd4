"""The table of frameworks, and the lists that are written by hand because type checkers read them."""

from __future__ import annotations

import itertools
import typing
from pathlib import Path

import pytest

import truebridge as tb
from truebridge import _core, _frameworks

STUB = Path(_frameworks.__file__).parents[1] / "_core.pyi"
NAMES = list(_frameworks.ALL)


def test_the_table_is_that_of_rust() -> None:
    assert tuple(NAMES) == _core.FRAMEWORKS
    files = {file.stem for file in Path(_frameworks.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {*NAMES}


def test_the_stub_names_every_target() -> None:
    (line,) = (line for line in STUB.read_text().splitlines() if line.startswith("Target = "))
    assert typing.get_args(eval(line.partition("=")[2], {"Literal": typing.Literal})) == (*NAMES, "tensorflow1")


def test_every_framework_has_its_functions() -> None:
    assert {f"to_{name}" for name in NAMES} == {name for name in tb.__all__ if name.startswith("to_")}
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
