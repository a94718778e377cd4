"""Shards of a tensor along a dimension, cut anew."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from ..errors import of_kind


def reshard(sources: Iterable[Any], targets: Iterable[Any], dim: int = 0) -> tuple[list[Any], list[Any]]:
    """Return the slices that ``copy`` fills shards of a tensor with, from other shards of it.

    Parameters
    ----------
    sources : iterable of tensor
        The parts of a tensor along a dimension, in order, of any lengths.
    targets : iterable of tensor
        Other parts of a tensor of the same shape, in order.
    dim : int, optional
        The dimension.

    Returns
    -------
    tuple of two lists
        Slices of the sources, and slices of the targets, one for each: ``copy(src, out=out)`` copies them together.

    Raises
    ------
    BridgeError
        If the shards of both sides are not cut from one shape, or have no such dimension, or if one cannot be sliced.

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
    sources, targets = _listed(sources, "sources"), _listed(targets, "targets")
    dim = _dimension(dim)
    of_sources, of_targets = _lengths(sources, targets, dim)
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


def _listed(shards: Iterable[Any], side: str) -> list[Any]:
    try:
        return list(shards)
    except TypeError as error:
        raise of_kind("argument", f"{side} is a {type(shards).__name__}: pass a list of tensors") from error


def _dimension(dim: int) -> int:
    try:
        return operator.index(dim)
    except TypeError as error:
        raise of_kind("argument", f"dim is {dim!r:.80}: it must be an integer") from error


def _lengths(sources: list[Any], targets: list[Any], dim: int) -> tuple[list[int], list[int]]:
    """Return the lengths of all shards along the dimension. All other lengths must be the same."""
    named = [(f"sources[{i}]", shard) for i, shard in enumerate(sources)]
    named += [(f"targets[{i}]", shard) for i, shard in enumerate(targets)]
    shapes = [_shape(name, shard) for name, shard in named]
    for (name, _), shape in zip(named, shapes, strict=True):
        if not -len(shape) <= dim < len(shape):
            raise of_kind("argument", f"{name} has the shape {shape}, without a dimension {dim}: name another one")
        axis = dim % len(shape)
        if len(shape) != len(shapes[0]) or _without(axis, shape) != _without(axis, shapes[0]):
            text = f"{name} has the shape {shape} and {named[0][0]} {shapes[0]}"
            raise of_kind("layout", f"{text}: shards of one tensor may differ along dimension {dim} only")
    lengths = [shape[dim] for shape in shapes]
    return lengths[: len(sources)], lengths[len(sources) :]


def _shape(name: str, shard: Any) -> tuple[int, ...]:
    try:
        return tuple(int(length) for length in shard.shape)
    except (AttributeError, TypeError, ValueError) as error:
        raise of_kind(
            "not_a_tensor", f"{name} is a {type(shard).__name__}, which has no shape: pass tensors"
        ) from error


def _without(axis: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _part(shard: Any, dim: int, begin: int, length: int) -> Any:
    """Return a slice of a shard; the shard itself where that is all of it."""
    if length == shard.shape[dim]:
        return shard
    whole = (slice(None),) * (dim % len(shard.shape))
    place = (*whole, slice(begin, begin + length))
    try:
        return shard[place]
    except Exception as error:
        text = f"a {type(shard).__name__} of shape {tuple(shard.shape)} cannot be sliced: pass dense tensors"
        raise of_kind("not_a_tensor", text) from error
