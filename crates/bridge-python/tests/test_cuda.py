"""torch ↔ CuPy on a CUDA device, where the suite does not look: other producers, exits, memory, record_stream."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import memory
import truebridge as tb
from capsules import CUDA, Producer

torch: Any = pytest.importorskip("torch")

cupy: Any = pytest.importorskip("cupy")


if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


def settled() -> dict[str, int]:
    torch.cuda.synchronize()
    return memory.settled()


def test_there_and_back_is_the_same_memory() -> None:
    tensor = torch.arange(12.0, device="cuda").reshape(3, 4)
    array = tb.to_cupy(tensor.T, copy=False)
    assert (array.data.ptr, array.shape, array.strides) == (tensor.data_ptr(), (4, 3), (4, 16))
    back = tb.to_torch(array, copy=False)
    assert (back.data_ptr(), back.stride()) == (tensor.data_ptr(), (1, 4))
    array[0, 0] = 7
    assert tensor[0, 0].item() == back[0, 0].item() == 7


def test_negative_strides_are_copied_by_cupy() -> None:
    array = cupy.arange(4.0)[::-1]
    assert tb.plan(array, "torch").reason == "negative strides"
    assert tb.to_torch(array).tolist() == [3, 2, 1, 0]
    with pytest.raises(tb.BridgeBufferError, match="negative strides"):
        tb.to_torch(array, copy=False)


def test_devices_are_checked_and_nothing_is_moved() -> None:
    tensor = torch.ones(3, device="cuda")
    assert tb.to_cupy(tensor, device="cuda:0").sum() == 3
    for call in (
        lambda: tb.to_cupy(tensor, device="cuda:7"),
        lambda: tb.to_numpy(tensor),
        lambda: tb.to_cupy(tensor.cpu()),
    ):
        with pytest.raises(tb.BridgeValueError) as caught:
            call()
        assert caught.value.kind == "device"


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "complex32"])
def test_dtypes_that_cupy_lacks(name: str) -> None:
    with pytest.raises(tb.BridgeTypeError, match=name):
        tb.to_cupy(torch.zeros(4, device="cuda").view(torch.uint8).view(getattr(torch, name)))


def test_record_stream_takes_any_stream_and_only_views() -> None:
    tensor = torch.zeros(4, device="cuda")
    view = tb.to_cupy(tensor)
    for stream in (torch.cuda.Stream(), cupy.cuda.Stream(), cupy.cuda.Stream.null.ptr):
        tb.record_stream(view[1:], stream)
    with pytest.raises(tb.BridgeValueError, match="its own framework"):
        tb.record_stream(torch.zeros(4, device="cuda"), torch.cuda.Stream())


def test_a_recorded_stream_is_waited_for() -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long s = clock64(); while (clock64() - s < n); }', "spin"
    )
    for value in range(50):
        tensor = torch.full((1 << 16,), float(value), device="cuda")
        view = tb.to_cupy(tensor)
        torch.cuda.synchronize()
        with stream:
            tb.record_stream(view, stream)
            spin((1,), (1,), (3_000_000,))
            read = view.copy()
        del view, tensor
        junk = [torch.full((1 << 16,), -1.0, device="cuda") for _ in range(3)]
        torch.cuda.synchronize()
        assert bool((read == value).all())
        del junk


@pytest.mark.parametrize("side", ["owner", "reader"])
def test_streams_may_go_out_of_scope_before_the_view(side: str) -> None:
    for _ in range(20):
        if side == "reader":
            with cupy.cuda.Stream(non_blocking=True):
                view = tb.to_cupy(torch.ones(1 << 10, device="cuda"))
        else:
            with cupy.cuda.Stream(non_blocking=True):
                view = tb.to_torch(cupy.ones(1 << 10))
        gc.collect()
        others = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
        assert view.sum() == 1 << 10
        del view, others
    assert settled()["leaked"] == 0


def test_memory_that_torch_has_from_elsewhere_is_not_reused_early() -> None:
    """PyTorch's ``record_stream`` ignores memory that is not its allocator's."""
    reader = cupy.cuda.Stream(non_blocking=True)
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long s = clock64(); while (clock64() - s < n); }', "spin"
    )
    for value in range(30):
        tensor = torch.from_dlpack(cupy.full(1 << 16, float(value)))
        with reader:
            view = tb.to_cupy(tensor)
            spin((1,), (1,), (3_000_000,))
            read = view.copy()
        del view, tensor
        junk = [cupy.full(1 << 16, -1.0) for _ in range(3)]
        torch.cuda.synchronize()
        assert bool((read == value).all())
        del junk


def test_zero_size_from_a_producer_known_by_a_protocol() -> None:
    assert tb.to_torch(ProtocolObject(cupy.empty((0, 3)))).shape == (0, 3)


class ProtocolObject:
    """A producer that this package knows nothing of, with memory of CuPy."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.streams: list[object] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **arguments: Any) -> object:
        self.streams.append(arguments.get("stream"))
        return self.array.__dlpack__(**arguments)


def test_a_producer_known_by_a_protocol_orders_the_legacy_stream() -> None:
    producer = ProtocolObject(cupy.arange(5))
    tensor = tb.to_torch(producer)
    assert (tensor.data_ptr(), tensor.tolist(), producer.streams) == (producer.array.data.ptr, [0, 1, 2, 3, 4], [1])
    del tensor
    assert settled()["pending"] == 0


def test_the_driver_knows_what_a_capsule_lies_about() -> None:
    array = cupy.cuda.alloc(512)
    for length, fits in ((128, True), (1 << 40, False)):
        producer = Producer()
        producer.tensor.device_type, producer.tensor.data, producer.shape[0] = CUDA, array.ptr, length
        if fits:
            assert tb.to_torch(producer.capsule()).numel() == length
        else:
            with pytest.raises(tb.BridgeValueError, match="outside its allocation"):
                tb.to_torch(producer.capsule())
        settled()
        assert producer.deleted == 1


def test_memory_comes_back_to_the_baseline() -> None:
    pool = cupy.get_default_memory_pool()
    side = cupy.cuda.Stream(non_blocking=True)
    settled()
    alive = memory.views()
    before = (torch.cuda.memory_allocated(), pool.used_bytes())
    for _ in range(5000):
        tb.to_cupy(torch.empty(1 << 20, device="cuda"))
        tb.to_torch(cupy.empty(1 << 18))
        # Allocated on one stream, exported under another: kept until the device has done its work.
        array = cupy.empty(1 << 18)
        with side:
            tb.to_torch(array)
        del array
    settled()
    assert memory.views() == alive
    assert (torch.cuda.memory_allocated(), pool.used_bytes()) == before


@pytest.mark.parametrize("last", ["del view", "keep = view", "import sys; sys.keep = view"])
def test_a_process_ends_with_pending_work(last: str) -> None:
    code = f"""
import torch, cupy, truebridge as tb
side = cupy.cuda.Stream(non_blocking=True)
array = cupy.zeros(1 << 20)
with side:
    view = tb.to_torch(array)
    torch.cuda._sleep(200_000_000)
    del array
back = tb.to_cupy(torch.zeros(8, device="cuda"))
{last}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_captured_graph_survives_views() -> None:
    tensor = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    before = tb.stats()["leaked"]
    with torch.cuda.graph(graph):
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with stream:
            view = tb.to_cupy(tensor)
            view += 1
            del view
    graph.replay()
    graph.replay()
    assert tb.stats()["leaked"] == before
    torch.cuda.synchronize()
    assert tensor.tolist() == [2, 2, 2, 2]


def test_a_capture_refuses_a_stream_outside() -> None:
    inside = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(tb.BridgeRuntimeError, match="captured"):
            tb.to_cupy(inside)
        inside += 1
    graph.replay()
    torch.cuda.synchronize()
    assert inside.tolist() == [1, 1, 1, 1]


def test_an_exception_in_flight_survives_the_release() -> None:
    """When a view is dropped, CuPy's stream is queried, also while an exception is pending."""
    tensor = torch.ones(2, device="cuda")
    for _ in range(3):
        with pytest.raises(tb.BridgeTypeError):
            [tb.to_cupy(x) for x in (tensor, tensor, 3)]
        with pytest.raises(ZeroDivisionError):
            print(tb.to_cupy(tensor), 1 / 0)


# ``trace`` on a CUDA device: the streams that are ordered, and who copies and moves.


def test_the_streams_that_are_ordered() -> None:
    owner, reader = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    with torch.cuda.stream(owner):
        tensor = torch.zeros(4, device="cuda")
        with reader, tb.trace() as trace:
            tb.to_cupy(tensor)
            tb.to_torch(tensor)
    ordered, same = trace.events
    assert ordered.streams == (owner.cuda_stream, reader.ptr)
    assert (ordered.device, ordered.path) == ("cuda:0", "in place")
    assert same.streams is None
    slices = [event for event in trace.chrome()["traceEvents"] if event["ph"] == "X"]
    assert slices[0]["args"]["streams"] == [f"{reader.ptr:#x} waits for {owner.cuda_stream:#x}"]


def test_copies_and_moves_name_who_makes_them() -> None:
    tensor = torch.zeros(8, 8, device="cuda")
    with tb.trace() as trace:
        tb.to_cupy(tensor, copy=True)
        tb.to_numpy(tensor, device="cpu")
        tb.to_torch(np.zeros(3, np.float32), device="cuda")
        tb.copy(tensor, out=cupy.zeros((8, 8), np.float32))
        tb.copy(tensor, out=np.zeros((8, 8), np.float32))
    assert [(event.copied_by, event.reason) for event in trace.events] == [
        ("kernels", "asked for"),
        ("move", "another device"),
        ("move", "another device"),
        ("kernels", "a tensor that exists"),
        ("move", "a tensor that exists"),
    ]
    assert [event.device for event in trace.events] == ["cuda:0", "cuda:0", "cpu", "cuda:0", "cuda:0"]


def test_memory_of_a_device_is_shared_in_place() -> None:
    with tb.trace() as trace:
        ticket = tb.share(torch.zeros(1 << 20, device="cuda"))
    (event,) = trace.events
    assert (event.source, event.target, event.path, event.nbytes) == ("torch", "ipc", "in place", 4 << 20)
    tb.revoke(ticket)


# Trees of tensors on a CUDA device: ordered once, returned together, and never too early.


COUNT = 40
LENGTH = 1 << 16


def spin(cycles: int) -> None:
    """Keep CuPy's current stream busy."""
    code = 'extern "C" __global__ void spin(long long n) { long long s = clock64(); while (clock64() - s < n); }'
    cupy.RawKernel(code, "spin")((1,), (1,), (cycles,))


def eventually(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "still not so after 20 s"
        time.sleep(0.001)


def test_the_reader_of_a_tree_waits_for_every_writer() -> None:
    writers = [torch.cuda.Stream() for _ in range(3)]
    reader = cupy.cuda.Stream(non_blocking=True)
    for value in range(20):
        tree: dict[str, Any] = {}
        for number, writer in enumerate(writers):
            with torch.cuda.stream(writer):
                torch.cuda._sleep(2_000_000)
                tree[str(number)] = [torch.full((LENGTH,), float(value), device="cuda") for _ in range(5)]
        tree["cupy"] = (cupy.full(LENGTH, float(value)), "text")
        # One current stream at the conversion: it is ordered after the writers first, as PyTorch's rules demand.
        for writer in writers:
            torch.cuda.current_stream().wait_stream(writer)
        with reader:
            views = tb.to_cupy(tree)
            sums = [array.sum() for number in "012" for array in views[number]] + [views["cupy"][0].sum()]
            # Still in the reader: CuPy reads a number back in the current stream, which waits for no other.
            totals = [float(total) for total in sums]
        assert totals == [value * LENGTH] * 16


@pytest.mark.parametrize("method", ["together", "one by one"])
def test_the_memory_of_a_tree_is_not_reused_early(method: str) -> None:
    leaked = settled()["leaked"]
    reader = cupy.cuda.Stream(non_blocking=True)
    for value in range(20):
        tensors = [torch.full((LENGTH,), float(value), device="cuda") for _ in range(COUNT)]
        with reader:
            views = tb.to_cupy(tensors)
            del tensors
            spin(20_000_000)
            reads = [view.copy() for view in views]
            junk = []
            if method == "together":
                views.clear()
            while views:
                views.pop()
                time.sleep(0.0002)
                junk.append(torch.full((LENGTH,), -1.0, device="cuda"))
        junk += [torch.full((LENGTH,), -1.0, device="cuda") for _ in range(COUNT)]
        torch.cuda.synchronize()
        assert all(bool((read == value).all()) for read in reads)
    assert settled()["leaked"] == leaked


def test_threads_drop_the_views_of_one_tree_in_streams_of_their_own() -> None:
    reader, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    leaked, alive = settled()["leaked"], memory.views()

    def drop(views: list[Any], stream: Any) -> None:
        with stream:
            while views:
                views.pop()

    for value in range(20):
        tensors = [torch.full((LENGTH,), float(value), device="cuda") for _ in range(COUNT)]
        with reader:
            views = tb.to_cupy(tensors)
            del tensors
            spin(20_000_000)
            reads = [view.copy() for view in views]
        streams = [reader, reader, other, cupy.cuda.Stream.null]
        threads = [threading.Thread(target=drop, args=(views[i::4], stream)) for i, stream in enumerate(streams)]
        del views
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        junk = [torch.full((LENGTH,), -1.0, device="cuda") for _ in range(COUNT)]
        torch.cuda.synchronize()
        assert all(bool((read == value).all()) for read in reads)
        del junk
    eventually(lambda: memory.views() == alive)
    assert settled()["leaked"] == leaked


def test_memory_of_unknown_reuse_is_not_reused_early() -> None:
    """CuPy's pool reuses memory on the stream of its allocation, which is not the current one here."""
    leaked = settled()["leaked"]
    reader = torch.cuda.Stream()
    for value in range(20):
        arrays = [cupy.full(LENGTH, float(value), dtype=cupy.float32) for _ in range(COUNT)]
        writer = cupy.cuda.Stream(non_blocking=True)
        writer.wait_event(cupy.cuda.get_current_stream().record())
        with writer, torch.cuda.stream(reader):
            views = tb.to_torch(arrays)
            torch.cuda._sleep(20_000_000)
            reads = [view.clone() for view in views]
            del arrays, views
        junk = [cupy.full(LENGTH, -1.0, dtype=cupy.float32) for _ in range(COUNT)]
        torch.cuda.synchronize()
        assert all(bool((read == value).all()) for read in reads)
        del junk
    assert settled()["leaked"] == leaked


def test_single_dropped_views_return_their_memory() -> None:
    # Not PyTorch's stream: in that one, memory is returned at once.
    with cupy.cuda.Stream(non_blocking=True):
        before = settled()["released"]
        views = tb.to_cupy([torch.ones(4, device="cuda") for _ in range(COUNT)])
        for dropped in range(1, COUNT):
            views.pop()
            eventually(lambda dropped=dropped: tb.stats()["released"] == before + dropped)
        assert views[0].sum() == 4


@pytest.mark.parametrize("captured", ["reader", "owner", "both", "blocking"])
def test_a_capture_between_the_drop_and_the_return_delays_the_return(captured: str) -> None:
    reader = cupy.cuda.Stream(non_blocking=True)
    if captured == "blocking":
        # The owner's stream is the legacy stream, which waits for every blocking stream.
        of_torch, streams = torch.cuda.default_stream(), [cupy.cuda.Stream()]
    else:
        of_torch = torch.cuda.Stream()
        owner = cupy.cuda.ExternalStream(of_torch.cuda_stream)
        streams = {"reader": [reader], "owner": [owner], "both": [owner, reader]}[captured]
    leaked, alive = settled()["leaked"], memory.views()
    with torch.cuda.stream(of_torch), reader:
        for _ in range(20):
            views = tb.to_cupy([torch.ones(4, device="cuda") for _ in range(COUNT)])
            views.pop()
            for stream in streams:
                stream.begin_capture()
            # Longer than memory waits for its return, which must not break the captures.
            time.sleep(0.005)
            for stream in streams:
                stream.end_capture()
            del views
    eventually(lambda: memory.views() == alive)
    assert settled()["leaked"] == leaked


def test_views_that_are_dropped_together_are_returned_at_once() -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        before = settled()["released"]
        views = tb.to_cupy([torch.ones(4, device="cuda") for _ in range(COUNT)])
        del views
        assert tb.stats()["released"] == before + COUNT


def test_a_tree_on_the_host_and_on_a_device_names_what_does_not_fit() -> None:
    with pytest.raises(tb.BridgeValueError, match=r"^tree\['b'\]: ") as caught:
        tb.to_cupy({"a": torch.ones(2, device="cuda"), "b": torch.ones(2)})
    assert caught.value.kind == "device"


def test_threads_convert_and_drop_trees() -> None:
    def work(failures: list[BaseException]) -> None:
        try:
            with cupy.cuda.Stream(non_blocking=True):
                for value in range(30):
                    views = tb.to_cupy([torch.full((64,), float(value), device="cuda") for _ in range(COUNT)])
                    kept = views[:: 1 + value % 3]
                    del views
                    assert all(float(view.sum()) == value * 64 for view in kept)
        except BaseException as failure:
            failures.append(failure)

    before, alive, failures = settled(), memory.views(), []  # type: ignore[var-annotated]
    threads = [threading.Thread(target=work, args=(failures,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    eventually(lambda: memory.views() == alive)
    assert settled()["leaked"] == before["leaked"]
