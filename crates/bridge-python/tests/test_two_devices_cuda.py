"""``tb.copy`` of many tensors from one CUDA device to another: values, and the order of the streams."""

from __future__ import annotations

import random
from typing import Any

import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("fewer than two CUDA devices", allow_module_level=True)


def shape_of(draw: random.Random) -> list[int]:
    """Return the shape of a small tensor, or of one that is worth a copy of its own."""
    return draw.choice(
        [[], [1], [draw.choice([5, 70_000, 3_000_000])], [37, draw.choice([3, 4_000])], [draw.choice([5, 300]), 7, 900]]
    )


def strided(draw: random.Random, shape: list[int], dtype: Any, device: str) -> Any:
    """Return a view with gaps, its dimensions in any order."""
    order = draw.sample(range(len(shape)), len(shape))
    base = torch.zeros([shape[d] + draw.choice([0, 0, 1, 3]) for d in order], dtype=dtype, device=device)
    for at, d in enumerate(order):
        base = base.narrow(at, 0, shape[d])
    return base.permute([order.index(d) for d in range(len(shape))])


@pytest.mark.parametrize("seed", range(20))
def test_many_pieces_in_any_streams(seed: int) -> None:
    """More than a block of them, written late and overwritten at once."""
    draw = random.Random(seed)
    here, there = draw.sample([0, 1], 2)
    first, second = (draw.choice([torch.cuda.default_stream(d), torch.cuda.Stream(d)]) for d in (here, there))
    sources, targets = [], []
    for _ in range(draw.choice([1, 9, 40, 200])):
        shape, dtype = shape_of(draw), draw.choice([torch.uint8, torch.float16, torch.float64])
        sources.append(strided(draw, shape, dtype, f"cuda:{here}"))
        targets.append(strided(draw, shape, dtype, f"cuda:{there}"))
    for device in (here, there):
        torch.cuda.synchronize(device)
    for value in range(1, 4):
        with torch.cuda.stream(first), torch.cuda.stream(second):
            with torch.cuda.stream(first):
                torch.cuda._sleep(draw.choice([0, 2_000_000]))
                for source in sources:
                    source.fill_(value)
            tb.copy(sources, out=targets)
            with torch.cuda.stream(first):
                for source in sources:
                    source.zero_()
            with torch.cuda.stream(second):
                wrong = sum(int((target != value).sum()) for target in targets)
        assert wrong == 0
