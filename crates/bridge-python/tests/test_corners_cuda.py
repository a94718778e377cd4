"""Corners on a CUDA device: who waits for copies, what is known of an allocator, handles used again, captures."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memory
import truebridge as tb
from capsules import CUDA

torch: Any = pytest.importorskip("torch")

cupy: Any = pytest.importorskip("cupy")


if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")

N = 1 << 16


def spin(stream: Any) -> None:
    """Keep a stream busy for some milliseconds."""
    code = 'extern "C" __global__ void spin(long long n) { long long s = clock64(); while (clock64() - s < n); }'
    with stream:
        cupy.RawKernel(code, "spin")((1,), (1,), (10_000_000,))


def settled() -> dict[str, int]:
    torch.cuda.synchronize()
    return memory.settled()


@pytest.mark.parametrize("reason", ["asked", "strides"])
def test_the_owner_of_a_view_waits_for_a_copy_of_the_view(reason: str) -> None:
    copier, other = cupy.cuda.Stream(non_blocking=True), torch.cuda.Stream()
    wrong = 0
    for value in range(1, 21):
        owner = torch.full((N,), float(value), device="cuda")
        view = tb.to_cupy(owner)
        torch.cuda.synchronize()
        spin(copier)
        with copier, torch.cuda.stream(other):
            copy = tb.to_torch(view, copy=True) if reason == "asked" else tb.to_torch(view[::-1])
        del view, owner
        junk = [torch.full((N,), -1.0, device="cuda") for _ in range(3)]
        torch.cuda.synchronize()
        wrong += not bool((copy == value).all())
        del junk, copy
    assert wrong == 0


def test_another_view_over_the_same_memory_is_no_view_of_ours() -> None:
    side, reader = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    wrong = 0
    for value in range(1, 21):
        array = cupy.full(N, float(value))
        cupy.cuda.Device().synchronize()
        ours, theirs = tb.to_torch(array), torch.from_dlpack(array)
        with torch.cuda.stream(side), reader:
            exported = tb.to_cupy(theirs)
        spin(reader)
        with reader:
            read = exported.copy()
        del ours, array, theirs
        with torch.cuda.stream(side), reader:
            del exported
        junk = [cupy.full(N, -1.0) for _ in range(3)]
        torch.cuda.synchronize()
        wrong += not bool((read == value).all())
        del junk, read
    assert wrong == 0


ALLOCATOR = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
/* Hands a freed block out again at once, as RMM's pools do for their own streams. */
static struct { void *at; size_t size; int is_free; } blocks[4096];
static int count;
void *take(size_t size, int device, void *stream) {
    for (int i = count - 1; i >= 0; i--)
        if (blocks[i].is_free && blocks[i].size == size) { blocks[i].is_free = 0; return blocks[i].at; }
    int (*allocate)(void **, size_t) = dlsym(RTLD_DEFAULT, "cudaMalloc");
    blocks[count].size = size;
    allocate(&blocks[count].at, size);
    return blocks[count++].at;
}
void give(void *at, size_t size, int device, void *stream) {
    for (int i = 0; i < count; i++) if (blocks[i].at == at) blocks[i].is_free = 1;
}
"""


def test_a_pluggable_allocator_is_not_believed_to_wait(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library = tmp_path / "allocator.c", tmp_path / "allocator.so"
    source.write_text(ALLOCATOR)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    code = f"""
import torch
allocator = torch.cuda.memory.CUDAPluggableAllocator({str(library)!r}, "take", "give")
torch.cuda.memory.change_current_allocator(allocator)
import cupy
import truebridge as tb
N = 1 << 16
code = 'extern "C" __global__ void spin(long long n) {{ long long s = clock64(); while (clock64() - s < n); }}'
kernel = cupy.RawKernel(code, "spin")
side, reader = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
wrong = 0
for value in range(1, 21):
    tensor = torch.full((N,), float(value), device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side), reader:
        view = tb.to_cupy(tensor)
        kernel((1,), (1,), (10_000_000,))
        read = view.copy()
        del view, tensor
    junk = [torch.full((N,), -1.0, device="cuda") for _ in range(3)]
    torch.cuda.synchronize()
    wrong += not bool((read == value).all())
    del junk
print(wrong)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


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


def test_record_stream_asks_no_more_than_it_needs() -> None:
    stream = torch.cuda.Stream()
    tb.record_stream(tb.to_cupy(torch.zeros(0, device="cuda")), stream)
    view = tb.to_torch(cupy.zeros(4)).requires_grad_()
    tb.record_stream(view, stream)
    with pytest.raises(tb.BridgeValueError, match="its own framework"):
        tb.record_stream(torch.zeros(4, device="cuda"), stream)


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
    with pytest.raises(tb.BridgeValueError, match=text):
        tb.convert(np.ones(3), "torch", device=f"cuda:{count}")


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


def test_a_view_dropped_in_a_capture_that_it_took_no_part_in_comes_back_after_it() -> None:
    tensor = torch.zeros(4, device="cuda")
    view = tb.to_cupy(torch.ones(4, device="cuda"))
    before = settled()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            del view
        tensor += 1
        assert tb.stats()["pending"] == before["pending"] + 1
    graph.replay()
    torch.cuda.synchronize()
    assert tensor.tolist() == [1, 1, 1, 1]
    deadline = time.monotonic() + 20
    while tb.stats()["pending"] > before["pending"] and time.monotonic() < deadline:
        time.sleep(0.01)
    after = settled()
    assert (after["leaked"], after["pending"]) == (before["leaked"], before["pending"])


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
    deadline = time.monotonic() + 20
    while tb.stats()["pending"] > before["pending"] and time.monotonic() < deadline:
        time.sleep(0.01)
    after = settled()
    assert (after["leaked"], after["pending"]) == (before["leaked"], before["pending"])


# Views of pinned memory that PyTorch replaces, and transfers that still use it.


COUNT = 1 << 20
NUMBERS = np.arange(COUNT, dtype=np.float32)


def pinned() -> Any:
    return torch.arange(COUNT, dtype=torch.float32).pin_memory()


def overwritten() -> list[Any]:
    return [torch.full((COUNT,), -1.0).pin_memory() for _ in range(4)]


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
        assert view[-1] == COUNT - 1
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
