"""``debug`` on a GPU: a race that is made on purpose is found every time, a right program never; poison in order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import truebridge as tb
from truebridge.diagnostics import debug as debugging

torch: Any = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)
cupy: Any = pytest.importorskip("cupy")

#: How often a race is made.
TIMES = 50
#: Cycles of a kernel that takes some 50 ms: the host makes a conversion in a thousandth of that.
CYCLES = 100_000_000
LENGTH = 1 << 18
LEGACY = 1

pytestmark = pytest.mark.filterwarnings("ignore::truebridge.BridgeDebugWarning")


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    """Begin and end with an idle device."""
    torch.cuda.synchronize()
    tb.to_cupy(torch.zeros(1, device="cuda"))
    yield
    torch.cuda.synchronize()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "still not so after 20 s"
        time.sleep(0.001)


def tensor(value: float = 1.0) -> Any:
    return torch.full((LENGTH,), value, device="cuda")


@contextlib.contextmanager
def in_torch(handle: int) -> Iterator[None]:
    """Let PyTorch launch into a stream of CuPy."""
    with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
        yield


def test_a_tensor_that_another_stream_still_writes_is_found_every_time() -> None:
    side = torch.cuda.Stream()
    with tb.debug() as debug:
        with torch.cuda.stream(side):
            known = tensor()
            tb.to_cupy(known)
        for count in range(1, TIMES + 1):
            torch.cuda.synchronize()
            shared = tensor()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(CYCLES)
                shared.fill_(2)
            view = tb.to_cupy(shared)
            exports = [found for found in debug.findings if found.kind == "export"]
            assert len(exports) == count, f"run {count}"
            assert (exports[-1].source, exports[-1].target, exports[-1].device) == ("torch", "cupy", "cuda:0")
            assert (exports[-1].stream, exports[-1].busy) == (LEGACY, side.cuda_stream)
            assert exports[-1].file == __file__
            torch.cuda.synchronize()
            del view


@pytest.mark.parametrize("method", ["wait_stream", "current stream", "synchronize", "event"])
def test_a_right_program_is_never_found(method: str) -> None:
    side = torch.cuda.Stream()
    with tb.debug() as debug:
        with torch.cuda.stream(side):
            tb.to_cupy(tensor())
        for _ in range(TIMES):
            torch.cuda.synchronize()
            shared = tensor()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(CYCLES // 10)
                shared.fill_(2)
                if method == "current stream":
                    view = tb.to_cupy(shared)
            if method == "wait_stream":
                torch.cuda.current_stream().wait_stream(side)
            if method == "event":
                torch.cuda.current_stream().wait_event(side.record_event())
            if method == "synchronize":
                side.synchronize()
            if method != "current stream":
                view = tb.to_cupy(shared)
            assert float(view.sum()) == 2 * LENGTH
            del view, shared
        assert debug.findings == (), str(debug)


def used_elsewhere(recorded: bool, debug: Any) -> int:
    """Use views in a stream of CuPy that is not current, and return in how many runs the drop was a finding."""
    reader = cupy.cuda.Stream(non_blocking=True)
    with reader:
        tb.to_cupy(tensor())
    runs = 0
    for _ in range(TIMES):
        torch.cuda.synchronize()
        view = tb.to_cupy(tensor())
        torch.cuda.synchronize()
        before = len(debug.findings)
        with in_torch(reader.ptr):
            torch.cuda._sleep(CYCLES)
        with reader:
            total = view.sum()
        if recorded:
            tb.record_stream(view, reader)
        del view
        found = debug.findings[before:]
        assert all((each.kind, each.busy) == ("return", reader.ptr) for each in found), str(debug)
        runs += bool(found)
        torch.cuda.synchronize()
        if recorded:
            assert float(total) == LENGTH
    return runs


def test_a_view_that_another_stream_still_reads_is_found_every_time() -> None:
    with tb.debug() as debug:
        assert used_elsewhere(False, debug) == TIMES


def test_a_recorded_stream_is_never_found() -> None:
    with tb.debug() as debug:
        assert used_elsewhere(True, debug) == 0


def test_the_late_reader_reads_nan() -> None:
    """The race of the test above changes what is read: poison instead of values that happen to be right."""
    reader = cupy.cuda.Stream(non_blocking=True)
    with tb.debug():
        view = tb.to_cupy(tensor())
        torch.cuda.synchronize()
        with in_torch(reader.ptr):
            torch.cuda._sleep(CYCLES)
        with reader:
            total = view.sum()
        del view
        torch.cuda.synchronize()
        assert cupy.isnan(total)


def test_memory_of_torch_is_overwritten_when_it_is_given_back() -> None:
    with tb.debug() as debug:
        shared = tensor()
        view = tb.to_cupy(shared)
        owner = cupy.cuda.UnownedMemory(shared.data_ptr(), shared.nbytes, None)
        pointer = cupy.ndarray(LENGTH, cupy.uint32, cupy.cuda.MemoryPointer(owner, 0))
        del shared
        torch.cuda.synchronize()
        assert float(view.sum()) == LENGTH
        del view
        torch.cuda.synchronize()
        assert debug.poisoned == 1
        # The allocator keeps the block, and has not reused it.
        assert (pointer.get() == 0xFFFFFFFF).all()


def test_memory_of_cupy_is_overwritten_when_it_is_given_back() -> None:
    with tb.debug() as debug:
        shared = cupy.ones(LENGTH, cupy.float32)
        owner = cupy.cuda.UnownedMemory(shared.data.ptr, shared.nbytes, None)
        pointer = cupy.ndarray(LENGTH, cupy.uint32, cupy.cuda.MemoryPointer(owner, 0))
        view = tb.to_torch(shared)
        del shared
        assert float(view.sum()) == LENGTH
        del view
        torch.cuda.synchronize()
        assert debug.poisoned == 1
        assert (pointer.get() == 0xFFFFFFFF).all()


def test_memory_whose_reuse_is_unknown_is_overwritten_as_well() -> None:
    """It was allocated for another stream than the one of its export: the pool may reuse it there."""
    other = cupy.cuda.Stream(non_blocking=True)
    with tb.debug() as debug:
        with other:
            shared = cupy.ones(LENGTH, cupy.float32)
        torch.cuda.synchronize()
        view = tb.to_torch(shared)
        del shared
        torch.cuda._sleep(CYCLES // 10)
        total = view.sum()
        del view
        torch.cuda.synchronize()
        assert float(total) == LENGTH
        eventually(lambda: debug.poisoned == 1 and tb.stats()["pending"] == 0)


def test_what_somebody_else_owns_is_left_alone() -> None:
    with tb.debug() as debug:
        for keep in (lambda x: x, lambda x: x[5:], lambda x: x.untyped_storage(), lambda x: x.detach()):
            shared = tensor()
            kept = keep(shared)
            view = tb.to_cupy(shared)
            del shared, view
            read = kept if isinstance(kept, torch.Tensor) else torch.tensor([], device="cuda").set_(kept)
            assert (read == 1).all()
        for keep in (lambda x: x, lambda x: x[5:], lambda x: x.data.mem):
            array = cupy.ones(LENGTH, cupy.float32)
            kept = keep(array)
            other = tb.to_torch(array)
            second = tb.to_torch(array)
            del array, other
            assert (second == 1).all()
            del second
        assert debug.poisoned == 0


def test_the_loop_of_a_pipeline_computes_what_it_computed() -> None:
    """Every block is poisoned when it is returned, and reused by the allocators: the sums stay right."""
    with tb.debug() as debug:
        for number in range(500):
            batch = tensor(number)
            array = tb.to_cupy(batch)
            del batch
            squares = array * array
            del array
            back = tb.to_torch(squares)
            del squares
            assert float(back[:4].sum()) == 4 * number**2
            del back
        torch.cuda.synchronize()
        assert debug.poisoned == 1000
        assert debug.findings == (), str(debug)


def test_a_capture_is_left_alone() -> None:
    shared, out = tensor(), torch.zeros(LENGTH, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with tb.debug() as debug:
        with torch.cuda.graph(graph), cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            fresh = shared + 1
            view = tb.to_cupy(fresh)
            out.copy_(fresh)
            del fresh, view
        for value in (3, 5):
            shared.fill_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert (out == value + 1).all()
        assert (debug.findings, debug.poisoned) == ((), 0), str(debug)


def test_memory_of_the_drivers_pool_is_overwritten() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    numpy = pytest.importorskip("numpy")
    if not tensorflow.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow sees no GPU")
    with tb.debug() as debug:
        moved = tb.to_tensorflow(numpy.ones(LENGTH, numpy.float32), device="cuda:0")
        assert float(tensorflow.reduce_sum(moved)) == LENGTH
        before = debug.poisoned
        del moved
        eventually(lambda: bool(tb.stats()) and debug.poisoned == before + 1)


def test_the_warning_names_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debugging, "_WARNED", set())
    side = torch.cuda.Stream()
    with tb.debug(), pytest.warns(tb.BridgeDebugWarning, match="was busy when torch exported") as caught:
        with torch.cuda.stream(side):
            tb.to_cupy(tensor())
        shared = tensor()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
        for _ in range(3):
            tb.to_cupy(shared)
        torch.cuda.synchronize()
    told = [each for each in caught if each.category is tb.BridgeDebugWarning and "exported" in str(each.message)]
    assert [each.filename for each in told] == [__file__]
