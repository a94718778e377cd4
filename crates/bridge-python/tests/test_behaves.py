"""What a program around the package may expect: quiet, ``torch.compile``, Ctrl-C."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from memory import eventually, views
from programs import Warm
from truebridge import _core, processes

torch: Any = pytest.importorskip("torch")

dynamo: Any = pytest.importorskip("torch._dynamo")


# No output that is not asked for: at exit whatever is alive, and no warning from any public call.


#: What a program leaves behind when it ends.
ENDINGS = {
    "views": "keep = [tb.to_torch(array), tb.to_numpy(tensor), tb.to_torch({'a': [array]})]; sys.keep = keep",
    "views in a cycle": "cycle = [tb.to_torch(array)]; cycle.append(cycle); del cycle",
    "shares": "ticket = tb.share(array); sys.keep = ticket",
    "shares that are open": "ticket = tb.share(array); view = tb.open(ticket, 'torch'); sys.keep = view",
    "names": "names = tb.serve(folder + '/names'); names.put('x', array); sys.keep = names",
    "a thread that waits for a name": """
        names = tb.serve(folder + '/names')
        threading.Thread(target=lambda: next(iter(names.watch('never'))), daemon=True).start()
    """,
    "threads that convert": """
        def work():
            for _ in range(200):
                tb.to_numpy(tb.to_torch({'a': array}, copy=True))
        for _ in range(4):
            threading.Thread(target=work).start()
    """,
    "a memory map": "tb.save(folder + '/x.npy', array); sys.keep = tb.load(folder + '/x.npy', 'torch')",
    "a callback": "weakref.finalize(array, lambda: None); sys.keep = tb.to_torch(array); del array",
    "a conversion at exit": "atexit.register(lambda: tb.to_torch(tb.to_numpy(tensor)).sum())",
    "a conversion after the last hook": """
        class Late:
            def __del__(self):
                # Modules cannot be imported any more, so this may fail, but not end the process.
                with self.suppress(Exception):
                    self.tb.to_numpy(self.tensor)
        late = Late(); late.tb, late.tensor, late.suppress = tb, tensor, contextlib.suppress
    """,
    "an open trace": "trace = tb.trace(); trace.__enter__(); tb.to_torch(array)",
    "an exit in the middle": "view = tb.to_torch(array); raise SystemExit(0)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends_without_a_word(ending: str, tmp_path: object, beside_torch: Warm) -> None:
    setup = "import atexit, contextlib, sys, threading, time, weakref, numpy as np, torch, truebridge as tb\n"
    setup += f"folder, array, tensor = {str(tmp_path)!r}, np.ones(64), torch.ones(64)\n"
    done = beside_torch.run(setup + textwrap.dedent(ENDINGS[ending]))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


CALLS = """
import asyncio, contextlib, io, pickle, sys, warnings
import numpy as np
# What the frameworks warn of when they are imported is theirs.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    {frameworks}
import truebridge as tb
from truebridge import autograd, errors, files, processes
from truebridge._frameworks import pairs
from truebridge.diagnostics import trace

array, tensor = np.arange(6.0, dtype=np.float32).reshape(2, 3), torch.ones(2, 3)
keywords = {{"copy": True, "device": "cpu", "order": "F", "permute": (1, 0), "detach": True}}
keywords["via"] = "host"
for x in (array, tensor, array[:, ::-1], tensor.T, {{"a": [array, tensor]}}, tensor.to(torch.bfloat16)):
    for target in ("torch", "numpy"):
        tb.convert(x, target)
        for name, value in keywords.items():
            tb.convert(x, target, **{{name: value}})
            tb.plan(x, target, **{{name: value}})
tb.to_torch(tensor.__dlpack__())
for name in dir(tb):
    # PaddlePaddle warns itself, when it is imported.
    if name.startswith("convert_") and not name.endswith(("cupy", "tf", "paddle")):
        getattr(tb, name)(array)
tb.copy(array, out=torch.empty(2, 3))
tb.to_numpy(torch.ones(2, requires_grad=True), detach=True)
for target in ("torch", "numpy"):
    tb.profile(target)
tb.stats()
tb.record_stream(tb.to_numpy(tensor), 1)
for path in ("x.npy", "x.npz", "x.safetensors"):
    tb.save(f"{folder}/{{path}}", array if path == "x.npy" else {{"a": array, "b": tensor}})
    tb.load(f"{folder}/{{path}}", "torch")
ticket = tb.share({{"a": array}})
assert tb.open(pickle.loads(pickle.dumps(ticket)), "torch")["a"].shape == (2, 3)
processes.transport(array), processes.held(), tb.revoke(ticket)
with tb.serve("{folder}/names") as served, tb.connect("{folder}/names") as client:
    client.put("x", array)
    client.get("x", "torch"), client.list(), next(iter(client.watch("x"))), client.remove("x")
with contextlib.redirect_stdout(io.StringIO()), tb.trace() as trace:
    tb.to_torch(array)
    print(trace)
    trace.save("{folder}/trace.json")
for bad in (3, "x", [1], np.array(["a"]), torch.eye(2).to_sparse()):
    for call in (tb.to_torch, tb.to_numpy, tb.share, lambda x: tb.plan(x, "torch"), lambda x: tb.copy(x, out=tensor)):
        try:
            call(bad)
        except tb.BridgeError:
            pass
{more}
"""

TENSORFLOW = """
constant = tf.ones((2, 3))
for x in (constant, tf.Variable(constant)):
    tb.to_torch(x, read_only=True), tb.to_numpy(x), tb.to_tensorflow(x), tb.plan(x, "torch")
tb.to_tensorflow(array), tb.to_tensorflow(tensor, copy=True), tb.profile("tensorflow")
square = autograd.torch_function(tf.square)
x = torch.ones(3, requires_grad=True)
square(x).sum().backward()
assert x.grad.tolist() == [2, 2, 2]
back = autograd.tf_function(lambda x: x * x)
with tf.GradientTape() as tape:
    tape.watch(constant)
    y = back(constant)
assert tape.gradient(y, constant).shape == (2, 3)
"""

#: Its own processes look at the frameworks, whichever the program has imported. Two are enough for what it says.
MATRIX = """
from truebridge.diagnostics import doctor
doctor.ALL = {name: doctor.ALL[name] for name in ("numpy", "torch")}
matrix = tb.doctor().matrix
assert {pair.method for pair in matrix.pairs if pair.device == "cpu"} == {"in place"}, str(matrix)
str(matrix)
"""


def test_no_public_call_warns(tmp_path: Path) -> None:
    has_tensorflow = importlib.util.find_spec("tensorflow") is not None
    frameworks, more = ("import tensorflow as tf", TENSORFLOW) if has_tensorflow else ("", "")
    code = CALLS.format(frameworks=frameworks, more=more + MATRIX, folder=tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    # A warning is an error there. TensorFlow writes a log.
    assert (done.returncode, "Warning" in done.stderr) == (0, False), done.stderr


def test_first_conversions_leave_the_filters_of_warnings(program: Any) -> None:
    """The filters are those of all threads: two that set and restore them at once leave the wrong ones."""
    done = program("""
        import threading, time, warnings
        import numpy as np, torch, truebridge as tb
        warnings.simplefilter("error")
        filters, empty = list(warnings.filters), torch.empty
        def slow(*args, **keywords):
            time.sleep(0.001)
            return empty(*args, **keywords)
        torch.empty = slow
        threads = [threading.Thread(target=tb.to_torch, args=(np.zeros(1),)) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert warnings.filters == filters
        half = torch.zeros(4, dtype=torch.float16).view(torch.complex32)  # PyTorch warns of a new one
        assert torch.from_dlpack(tb.lend(half)).data_ptr() == half.data_ptr()
    """)
    assert (done.returncode, done.stderr) == (0, "")


# ``torch.compile``: the graph breaks where a function of the package is called, without a warning and at no cost.


#: What a program compiles, by the function that it calls.
BREAKING: dict[str, Callable[[Any], Any]] = {
    "to_torch": lambda x: tb.to_torch(x * 2) + 1,
    "to_numpy": lambda x: torch.from_numpy(tb.to_numpy(x * 2)) + 1,
    "convert": lambda x: tb.convert({"a": x * 2}, "torch")["a"] + 1,
    "convert_pytorch_to_numpy": lambda x: torch.as_tensor(tb.convert_pytorch_to_numpy(x * 2)) + 1,
    "copy": lambda x: tb.copy(x * 2, out=torch.empty(3)) + 1,
    "plan": lambda x: x * 2 + tb.plan(x * 2, "numpy", copy=True).nbytes - 11,
    "stats": lambda x: x * 2 + (tb.stats()["leaked"] >= 0),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", BREAKING)
def test_the_graph_breaks_without_a_warning(name: str, backend: str) -> None:
    # The first tensor of a class asks JAX, where it is imported, whether that is a container: PyTorch would trace that.
    tb.to_torch(torch.ones(1))
    dynamo.reset()
    dynamo.utils.counters.clear()
    compiled = torch.compile(BREAKING[name], backend=backend)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = [compiled(torch.full((3,), float(i))).tolist() for i in range(4)]
    assert found == [[2 * i + 1] * 3 for i in range(4)]
    assert [str(warning.message) for warning in heard if "truebridge" in str(warning.message)] == []
    breaks = list(dynamo.utils.counters["graph_break"])
    assert len(breaks) == 1 and "works on the memory of real tensors" in breaks[0], breaks


@pytest.mark.parametrize("name", BREAKING)
def test_a_whole_graph_is_refused_by_pytorch(name: str) -> None:
    dynamo.reset()
    with pytest.raises(dynamo.exc.Unsupported, match="call it outside of the graph"):
        torch.compile(BREAKING[name], backend="eager", fullgraph=True)(torch.ones(3))


def test_errors_come_out_of_compiled_code_as_they_are() -> None:
    dynamo.reset()
    compiled = torch.compile(BREAKING["to_torch"], backend="eager")
    with pytest.raises(tb.BridgeBufferError) as caught:
        compiled(torch.ones(3, requires_grad=True))
    assert caught.value.kind == "requires_grad"


class Conversion(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return tb.to_torch(x * 2) + 1


@pytest.mark.parametrize("strict", [True, False])
def test_an_export_is_a_typed_error(strict: bool) -> None:
    dynamo.reset()
    with pytest.raises((tb.BridgeTypeError, dynamo.exc.Unsupported)) as caught:
        torch.export.export(Conversion(), (torch.ones(3),), strict=strict)
    assert ("call it outside of the graph" in str(caught.value)) == strict, caught.value


def test_fake_tensors_are_refused_and_real_ones_convert() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = torch.ones(3)
    with FakeTensorMode():
        for call in (tb.to_numpy, tb.to_torch, lambda x: tb.plan(x, "numpy"), lambda x: tb.copy(real, out=x)):
            with pytest.raises(tb.BridgeTypeError, match="plain tensor"):
                call(torch.ones(3))
        assert tb.to_numpy(real).tolist() == [1, 1, 1]


@pytest.mark.parametrize("keywords", [{"order": "F"}, {"copy": True}])
def test_no_copies_of_torch_are_made_beside_fake_tensors(keywords: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = torch.ones(2, 3)
    with FakeTensorMode():
        with pytest.raises(tb.BridgeTypeError, match="leave the mode") as caught:
            tb.to_torch(real, **keywords)
        assert caught.value.kind == "not_a_tensor"
        assert tb.to_numpy(real, **keywords).tolist() == [[1] * 3] * 2
    assert tb.to_torch(real, **keywords).tolist() == [[1] * 3] * 2


def test_a_call_costs_what_it_did() -> None:
    assert isinstance(tb.to_torch, BuiltinFunctionType) and isinstance(tb.copy, BuiltinFunctionType)


@pytest.mark.parametrize("order", ["torch._dynamo, truebridge", "truebridge, torch._dynamo"])
def test_any_order_of_imports_works(order: str, program: Any) -> None:
    done = program(f"""
        import sys, warnings
        import torch
        assert "torch._dynamo" not in sys.modules
        warnings.filterwarnings("error", category=UserWarning, module="torch._dynamo$")
        import {order}
        tb = truebridge
        assert not [finder for finder in sys.meta_path if "truebridge" in repr(finder)]
        compiled = torch.compile(lambda x: tb.to_torch(x) + 1, backend="eager")
        assert compiled(torch.ones(2)).tolist() == [2, 2]
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_limits_are_those_of_the_page() -> None:
    """Those of ``docs/limits.md``: a sentence that is no longer true fails here."""
    from torch.autograd import forward_ad
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(lambda x: tb.to_torch(x) + 1)(torch.ones(2))
    assert traced(torch.zeros(2)).tolist() == [2, 2]
    with pytest.raises(tb.BridgeError, match="convert outside of what is traced") as caught:
        torch.jit.trace(lambda x: tb.to_torch(x, copy=True) + 1, torch.ones(2), check_trace=False)
    assert caught.value.kind == "refused"
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.full((2,), 5.0))
        assert tb.to_numpy(dual).tolist() == [1, 1]
        assert forward_ad.unpack_dual(tb.to_torch(dual)).tangent is None


# Ctrl-C in the middle: ``KeyboardInterrupt`` arrives, and nothing is left of the call.


def interrupted(call: Callable[[], object], after: float = 0.05) -> float:
    """Send Ctrl-C to this thread during a call, expect the exception, and return the seconds that it took to arrive."""
    main, sent = threading.get_ident(), [0.0]

    def send() -> None:
        time.sleep(after)
        sent[0] = time.monotonic()
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sender = threading.Thread(target=send)
    try:
        # On a busy machine it may arrive before the call has begun: that is not a fault of the call.
        with pytest.raises(KeyboardInterrupt):
            sender.start()
            call()
            raise AssertionError("the call ended before it was interrupted")
        return time.monotonic() - sent[0]
    finally:
        sender.join()
        signal.signal(signal.SIGINT, before)


def for_ever(call: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        call()


ARRAY = np.zeros((1 << 10, 1 << 10))

INTERRUPTED: dict[str, Callable[[Path], Callable[[], object]]] = {
    "in place": lambda _: lambda: tb.to_torch(ARRAY),
    "a copy": lambda _: lambda: tb.to_torch(ARRAY, copy=True),
    "a transposed copy": lambda _: lambda: tb.to_torch(ARRAY, permute=(1, 0), order="C"),
    "a tree": lambda _: lambda: tb.to_torch({"a": [ARRAY] * 50}),
    "copy": lambda _: lambda: tb.copy(ARRAY, out=torch.empty(ARRAY.shape, dtype=torch.float64)),
    "save": lambda path: lambda: tb.save(path / "x.npy", ARRAY),
    "save safetensors": lambda path: lambda: tb.save(path / "x.safetensors", {"a": ARRAY}),
    "share": lambda _: lambda: tb.revoke(tb.share(ARRAY)),
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    call = INTERRUPTED[name](tmp_path)
    before, shares = views(), processes.held()["shares"]
    for number in range(5):
        interrupted(lambda: for_ever(call), 0.02 + 0.013 * number)
    # A share of which no ticket was returned ends with its time: the interrupt may come between the two.
    assert processes.held()["shares"] <= shares + (5 if name == "share" else 0)
    _core.ipc_close()
    eventually(lambda: views() == before)
    # The file is whole or absent, and no part of one stays.
    left = [path for path in tmp_path.iterdir() if path.suffix not in (".npy", ".safetensors")]
    assert left == []
    for path in tmp_path.iterdir():
        loaded = tb.load(path, "numpy")
        assert (loaded if path.suffix == ".npy" else loaded["a"]).shape == ARRAY.shape
    assert tb.to_torch(ARRAY).shape == ARRAY.shape


def test_a_put_that_is_interrupted_is_listed_or_ended(tmp_path: Path) -> None:
    """What no name stands for is not shared, wherever the interrupt has come."""
    _core.ipc_close()
    with tb.serve(tmp_path / "names") as names:
        for number in range(20):
            interrupted(lambda: for_ever(lambda: names.put("x", ARRAY[:64])), 0.01 + 0.0013 * number)
        names.put("x", ARRAY[:1])
        eventually(lambda: processes.held()["shares"] == 1)
        assert names.get("x", "numpy").shape == (1, ARRAY.shape[1])
    # What was opened is returned by a message.
    eventually(lambda: processes.held()["shares"] == 0)


def test_load_is_interrupted(tmp_path: Path) -> None:
    tb.save(tmp_path / "x.npy", ARRAY)
    for copy in (None, True):
        before = views()
        interrupted(lambda: for_ever(lambda: tb.load(tmp_path / "x.npy", "torch", copy=copy)))  # noqa: B023
        eventually(lambda: views() == before)  # noqa: B023


def test_waiting_for_a_name_is_interrupted(tmp_path: Path) -> None:
    with tb.serve(tmp_path / "names") as names:
        assert interrupted(lambda: next(iter(names.watch("never")))) < 2
        names.put("x", np.ones(2))
        assert names.get("x", "numpy").tolist() == [1, 1]


@contextmanager
def silent(path: Path) -> Iterator[Path]:
    """A process that takes connections and answers nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen()
        yield path


def test_waiting_for_an_answer_is_interrupted(tmp_path: Path) -> None:
    """Of a process that hangs: it has five seconds to answer."""
    ticket = tb.share(np.ones(1))
    own = ticket.text.split('"socket":"')[1].split('"')[0]
    tb.revoke(ticket)
    with silent(tmp_path / "socket") as path:
        text = ticket.text.replace(own, str(path))
        assert interrupted(lambda: tb.open(text, "numpy")) < 2
        with ThreadPoolExecutor() as threads:
            other = threads.submit(tb.open, text, "numpy")
            assert interrupted(lambda: tb.open(text, "numpy"), 0.2) < 2
            assert isinstance(other.exception(), ConnectionError)
        assert interrupted(lambda: tb.connect(path)) < 2


class Handler:
    """A handler that is not a function."""

    def __call__(self, number: int, frame: object) -> None:
        raise TimeoutError("the program's own")


@pytest.mark.parametrize("is_object", [False, True])
@pytest.mark.parametrize("attribute", ["__dlpack__", "__dlpack_device__", "__array_interface__", "items"])
def test_what_a_signal_handler_raises_passes_as_it_is(attribute: str, is_object: bool) -> None:
    """The handler runs in whatever runs then, here in a producer or a container."""

    def alarmed(number: int, frame: object) -> None:
        raise TimeoutError("the program's own")

    class Producer:
        def __getattribute__(self, name: str) -> object:
            if name == attribute:
                signal.raise_signal(signal.SIGALRM)
            return object.__getattribute__(self, name)

        def __dlpack__(self, **keywords: object) -> object:
            return np.ones(3).__dlpack__()

        def __dlpack_device__(self) -> object:
            return 1, 0

    class Container(dict):  # type: ignore[type-arg]
        def items(self) -> object:  # type: ignore[override]
            signal.raise_signal(signal.SIGALRM)

    if attribute == "__array_interface__":
        del Producer.__dlpack__
    x: Any = Container(a=np.ones(3)) if attribute == "items" else Producer()
    out: Any = {"a": np.zeros(3)} if attribute == "items" else np.zeros(3)
    former = signal.signal(signal.SIGALRM, Handler() if is_object else alarmed)
    try:
        for call in (lambda: tb.to_numpy(x), lambda: tb.to_numpy([x]), lambda: tb.copy([x], out=[out])):
            with pytest.raises(TimeoutError, match="the program's own") as caught:
                call()
            assert type(caught.value) is TimeoutError
    finally:
        signal.signal(signal.SIGALRM, former)
    # The producer's own exception is reported as one.
    with pytest.raises(tb.BridgeRuntimeError, match="ZeroDivisionError"):
        tb.to_numpy(Failing())


class Failing:
    @property
    def __dlpack__(self) -> object:
        raise ZeroDivisionError
