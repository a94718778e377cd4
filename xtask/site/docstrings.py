"""Give functions that no file of Python spells out their docstrings.

Of those that are written in Rust the stub has the signatures, and the sources have the text. Those of pairs are made
when their module is imported.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import griffe

sys.path.insert(0, str(Path(__file__).parent))
import frameworks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CRATES = Path(__file__).parents[2] / "crates"
SOURCES = [
    *sorted((CRATES / "bridge-python/src").glob("*.rs")),
    CRATES / "bridge-tensorflow/src/graph/python.rs",
]
OPTIONS = CRATES / "bridge-python/src/options.rs"
KEYWORDS = CRATES / "bridge-python/src/docs/keywords.txt"
PACKAGE = CRATES / "bridge-python/python/truebridge"

#: A documented item that Python sees: the indentation, the comment, the attributes, and the name.
ITEM = re.compile(
    r"^( *)(///.*\n(?: *(?:///|#\[doc = ).*\n)*)((?: *#\[(?:.*|.*\n(?:.*\n){1,2}.*)\]\n)*) *(?:pub(?:\([\w ]+\))? )?"
    r"(?:fn|struct|enum) (?:r#)?(\w+)",
    re.M,
)
INCLUDED = re.compile(r'^ *#\[doc = include_str!\("(.*)"\)\]\n', re.M)
SEEN = re.compile(r"#\[(pyfunction|pyclass|getter|new|staticmethod|pyo3)")
#: The signature that a reader sees, where it differs from what the function takes.
SIGNATURE = re.compile(r"text_signature = \"(\(.*?\))\"|signature = (\(.*?\))\)\]", re.S)
NAME = re.compile(r'name = "(\w+)"')
IMPL = re.compile(r"^impl(?:<.*?>)? (\w+)", re.M)

#: Functions with the keywords of conversions, and the keywords in the macro that defines them.
WITH_KEYWORDS = re.compile(r"^takes_keywords! \{\n(.*?)^\}", re.M | re.S)
HEAD = re.compile(r"^fn (\w+)\(([\w, ]+); keywords\)", re.M)
DEFAULTS = re.compile(r"signature = \(\s*\$\(\$argument,\)\+ (\*,.*?), \*\*unknown\s*\)", re.S)


#: The public names, which have a place in the reference.
NAMES = set(re.findall(r'^    "(\w+)",$', (PACKAGE / "__init__.py").read_text(), re.M))


class Item(NamedTuple):
    """What the sources say of one item. ``owner`` is the class of a method, or empty."""

    owner: str
    name: str
    text: str
    signature: str | None


def items() -> Iterator[Item]:
    """Yield the documented items under the names that Python has for them."""
    for file in SOURCES:
        source = written_out(file.read_text())
        classes: dict[str, str] = {}
        for found in ITEM.finditer(source):
            indentation, comment, attributes, name = found.groups()
            if not SEEN.search(attributes):
                continue
            named, signature = NAME.search(attributes), SIGNATURE.search(attributes)
            parts = INCLUDED.split(comment)
            parts[1::2] = ((file.parent / place).read_text() + "\n" for place in parts[1::2])
            text = "".join(parts)
            text = re.sub(r"^ */// ?", "", text, flags=re.M).strip()
            owner = IMPL.findall(source, 0, found.start())[-1] if indentation else ""
            seen = named[1] if named else name
            if not indentation:
                classes[name] = seen
            yield Item(classes.get(owner, owner), seen, text, signature and (signature[1] or signature[2]))


def written_out(source: str) -> str:
    """Return a source with the functions of ``takes_keywords!`` as the macro defines them."""
    (defaults,) = DEFAULTS.findall(OPTIONS.read_text())
    head = rf"#[pyfunction]\n#[pyo3(signature = (\2, {' '.join(defaults.split())}))]\nfn \1("
    return WITH_KEYWORDS.sub(lambda block: HEAD.sub(head, textwrap.dedent(block[1])), source)


class RustDocstrings(griffe.Extension):
    """Fill in what the stub of the extension module leaves out, and what is made at run time."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Visit the stub once the package is loaded. Docstrings that the stub has stay."""
        core = pkg["_core"]
        # Else the choices of a parameter, which are strings, are taken for names.
        core.set_member("annotations", griffe.Alias("annotations", "__future__.annotations"))
        for made in core.classes.values():
            # Classes of Rust have no ``__init__``, which is where griffe looks for parameters.
            if "__new__" in made.members:
                made.set_member("__init__", made.members["__new__"])
        for owner, name, text, signature in items():
            if not owner and signature:
                callable_in(core, name, signature)
            place = core.members.get(owner) if owner else core
            item = place and place.members.get(name)
            if item and item.docstring is None:
                item.docstring = docstring(text, item)
        for function in pairs():
            put(pkg["_frameworks.pairs"], function.__name__, str(inspect.signature(function)), function.__doc__)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Turn what only reStructuredText has into Markdown: code after ``::``, and the list of "See Also"."""
        if obj.docstring:
            text, *also = re.split(r"(?<=\nSee Also\n--------\n)", obj.docstring.value, maxsplit=1)
            also = [re.sub(r"^([\w.]+) : ", r"- `\1`: ", part, flags=re.M) for part in also]
            obj.docstring.value = linked(re.sub(r"::$", ":", "".join([text, *also]), flags=re.M))


def linked(text: str) -> str:
    """Return a docstring whose "As for ``name``" is a link to that name."""

    def link(found: re.Match[str]) -> str:
        return f"{found[1]} [`{found[2]}`][truebridge.{found[2]}]" if found[2] in NAMES else found[0]

    return re.sub(r"\b([Aa]s (?:for|from)) ``(\w+)``", link, text)


def callable_in(core: griffe.Module, name: str, signature: str) -> None:
    """Replace by a function what the stub declares otherwise: an attribute, ``_To[Tensor]``, or overloads."""
    declared, overloads = core.members.get(name), core.overloads.pop(name, None)
    if not overloads and not isinstance(declared, griffe.Attribute):
        return
    returned = "Any" if overloads else re.sub(r"^\w+\[(.*)\]$", r"\1", str(declared.annotation))
    put(
        core,
        name,
        f"{annotated(core, signature)} -> {returned}",
        declared and declared.docstring and declared.docstring.value,
    )
    core[name].overloads = overloads or None


def docstring(text: str, of: griffe.Object) -> griffe.Docstring:
    """Return a docstring. Members of a class get no parser from the handler of mkdocstrings."""
    return griffe.Docstring(linked(text), parent=of, parser="numpy")


def put(module: griffe.Module, name: str, signature: str, text: str | None) -> None:
    """Put a function with this signature and docstring into a module."""
    made = griffe.visit(module.path, filepath=module.filepath, code=f"def {name}{signature}: ...")[name]
    made.docstring = text and docstring(text, made)
    module.set_member(name, made)


def annotated(core: griffe.Module, signature: str) -> str:
    """Return a signature of Rust with the types that the stub has for keywords."""
    types = {"x": "Any", "target": "Target", "stream": "Any"}
    types.update({name: str(member.annotation) for name, member in core["Keywords"].members.items()})
    (function,) = ast.parse(f"def function{signature.replace('=false', '=False')}: ...").body
    for parameter in (*function.args.args, *function.args.kwonlyargs):
        # As text: in code, griffe would take the strings of a Literal for names.
        parameter.annotation = ast.Constant(types[parameter.arg])
    return f"({ast.unparse(function.args)})"


def pairs() -> Iterator[Callable[..., Any]]:
    """Run the module of the pairs without the extension module, and yield its functions."""
    with frameworks.package():
        module = importlib.import_module("truebridge._frameworks.pairs")
    yield from (made for name, made in vars(module).items() if name.startswith("convert_"))
