"""PyTorch and CuPy on a CUDA device, where the suite does not look: captures, devices, exits, traces, pinned memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import memory
import truebridge as tb
from capsules import CUDA, Producer, Wrapper

torch: Any = pytest.importorskip("torch")
cupy: Any = pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from devices import settled  # noqa: E402

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")


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


def test_record_stream_takes_any_stream_and_only_views() -> None:
    view = tb.to_cupy(torch.zeros(4, device="cuda"))
    for stream in (torch.cuda.Stream(), cupy.cuda.Stream(), cupy.cuda.Stream.null.ptr):
        tb.record_stream(view[1:], stream)
    tb.record_stream(tb.to_cupy(torch.zeros(0, device="cuda")), torch.cuda.Stream())
    tb.record_stream(tb.to_torch(cupy.zeros(4)).requires_grad_(), torch.cuda.Stream())
    with pytest.raises(tb.BridgeValueError, match="its own framework"):
        tb.record_stream(torch.zeros(4, device="cuda"), torch.cuda.Stream())


def test_a_producer_known_by_a_protocol_orders_the_legacy_stream() -> None:
    streams: list[object] = []

    class Noting(Wrapper):
        def __dlpack__(self, **keywords: Any) -> Any:
            streams.append(keywords.get("stream"))
            return super().__dlpack__(**keywords)

    array = cupy.arange(5)
    tensor = tb.to_torch(Noting(array))
    assert (tensor.data_ptr(), tensor.tolist(), streams) == (array.data.ptr, [0, 1, 2, 3, 4], [1])
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


def test_a_handle_that_names_another_stream_now_is_kept_alive() -> None:
    again = 0
    for _ in range(20):
        first = cupy.cuda.Stream(non_blocking=True)
        handle = first.ptr
        with cupy.cuda.ExternalStream(handle):
            view = tb.to_cupy(torch.ones(8, device="cuda"))
        del view, first
        streams = []
        while len(streams) < 64 and (not streams or streams[-1].ptr != handle):
            streams.append(cupy.cuda.Stream(non_blocking=True))
        stream = streams.pop()
        again += stream.ptr == handle
        with stream:
            view = tb.to_cupy(torch.ones(8, device="cuda"))
        alive = weakref.ref(stream)
        del stream
        gc.collect()
        assert alive() is not None
        del view, streams
    assert again, "the driver used no handle again"
    assert settled()["leaked"] == 0


@two_gpus
def test_a_stream_of_another_device_is_refused() -> None:
    view = tb.to_cupy(torch.zeros(4, device="cuda:0"))
    with pytest.raises(tb.BridgeValueError, match="cuda:0") as caught:
        tb.record_stream(view, torch.cuda.Stream("cuda:1"))
    assert caught.value.kind == "device"
    tb.record_stream(view, torch.cuda.Stream("cuda:0"))
    del view
    assert settled()["leaked"] == 0


@two_gpus
def test_a_copy_stays_on_the_device_of_the_array() -> None:
    with cupy.cuda.Device(1):
        array = cupy.arange(8, dtype=cupy.float32)
    tensor = tb.to_torch(array[::-1], device="cuda:1")
    assert (str(tensor.device), tensor.tolist()) == ("cuda:1", [7, 6, 5, 4, 3, 2, 1, 0])
    assert cupy.cuda.Device().id == 0
    moved = tb.to_torch(array[::-1], device="cuda:0")
    assert (str(moved.device), moved.tolist()) == ("cuda:0", tensor.tolist())


@two_gpus
def test_cuda_without_a_number_is_the_current_device() -> None:
    tensor = torch.ones(2, device="cuda:1")
    assert tb.to_cupy(tensor, device="cuda").device.id == 0
    with torch.cuda.device(1):
        torch.cuda.current_stream().synchronize()
        assert tb.to_cupy(tensor, device="cuda").device.id == 1
        assert tb.to_cupy(tensor, device=torch.device("cuda")).device.id == 1


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    count = torch.cuda.device_count()
    text = rf"there is no cuda:{count}: .* {count} CUDA device\(s\), cuda:0 to cuda:{count - 1}(?!\d)"
    for call in (tb.convert, tb.plan):
        with pytest.raises(tb.BridgeValueError, match=text) as caught:
            call(np.ones(3), "torch", device=f"cuda:{count}")
        assert caught.value.kind == "device"


def test_devices_of_every_framework_are_understood() -> None:
    tensor = torch.ones(2, device="cuda")
    for device in ("cuda", "cuda:0", tensor.device, torch.device("cuda"), cupy.cuda.Device(0), (CUDA, 0)):
        assert tb.to_cupy(tensor, device=device).sum() == 2
    for nonsense in ("gpu", 3.5, object(), torch.device("cpu"), cupy.cuda.Stream.null):
        with pytest.raises(tb.BridgeValueError):
            tb.to_cupy(tensor, device=nonsense)


@pytest.mark.parametrize("shape", [(2, 3, 1, 1), (2, 1, 8, 8)])
def test_channels_last_survives_cupy(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, device="cuda").to(memory_format=torch.channels_last)
    assert tb.to_torch(tb.to_cupy(tensor)).stride() == tensor.stride()


@pytest.mark.parametrize("method", ["torch → cupy", "cupy → torch", "cupy → cupy"])
@pytest.mark.parametrize("captured", ["blocking", "non-blocking", "per-thread"])
def test_a_view_dropped_in_a_capture_of_any_kind_of_stream_comes_back_after_it(captured: str, method: str) -> None:
    """CUDA forbids the legacy stream, and questions about it, while a blocking stream is captured."""
    streams = {
        "blocking": cupy.cuda.Stream,
        "non-blocking": lambda: cupy.cuda.Stream(non_blocking=True),
        "per-thread": lambda: cupy.cuda.Stream.ptds,
    }
    stream, side = streams[captured](), cupy.cuda.Stream(non_blocking=True)
    counter = cupy.zeros(4)
    torch.cuda.synchronize()
    before = settled()
    with side:
        if method == "torch → cupy":
            view = tb.to_cupy(torch.ones(1 << 20, device="cuda"))
        elif method == "cupy → torch":
            view = tb.to_torch(cupy.ones(1 << 20))
        else:
            view = tb.to_cupy(tb.to_torch(cupy.ones(1 << 20)))
    torch.cuda.synchronize()
    with stream:
        stream.begin_capture()
        counter += 1
        del view
        gc.collect()
        graph = stream.end_capture()
    with side:
        graph.launch()
    torch.cuda.synchronize()
    assert counter.tolist() == [1, 1, 1, 1], "the capture is whole"
    memory.eventually(lambda: tb.stats()["pending"] <= before["pending"])
    assert settled()["leaked"] == before["leaked"]


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


def test_single_dropped_views_return_their_memory() -> None:
    # Not PyTorch's stream: in that one, memory is returned at once.
    with cupy.cuda.Stream(non_blocking=True):
        before = settled()["released"]
        views = tb.to_cupy([torch.ones(4, device="cuda") for _ in range(COUNT)])
        for dropped in range(1, COUNT):
            views.pop()
            memory.eventually(lambda dropped=dropped: tb.stats()["released"] == before + dropped)
        assert views[0].sum() == 4


@pytest.mark.usefixtures("leaks_nothing")
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


@pytest.mark.usefixtures("leaks_nothing")
def test_threads_convert_and_drop_trees() -> None:
    def work(_: int) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            for value in range(30):
                views = tb.to_cupy([torch.full((64,), float(value), device="cuda") for _ in range(COUNT)])
                kept = views[:: 1 + value % 3]
                del views
                assert all(float(view.sum()) == value * 64 for view in kept)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


# Views of pinned memory that PyTorch replaces, and transfers that still use it.


PINNED = 1 << 20
NUMBERS = np.arange(PINNED, dtype=np.float32)


def pinned() -> Any:
    return torch.arange(PINNED, dtype=torch.float32).pin_memory()


def overwritten() -> list[Any]:
    return [torch.full((PINNED,), -1.0).pin_memory() for _ in range(4)]


def test_a_view_of_pinned_memory_has_its_elements_after_a_move() -> None:
    tensor = pinned()
    views = [tb.to_numpy(tensor), tb.to_numpy(tensor[5:])]
    assert tensor.is_pinned()
    tensor.share_memory_()
    reused = overwritten()
    assert (views[0] == NUMBERS).all() and (views[1] == NUMBERS[5:]).all()
    del views, reused, tensor
    gc.collect()
    again = pinned()
    assert (tb.to_numpy(again) == NUMBERS).all()


def test_pinned_memory_that_was_exported_waits_for_its_transfers() -> None:
    """PyTorch reuses a block after the copies that read it, also those of a slice."""
    for start in (0, 1000):
        for keeps_view in (False, True):
            tensor = pinned()
            view = tb.to_numpy(tensor)
            if not keeps_view:
                del view
            torch.cuda._sleep(200_000_000)
            moved = tensor[start:].to("cuda", non_blocking=True)
            del tensor
            view = None
            overwritten()
            assert (moved.cpu().numpy() == NUMBERS[start:]).all(), (start, keeps_view)


def test_pinned_memory_is_used_again_after_its_views() -> None:
    tb.to_numpy(pinned())
    gc.collect()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    for _ in range(50):
        tensor = pinned()
        view = tb.to_numpy(tensor)
        tensor.share_memory_()
        del tensor
        assert view[-1] == PINNED - 1
        del view
    gc.collect()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= before + (16 << 20)


@pytest.mark.parametrize("target", ["cupy", "torch", "loan"])
def test_a_writable_view_of_immutable_memory_of_a_device_is_warned_of(target: str) -> None:
    jnp: Any = pytest.importorskip("jax.numpy")
    if target == "cupy":
        pytest.importorskip("cupy")
    x = jnp.ones(16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            tb.lend(x) if target == "loan" else tb.convert(x, target)
        tb.lend(x, read_only=True) if target == "loan" else tb.convert(x, target, read_only=True)
    found = [warning for warning in caught if issubclass(warning.category, tb.ImmutableWarning)]
    assert len(found) == 1 and found[0].filename == __file__
