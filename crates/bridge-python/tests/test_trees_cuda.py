"""Trees of tensors on a CUDA device: ordered once, returned together, and never too early."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import memory
import truebridge as tb

torch: Any = pytest.importorskip("torch")

cupy: Any = pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

COUNT = 40
LENGTH = 1 << 16


def settled() -> dict[str, int]:
    torch.cuda.synchronize()
    return memory.settled()


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


@pytest.mark.parametrize("way", ["together", "one by one"])
def test_the_memory_of_a_tree_is_not_reused_early(way: str) -> None:
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
            if way == "together":
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


def test_views_that_are_dropped_alone_return_their_memory_soon() -> None:
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
