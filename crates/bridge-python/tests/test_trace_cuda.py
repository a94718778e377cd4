"""``trace`` on a CUDA device: the streams that are ordered, and who copies and moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")

cupy: Any = pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


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
