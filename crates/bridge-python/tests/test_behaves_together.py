"""Threads, tasks, forked and started processes, and subinterpreters, all at once with conversions."""

from __future__ import annotations

import asyncio
import copy
import gc
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from memory import counts, eventually, views
from programs import Warm
from test_errors import fake
from truebridge import processes

torch: Any = pytest.importorskip("torch")


THREADS = 16


def started(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


@pytest.mark.parametrize("shared", [True, False])
def test_sixteen_threads_convert_at_once(shared: bool) -> None:
    """All begin together, with one tensor or each with its own, and drop views that another thread has made."""
    common = np.full(64, -1.0)
    barrier, before = threading.Barrier(THREADS), views()
    handed: list[Any] = []

    def work(number: int) -> bool:
        array = common if shared else np.full(64, float(number))
        barrier.wait(60)
        good = True
        for i in range(200):
            tensor = tb.to_torch(array if i % 2 else {"x": array})
            tensor = tensor if i % 2 else tensor["x"]
            back = tb.to_numpy(tensor, permute=(0,))
            good &= back.ctypes.data == array.ctypes.data and back[0] == array[0]
            handed.append(tensor)
            if len(handed) > THREADS:
                handed.pop(0)
        return good

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(work, range(THREADS)))
    del handed[:]
    eventually(lambda: views() == before)


def test_tasks_convert_and_share_at_once() -> None:
    async def task(number: int) -> list[float]:
        array = np.full(8, float(number))
        tensor = tb.to_torch(array)
        await asyncio.sleep(0)
        moved = await asyncio.to_thread(tb.to_numpy, tensor)
        await asyncio.sleep(0)
        return list(tb.to_torch({"x": moved})["x"][:1].tolist())

    async def main() -> list[list[float]]:
        return await asyncio.gather(*(task(number) for number in range(100)))

    assert asyncio.run(main()) == [[float(number)] for number in range(100)]


def test_a_task_that_is_cancelled_leaves_no_view() -> None:
    async def task(entered: asyncio.Event) -> None:
        view = tb.to_torch(np.ones(3))
        entered.set()
        await asyncio.sleep(60)
        del view

    async def main() -> None:
        entered = asyncio.Event()
        running = asyncio.create_task(task(entered))
        await entered.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    before = views()
    asyncio.run(main())
    eventually(lambda: views() == before)


@pytest.mark.parametrize("end", ["os._exit(0)", "raise SystemExit", "pass"])
def test_a_child_converts_and_ends_as_it_likes(end: str, beside_torch: Warm) -> None:
    """The parent has live views, a share that it has opened, and threads that convert while it forks."""
    done = beside_torch.run(f"""
        import os, threading, warnings, numpy as np, torch, truebridge as tb
        from truebridge import processes
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks with threads
        source, stop = torch.arange(4.0), threading.Event()
        view = tb.to_numpy(source)
        ticket = tb.share(np.arange(5))
        opened = tb.open(ticket, "torch")
        def work():
            while not stop.is_set():
                tb.to_numpy(tb.to_torch(np.ones(8)))
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            child = os.fork()
            if child == 0:
                stop.set()
                assert tb.to_torch(view + 1).tolist() == [1, 2, 3, 4]
                assert tb.to_numpy({{"a": source}}, copy=True)["a"].tolist() == [0, 1, 2, 3]
                big = np.ones(1 << 20)
                assert tb.to_torch(big[::-1])[0] == 1
                del view, opened
                {end}
                break
            assert os.waitpid(child, 0)[1] == 0, "a child failed"
        else:
            stop.set()
            for thread in threads:
                thread.join()
            held = processes.held()
            assert (held["shares"], held["leases"], opened.tolist()) == (1, 1, [0, 1, 2, 3, 4]), held
    """)
    assert (done.returncode, done.stderr) == (0, "")


#: A machine with a GPU: a driver that says when it is started, and the library that counts GPUs without it.
DRIVER = """
#include <stdio.h>
int cuInit(unsigned flags) { fputs("the driver was started\\n", stderr); return 100; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
"""
NVML = """
int nvmlInit(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a PyTorch for CUDA")
@pytest.mark.parametrize(("asks", "starts"), [("", False), ("torch.cuda.is_available()", True)])
def test_tensors_of_the_host_do_not_start_the_driver(
    asks: str, starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that is forked after the driver was started cannot use CUDA."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    for library, code in (("libcuda.so.1", DRIVER), ("libnvidia-ml.so.1", NVML)):
        command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", library]
        subprocess.run(command, input=code, text=True, cwd=tmp_path, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    done = started(f"""
        import numpy as np, torch, truebridge as tb
        assert tb.to_torch(np.ones((3, 4)).T, copy=True).sum() == 12
        x = tb.to_torch(np.ones(8))
        tb.to_numpy({{"a": x}}), tb.plan(x, "numpy"), tb.copy(x, out=np.zeros(8)), tb.stats()
        tb.open(tb.share(x), "torch")
        {asks}
    """)
    assert (done.returncode, "the driver was started" in done.stderr) == (0, starts), done.stderr


def _worker(array: Any, text: str) -> tuple[float, list[float]]:
    return tb.to_torch(array).sum().item(), tb.open(text, "numpy").tolist()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_of_multiprocessing(method: str) -> None:
    """A view is pickled as an array is; a ticket opens the memory itself."""
    view, shares = tb.to_numpy(torch.arange(4.0)), processes.held()["shares"]
    ticket = tb.share(np.arange(3.0))
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(_worker, (view, ticket.text)) == (6, [0, 1, 2])
    tb.revoke(ticket)
    # Those of other tests may end by their time.
    assert processes.held()["shares"] <= shares


INTERPRETERS = """
try:
    import _interpreters as interpreters
    def run(code):
        failed = interpreters.exec(interpreters.create({config!r}), code)
        return failed and failed.formatted
except ImportError:
    import _xxsubinterpreters as interpreters
    def run(code):
        try:
            interpreters.run_string(interpreters.create(isolated={config!r} == "isolated"), code)
        except interpreters.RunFailedError as error:
            return str(error)
import sys
code = f"import sys; sys.path[:] = {{sys.path}}; import truebridge"
"""

ORDERS: dict[str, Callable[[str], str]] = {
    "before": lambda refused: f"{refused}\nimport truebridge as tb",
    "after": lambda refused: f"import truebridge as tb\n{refused}",
}


@pytest.mark.parametrize("config", ["legacy", "isolated"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_subinterpreter_is_refused_and_the_main_one_goes_on(order: str, config: str) -> None:
    refused = "text = run(code)\nassert text and 'ImportError' in text, text"
    if config == "legacy":
        # Python itself refuses others from 3.12 on.
        refused += "\nassert 'main interpreter only' in text, text"
    program = INTERPRETERS.format(config=config) + ORDERS[order](refused)
    done = started(program + "\nimport numpy as np\nassert tb.to_numpy(np.ones(2)).tolist() == [1, 1]")
    assert (done.returncode, done.stderr) == (0, "")


# Views and the package's objects are copied and pickled as values, and subclasses keep their class.


def address(tensor: Any) -> int:
    found: int = tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr()
    return found


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "pickle of a tree": lambda x: pickle.loads(pickle.dumps({"a": [x]}))["a"][0],
}


@pytest.mark.parametrize("make", [lambda: tb.to_torch(np.arange(4.0)), lambda: tb.to_numpy(torch.arange(4.0))])
@pytest.mark.parametrize("method", COPIES)
def test_a_copy_of_a_view_owns_its_memory(method: str, make: Callable[[], Any]) -> None:
    view = make()
    with_copy = tb.stats()["leased"]
    own = COPIES[method](view)
    assert tb.stats()["leased"] == with_copy
    assert type(own) is type(view) and address(own) != address(view)
    own[0] = 7
    assert view.tolist() == [0, 1, 2, 3]
    del view
    gc.collect()
    assert own.tolist() == [7, 1, 2, 3]


def test_a_shallow_copy_is_that_of_the_framework() -> None:
    """``copy.copy`` of a torch tensor shares the memory, of an array it does not: with views as without."""
    tensor, array = tb.to_torch(np.arange(4.0)), tb.to_numpy(torch.arange(4.0))
    other = copy.copy(tensor)
    assert address(other) == address(tensor) and address(copy.copy(array)) != address(array)
    seen = counts()["released"]
    del tensor
    assert tb.stats()["released"] == seen and other.tolist() == [0, 1, 2, 3]


def values() -> list[object]:
    with tb.trace() as trace:
        tb.to_torch(np.ones(2))
    with pytest.raises(tb.BridgeError) as caught:
        tb.to_torch(np.ones(2)[::-1], copy=False)
    ticket = tb.share(np.ones(1))
    tb.revoke(ticket)
    plans = [tb.plan(np.ones(3)[::step], "torch") for step in (1, -1)]
    return [*plans, ticket, trace.events, caught.value, tb.profile("numpy"), tb.stats()]


def test_the_objects_of_the_package_are_values() -> None:
    for value in values():
        for method in (copy.copy, *COPIES.values()):
            again = method(value)
            assert type(again) is type(value)
            if isinstance(value, tb.BridgeError):
                assert (again.kind, again.args) == (value.kind, value.args)
            else:
                assert again == value
            assert repr(again) == repr(value)


def test_equal_plans_say_the_same() -> None:
    same, other = (tb.plan(np.ones(3), "torch") for _ in range(2)), tb.plan(np.ones(3)[::-1], "torch")
    assert len({*same}) == 1 and other not in same
    assert (other.zero_copy, other.nbytes, other.copied_by) == (False, 24, "host")


class Named(torch.Tensor):  # type: ignore[misc]
    """A subclass as people write them, with its own attribute and function."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return super().__torch_function__(function, types, arguments, keywords or {})


class Raising(torch.Tensor):  # type: ignore[misc]
    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise AssertionError("never called")


class Dispatching(torch.Tensor):  # type: ignore[misc]
    @staticmethod
    def __new__(cls, inner: Any) -> Any:  # noqa: PLW0211
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("never called")


#: Classes that are converted as the plain tensor that they hold.
SUBCLASSES: dict[str, Callable[[Path], Any]] = {
    "matrix": lambda _: np.array([[1.0, 2.0]]).view(np.matrix),
    "memmap": lambda path: memmap(path),
    "field of a recarray": lambda _: np.rec.fromarrays([np.array([1.0, 2.0])], names="a").a,
    "parameter": lambda _: torch.nn.Parameter(torch.tensor([1.0, 2.0]), requires_grad=False),
    "buffer": lambda _: torch.nn.Buffer(torch.tensor([1.0, 2.0])),
    "torch function": lambda _: torch.tensor([1.0, 2.0]).as_subclass(Named),
    "raising torch function": lambda _: torch.tensor([1.0, 2.0]).as_subclass(Raising),
    "inference": lambda _: inference(),
}


def memmap(path: Path) -> Any:
    array = np.memmap(path / "array", dtype=np.float64, mode="w+", shape=(2,))
    array[:] = [1, 2]
    return array


def inference() -> Any:
    with torch.inference_mode():
        return torch.tensor([1.0, 2.0])


@pytest.mark.parametrize("target", ["numpy", "torch"])
@pytest.mark.parametrize("case", SUBCLASSES)
def test_a_subclass_converts_as_a_plain_tensor(case: str, target: str, tmp_path: Path) -> None:
    source = SUBCLASSES[case](tmp_path)
    result = tb.convert(source, target, copy=False)
    assert type(result) in (np.ndarray, torch.Tensor)
    assert np.ravel(result).tolist() == [1, 2]
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(case == "inference"):
        assert address(result) == address(source)
        source[..., 1] = 5
    assert np.ravel(result).tolist() == [1, 5]


def transformed(transform: Callable[..., Any]) -> Callable[[Callable[[Any], Any]], Any]:
    return lambda call: transform(lambda x: (call(x), x.sum())[1])(torch.ones(2, 2))


def tracked(call: Callable[[Any], Any]) -> Any:
    return torch.func.jvp(lambda x: (call(x), x.sum())[1], (torch.ones(2),), (torch.ones(2),))


#: Tensors that hold no memory, and classes whose memory is not their value: the call, the words.
REFUSED: dict[str, tuple[Callable[[Callable[[Any], Any]], Any], str]] = {
    "masked": (lambda call: call(np.ma.masked_array([1.0, 2.0], [0, 1])), "filled"),
    "masked without a mask": (lambda call: call(np.ma.masked_array([1.0, 2.0])), "filled"),
    "records": (lambda call: call(np.rec.fromarrays([np.ones(2)], names="a")), "convert each by itself"),
    "fake": (lambda call: call(fake()), "plain tensor"),
    "dispatching": (lambda call: call(Dispatching(torch.ones(2))), "plain tensor"),
    "vmap": (transformed(torch.func.vmap), "outside of the transform"),
    "functionalize": (transformed(torch.func.functionalize), "outside of the transform"),
    "jvp": (tracked, "outside of the transform"),
    "uninitialised": (lambda call: call(torch.nn.UninitializedBuffer()), "call the module once"),
    "storage": (lambda call: call(torch.ones(2).untyped_storage()), "not a tensor"),
}


@pytest.mark.parametrize("call", [tb.to_numpy, tb.to_torch, lambda x: tb.plan(x, "numpy"), lambda x: tb.share(x)])
@pytest.mark.parametrize("case", REFUSED)
def test_a_class_without_plain_memory_is_refused(case: str, call: Callable[[Any], Any]) -> None:
    run, words = REFUSED[case]
    with pytest.raises(tb.BridgeTypeError, match=words):
        run(call)


def test_a_transform_of_gradients_is_refused_with_and_without_detach() -> None:
    for detach in (False, True):
        with pytest.raises(tb.BridgeError) as caught:
            torch.func.grad(lambda x: (tb.to_numpy(x, detach=detach), x.sum())[1])(torch.ones(2))  # noqa: B023
        assert caught.value.kind == ("not_a_tensor" if detach else "requires_grad")


@pytest.mark.parametrize("make", [lambda: np.arange(1000.0), lambda: torch.arange(1000.0)])
def test_a_callback_of_the_source_runs_when_the_last_view_is_dropped(make: Callable[[], Any]) -> None:
    source = make()
    is_array = isinstance(source, np.ndarray)
    heard: list[int] = []
    # A view holds an array, but of a torch tensor its storage.
    watched = weakref.ref(source, lambda _: heard.append(1))
    view = tb.to_torch(source) if is_array else tb.to_numpy(source)
    part, again = view[10:], tb.convert(view, "numpy" if is_array else "torch")
    live = counts()["released"]
    del source, view
    gc.collect()
    if is_array:
        assert watched() is not None and not heard
    del part
    assert float(again[999]) == 999 and tb.stats()["released"] == live
    del again
    gc.collect()
    assert heard == [1] and tb.stats()["released"] == live + 2


def test_a_view_keeps_nothing_but_the_memory() -> None:
    """What only the source's tree held is dropped with it."""

    class Batch(dict[str, Any]):
        pass

    batch = Batch(x=np.ones(4), y=np.ones(4))
    dropped, kept = weakref.ref(batch["y"]), weakref.ref(batch["x"])
    view, gone = tb.to_torch(batch["x"]), weakref.ref(batch)
    del batch
    assert gone() is None and dropped() is None and kept() is not None
    del view
    assert kept() is None


def test_cycles_through_views_are_collected() -> None:
    class Holder(np.ndarray):
        view: Any

    array = np.arange(4.0).view(Holder)
    watched = weakref.ref(array)
    cycle: list[Any] = [array]
    cycle.append(cycle)
    cycle.append(tb.to_torch(array))
    del array, cycle
    gc.collect()
    assert watched() is None
