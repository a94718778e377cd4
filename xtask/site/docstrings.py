"""Give the functions that are written in Rust their docstrings: the stub has signatures, the sources have the text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import griffe

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = Path(__file__).parents[2] / "crates/bridge-python/src"

#: A documented item that Python sees: the indentation, the comment, the attributes, and the name.
ITEM = re.compile(
    r"^( *)(///.*\n(?: *///.*\n)*)((?: *#\[.*\]\n)*) *(?:pub(?:\([\w ]+\))? )?(?:fn|struct|enum) (?:r#)?(\w+)", re.M
)
SEEN = re.compile(r"#\[(pyfunction|pyclass|getter|new|staticmethod|pyo3)")
SIGNATURE = re.compile(r"signature = (\(.*\))\)\]")
NAME = re.compile(r'name = "(\w+)"')
IMPL = re.compile(r"^impl(?:<.*?>)? (\w+)", re.M)


class Item(NamedTuple):
    """What the sources say of one item. ``owner`` is the class of a method, or empty."""

    owner: str
    name: str
    text: str
    signature: str | None


def items() -> Iterator[Item]:
    """Yield the documented items under the names that Python has for them."""
    for file in sorted(SOURCES.glob("*.rs")):
        source = file.read_text()
        for found in ITEM.finditer(source):
            indentation, comment, attributes, name = found.groups()
            if not SEEN.search(attributes):
                continue
            named, signature = NAME.search(attributes), SIGNATURE.search(attributes)
            text = re.sub(r"^ */// ?", "", comment, flags=re.M).strip()
            owner = IMPL.findall(source, 0, found.start())[-1] if indentation else ""
            yield Item(owner, named[1] if named else name, text, signature and signature[1])


class RustDocstrings(griffe.Extension):
    """Fill in what the stub of the extension module leaves out."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Visit the stub once the package is loaded. Docstrings that the stub has stay."""
        core = pkg["_core"]
        for owner, name, text, signature in items():
            if not owner and signature:
                callable_in(core, name, signature)
            place = core.members.get(owner) if owner else core
            item = place and place.members.get(name)
            if item and item.docstring is None:
                item.docstring = griffe.Docstring(text, parent=item)


def callable_in(core: griffe.Module, name: str, signature: str) -> None:
    """Put a function in the place of what the stub declares otherwise: an attribute, ``_To[Tensor]``, or overloads."""
    declared, overloads = core.members.get(name), core.overloads.pop(name, None)
    if not overloads and not isinstance(declared, griffe.Attribute):
        return
    returned = "Any" if overloads else re.sub(r"^\w+\[(.*)\]$", r"\1", str(declared.annotation))
    code = f"def {name}{signature} -> {returned}: ..."
    made = griffe.visit(core.path, filepath=core.filepath, code=code)[name]
    made.overloads = overloads or None
    made.docstring = declared.docstring if declared else None
    core.set_member(name, made)
