"""The types of the package: what type checkers read in it once it is installed, over stubs of the frameworks."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import types
import typing
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import truebridge as tb
from docstrings import check_the_example, check_the_function, check_the_summary, entries, sections, source_of
from truebridge import _core, errors
from truebridge._frameworks.table import ALL
from truebridge.diagnostics import bench as benching
from truebridge.diagnostics import doctor as examining
from truebridge.diagnostics import measure
from truebridge.diagnostics import report as reporting

numpy = pytest.importorskip("numpy")

pytest.importorskip("numpy")


FOLDER = Path(__file__).parent / "typed"
FILES = [FOLDER / "stated.py", FOLDER / "refused.py"]

#: What the checks have to know of a framework: more than the name of its tensor.
STUBS = {
    "cupy": "class ndarray:\n    def get(self) -> object: ...\n",
    "tensorflow": "class Tensor:\n    def numpy(self) -> object: ...\n",
    "torch": "class Tensor:\n    def detach(self) -> Tensor: ...\nclass nn:\n    class Module:\n"
    "        def __call__(self, *args: object) -> object: ...\n",
}

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
    """Install the package into a new environment, and return its Python.

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
    for row in ALL.values():
        module, _, name = row.tensor.rpartition(".")
        if module != "numpy":
            stub = packages / f"{module}-stubs" / "__init__.pyi"
            stub.parent.mkdir(exist_ok=True)
            stub.write_text(STUBS.get(module, f"class {name}: ...\n"))
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
        # The frameworks are only stubs.
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
    client = "truebridge.processes.client.Client.watch"
    assert {"truebridge.to_torch", "truebridge.convert_tf_to_pytorch", client} <= names


#: Names that only the stub has: types, and the functions whose keywords are one type, which another test compares. And
#: a method that is a slot in the module, which has no signature.
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


# The docstrings: each public name has the sections that its signature asks for, and the examples run.


MODULES = [
    "autograd",
    "diagnostics.debug",
    "diagnostics.trace",
    "errors",
    "files",
    "jax",
    "processes",
    "ray",
    "tensorflow",
    "tensorflow.v1",
]


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@functools.cache
def gpus() -> int:
    torch = pytest.importorskip("torch")
    return torch.cuda.device_count() if has("cupy") else 0


def tensorflow1() -> bool:
    try:
        import graphs
    except pytest.skip.Exception:
        return False
    return bool(graphs.FOLDER)


#: What an example needs that mentions a word, and whether that is here.
NEEDS: dict[str, tuple[str, Callable[[], object]]] = {
    **{name: (row.label, functools.partial(has, name)) for name, row in ALL.items()},
    "cupy": ("CuPy and CUDA", gpus),
    '"cuda': ("CuPy and CUDA", gpus),
    # Its graphs would be built for the GPU, and are fed from the host.
    "tb.tensorflow.": ("a machine without CUDA", lambda: not gpus()),
    "onnxruntime": ("ONNX Runtime", lambda: has("onnxruntime")),
    "safetensors": ("safetensors", lambda: has("safetensors")),
    "tensorflow1.": ("TRUEBRIDGE_TENSORFLOW1", tensorflow1),
    "ray": ("Ray", lambda: has("ray")),
}


def public() -> Iterator[tuple[str, Any]]:
    """Yield every public function and class, and the public members of classes, each once."""
    found: dict[int, tuple[str, Any]] = {}
    there = [name for name in MODULES if name != "ray" or has("ray")]
    places = [("", tb), *((f"{name}.", importlib.import_module(f"truebridge.{name}")) for name in there)]
    for prefix, module in places:
        names = getattr(module, "__all__", [name for name, thing in vars(module).items() if isinstance(thing, type)])
        for name in (*names, *(name for name in dir(module) if name.startswith("convert_"))):
            thing = getattr(module, name)
            if callable(thing) and (thing.__module__ or "").startswith("truebridge"):
                found.setdefault(id(thing), (f"{prefix}{name}", thing))
    for module in (reporting, benching):
        found.update({id(thing): (name, thing) for name, thing in vars(module).items() if name in module.__all__})
    for name, thing in found.values():
        yield name, thing
        if isinstance(thing, type):
            for member, value in vars(thing).items():
                value = value.__func__ if isinstance(value, classmethod) else value
                field = member in getattr(thing, "_fields", ())
                if not member.startswith("_") and not field and hasattr(value, "__get__"):
                    yield f"{name}.{member}", value


#: Sorted: the attributes of classes in Rust have another order in each process, and processes share the tests.
EVERY = dict(sorted(public(), key=lambda named: named[0]))


@functools.cache
def stub() -> dict[str, Any]:
    """Return the functions of the extension module as its stub declares them, by name."""
    tree = ast.parse(Path(tb.__file__).with_name("_core.pyi").read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def returns(thing: Any) -> bool:
    """Whether a function returns something."""
    if inspect.isbuiltin(thing):
        declared = stub().get(thing.__name__)
        return declared is None or ast.unparse(declared.returns) != "None"
    return inspect.signature(thing).return_annotation not in (None, "None")


#: Classes of Rust that hold fields.
RECORDS = (tb.Loan, tb.Plan, tb.jax.Feed, tb.tensorflow.v1.Tensor)


def is_record(thing: Any) -> bool:
    """Whether only the package makes instances of a class, and it holds fields."""
    made = hasattr(thing, "_fields") or dataclasses.is_dataclass(thing) or thing in RECORDS
    return isinstance(thing, type) and made


def is_error(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, (tb.BridgeError, Warning))


def is_documented_by_its_parent(thing: Any) -> bool:
    """Whether it needs only a summary: properties, errors, and arrays that the package makes."""
    return not (inspect.isroutine(thing) or isinstance(thing, type)) or is_error(thing) or thing is tb.tensorflow.Feed


def test_everything_public_is_found() -> None:
    assert {"to_torch", "convert_tf_to_cupy", "Plan.nbytes", "processes.Client.watch"} <= set(EVERY)
    assert "diagnostics.trace.Trace.save" in EVERY
    named = {name for name in tb.__all__ if callable(getattr(tb, name))}
    assert {id(thing) for thing in EVERY.values()} >= {id(getattr(tb, name)) for name in named}
    folder = Path(tb.__file__).parent
    entries = {file.stem for file in folder.glob("[a-z]*.py")} | {
        file.parent.name for file in folder.glob("[a-z]*/__init__.py")
    }
    assert entries == {name.partition(".")[0] for name in MODULES}, "a new module belongs in MODULES"


@pytest.mark.parametrize("name", EVERY)
def test_the_docstring_fits_the_signature(name: str) -> None:
    thing = EVERY[name]
    found = sections(thing)
    check_the_summary(found)
    if is_documented_by_its_parent(thing):
        return
    if is_record(thing):
        fields = getattr(thing, "_fields", None) or getattr(thing, "__dataclass_fields__", None)
        expected = fields or [
            name for name, value in vars(thing).items() if isinstance(value, types.GetSetDescriptorType)
        ]
        assert sorted(entries(found["Attributes"])) == sorted(expected)
        return
    yields = inspect.isgeneratorfunction(thing) or inspect.isasyncgenfunction(thing)
    returned = not isinstance(thing, type) and returns(thing)
    check_the_function(thing, found, "Yields" if yields else "Returns" if returned else "")
    if isinstance(thing, type) or name.rpartition(".")[0] in ("", *MODULES):
        assert ">>> import truebridge as tb" in found.get("Examples", "")


def test_a_result_of_a_conversion_has_the_keywords_of_all() -> None:
    for name in ("to_torch", "to_cupy", "to_numpy", "to_tensorflow", "convert", "plan", "convert_tf_to_numpy"):
        assert _core.KEYWORDS in inspect.getdoc(EVERY[name])


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder of the test, as a process that shares nothing yet."""
    sockets = tmp_path_factory.mktemp("ipc")
    sockets.chmod(0o700)
    monkeypatch.setenv("TRUEBRIDGE_IPC", str(sockets))
    monkeypatch.chdir(tmp_path)
    _core.ipc_close()
    yield tmp_path
    _core.ipc_close()


#: The frameworks of the examples of ``doctor`` and ``bench``. ``test_doctor.py`` and
#: ``test_doctor_bench.py`` ask for all of them, which takes long.
TWO = {name: ALL[name] for name in ("numpy", "torch")}


@functools.cache
def report() -> Any:
    """Examine the machine, once for all examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examining, "ALL", TWO)
        return doctor()


@functools.cache
def measured() -> Any:
    """Measure small tensors in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "ALL", TWO)
        patch.setattr(measure, "KINDS", {name: kind._replace(shape=(8, 8)) for name, kind in measure.KINDS.items()})
        found = {"driver": {}, "bench": measure.bench("0.01", lambda share: None)}
        patch.setattr(examining, "ask", lambda asked, *_, **__: {name: found[name] for name in asked})
        return bench(seconds=1)


#: What the examples call by other names.
doctor, bench = examining.doctor, benching.bench


#: The examples by the names that they belong to.
EXAMPLES = {
    name: found["Examples"]
    for name, thing in {"truebridge": tb, **EVERY}.items()
    if "Examples" in (found := sections(thing))
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = EXAMPLES[name]
    # What an example calls says as much as what it imports.
    words = f"{name}\n{source_of(text)}".replace("_tf", "tensorflow").replace("tensorflow.v1.", "tensorflow1.")
    for word, (what, is_here) in NEEDS.items():
        if word in words and not is_here():
            pytest.skip(f"needs {what}")
    if "tensorflow1." in words:
        import graphs

        (folder / "model.pb").write_bytes(graphs.line())
        (folder / "tensorflow1").symlink_to(Path(graphs.FOLDER).resolve())
    for module in (tb, examining):
        monkeypatch.setattr(module, "doctor", lambda **_: report())
    monkeypatch.setattr(tb, "bench", lambda **_: measured())
    check_the_example(name, text)
