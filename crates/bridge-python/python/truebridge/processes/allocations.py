"""Memory that a store takes over as it is: of tensors that are made there, and of PyTorch's pool."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

from .. import _core
from ..errors import of_kind
from .trees import shareable, tree_of

if TYPE_CHECKING:
    import torch

    from .._core import Device, Target


def empty(like: Any, target: Target, device: Device) -> Any:
    """Make tensors of the shapes and dtypes of others."""
    tensors, tree = shareable(like)
    return tree_of(tree, _core.ipc_empty([_spec(tensor) for tensor in tensors], target, device))


@functools.cache
def pool() -> torch.cuda.MemPool:
    """Return the pool of PyTorch whose memory a store takes over."""
    try:
        from torch.cuda import MemPool
        from torch.cuda.memory import CUDAPluggableAllocator
    except ImportError as error:
        raise of_kind("missing", "a memory pool needs PyTorch 2.6 or later: install it, or use empty") from error
    try:
        allocator = CUDAPluggableAllocator(_core.__file__, "truebridge_pool_allocate", "truebridge_pool_free")
        return MemPool(allocator.allocator())
    except RuntimeError as error:
        raise of_kind(
            "missing", f"PyTorch cannot make a memory pool ({error}): use a GPU and a build for CUDA"
        ) from error


def _spec(x: Any) -> tuple[str, list[int]]:
    """Return the name of the dtype, and the shape."""
    try:
        dtype, shape = x.dtype, [operator.index(length) for length in x.shape]
    except (AttributeError, TypeError, ValueError) as error:
        text = f"{type(x).__name__} has no shape and dtype: pass tensors, or objects that have both"
        raise of_kind("not_a_tensor", text) from error
    if not all(0 <= length < 1 << 63 for length in shape):
        raise of_kind("argument", f"the shape {shape!r:.80} is not valid: lengths are from 0 to 2^63 - 1")
    return str(getattr(dtype, "name", dtype)).removeprefix("torch."), shape
