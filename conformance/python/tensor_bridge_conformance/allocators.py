"""Allocators that are set by a call. The runner names the one to set in the environment."""

from __future__ import annotations

import os
from typing import Any, ClassVar


def chosen(adapter: str) -> str | None:
    """Return the allocator of an adapter's variant (``conformance/src/runner/variants.rs``), or ``None``."""
    return os.environ.get(f"CONFORMANCE_{adapter.upper()}_ALLOCATOR")


def prepare(adapter: str) -> None:
    """Set PyTorch's allocator, which it accepts only before the first allocation."""
    if adapter != "torch" or chosen(adapter) != "pluggable" or Pools.torch is not None:
        return
    import torch

    from tensor_bridge_conformance import _conformance

    Pools.torch = torch.cuda.memory.CUDAPluggableAllocator(_conformance.__file__, "tb_plug_malloc", "tb_plug_free")
    torch.cuda.memory.change_current_allocator(Pools.torch)


class Pools:
    """The allocators of this process. Two subjects of one framework share them."""

    torch: ClassVar[Any] = None
    cupy: ClassVar[Any] = None


def _sharable_pools(cuda: Any) -> list[int]:
    """Return a pool of the driver for each device, whose memory other processes can open by a descriptor."""
    pinned, descriptor, on_device = 1, 1, 1
    devices = range(cuda.runtime.getDeviceCount())
    properties = (cuda.runtime.MemPoolProps(pinned, descriptor, on_device, device) for device in devices)
    return [cuda.runtime.memPoolCreate(wanted) for wanted in properties]


def cupy_pool(cupy: Any) -> Any:
    """Set CuPy's allocator. Return its pool, or ``None`` where it has none."""
    cuda = cupy.cuda
    made = {
        None: cupy.get_default_memory_pool,
        "uncached": lambda: None,
        "async": cuda.MemoryAsyncPool,
        "managed": lambda: cuda.MemoryPool(cuda.malloc_managed),
        "shared": lambda: cuda.MemoryAsyncPool(_sharable_pools(cuda)),
    }
    name = chosen("cupy")
    if Pools.cupy is None:
        Pools.cupy = made[name]()
        if name is not None:
            cuda.set_allocator(Pools.cupy.malloc if Pools.cupy is not None else None)
    return Pools.cupy
