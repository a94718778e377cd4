"""Give the functions that are written in Rust their docstrings: the stub has signatures, the sources have the text."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import griffe

SOURCES = Path(__file__).parents[2] / "crates/bridge-python/src"

#: A documented item that Python sees: the comment, the attributes, and the name.
ITEM = re.compile(r"((?:^ *///.*\n)+)((?:^ *#\[.*\]\n)*)^ *(?:pub(?:\([\w ]+\))? )?(fn|struct|enum) (?:r#)?(\w+)", re.M)
SEEN = re.compile(r"#\[(pyfunction|pyclass|getter|new|staticmethod|pyo3)")
SIGNATURE = re.compile(r"signature = (\(.*\))\)\]")
NAME = re.compile(r'name = "(\w+)"')


def items() -> dict[str, tuple[str, str | None]]:
    """Return the text and the signature of each item, by the name that Python has for it."""
    found = {}
    for file in sorted(SOURCES.glob("*.rs")):
        for comment, attributes, _, name in ITEM.findall(file.read_text()):
            if SEEN.search(attributes):
                named, signature = NAME.search(attributes), SIGNATURE.search(attributes)
                text = textwrap.dedent(re.sub(r"^ *///", "", comment, flags=re.M)).strip()
                found[named[1] if named else name] = (text, signature[1] if signature else None)
    return found


class RustDocstrings(griffe.Extension):
    """Fill in what the stub of the extension module leaves out."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Visit the stub once the package is loaded. Docstrings that the stub has stay."""
        core = pkg["_core"]
        for name, (text, signature) in items().items():
            for owner in (core, *core.classes.values()):
                if owner is core and signature:
                    callable_in(core, name, signature)
                item = owner.members.get(name)
                if item is not None and item.docstring is None:
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
