"""What the tests on a CUDA device share: streams that are busy, and the work that a call gives to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import memory


def late(value: float, count: int = 1 << 20) -> Any:
    """Return a tensor of PyTorch that is zero until the device has been busy for some tens of milliseconds.

    The host has long issued what follows, so a reader that does not wait reads what was there before.
    """
    tensor = torch.zeros(count, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    return tensor.fill_(value)


class Late(torch.autograd.Function):  # type: ignore[misc]
    """Passes on what it gets, and a gradient of threes that is written late."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return late(3.0, gradient.numel())


def spin(stream: Any, cycles: int = 10_000_000) -> None:
    """Keep a stream of CuPy busy, for some milliseconds unless told otherwise."""
    import cupy

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
