"""The warning for results that let a program write to memory which its framework never changes.

In place is the default. A warning says so once for each pair of frameworks of a process, at the line of the program.
"""

from __future__ import annotations

import ast
import itertools
import mmap
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import capsules
import truebridge as tb
from programs import Warm

np: Any = pytest.importorskip("numpy")

torch: Any = pytest.importorskip("torch")

PACKAGE = Path(tb.__file__).parent

#: What each program begins with: it counts the warnings of the class, with the line of each.
BEGIN = """
import warnings
import numpy as np, torch
import truebridge as tb
caught = []
def show(message, category, filename, lineno, *_):
    assert issubclass(category, tb.ImmutableWarning) and category is not tb.BridgeWarning, (category, message)
    caught.append((str(message), filename, lineno))
warnings.showwarning = show
warnings.simplefilter("ignore")
warnings.simplefilter("always", tb.ImmutableWarning)
"""

#: A tensor that does not change, of each framework that has them, on the host.
SOURCES = {
    "jax": """
import jax, jax.numpy as jnp
make = lambda: jnp.ones(16, device=jax.devices("cpu")[0])
""",
    "tensorflow": """
import numpy as np, tensorflow as tf
def make():
    with tf.device("CPU"):
        return tf.constant(np.ones(16, np.float32) * 3)
""",
}


@pytest.fixture(scope="module", params=SOURCES)
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def program(name: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Run programs that no pair was warned of before: they have a tensor ``x`` of the framework ``name``."""
    warm = request.getfixturevalue("beside_tensorflow") if name == "tensorflow" else Warm("numpy", "torch", name)

    def run(code: str) -> None:
        start = f"name = {name!r}\n{SOURCES[name]}\nx = make()\n"
        done = warm.run(BEGIN + start + code, frozen=True, JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stderr

    yield run
    if name != "tensorflow":
        warm.close()


def test_a_pair_is_warned_of_once_at_the_line_of_the_program(program: Any) -> None:
    program(
        """
code = "import truebridge as tb\\n\\ndef run(x):\\n    return tb.to_torch(x)\\n"
space = {}
exec(compile(code, "program.py", "exec"), space)
t = space["run"](x)
space["run"](make())
tb.convert(make(), "torch")
((text, file, line),) = caught
assert (file, line) == ("program.py", 4), caught
assert name in text and "torch" in text and "read_only=True" in text and "copy=True" in text, text
# In place stays the default.
t.fill_(9)
assert (tb.to_numpy(x) == 9).all()
assert tb.plan(x, "torch").zero_copy
"""
    )


def test_a_function_of_a_pair_warns_at_the_line_that_calls_it(program: Any) -> None:
    program(
        """
convert = {"jax": tb.convert_jax_to_pytorch, "tensorflow": tb.convert_tf_to_pytorch}[name]
exec(compile("\\n\\nconvert(x)", "program.py", "exec"))
((_, file, line),) = caught
assert (file, line) == ("program.py", 3), caught
"""
    )


def test_a_promise_and_a_copy_are_silent(program: Any) -> None:
    program(
        """
tb.to_torch(x, read_only=True), tb.to_torch(x, copy=True), tb.to_torch(x, via="host", copy=True)
tb.lend(x, read_only=True), tb.lend(x, copy=True), tb.call(lambda y: None, x, read_only=True)
tb.call(lambda y: None, tb.lend(x, read_only=True))
assert not caught, caught
"""
    )


def test_targets_that_keep_read_only_memory_are_silent(program: Any) -> None:
    program(
        """
array = tb.to_numpy(x)
assert not array.flags.writeable
tb.to_jax(x) if name == "jax" else tb.to_tensorflow(x)
assert not caught, caught
# What they have of it is immutable as well.
tb.to_torch(array)
assert "numpy" in caught[0][0], caught
"""
    )


def test_a_tree_is_warned_of_once(program: Any) -> None:
    program(
        """
tb.to_torch({"a": [x, make()], "b": np.ones(3), "c": tb.to_numpy(x)})
texts = [text for text, *_ in caught]
assert len(texts) == 2 and f"of {name} " in texts[1] and "of numpy " in texts[0] or \\
    len(texts) == 2 and f"of {name} " in texts[0] and "of numpy " in texts[1], texts
"""
    )


def test_a_loan_is_a_pair_of_its_own(program: Any) -> None:
    program(
        """
tb.to_torch(x)
assert len(caught) == 1, caught
with tb.lend(x) as loan:
    assert len(caught) == 2 and "read_only=True to lend" in caught[1][0], caught
    # It has been warned of already.
    tb.to_torch(loan)
tb.lend([x]), tb.call(lambda y: None, x)
assert len(caught) == 2, caught
"""
    )


def test_a_filter_that_makes_an_error_of_it_leaves_nothing(program: Any) -> None:
    program(
        """
import gc
from memory import views
tb.to_numpy(x)
gc.collect()
held = views()
warnings.simplefilter("error", tb.ImmutableWarning)
calls = [
    lambda: tb.to_torch(x), lambda: tb.to_torch([x, x]), lambda: tb.convert(x, "torch"), lambda: tb.lend(x),
    lambda: tb.call(print, x),
]
for call in calls + calls:
    try:
        call()
    except tb.ImmutableWarning as warning:
        assert type(warning) is tb.ImmutableWarning and warning.__cause__ is None
    else:
        raise AssertionError("not raised")
gc.collect()
assert views() == held
warnings.simplefilter("ignore", tb.ImmutableWarning)
tb.to_torch(x)
"""
    )


def test_what_the_package_converts_itself_is_silent(program: Any) -> None:
    program(
        """
import os, tempfile
warnings.simplefilter("error", tb.ImmutableWarning)
if name == "jax":
    import jax
    module = tb.autograd.torch_function(lambda y: jnp.sin(y) * 2, of="jax")
    fed = jax.jit(lambda: tb.jax.external_input(feed))
    feed = tb.jax.feed(x)
    assert fed().tolist() == [1.0] * 16
else:
    variable = tf.Variable(tf.ones(16))
    module = tb.autograd.torch_function(lambda y: tf.sin(y) * variable, variables=[variable])
    read = tf.function(lambda handle: tb.tensorflow.external_input(tf.float32, [16], handle))
    feed = tb.tensorflow.feed(x)
    assert read(feed).numpy().tolist() == [3.0] * 16
t = torch.ones(16, requires_grad=True)
module(t).sum().backward()
optimizer = torch.optim.SGD([t, *module.parameters()], lr=0.1)
optimizer.step()
module(t).sum().backward()
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "x.npz")
    tb.save(path, {"x": x})
    tb.load(path, "torch")
out = torch.zeros(16)
tb.copy(x, out=out)
tb.copier(x, out=out)()
ticket = tb.share(x)
tb.open(ticket, "torch")
"""
    )


# A write of PyTorch to a view of what never changes is found when the view is exported.


@pytest.fixture
def make(name: str) -> Callable[[], Any]:
    """Return what makes tensors of the framework in this process."""
    space: dict[str, Any] = {}
    exec(SOURCES[name], space)
    return cast(Callable[[], Any], space["make"])


ignored = pytest.mark.filterwarnings("ignore::truebridge.ImmutableWarning")


def finds(name: str, folder: Path) -> dict[str, Callable[[Any], Any]]:
    """Return the calls that find a write: each exports a tensor."""
    return {
        "to_numpy": tb.to_numpy,
        "to_torch": tb.to_torch,
        "to_jax or to_tensorflow": lambda it: tb.convert(it, cast(Any, name)),
        "a tree": lambda it: tb.to_numpy([it]),
        "lend": tb.lend,
        "share": lambda it: tb.revoke(tb.share(it)),
        "plan": lambda it: tb.plan(it, "numpy"),
        "copy": lambda it: tb.copy(it, out=torch.zeros(it.shape)),
        "copy=True": lambda it: tb.to_numpy(it, copy=True),
        "copier": lambda it: tb.copier(it, out=torch.zeros(it.shape)),
        "save": lambda it: tb.save(folder / "x.npy", it),
    }


@pytest.fixture
def found(name: str, tmp_path: Path) -> Callable[..., None]:
    """Expect that each call finds a write to each tensor."""

    def found(*tensors: Any) -> None:
        for tensor, (how, export) in itertools.product(tensors, finds(name, tmp_path).items()):
            with pytest.raises(tb.BridgeBufferError, match="torch has written to memory") as caught:
                export(tensor)
                pytest.fail(f"not found by {how}")
            assert caught.value.kind == "read_only", how
            assert ".clone()" in str(caught.value) and "copy=True" in str(caught.value), how

    return found


@pytest.fixture
def fine(name: str, tmp_path: Path) -> Callable[..., None]:
    """Expect that no call finds a write to any of the tensors."""

    def fine(*tensors: Any) -> None:
        for tensor, export in itertools.product(tensors, finds(name, tmp_path).values()):
            export(tensor)

    return fine


@ignored
@pytest.mark.parametrize("keywords", [{}, {"read_only": True}])
@pytest.mark.parametrize(
    "write",
    [
        "t += 1",
        "t[1:].fill_(9)",
        "t.detach().zero_()",
        "t.view(4, 4)[0] = 5",
        "torch.add(t, 1, out=t)",
        "p = torch.nn.Parameter(t); p.grad = torch.ones(16); torch.optim.SGD([p], lr=1.0).step()",
    ],
)
def test_a_write_of_torch_is_found(write: str, keywords: Any, make: Any, found: Any, fine: Any) -> None:
    t = tb.to_torch(make(), **keywords)
    fine(t, t[2:])
    exec(write, {"t": t, "torch": torch})
    found(t, t[2:], t.detach())
    # What was made before it is as it was, and separate memory is not concerned.
    fine(t.clone(), tb.to_torch(make(), **keywords))


@ignored
@pytest.mark.parametrize(
    ("write", "why"),
    [
        ("t.data += 1", "a separate counter"),
        ("t.numpy()[0] = 1", "NumPy counts nothing"),
        ("tb.to_torch(t.numpy()).add_(1)", "another tensor over the memory"),
        ("t.unsqueeze_(0).squeeze_(0), t.unsqueeze_(0)", "another shape is not a write"),
        ("tb.copy(torch.ones(16), out=t)", "the caller has named the target"),
        ("tb.copy([torch.ones(16)], out=[t])", "the caller has named the target"),
        ("tb.copier(torch.ones(16), out=t)()", "the caller has named the target"),
        ("t = tb.to_torch(x, copy=True); t += 1", "a copy"),
        (
            "y = torch.ones(16); y += 1; a = tb.convert(y, name); t = tb.to_torch(a); fine(y)",
            "the source was written to",
        ),
    ],
)
def test_what_is_not_a_write_to_the_view_is_not_found(write: str, why: str, name: str, make: Any, fine: Any) -> None:
    x = make()
    space = {"x": x, "t": tb.to_torch(x), "name": name, "fine": fine, "torch": torch, "tb": tb}
    exec(write, space)
    fine(space["t"])


@ignored
def test_a_copier_finds_a_write_after_it_was_made(make: Any) -> None:
    t = tb.to_torch(make())
    copier = tb.copier(t, out=torch.zeros(t.shape))
    copier()
    t += 1
    with pytest.raises(tb.BridgeBufferError) as caught:
        copier()
    assert caught.value.kind == "read_only"


@ignored
def test_a_view_is_watched_as_long_as_its_memory_lives(make: Any, found: Any) -> None:
    x = make()
    for _ in range(50):
        t = tb.to_torch(x)
        kept = t[3:]
        t += 1
        del t
        found(kept)
        del kept
        for other in [torch.zeros(16).add_(1) for _ in range(50)]:
            tb.to_numpy(other)


def test_a_variable_that_pytorch_trains_is_written_to_on_purpose() -> None:
    tf: Any = pytest.importorskip("tensorflow")
    with tf.device("CPU"):
        variable = tf.Variable(tf.ones(16))
    module = tb.autograd.torch_function(lambda y: y * variable, variables=[variable])
    t = torch.ones(16, requires_grad=True)
    (parameter,) = module.parameters()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(3):
        module(t).sum().backward()
        optimizer.step()
        tb.to_numpy(parameter.detach())
    assert (tb.to_numpy(parameter.detach()) == variable.numpy()).all()


#: The modules whose functions convert for the user, who is warned.
FOR_THE_USER = {"__init__.py", *(f"_frameworks/{name}.py" for name in ("pairs", "calls", "onnxruntime"))}
WARNS = re.compile(r"^(convert|to_\w+|lend|lend_together)$")


def test_no_other_module_of_the_package_calls_what_warns() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="_core"), attr=name)) if WARNS.match(name):
                    promised = [one for one in node.keywords if one.arg == "read_only"]
                    if not (promised and isinstance(promised[0].value, ast.Constant) and promised[0].value.value):
                        found.setdefault(place, []).append(name)
                case ast.ImportFrom(module="_core", names=names) if place != "__init__.py":
                    found.setdefault(place, []).extend(one.name for one in names if WARNS.match(one.name))
    assert {name for name, called in found.items() if called} <= FOR_THE_USER, found


# The rule for read-only memory.
#
# What a framework never changes is converted in place. What is protected is refused where the target would allow
# writes, unless the caller promises to write nothing.


def flagged(_: Path) -> Any:
    array = np.arange(16, dtype=np.float32)
    array.flags.writeable = False
    return array


def mapped(folder: Path) -> Any:
    path = folder / "numbers"
    path.write_bytes(np.arange(16, dtype=np.float32).tobytes())
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.float32)


class Marked:
    """A producer that marks its memory as read-only."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(max_version=(1, 0))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


PROTECTED: dict[str, Callable[[Path], Any]] = {
    "the flag of NumPy": flagged,
    "a file that is mapped to read": mapped,
    "the mark of DLPack": lambda folder: Marked(flagged(folder)),
}


@pytest.mark.parametrize("kind", PROTECTED)
def test_protected_memory_needs_a_promise(kind: str, tmp_path: Path) -> None:
    x = PROTECTED[kind](tmp_path)
    for keywords in ({}, {"copy": False}, {"read_only": False}):
        with pytest.raises(tb.BridgeBufferError, match="read-only.*copy=True.*read_only=True") as caught:
            tb.to_torch(x, **keywords)
        assert caught.value.kind == "read_only"
        with pytest.raises(tb.BridgeBufferError, match="read_only=True"):
            tb.plan(x, "torch", **keywords)
    view = tb.to_torch(x, copy=False, read_only=True)
    assert tb.plan(x, "torch", read_only=True).zero_copy
    assert view.tolist() == list(range(16))
    assert view.data_ptr() == tb.to_numpy(x).ctypes.data
    assert not tb.to_numpy(x).flags.writeable


def test_the_promise_is_for_each_tensor_of_a_tree(tmp_path: Path) -> None:
    tree = {"weights": [flagged(tmp_path), np.ones(3, np.float32)]}
    with pytest.raises(tb.BridgeBufferError, match=r"tree\['weights'\]\[0\]: .*read_only=True"):
        tb.to_torch(tree)
    views = tb.to_torch(tree, copy=False, read_only=True)["weights"]
    assert [view.data_ptr() for view in views] == [x.ctypes.data for x in tree["weights"]]


def test_the_promise_makes_arrays_of_numpy_read_only() -> None:
    t = torch.zeros(4)
    array = tb.to_numpy(t, read_only=True)
    assert array.ctypes.data == t.data_ptr()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert tb.to_numpy(t).flags.writeable
    assert tb.to_numpy(t, copy=True, read_only=True).flags.writeable


def test_tensors_that_never_change_convert_without_a_promise() -> None:
    tf: Any = pytest.importorskip("tensorflow")
    x = tf.constant([1.0, 2.0])
    view = tb.to_torch(x, copy=False)
    array = tb.to_numpy(x, copy=False)
    assert view.data_ptr() == array.ctypes.data
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 9
    # What was protected before it came to TensorFlow is protected still.
    assert tb.to_torch(array[1:], copy=False).tolist() == [2.0]
    frozen = tb.to_numpy(torch.ones(64))
    frozen.flags.writeable = False
    with pytest.raises(tb.BridgeBufferError, match="read_only=True"):
        tb.to_torch(tb.to_tensorflow(frozen, copy=False))
    assert tb.to_torch(tb.to_tensorflow(frozen, copy=False), read_only=True).data_ptr() == frozen.ctypes.data


@pytest.mark.parametrize("writes", [False, True])
def test_an_array_without_elements_keeps_the_mark(writes: bool) -> None:
    producer = capsules.Producer()
    producer.shape[0], producer.tensor.data, producer.managed.flags = 0, None, 0 if writes else 1
    array = tb.to_numpy(producer.capsule())
    assert (array.shape, array.flags.writeable) == ((0,), writes)
