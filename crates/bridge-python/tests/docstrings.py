"""Docstrings in NumPy's style, for the tests of both packages: the one for TensorFlow 1.x has Python 3.7."""

from __future__ import annotations

import builtins
import doctest
import inspect
import linecache
import re
from typing import Any

#: What shows of a name in a section: ``x : tensor``, ``name, target``.
ENTRY = re.compile(r"^(\w+(?:, \w+)*)(?: : .+)?$", re.M)
SECTION = re.compile(r"^([A-Z][\w ]*)\n-+$", re.M)
#: The order of the sections.
ORDER = ["Parameters", "Attributes", "Returns", "Yields", "Raises", "Warns", "Notes", "See Also", "Examples"]

SUMMARY = re.compile(r"[A-Z`].{,115}[.]")


def sections(thing: Any) -> dict[str, str]:
    """Return the sections of a docstring by their titles. The text before the first has the empty title."""
    title, *rest = SECTION.split(inspect.getdoc(thing) or "")
    return {"": title, **{rest[i]: rest[i + 1] for i in range(0, len(rest), 2)}}


def entries(section: str) -> list[str]:
    return [name for names in ENTRY.findall(section) for name in names.split(", ")]


def check_the_summary(found: dict[str, str]) -> None:
    summary = found[""].splitlines()[0] if found[""] else ""
    assert SUMMARY.fullmatch(summary), summary
    titles = list(found)[1:]
    assert titles == sorted(titles, key=ORDER.index)
    assert not re.search(r"^ *(Raises an?|Returns) ", found[""], re.M), "say that in a section"


def check_the_function(thing: Any, found: dict[str, str], result: str) -> None:
    """Compare the sections with the signature. ``result`` is the section for what is returned, or empty."""
    parameters = [one for one in inspect.signature(thing).parameters if one not in ("self", "cls")]
    assert entries(found.get("Parameters", "")) == parameters
    assert "Raises" in found or not parameters
    assert {"Returns", "Yields"} & set(found) == {result} - {""}


def source_of(text: str) -> str:
    """Return the program that an example is."""
    return "\n".join(example.source for example in doctest.DocTestParser().get_examples(text))


def check_the_example(name: str, text: str) -> None:
    """Run an example, which prints what it says."""
    assert "doctest:" not in text, "an example runs everywhere, or a table says where"
    test = doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, name, None, 0)
    printed: list[str] = []
    files = {f"<doctest {name}[{number}]>": example.source for number, example in enumerate(test.examples)}
    for file, source in files.items():
        # TensorFlow reads the sources of what it traces.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    try:
        done = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=printed.append)
    finally:
        for file in files:
            del linecache.cache[file]
        # The last result that was shown.
        vars(builtins).pop("_", None)
    assert not done.failed, "".join(printed)
    assert done.attempted > 1
