"""Where tensors of PyTorch are in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


def span(tensor: Any) -> tuple[int, int]:
    """Return the addresses of the first byte and after the last one."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    steps = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (steps + 1) * tensor.element_size()


def overlaps(tensor: Any, spans: Iterable[tuple[int, int]]) -> bool:
    """Return whether the tensor is within one of the spans, or around it."""
    begin, end = span(tensor)
    return any(begin < until and since < end for since, until in spans)
