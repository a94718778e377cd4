"""The package itself: its imports, its table of frameworks, and where a framework is named."""

from __future__ import annotations

import ast
import fnmatch
import graphlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tokenize
import typing
from pathlib import Path

import numpy as np
import pytest

import truebridge as tb
from truebridge import _core
from truebridge._frameworks import table
from truebridge._frameworks.numpy import aligned

# The import of the package: short, without a framework, and with everything in it that it names.


def run(code: str) -> str:
    """Run a program in a new process, and return what it prints."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_takes_neither_frameworks_nor_what_is_needed_later() -> None:
    code = """
        import sys, truebridge
        late = {"torch", "cupy", "numpy", "tensorflow", "safetensors", "argparse", "subprocess", "dataclasses", "json"}
        print(sorted(late & set(sys.modules)))
    """
    assert run(code) == "[]\n"


def test_a_first_conversion_imports_no_module_of_numpy_that_is_large() -> None:
    code = """
        import sys, numpy, truebridge
        truebridge.to_numpy(numpy.zeros(3)), truebridge.lend(numpy.zeros(3))
        print("numpy.ma" in sys.modules)
    """
    # Before version 2 NumPy imports it itself.
    assert run(code) == f"{np.__version__.startswith('1.')}\n"


def test_the_import_calls_less_than_a_quarter_of_the_functions_that_numpy_calls() -> None:
    # Counted, because the times of both differ by a factor of two on a machine that is busy.
    code = """
        import sys
        calls = 0
        def count(frame, event, _):
            global calls
            calls += event == "call"
        sys.setprofile(count)
        import truebridge
        ours = calls
        import numpy
        sys.setprofile(None)
        print(ours / (calls - ours))
    """
    assert float(run(code)) < 0.25


@pytest.mark.parametrize("name", ["doctor", "processes", "open", "trace", "Ticket", "convert_tf_to_pytorch"])
def test_a_name_that_is_imported_later_is_one_object(name: str) -> None:
    code = f"""
        import truebridge as tb
        assert {name!r} in dir(tb)
        first = getattr(tb, {name!r})
        from truebridge import {name} as second
        assert first is second is getattr(tb, {name!r})
    """
    run(code)


def test_everything_that_is_named_is_there() -> None:
    assert all(getattr(tb, name) is not None for name in tb.__all__)
    assert set(tb.__all__) <= set(dir(tb))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tb.nonsense  # type: ignore[attr-defined]


def test_the_modules_import_one_another_without_a_circle() -> None:
    """Also where they do at their first use, and for types. Modules import nothing of the package itself."""
    folder = Path(tb.__file__).parent

    def named(file: Path) -> str:
        return ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")

    modules = {named(file): file for file in folder.rglob("*.py") if file.parent != folder or file.stem[0] != "_"}

    def imported(file: Path) -> set[str]:
        found = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                parts = file.relative_to(folder).parts
                place = ".".join([*parts[: len(parts) - node.level], *(node.module or "").split(".")]).strip(".")
                found |= {
                    one if (one := f"{place}.{name.name}".strip(".")) in modules else place for name in node.names
                }
        return found & modules.keys()

    imports = {name: imported(file) for name, file in modules.items()}
    assert (
        len(imports) > 20 and "processes.tickets" in imports["processes"] and "errors" in imports["processes.tickets"]
    )
    list(graphlib.TopologicalSorter(imports).static_order())


# The table of frameworks, and the lists that are written from it because type checkers read them.


ROOT = Path(__file__).parents[3]
LISTS = ROOT / "xtask/site/frameworks.py"
NAMES = list(table.ALL)
#: Modules next to the rows, for all frameworks, for libraries that are none, and for a compiler.
OF_ALL = ("pairs", "shards", "calls", "onnxruntime", "compiled")


def test_the_table_is_that_of_rust() -> None:
    assert {name for name, variable in _core.FRAMEWORKS.items() if variable is None} == {*NAMES}
    assert [name for name in _core.FRAMEWORKS if name in table.ALL] == NAMES
    files = {file.stem for file in Path(table.__file__).parent.glob("*.py")} - {"__init__", "table", *OF_ALL}
    assert files == {*_core.FRAMEWORKS} == {*NAMES, *table.FOLDERS}


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
    assert '"to_made",' in public and "        convert_tf_to_made as convert_tf_to_made,\n" in public


def test_a_program_can_list_the_targets() -> None:
    assert typing.get_args(tb.Target) == tuple(_core.FRAMEWORKS)


def test_every_framework_has_its_functions() -> None:
    # ONNX Runtime has values for sessions, and no adapter in Python.
    named = {name for name in tb.__all__ if name.startswith("to_")} - {"to_onnxruntime"}
    assert {f"to_{name}" for name in NAMES} == named
    pairs = itertools.permutations((row.alias for row in table.ALL.values()), 2)
    expected = {f"convert_{source}_to_{target}" for source, target in pairs}
    assert expected == {name for name in dir(tb) if name.startswith("convert_")}
    assert not expected & set(tb.__all__), "an import of everything takes no pairs"


@pytest.mark.parametrize("name", NAMES)
def test_a_row_says_what_is(name: str) -> None:
    row, module = table.ALL[name], pytest.importorskip(name)
    if not row.on_host:
        pytest.skip("it needs a GPU")
    tensor = row.small(module, "cpu", 0)
    assert (type(tensor).__module__, type(tensor).__qualname__) == row.kind
    assert tb.to_numpy(tensor).shape == (table.SMALL,)
    assert tb.to_numpy(tensor).ctypes.data % table.ALIGNMENT == 0
    side = row.side(module, None)
    array = aligned(tb.to_numpy(tensor) + 1)
    assert side.to_host(side.of_host(array)).tolist() == array.tolist()


# A framework is named in its own home and in the tables, and elsewhere only for a reason that is written here.
#
# Homes are the crate of its adapter, its modules of ``_frameworks`` and of the suite's ``subjects``, and what is only
# for one framework. Comments, docstrings and tests name what they like. An entry that is not needed any more fails.


FRAMEWORK = re.compile(rf"(?i)(?<![a-z])({'|'.join([*_core.FRAMEWORKS, 'pytorch'])})(?![a-z])")

#: Folders of code. ``benches`` are programs about named frameworks, as tests are.
SOURCES = ("crates", "conformance", "xtask")
NOT_CODE = re.compile(r"(^|/)(tests?|examples)/|/tests\.rs$|/test_[^/]*$")

#: Homes and tables, where a framework is at home.
HOMES = (
    "crates/bridge-torch/*",
    "crates/bridge-cupy/*",
    "crates/bridge-numpy/*",
    "crates/bridge-jax/*",
    "crates/bridge-paddle/*",
    # adapters: end
    "crates/bridge-tensorflow/*",
    "crates/bridge-capi/*",
    "crates/bridge-frameworks/src/table.rs",
    "crates/bridge-python/python/truebridge/_frameworks/*",
    "crates/bridge-python/python/truebridge/autograd/_*.py",
    "crates/bridge-python/python/truebridge/jax.py",
    "crates/bridge-python/python/truebridge/tensorflow/*",
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
)

NUMPY_IS_A_TOOL = "reads and writes arrays of the host by NumPy, whatever the tensors are"
MODULES = "has modules, or the functions of modules, that are for one framework"
EXAMPLE = "the words of an error or a help name a pair as an example"
TENSORFLOW1 = "TensorFlow 1.15 has no module to import: a folder and a function of `_core` stand for it"
COMMANDS = "a command of the check builds, lists or links this framework by name"

#: Why a file outside the homes names a framework.
REASONS: dict[str, str] = {
    "crates/bridge-core/src/plan.rs": "the advice for a dtype that only one framework has",
    "crates/bridge-frameworks/src/unsupported.rs": "objects that are not tensors, by the package that they come from",
    "conformance/python/truebridge_conformance/_conformance.pyi": TENSORFLOW1,
    "conformance/python/truebridge_conformance/others.py": NUMPY_IS_A_TOOL,
    "conformance/src/fault/real.rs": "each fault is in the adapter of one framework",
    "conformance/src/lib.rs": "a feature of the crate",
    "conformance/src/names.rs": EXAMPLE,
    "conformance/src/python/extension.rs": TENSORFLOW1,
    "conformance/src/python/floor.rs": "calls the functions of each framework without the bridge: it is the bar",
    "conformance/src/python/mod.rs": "opens the adapters that run on request, and " + TENSORFLOW1,
    "conformance/src/python/remote.rs": "a Python 3.7 is the other process only of this framework",
    "conformance/src/report/program.rs": "the lines of each framework that show a case without the bridge",
    "conformance/src/runner/sanitizer.rs": "how each framework is told to cache no memory",
    "conformance/src/runner/adapters.rs": "the table of adapters that run on request",
    "conformance/src/runner/mod.rs": "names the adapters that run on request for other modules",
    "conformance/src/runner/peers.rs": "the memory of the suite's own producer of DLPack is an array",
    "conformance/src/runner/planted.rs": "flaws are planted between two copies of one framework",
    "crates/bridge-core/src/layout.rs": EXAMPLE,
    "crates/bridge-frameworks/src/driver.rs": EXAMPLE,
    "crates/bridge-frameworks/src/protocol.rs": "knows what other producers' protocols say, and NumPy's is one of them",
    "crates/bridge-frameworks/src/interfaces.rs": "reads the array interface, whose fields are NumPy's",
    "crates/bridge/src/lib.rs": "features that the examples of a page of the documentation need",
    "crates/bridge-frameworks/src/adapters.rs": TENSORFLOW1,
    "crates/bridge-pyo3/src/objects/dtypes.rs": NUMPY_IS_A_TOOL,
    "crates/bridge-pyo3/src/objects/mod.rs": NUMPY_IS_A_TOOL,
    "crates/bridge-python/python/truebridge/__init__.py": MODULES,
    "crates/bridge-python/python/truebridge/diagnostics/bench.py": NUMPY_IS_A_TOOL,
    "crates/bridge-python/python/truebridge/_core.pyi": MODULES,
    "crates/bridge-python/python/truebridge/files/formats.py": NUMPY_IS_A_TOOL,
    "crates/bridge-python/python/truebridge/diagnostics/measure.py": NUMPY_IS_A_TOOL,
    "crates/bridge-python/python/truebridge/processes/_rdt.py": "Ray's transports and buffers take only PyTorch",
    "crates/bridge-python/python/truebridge/processes/allocations.py": "a pool of PyTorch, and its dtypes",
    "crates/bridge-python/python/truebridge/files/__init__.py": NUMPY_IS_A_TOOL,
    "crates/bridge-python/python/truebridge/processes/client.py": "returns a memory pool of PyTorch",
    "crates/bridge-python/src/containers.rs": "PyTorch's ParameterDict and ParameterList are containers by their class",
    "crates/bridge-python/src/copier.rs": "scalars of NumPy, whose memory does not stay, are known by their type",
    "crates/bridge-python/src/conversions.rs": NUMPY_IS_A_TOOL,
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
    listed = subprocess.run(["git", "ls-files", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout")
    return [file for file in listed.stdout.split() if file.endswith((".py", ".pyi", ".rs"))]


def naming() -> set[str]:
    """Return the files that name a framework outside the homes."""
    found = set()
    for file in files():
        if NOT_CODE.search(file) or any(fnmatch.fnmatch(file, home) for home in HOMES):
            continue
        text = without_lists((ROOT / file).read_text(encoding="utf-8"))
        if FRAMEWORK.search((words_of_rust if file.endswith(".rs") else words_of_python)(text)):
            found.add(file)
    return found


def test_a_framework_is_named_in_its_home_or_for_a_reason() -> None:
    found = naming()
    unknown, stale = sorted(found - REASONS.keys()), sorted(REASONS.keys() - found)
    assert not unknown, f"read the tables here instead of naming a framework, or give a reason in {__name__}: {unknown}"
    assert not stale, f"these name no framework any more: remove them from {__name__}: {stale}"


def test_every_home_exists() -> None:
    every = files()
    assert [home for home in HOMES if not fnmatch.filter(every, home)] == []


def test_comments_docstrings_and_tests_name_what_they_like() -> None:
    assert not FRAMEWORK.search(words_of_python('"""Of torch."""\ndef f():\n    """torch"""\n    return 1  # torch\n'))
    assert FRAMEWORK.search(words_of_python("def f():\n    return 'torch'\n"))
    assert not FRAMEWORK.search(words_of_rust("// torch\nfn f() {} // torch\n#[cfg(test)]\nmod tests { torch }\n"))
    assert FRAMEWORK.search(words_of_rust("use bridge_torch::Torch;\n"))
    assert without_lists("a\n    # adapters: begin to\n    to_torch,\n    # adapters: end\nb\n").split() == ["a", "b"]
    assert not FRAMEWORK.search("fetched torches")


# What the frameworks accept and emit is kept as data: a change shows in ``fixtures/profiles.json``.


PROFILES = json.loads((Path(__file__).parents[3] / "fixtures/profiles.json").read_text())


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_profiles_are_as_written_down(name: str) -> None:
    written = dict(PROFILES[name])
    try:
        profile = dict(tb.profile(name))
    except tb.BridgeImportError as error:
        pytest.skip(str(error))
    # A machine without a GPU has fewer devices.
    assert set(profile.pop("devices")) <= set(written.pop("devices"))
    assert profile == written
