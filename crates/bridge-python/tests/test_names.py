"""A framework is named in its own room and in the tables, and elsewhere only for a reason that is written here.

Rooms are the crate of its adapter, its modules of ``_frameworks`` and of the suite's ``subjects``, and what is for one
framework alone. Comments, docstrings and tests name what they like. An entry that is not needed any more fails.
"""

from __future__ import annotations

import fnmatch
import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FRAMEWORK = re.compile(r"(?i)(?<![a-z])(torch|pytorch|cupy|numpy|jax|tensorflow1?)(?![a-z])")

#: Folders of code. ``benches`` and ``fuzz`` are programs about named frameworks, as tests are.
CODE = ("crates", "conformance", "xtask")
NOT_CODE = re.compile(r"(^|/)(tests?|examples|fuzz)/|/tests\.rs$|/test_[^/]*$")

#: Rooms and tables, where a framework is at home.
ROOMS = (
    "crates/bridge-torch/*",
    "crates/bridge-cupy/*",
    "crates/bridge-numpy/*",
    "crates/bridge-jax/*",
    "crates/bridge-tensorflow/*",
    "crates/bridge-capi/*",
    "crates/bridge-frameworks/src/table.rs",
    "crates/bridge-python/python/truebridge/_frameworks/*",
    "crates/bridge-python/python/truebridge/_autograd_*.py",
    "crates/bridge-python/python/truebridge/_compiled.py",
    "crates/bridge-python/python/truebridge/jax.py",
    "crates/bridge-python/python/truebridge/tensorflow*.py",
    "crates/bridge-python/python/truebridge/_operations.py",
    "crates/bridge-python/src/jax.rs",
    "crates/bridge-python/src/pytrees.rs",
    "crates/bridge-python/src/tensorflow*.rs",
    "conformance/python/truebridge_conformance/subjects/*",
    "conformance/python/truebridge_conformance/judge/suites.py",
    "conformance/python/truebridge_conformance/scoreboard/frameworks.py",
    "conformance/python/truebridge_conformance/sessions.py",
    "conformance/python/truebridge_conformance/python37.py",
    "conformance/src/rust/*",
    "conformance/src/runner/variants.rs",
    "xtask/src/tensorflow1.rs",
    "xtask/templates/*",
)

NUMPY_IS_A_TOOL = "reads and writes arrays of the host by NumPy, whatever the tensors are"
MODULES = "has modules, or the functions of modules, that are for one framework"
EXAMPLE = "the words of an error or a help name a pair as an example"
TENSORFLOW1 = "TensorFlow 1.15 has no module of its own to import: a folder and a function of `_core` stand for it"
COMMANDS = "a command of the check builds, lists or links this framework by name"

#: Why a file outside the rooms names a framework.
REASONS: dict[str, str] = {
    "crates/bridge-core/src/plan.rs": "the advice for a dtype that one framework alone has",
    "crates/bridge-frameworks/src/strangers.rs": "objects that are not tensors, by the package that they come from",
    "conformance/python/truebridge_conformance/_conformance.pyi": TENSORFLOW1,
    "conformance/python/truebridge_conformance/others.py": NUMPY_IS_A_TOOL,
    "conformance/src/fault/real.rs": "each fault is in the adapter of one framework",
    "conformance/src/lib.rs": "a feature of the crate",
    "conformance/src/python/extension.rs": TENSORFLOW1,
    "conformance/src/python/floor.rs": "calls the functions of each framework without the bridge: it is the bar",
    "conformance/src/python/mod.rs": "opens the adapters that run on request, and " + TENSORFLOW1,
    "conformance/src/python/remote.rs": "a Python 3.7 is the other process of this framework alone",
    "conformance/src/runner/sanitizer.rs": "how each framework is told to cache no memory",
    "conformance/src/runner/adapters.rs": "the table of adapters that run on request",
    "conformance/src/runner/mod.rs": "names the adapters that run on request for other modules",
    "conformance/src/runner/options.rs": EXAMPLE,
    "conformance/src/runner/planted.rs": "flaws are planted between two copies of one framework",
    "crates/bridge-core/src/layout.rs": EXAMPLE,
    "crates/bridge-frameworks/src/driver.rs": EXAMPLE,
    "crates/bridge-frameworks/src/foreign.rs": "knows what other producers' protocols say, and NumPy's is one of them",
    "crates/bridge-frameworks/src/interfaces.rs": "reads the array interface, whose fields are NumPy's",
    "crates/bridge/src/lib.rs": "features that the examples of a page of the documentation need",
    "crates/bridge-frameworks/src/objects.rs": TENSORFLOW1,
    "crates/bridge-pyo3/src/dtypes.rs": NUMPY_IS_A_TOOL,
    "crates/bridge-pyo3/src/lib.rs": NUMPY_IS_A_TOOL,
    "crates/bridge-python/python/truebridge/__init__.py": MODULES,
    "crates/bridge-python/python/truebridge/_bench.py": NUMPY_IS_A_TOOL,
    "crates/bridge-python/python/truebridge/_core.pyi": MODULES,
    "crates/bridge-python/python/truebridge/_formats.py": NUMPY_IS_A_TOOL,
    "crates/bridge-python/python/truebridge/_measure.py": NUMPY_IS_A_TOOL,
    "crates/bridge-python/python/truebridge/_onnxruntime.py": NUMPY_IS_A_TOOL,
    "crates/bridge-python/python/truebridge/_rdt.py": "Ray's own transports and buffers are for tensors of PyTorch",
    "crates/bridge-python/python/truebridge/_rooms.py": "a memory pool of PyTorch, and how PyTorch writes its dtypes",
    "crates/bridge-python/python/truebridge/autograd.py": "gradients cross between the two that have them",
    "crates/bridge-python/python/truebridge/files.py": NUMPY_IS_A_TOOL,
    "crates/bridge-python/python/truebridge/names.py": "returns a memory pool of PyTorch",
    "crates/bridge-python/src/containers.rs": "PyTorch's ParameterDict and ParameterList are containers by their class",
    "crates/bridge-python/src/copier.rs": "scalars of NumPy, whose memory does not stay, are known by their type",
    "crates/bridge-python/src/cross.rs": NUMPY_IS_A_TOOL,
    "crates/bridge-python/src/debug/last.rs": "knows which objects keep memory that is about to be freed",
    "crates/bridge-python/src/debug/mod.rs": TENSORFLOW1,
    "crates/bridge-python/src/debug/streams.rs": "finds the streams of a framework, which differ in how they are found",
    "crates/bridge-python/src/device.rs": "takes the device objects of other packages",
    "crates/bridge-python/src/lib.rs": "registers the functions of `convert` and of TensorFlow's modules",
    "crates/bridge-python/src/options.rs": "`detach` is a word of PyTorch",
    "crates/bridge-python/src/stats.rs": TENSORFLOW1,
    "crates/bridge/src/misuse.rs": "examples of what does not compile",
    "xtask/site/docstrings.py": "the site shows docstrings, whose style is NumPy's",
    "xtask/site/hooks.py": "the site's links to the pages of frameworks",
    "xtask/site/pictures.py": "pictures of the documentation, from reports that name frameworks",
    "xtask/site/tables.py": "tables of the documentation, from reports that name frameworks",
    "xtask/src/audit.rs": COMMANDS,
    "xtask/src/bundle.rs": COMMANDS,
    "xtask/src/check.rs": COMMANDS,
    "xtask/src/counts.rs": "the versions that the counts of conversions hold for",
    "xtask/src/features.rs": COMMANDS,
    "xtask/src/main.rs": COMMANDS,
    "xtask/src/new_adapter.rs": EXAMPLE,
    "xtask/src/tried.rs": COMMANDS,
    "xtask/src/venv.rs": COMMANDS,
}


def without_lists(text: str) -> str:
    """Return a text without the lists that stand between marks."""
    return re.sub(r"(?ms)^\s*(?:#|//) adapters: begin.*?adapters: end$", "", text)


def words_of_python(text: str) -> str:
    """Return the names and strings, without comments and docstrings."""
    words, before = [], tokenize.NEWLINE
    starts = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            continue
        if token.type != tokenize.STRING or before not in starts:
            words.append(token.string)
        before = token.type
    return " ".join(words)


def words_of_rust(text: str) -> str:
    """Return the lines without comments, up to the tests."""
    code = re.split(r"(?m)^#\[cfg\(test\)\]\nmod ", text)[0]
    return "\n".join(line.split("//")[0] for line in code.splitlines())


def files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", *CODE], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout")
    return [file for file in listed.stdout.split() if file.endswith((".py", ".pyi", ".rs"))]


def naming() -> set[str]:
    """Return the files that name a framework outside the rooms."""
    found = set()
    for file in files():
        if NOT_CODE.search(file) or any(fnmatch.fnmatch(file, room) for room in ROOMS):
            continue
        text = without_lists((ROOT / file).read_text(encoding="utf-8"))
        if FRAMEWORK.search((words_of_rust if file.endswith(".rs") else words_of_python)(text)):
            found.add(file)
    return found


def test_a_framework_is_named_in_its_room_or_for_a_reason() -> None:
    found = naming()
    unknown, stale = sorted(found - REASONS.keys()), sorted(REASONS.keys() - found)
    assert not unknown, f"read the tables here instead of naming a framework, or give a reason in {__name__}: {unknown}"
    assert not stale, f"these name no framework any more: remove them from {__name__}: {stale}"


def test_every_room_exists() -> None:
    every = files()
    assert [room for room in ROOMS if not fnmatch.filter(every, room)] == []


def test_comments_docstrings_and_tests_name_what_they_like() -> None:
    assert not FRAMEWORK.search(words_of_python('"""Of torch."""\ndef f():\n    """torch"""\n    return 1  # torch\n'))
    assert FRAMEWORK.search(words_of_python("def f():\n    return 'torch'\n"))
    assert not FRAMEWORK.search(words_of_rust("// torch\nfn f() {} // torch\n#[cfg(test)]\nmod tests { torch }\n"))
    assert FRAMEWORK.search(words_of_rust("use bridge_torch::Torch;\n"))
    assert without_lists("a\n    # adapters: begin to\n    to_torch,\n    # adapters: end\nb\n").split() == ["a", "b"]
    assert not FRAMEWORK.search("fetched torches")
