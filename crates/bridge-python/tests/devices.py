"""What the tests on a CUDA device share: streams that are busy, and the work that a call gives to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import torch

import memory


def spin(stream: Any, cycles: int = 10_000_000) -> None:
    """Keep a stream of CuPy busy, for some milliseconds unless told otherwise."""
    code = 'extern "C" __global__ void spin(long long n) { long long s = clock64(); while (clock64() - s < n); }'
    with stream:
        cupy.RawKernel(code, "spin")((1,), (1,), (cycles,))


def settled() -> dict[str, int]:
    """The counts once the device has done its work."""
    torch.cuda.synchronize()
    return memory.settled()


def work(call: Callable[[], Any]) -> list[str]:
    """The names of the kernels and copies that a call gives to the device. What it loads is loaded by a call before."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiled.events() if event.device_type.name == "CUDA"]


def captured(call: Callable[[], Any]) -> Any:
    """Return the graph of a call, which has been made once before."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
