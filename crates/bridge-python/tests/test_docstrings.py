"""The docstrings: each public name has the sections that its signature asks for, and the examples run."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import truebridge as tb
from docstrings import check_the_example, check_the_function, check_the_summary, entries, sections, source_of
from truebridge import _bench, _core, _doctor, _measure, _report, processes
from truebridge._frameworks import ALL

pytest.importorskip("numpy")

MODULES = [
    "autograd",
    "debugging",
    "errors",
    "files",
    "jax",
    "names",
    "processes",
    "publications",
    "ray",
    "tensorflow",
    "tensorflow1",
    "tracing",
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
    places = [("", tb), *((f"{name}.", getattr(tb, name)) for name in MODULES if name != "ray" or has("ray"))]
    for prefix, module in places:
        names = getattr(module, "__all__", [name for name, thing in vars(module).items() if isinstance(thing, type)])
        for name in names:
            thing = getattr(module, name)
            if callable(thing) and (thing.__module__ or "").startswith("truebridge"):
                found.setdefault(id(thing), (f"{prefix}{name}", thing))
    for module in (_report, _bench):
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
RECORDS = (tb.Loan, tb.Plan, tb.jax.Feed, tb.tensorflow1.Tensor)


def is_record(thing: Any) -> bool:
    """Whether a class is made by the package alone, and holds fields."""
    made = hasattr(thing, "_fields") or dataclasses.is_dataclass(thing) or thing in RECORDS
    return isinstance(thing, type) and made


def is_error(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, (tb.BridgeError, Warning))


def is_documented_by_its_parent(thing: Any) -> bool:
    """Whether nothing but the summary is asked of it: properties, errors, and arrays that the package makes."""
    return not (inspect.isroutine(thing) or isinstance(thing, type)) or is_error(thing) or thing is tb.tensorflow.Feed


def test_everything_public_is_found() -> None:
    assert {"to_torch", "convert_tf_to_cupy", "Plan.nbytes", "names.Client.watch", "tracing.Trace.save"} <= set(EVERY)
    named = {name for name in tb.__all__ if callable(getattr(tb, name))} - {"Target"}
    assert {id(thing) for thing in EVERY.values()} >= {id(getattr(tb, name)) for name in named}
    files = Path(tb.__file__).parent.glob("[a-z]*.py")
    assert {file.stem for file in files} - {"pairs"} == set(MODULES), "a new module belongs into MODULES"


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
    if isinstance(thing, type) or name.count(".") == (name.split(".")[0] in MODULES):
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
    processes._core.ipc_close()
    yield tmp_path
    processes._core.ipc_close()


#: The frameworks of the examples of ``doctor``, ``matrix`` and ``bench``. ``test_doctor.py`` and
#: ``test_doctor_bench.py`` ask for all of them, which takes long.
TWO = {name: ALL[name] for name in ("numpy", "torch")}


@functools.cache
def report() -> Any:
    """Examine the machine, once for all examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_doctor, "ALL", TWO)
        return doctor()


@functools.cache
def measured() -> Any:
    """Measure small tensors in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_measure, "ALL", TWO)
        patch.setattr(_measure, "KINDS", {name: kind._replace(shape=(8, 8)) for name, kind in _measure.KINDS.items()})
        found = {"driver": {}, "bench": _measure.bench("0.01", lambda share: None)}
        patch.setattr(_doctor, "ask", lambda asked, *_, **__: {name: found[name] for name in asked})
        return bench(seconds=1)


#: What the examples call by other names.
doctor, bench = _doctor.doctor, _bench.bench


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
    words = f"{name}\n{source_of(text)}".replace("_tf", "tensorflow")
    for word, (what, is_here) in NEEDS.items():
        if word in words and not is_here():
            pytest.skip(f"needs {what}")
    if "tensorflow1." in words:
        import graphs

        (folder / "model.pb").write_bytes(graphs.line())
        (folder / "tensorflow1").symlink_to(Path(graphs.FOLDER).resolve())
    for module in (tb, _doctor):
        monkeypatch.setattr(module, "doctor", lambda **_: report())
    monkeypatch.setattr(tb, "bench", lambda **_: measured())
    check_the_example(name, text)
