"""What several subjects share."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102
from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any

#: Every dtype that the suite names. A subject keeps those that its framework has.
NAMES = [
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "bfloat16", "complex32", "complex64", "complex128"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]

#: Seconds of a delay, for frameworks without a kernel that counts cycles.
DELAY = 3e-3

#: The modulus of the addresses of base buffers, in bytes (``Spec::GRAIN``).
GRAIN = 128


def row_major(shape: list[int]) -> list[int]:
    """Return the strides of a compact tensor, in elements."""
    return [math.prod(max(length, 1) for length in shape[dim + 1 :]) for dim in range(len(shape))]


def beginning(
    allocate: Callable[[int], Any], address: Callable[[Any], int], nbytes: int, align: int
) -> tuple[Any, int]:
    """Allocate memory for a base buffer that begins ``align`` bytes after a multiple of ``GRAIN``.

    Return it, and the bytes before the buffer. It allocates no more than that takes, because allocators reuse a block
    for a request of the same size.
    """
    memory = allocate(align + nbytes)
    if address(memory) % GRAIN:
        memory = allocate(GRAIN + align + nbytes)
    return memory, -address(memory) % GRAIN + align


def placed(allocate: Callable[[int], Any], address: Callable[[Any], int], nbytes: int, align: int) -> Any:
    """Allocate a base buffer that begins ``align`` bytes after a multiple of ``GRAIN``, as ``beginning`` does."""
    memory, start = beginning(allocate, address, nbytes, align)
    return memory[start : start + nbytes]


def allocator(adapter: str) -> str | None:
    """Return the allocator of an adapter's variant (``conformance/src/runner/variants.rs``), or ``None``."""
    return os.environ.get(f"CONFORMANCE_{adapter.upper()}_ALLOCATOR")


def taken(take: Callable[[Any], Any], tensor: Any) -> Any:
    """Import a tensor by a framework's ``from_dlpack``. Return ``None`` for a tensor without ``__dlpack__``.

    Of a tensor on a GPU TensorFlow exports a capsule only.
    """
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and tensorflow.is_tensor(tensor) and "GPU" in tensor.device:
        return take(tensorflow.experimental.dlpack.to_dlpack(tensor))
    return take(tensor) if hasattr(tensor, "__dlpack__") else None


class Optional:
    """What not every framework can do. A subject that can says so in its capabilities."""

    def part(self, tensor: Any, start: int) -> Any:
        raise NotImplementedError

    def use_device(self, index: int) -> int:
        raise NotImplementedError

    def begin_capture(self) -> Any:
        raise NotImplementedError

    def end_capture(self, graph: Any) -> None:
        raise NotImplementedError

    def replay(self, graph: Any) -> None:
        raise NotImplementedError


class SingleStream(Optional):
    """A framework that makes no streams."""

    def streams(self) -> list[int]:
        return []

    def use(self, handle: int) -> int:
        raise RuntimeError(f"the framework has a single stream, and cannot use {handle:#x}")

    def fresh(self, external: bool) -> int | None:
        return None

    def end(self, handle: int) -> None:
        raise RuntimeError(f"the framework has a single stream, and did not make {handle:#x}")


class Unwritable(SingleStream):
    """A framework whose tensors cannot be written to, and whose work on a GPU all runs in one stream."""

    def create_unwritten(self, spec: Any) -> Any:
        raise TypeError("tensors of TensorFlow cannot be written to")

    def write(self, tensor: Any, data: bytes) -> None:
        raise TypeError("tensors of TensorFlow cannot be written to")
