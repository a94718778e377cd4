"""Write the lists of frameworks that a type checker reads as text, because it cannot follow a table.

A list is between the comments ``# adapters: begin NAME`` and ``# adapters: end`` of a file of ``FILES``. Its entries
are the frameworks of ``table.rs``, with what the rows of ``truebridge._frameworks`` say of them. Nothing has to be
compiled for that, and no framework is imported. ``cargo xtask generate tables`` writes every list; with ``--check`` it
names the files whose lists are stale.
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "crates/bridge-python/python/truebridge"
TABLE = ROOT / "crates/bridge-frameworks/src/table.rs"
KEYWORDS = ROOT / "crates/bridge-python/src/docs/keywords.txt"

#: The files with lists.
FILES = tuple(PACKAGE / name for name in ("__init__.py", "_core.pyi", "_frameworks/pairs.py"))
#: A row of Rust's table: the name, the kind of source, and its arguments.
ROW = re.compile(r'\n +\w+ \{\n +name: "(\w+)".*?source: Source::(\w+)\((.*?)\),\n', re.S)
#: A list with its marks: the indentation, the rest of the first mark, the name, the entries, and the second mark, with
#: the empty line before it that the formatter wants after some entries.
MARKED = re.compile(r"^( *)(# adapters: begin (\w+)\n)((?:.*\n)*?)(\n? *# adapters: end\n)", re.M)


@cache
def names() -> dict[str, str | None]:
    """Return what ``_core.FRAMEWORKS`` is: the variable of each framework, or ``None`` for one that is imported."""
    rows = ROW.findall(TABLE.read_text())
    return {name: argument.strip('"') if source == "Folder" else None for name, source, argument in rows}


@contextmanager
def package() -> Iterator[None]:
    """Let modules of the package be imported without its extension module, which is replaced by names."""
    core: Any = ModuleType("truebridge._core")
    core.KEYWORDS, core.FRAMEWORKS = KEYWORDS.read_text(), names()
    core.__getattr__ = lambda name: SimpleNamespace(__name__=name)
    stand_in: Any = ModuleType("truebridge")
    stand_in.__path__, stand_in._core = [str(PACKAGE)], core
    before = {name for name in sys.modules if name.startswith("truebridge.")}
    with mock.patch.dict(sys.modules, {"truebridge": stand_in, "truebridge._core": core}):
        for name in before - {"truebridge._core"}:
            del sys.modules[name]
        yield


@cache
def rows() -> Any:
    """Return the module ``truebridge._frameworks.table``: the rows that Python has."""
    with package():
        return importlib.import_module("truebridge._frameworks.table")


def labels() -> dict[str, str]:
    """Return what each framework is called in prose."""
    every = {**rows().ALL, **rows().FOLDERS}
    return {name: every[name].label for name in names()}


def types() -> dict[str, str]:
    """Return the class of tensors of each framework that is imported, as a type checker knows it."""
    return {name: row.annotation or row.tensor for name, row in rows().ALL.items()}


def pairs() -> list[tuple[str, str, str]]:
    """Return the name of the function for each pair, and the names of the two frameworks."""
    every = rows().ALL
    both = itertools.permutations(every, 2)
    return [(f"convert_{every[one].alias}_to_{every[other].alias}", one, other) for one, other in both]


def imports() -> list[str]:
    """Return the modules of the classes of tensors."""
    return sorted(f"import {kind.partition('[')[0].rpartition('.')[0]}" for kind in types().values())


def target() -> list[str]:
    """Return the type of a target."""
    return ["Target = Literal[", *(f'    "{name}",' for name in names()), "]"]


def functions() -> list[str]:
    """Return the declarations of ``to_torch`` and so on."""
    return [f"to_{name}: _To[{kind}]" for name, kind in types().items()]


def overloads() -> list[str]:
    """Return the overloads of ``convert``, one for each target."""
    every = {**types(), **{name: row.tensor for name, row in rows().FOLDERS.items()}}
    lines = []
    for name in names():
        lines.append("@overload")
        lines.append(
            f'def convert(x: Any, target: Literal["{name}"], **keywords: Unpack[Keywords]) -> {every[name]}: ...'
        )
    return lines


def declared() -> list[str]:
    """Return the types of the functions for the pairs."""
    kinds = types()
    return [f"{function}: _Convert[{kinds[one]}, {kinds[other]}]" for function, one, other in pairs()]


def to() -> list[str]:
    """Return the names of ``to_torch`` and so on, as members of an import."""
    return [f"to_{name}," for name in sorted(types())]


def convert() -> list[str]:
    """Return the names of the functions for the pairs, as members of an import that shows them to others."""
    return sorted(f"{function} as {function}," for function, _, _ in pairs())


def public() -> list[str]:
    """Return the names of ``to_torch`` and so on, as strings."""
    return [f'"{name[:-1]}",' for name in to()]


LISTS: dict[str, Callable[[], list[str]]] = {
    made.__name__: made for made in (imports, target, functions, overloads, declared, to, convert, public)
}


def filled(file: Path) -> str:
    """Return the text of a file with every list as the tables have it."""
    text = file.read_text()
    if len(re.findall("# adapters: (?:begin|end)", text)) != 2 * len(MARKED.findall(text)):
        raise ValueError(f"{file} has a list without a begin or an end")

    def made(marked: re.Match[str]) -> str:
        entries = "".join(f"{marked[1]}{line}\n" for line in LISTS[marked[3]]())
        return f"{marked[1]}{marked[2]}{entries}{marked[5]}"

    return MARKED.sub(made, text)


def main(arguments: list[str]) -> int:
    """Write the lists of all files, or with ``--check`` print the files that would change."""
    stale = [(file, text) for file in FILES if (text := filled(file)) != file.read_text()]
    for file, text in stale:
        print(file.relative_to(ROOT))
        if arguments != ["--check"]:
            file.write_text(text)
    if stale and arguments == ["--check"]:
        print("the lists of frameworks in these files are stale: run `cargo xtask generate tables`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
