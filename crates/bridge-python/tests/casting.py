"""Numbers of every floating dtype that ``tb.copy`` casts between, and trees of them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

DTYPES: dict[str, Any] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
CASTS = list(itertools.permutations(DTYPES, 2))


def bits(tensor: Any) -> Any:
    """Return the bits of each element as an integer."""
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(dtype)


def borders() -> np.ndarray:
    """Return numbers between which another number of a small dtype becomes the nearest, and their neighbours."""
    all_ = []
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        count = 1 << 8 * dtype.itemsize - 1
        numbers = torch.arange(count).to(torch.int16 if dtype.itemsize == 2 else torch.uint8).view(dtype)
        values = np.unique(numbers.to(torch.float64).numpy())
        values = values[np.isfinite(values)]
        all_ += [values, (values[1:] + values[:-1]) / 2]
    return np.concatenate(all_)


def numbers(name: str, random: np.random.Generator) -> Any:
    """Return all numbers of a small dtype, and of the others many that are hard to round, and any bits."""
    dtype = DTYPES[name]
    if dtype.itemsize < 4:
        count = 1 << 8 * dtype.itemsize
        return torch.arange(count).to(torch.int16 if dtype.itemsize == 2 else torch.uint8).view(dtype)
    real = np.dtype(name)
    near = borders().astype(real)
    near = np.concatenate([near, np.nextafter(near, real.type(np.inf)), np.nextafter(near, real.type(-np.inf))])
    limits = np.finfo(real)
    edges = np.array([0, np.inf, np.nan, limits.max, limits.tiny, limits.smallest_subnormal], real)
    anything = np.frombuffer(random.bytes(20_000 * real.itemsize), real)
    return torch.from_numpy(np.concatenate([near, -near, edges, -edges, anything]))


def same(found: Any, expected: Any) -> None:
    """Compare bit by bit. Every NaN is equal to every other one."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    wide, wanted = found.to(torch.float64), expected.to(torch.float64)
    differ = ~((bits(found) == bits(expected)) | (wide.isnan() & wanted.isnan()))
    assert not differ.any(), (found[differ][:5], expected[differ][:5])


def view(random: np.random.Generator, shape: list[int], dtype: Any, device: str) -> Any:
    """Return a view of any numbers, of this shape: permuted, with gaps, and at any offset."""
    order = [int(axis) for axis in random.permutation(len(shape))]
    steps = [int(step) for step in random.choice([1, 1, 1, 2, 3], len(shape))]
    lengths = [shape[axis] * steps[axis] + int(random.integers(0, 2)) for axis in order]
    offset = int(random.integers(0, 9))
    count = offset + int(np.prod(lengths, dtype=np.int64))
    raw = np.frombuffer(random.bytes((count + 1) * dtype.itemsize), np.uint8)
    whole = torch.from_numpy(raw.copy()).to(device).view(dtype)[offset:count].view(lengths)
    placed = whole.permute([int(axis) for axis in np.argsort(order)])
    for axis, (length, step) in enumerate(zip(shape, steps, strict=True)):
        placed = placed.narrow(axis, 0, length * step)[(*(slice(None),) * axis, slice(None, None, step))]
    return placed


def pair(random: np.random.Generator, to: str, device: str, longest: int = 40) -> tuple[Any, Any]:
    """Return a source of any dtype, and a target that it is cast into."""
    name = list(DTYPES)[int(random.integers(len(DTYPES)))]
    shape = [int(length) for length in random.integers(0, longest, random.integers(0, 4))]
    if shape and random.random() < 0.5:
        # Rows of many vectors, mostly with an end.
        shape[-1] = int(random.integers(16, 1000))
    repeated = [1 if random.random() < 0.2 else length for length in shape]
    source = view(random, repeated, DTYPES[name], device)
    if name.startswith("float") and "8" not in name and random.random() < 0.2:
        source = torch._neg_view(source)
    return source, view(random, shape, DTYPES[to], device)


def cast(source: Any, target: Any) -> Any:
    """Return what PyTorch casts the source to."""
    return source.to(target.dtype).expand(target.shape).resolve_neg()
