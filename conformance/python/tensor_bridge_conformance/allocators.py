"""Allocators that a framework takes by a call: the runner says in the environment which one it shall be."""

from __future__ import annotations

import os
from typing import Any, ClassVar


def chosen(adapter: str) -> str | None:
    """The name of the allocator that the variant of an adapter is about (``conformance/src/runner/variants.rs``)."""
    return os.environ.get(f"CONFORMANCE_{adapter.upper()}_ALLOCATOR")


def prepare(adapter: str) -> None:
    """Set PyTorch's allocator, before anything is allocated: later it takes no other."""
    if adapter != "torch" or chosen(adapter) != "pluggable" or Pools.torch is not None:
        return
    import torch

    from tensor_bridge_conformance import _conformance

    Pools.torch = torch.cuda.memory.CUDAPluggableAllocator(_conformance.__file__, "tb_plug_malloc", "tb_plug_free")
    torch.cuda.memory.change_current_allocator(Pools.torch)


class Pools:
    """The allocators of this process: two subjects of one framework share them."""

    torch: ClassVar[Any] = None
    cupy: ClassVar[Any] = None


def cupy_pool(cupy: Any) -> Any:
    """Set CuPy's allocator. Return its pool, or ``None`` where it has none."""
    cuda = cupy.cuda
    made = {
        None: cupy.get_default_memory_pool,
        "uncached": lambda: None,
        "async": cuda.MemoryAsyncPool,
        "managed": lambda: cuda.MemoryPool(cuda.malloc_managed),
    }
    name = chosen("cupy")
    if Pools.cupy is None:
        Pools.cupy = made[name]()
        if name is not None:
            cuda.set_allocator(Pools.cupy.malloc if Pools.cupy is not None else None)
    return Pools.cupy
