"""Shards of a tensor along a dimension, cut anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import of_kind


def reshard(sources: Sequence[Any], targets: Sequence[Any], dim: int = 0) -> tuple[list[Any], list[Any]]:
    """Return the slices that ``copy`` fills shards of a tensor with, from other shards of it.

    Parameters
    ----------
    sources : sequence of tensor
        The parts of a tensor along a dimension, in order, of any lengths.
    targets : sequence of tensor
        Other parts of a tensor of the same length, in order.
    dim : int, optional
        The dimension.

    Returns
    -------
    tuple of two lists
        Slices of the sources, and slices of the targets, one for each: ``copy(src, out=out)`` copies them together.

    Raises
    ------
    BridgeError
        If the shards are not of one length together, or have no such dimension.

    See Also
    --------
    copier : keeps the plan of these copies.

    Examples
    --------
    >>> import torch
    >>> import truebridge as tb
    >>> halves = list(torch.arange(12.0).reshape(2, 6).split(3, dim=1))
    >>> thirds = [torch.zeros(2, 2) for _ in range(3)]
    >>> src, out = tb.reshard(halves, thirds, dim=1)
    >>> [list(part.shape) for part in src]
    [[2, 2], [2, 1], [2, 1], [2, 2]]
    >>> tb.copy(src, out=out)[3]
    tensor([[ 4.,  5.],
            [10., 11.]])
    """
    of_sources, of_targets = _lengths(sources, dim), _lengths(targets, dim)
    if sum(of_sources) != sum(of_targets):
        text = f"the sources have {sum(of_sources)} elements along dimension {dim} and the targets {sum(of_targets)}"
        raise of_kind("layout", f"{text}: pass all shards of both")
    src, out = [], []
    source = target = 0
    # Elements of the current shards that are used.
    begin = filled = 0
    while source < len(sources) and target < len(targets):
        length = min(of_sources[source] - begin, of_targets[target] - filled)
        if length:
            src.append(_part(sources[source], dim, begin, length))
            out.append(_part(targets[target], dim, filled, length))
        begin, filled = begin + length, filled + length
        if begin == of_sources[source]:
            source, begin = source + 1, 0
        if target < len(targets) and filled == of_targets[target]:
            target, filled = target + 1, 0
    return src, out


def _lengths(shards: Sequence[Any], dim: int) -> list[int]:
    shapes = [tuple(shard.shape) for shard in shards]
    for shape in shapes:
        if not -len(shape) <= dim < len(shape):
            raise of_kind("argument", f"a shard of shape {shape} has no dimension {dim}")
    return [int(shape[dim]) for shape in shapes]


def _part(shard: Any, dim: int, begin: int, length: int) -> Any:
    """Return a slice of a shard; the shard itself where that is all of it."""
    if length == shard.shape[dim]:
        return shard
    whole = (slice(None),) * (dim % len(shard.shape))
    place = (*whole, slice(begin, begin + length))
    return shard[place]
