"""``debug``: memory that is returned is overwritten if it has no other owner, and findings are reported once."""

from __future__ import annotations

import ctypes
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import capsules
import truebridge as tb
from programs import Warm
from truebridge.diagnostics import debug as debugging

np: Any = pytest.importorskip("numpy")
torch: Any = pytest.importorskip("torch")

#: Elements of float32: enough for a separate block.
LENGTH = 1000
PLACE = ("torch", "cupy", "train.py", 7)


#: What ``array`` holds, and what it holds once it was overwritten.
ONES, POISON = b"\x00\x00\x80\x3f" * LENGTH, b"\xff" * 4 * LENGTH


def array() -> Any:
    return np.ones(LENGTH, np.float32)


class Handler(ctypes.Structure):
    """``PyDataMem_Handler`` of NumPy's C API, which allocates the memory of arrays."""

    _fields_ = [
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", ctypes.c_void_p),
        ("malloc", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)),
        ("calloc", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)),
        ("realloc", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)),
        ("free", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)),
    ]


#: Where NumPy's table of functions has ``PyDataMem_SetHandler``.
SET_HANDLER = 304


@pytest.fixture
def freed() -> Iterator[list[bytes]]:
    """Return what the memory of each array of ``LENGTH`` held when it was freed, of those made in the meantime."""
    libc, blocks = ctypes.CDLL(None), []
    for name, arguments in (("malloc", 1), ("calloc", 2), ("realloc", 2)):
        getattr(libc, name).restype = ctypes.c_void_p
        getattr(libc, name).argtypes = [ctypes.c_size_t] * arguments
    libc.free.argtypes = [ctypes.c_void_p]

    def free(_: int, address: int, nbytes: int) -> None:
        if nbytes == 4 * LENGTH:
            blocks.append(ctypes.string_at(address, nbytes))
        libc.free(address)

    kinds = dict(Handler._fields_)
    handler = Handler(
        b"recording",
        1,
        None,
        kinds["malloc"](lambda _, nbytes: libc.malloc(nbytes)),
        kinds["calloc"](lambda _, count, nbytes: libc.calloc(count, nbytes)),
        kinds["realloc"](lambda _, address, nbytes: libc.realloc(address, nbytes)),
        kinds["free"](free),
    )
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(
        api.PyCapsule_GetPointer(np._core._multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p)
    )
    change = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[SET_HANDLER])
    before = change(capsules.new_capsule(ctypes.addressof(handler), b"mem_handler", None))
    yield blocks
    change(before)
    gc.collect()


def test_an_array_is_overwritten_before_it_is_freed(freed: list[bytes]) -> None:
    with tb.debug() as debug:
        values = array()
        view = tb.to_torch(values)
        del values
        assert (view == 1).all()
        del view
    assert freed == [POISON]
    assert np.isnan(np.frombuffer(freed[0], np.float32)).all()
    assert (debug.poisoned, debug.findings) == (1, ())


def test_nothing_is_overwritten_without_debug_mode(freed: list[bytes]) -> None:
    before = tb._core.debug_poisoned()
    view = tb.to_torch(array())
    del view
    assert freed == [ONES]
    # A view that was made before, in it or after it.
    view = tb.to_torch(array())
    with tb.debug() as debug:
        del view
    assert debug.poisoned == tb._core.debug_poisoned() - before == 0
    with tb.debug():
        view = tb.to_torch(array())
    del view
    assert tb._core.debug_poisoned() == before


def test_a_part_of_an_array_is_overwritten_alone(freed: list[bytes]) -> None:
    with tb.debug():
        view = tb.to_torch(array()[10:20:2])
        del view
    assert freed == [ONES[:40] + POISON[:36] + ONES[76:]]


def _base(values: Any) -> Any:
    return values[5:]


def _saved(tensor: Any) -> Any:
    return (tensor.requires_grad_() * 2).grad_fn


#: What another owner still has of a tensor: how it is made, what is kept of it, and what that holds then.
OWNED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "the array": (array, lambda x: x, lambda x: x),
    "a slice": (array, _base, lambda x: x),
    "a view of a view": (array, lambda x: x.reshape(10, 100)[1:].T, lambda x: x),
    "a memoryview": (array, memoryview, np.asarray),
    "a tensor over the array": (array, torch.from_numpy, lambda x: x),
    "a DLPack tensor": (array, torch.from_dlpack, lambda x: x),
    "another bridged tensor": (array, tb.to_torch, lambda x: x),
    "the tensor": (lambda: torch.ones(LENGTH), lambda x: x, lambda x: x),
    "a slice of the tensor": (lambda: torch.ones(LENGTH), _base, lambda x: x),
    "the storage": (lambda: torch.ones(LENGTH), lambda x: x.untyped_storage(), lambda x: torch.tensor([]).set_(x)),
    "a detached tensor": (lambda: torch.ones(LENGTH), lambda x: x.detach(), lambda x: x),
    "NumPy's view": (lambda: torch.ones(LENGTH), lambda x: x.numpy(), lambda x: x),
    "a capsule": (lambda: torch.ones(LENGTH), lambda x: x.__dlpack__(), torch.from_dlpack),
    "what owns the tensor's memory": (lambda: torch.from_numpy(array()), lambda x: x.numpy().base, lambda x: x),
}


@pytest.mark.parametrize("case", OWNED)
def test_what_somebody_else_owns_is_left_alone(case: str) -> None:
    make, keep, read = OWNED[case]
    tensor = make()
    kept = keep(tensor)
    with tb.debug() as debug:
        view = tb.to_torch(tensor) if isinstance(tensor, np.ndarray) else tb.to_numpy(tensor)
        del tensor, view
        gc.collect()
        assert (read(kept) == 1).all()
        assert debug.poisoned == 0


def test_the_last_of_two_views_gives_the_memory_back(freed: list[bytes]) -> None:
    with tb.debug() as debug:
        values = array()
        first, second = tb.to_torch(values), tb.to_torch(values)
        del values, first
        assert debug.poisoned == 0
        assert (second == 1).all()
        del second
        assert debug.poisoned == 1
    assert freed == [POISON]


def test_what_autograd_has_saved_is_left_alone() -> None:
    weight = torch.ones(LENGTH, requires_grad=True)
    with tb.debug() as debug:
        factor = torch.full((LENGTH,), 3.0)
        product = (weight * factor).sum()
        view = tb.to_numpy(factor)
        del factor, view
        assert debug.poisoned == 0
        product.backward()
        assert (weight.grad == 3).all()


def test_a_tensor_of_torch_is_overwritten_once_nobody_has_it() -> None:
    with tb.debug() as debug:
        tensor = torch.ones(LENGTH)
        view = tb.to_numpy(tensor[1:])
        part = tensor[:5]
        del tensor, view
        assert debug.poisoned == 0 and (part == 1).all()
        view = tb.to_numpy(part)
        del part
        assert (view == 1).all()
        del view
        assert debug.poisoned == 1


def test_memory_that_is_not_the_frameworks_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "values"
    path.write_bytes(ONES)
    with tb.debug() as debug:
        for make in (
            lambda: np.memmap(path, np.float32, "r+"),
            lambda: np.frombuffer(bytearray(4 * LENGTH), np.float32),
            lambda: np.lib.stride_tricks.as_strided(array(), (LENGTH,), (4,)),
            lambda: array().view(type("Own", (np.ndarray,), {})),
        ):
            view = tb.to_torch(make())
            del view
        for make in (
            lambda: torch.from_file(str(path), shared=True, size=LENGTH),
            lambda: torch.ones(LENGTH).share_memory_(),
            lambda: torch.frombuffer(bytearray(4 * LENGTH), dtype=torch.float32),
            lambda: torch.from_numpy(array()),
        ):
            view = tb.to_numpy(make())
            del view
        gc.collect()
        assert debug.poisoned == 0
    assert path.read_bytes() == ONES


@pytest.mark.parametrize("made", ["a constant of tensorflow", "a read-only array"])
def test_a_write_through_a_view_that_must_not_be_written_to_is_found(made: str) -> None:
    values = np.ones(LENGTH, np.float32)
    values.flags.writeable = False
    if made == "a constant of tensorflow":
        values = pytest.importorskip("tensorflow").constant(values)
    with warnings.catch_warnings(), tb.debug() as debug:
        warnings.simplefilter("ignore", tb.BridgeDebugWarning)
        view = tb.to_torch(values, copy=False, read_only=True)
        assert float(view.sum()) == LENGTH
        del view
        assert not debug.findings
        view = tb.to_torch(values, copy=False, read_only=True)
        view[7] = 5
        del view
        copy = tb.to_torch(values, copy=True)
        copy[7] = 6
        del copy
    assert [(found.kind, found.target, found.file) for found in debug.findings] == [("write", "torch", __file__)]
    assert "copy=True" in str(debug.findings[0])


def test_a_read_only_array_is_left_alone() -> None:
    with tb.debug() as debug:
        values = array()
        values.flags.writeable = False
        view = tb.to_numpy(values)
        del values, view
        assert debug.poisoned == 0


def test_a_weak_reference_finds_nothing_any_more(freed: list[bytes]) -> None:
    with tb.debug() as debug:
        values = array()
        weak = weakref.ref(values)
        view = tb.to_torch(values)
        del values
        assert weak() is not None
        del view
        assert weak() is None
    assert (debug.poisoned, len(freed)) == (1, 1)


def test_a_copy_that_this_package_owns_is_overwritten() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    values = array()
    with tb.debug() as debug:
        view = tb.to_tensorflow(values[::2], copy=True)
        assert (view.numpy() == 1).all()
        del view
        gc.collect()
        tb.stats()
        assert debug.poisoned == 1
    assert (values == 1).all()
    # A constant may be shared with the whole process.
    constant = tensorflow.ones(LENGTH)
    with tb.debug() as debug:
        view = tb.to_torch(constant)
        del constant, view
        assert debug.poisoned == 0
    assert (tensorflow.ones(LENGTH).numpy() == 1).all()


def test_the_arrays_of_a_tree_are_overwritten() -> None:
    with tb.debug() as debug:
        tree = tb.to_torch({"one": [array(), array()], "two": array()})
        kept = tree["two"]
        del tree
        assert debug.poisoned == 2
        assert (kept == 1).all()


def test_an_error_leaves_the_tensors_as_they_were() -> None:
    tree = {"good": array(), "bad": np.array(["text"])}
    with tb.debug() as debug:
        with pytest.raises(tb.BridgeError):
            tb.to_torch(tree)
        assert (tree["good"] == 1).all()
    assert (debug.poisoned, debug.findings) == (0, ())


def test_copies_into_tensors_and_plans_overwrite_nothing() -> None:
    with tb.debug() as debug:
        values, target = array(), torch.zeros(LENGTH)
        tb.copy(values, out=target)
        tb.plan(values, "torch")
        assert (values == 1).all() and (target == 1).all()
        assert debug.poisoned == 0


def test_threads_may_give_memory_back() -> None:
    def work() -> None:
        for number in range(200):
            values = np.full(100, number, np.float32)
            view = tb.to_torch(values)
            del values
            if not (view == number).all():
                wrong.append(number)

    wrong: list[int] = []
    with tb.debug() as debug:
        threads = [threading.Thread(target=work) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert wrong == []
    assert debug.poisoned == 800


def test_modes_may_overlap() -> None:
    one, other = tb.debug(), tb.debug()
    with one:
        with other:
            view = tb.to_torch(array())
            del view
        view = tb.to_torch(array())
        del view
        with pytest.raises(tb.BridgeValueError, match="on already"):
            one.__enter__()
    assert (one.poisoned, other.poisoned) == (2, 1)
    with other:
        view = tb.to_torch(array())
        del view
    assert (one.poisoned, other.poisoned) == (2, 2), "it may be entered again"
    other.close()


def test_a_trace_and_the_mode_go_together(freed: list[bytes]) -> None:
    with tb.debug() as debug, tb.trace() as trace:
        view = tb.to_torch(array())
        del view
    assert [(event.source, event.target, event.path) for event in trace.events] == [("numpy", "torch", "in place")]
    assert debug.poisoned == 1
    view = tb.to_torch(array())
    del view
    assert freed[-1] == ONES


def test_the_environment_turns_it_on(program: Any) -> None:
    code = """
        import numpy, truebridge as tb, torch
        view = tb.to_torch(numpy.ones(10))
        del view
        print(tb._core.debug_poisoned())
    """
    for value in ("1", "0"):
        done = program(code, TRUEBRIDGE_DEBUG=value)
        assert (done.returncode, done.stdout.strip()) == (0, value), done.stderr


def test_a_program_ends_with_views_alive(beside_torch: Warm) -> None:
    done = beside_torch.run("""
        import numpy, truebridge as tb, torch, threading
        debug = tb.debug().__enter__()
        view = tb.to_torch(numpy.ones(10))
        array = tb.to_numpy(torch.ones(10))
        print("end")
    """)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "end", "")


def test_a_finding_is_told_once_for_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debugging, "_WARNED", set())
    with tb.debug() as debug, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for line in (7, 7, 8):
            debugging._found("export", ("cuda:0", 1, 0xB0), (*PLACE[:3], line))
        debugging._found("return", ("cuda:0", 0xA0, 0xB0), PLACE)
    told = [(each.category, each.filename, each.lineno) for each in caught]
    assert told == [(tb.BridgeDebugWarning, "train.py", line) for line in (7, 8, 7)]
    assert "stream 0xb0 was busy when torch exported a tensor on cuda:0" in str(caught[0].message)
    assert "make the legacy default stream wait for it" in str(caught[0].message)
    assert "record_stream(view, stream)" in str(caught[2].message)
    assert [(each.kind, each.stream, each.busy, each.line) for each in debug.findings] == [
        ("export", 1, 0xB0, 7),
        ("export", 1, 0xB0, 7),
        ("export", 1, 0xB0, 8),
        ("return", 0xA0, 0xB0, 7),
    ]
    lines = str(debug).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("train.py:7: stream 0xb0") and lines[0].endswith("(2 times)")
    assert repr(debug) == "<Debug: 4 findings>"


def test_findings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debugging, "LIMIT", 3)
    with tb.debug() as debug, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            debugging._found("export", ("cuda:0", 1, 0xB0), PLACE)
    assert len(debug.findings) == 3


def test_the_line_is_that_of_the_program() -> None:
    inside = compile(
        "def outer(site):\n return inner(site)\ndef inner(site):\n return site()", debugging.__file__, "exec"
    )
    space: dict[str, Any] = {}
    exec(inside, space)
    file, line = space["outer"](debugging._site)
    assert Path(file).name == Path(__file__).name
    assert "space" in Path(__file__).read_text().splitlines()[line - 1]
