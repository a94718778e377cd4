"""Views of pinned memory that PyTorch replaces, and transfers that still use it."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

COUNT = 1 << 20
NUMBERS = np.arange(COUNT, dtype=np.float32)


def pinned() -> Any:
    return torch.arange(COUNT, dtype=torch.float32).pin_memory()


def overwritten() -> list[Any]:
    return [torch.full((COUNT,), -1.0).pin_memory() for _ in range(4)]


def test_a_view_of_pinned_memory_has_its_elements_after_a_move() -> None:
    tensor = pinned()
    views = [tb.to_numpy(tensor), tb.to_numpy(tensor[5:])]
    assert tensor.is_pinned()
    tensor.share_memory_()
    reused = overwritten()
    assert (views[0] == NUMBERS).all() and (views[1] == NUMBERS[5:]).all()
    del views, reused, tensor
    gc.collect()
    again = pinned()
    assert (tb.to_numpy(again) == NUMBERS).all()


def test_pinned_memory_that_was_exported_waits_for_its_transfers() -> None:
    """PyTorch reuses a block after the copies that read it, also those of a slice."""
    for start in (0, 1000):
        for keeps_view in (False, True):
            tensor = pinned()
            view = tb.to_numpy(tensor)
            if not keeps_view:
                del view
            torch.cuda._sleep(200_000_000)
            moved = tensor[start:].to("cuda", non_blocking=True)
            del tensor
            view = None
            overwritten()
            assert (moved.cpu().numpy() == NUMBERS[start:]).all(), (start, keeps_view)


def test_pinned_memory_is_used_again_after_its_views() -> None:
    tb.to_numpy(pinned())
    gc.collect()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    for _ in range(50):
        tensor = pinned()
        view = tb.to_numpy(tensor)
        tensor.share_memory_()
        del tensor
        assert view[-1] == COUNT - 1
        del view
    gc.collect()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= before + (16 << 20)


@pytest.mark.parametrize("target", ["cupy", "torch", "loan"])
def test_a_writable_view_of_immutable_memory_of_a_device_is_warned_of(target: str) -> None:
    jnp: Any = pytest.importorskip("jax.numpy")
    if target == "cupy":
        pytest.importorskip("cupy")
    x = jnp.ones(16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            tb.lend(x) if target == "loan" else tb.convert(x, target)
        tb.lend(x, read_only=True) if target == "loan" else tb.convert(x, target, read_only=True)
    found = [warning for warning in caught if issubclass(warning.category, tb.ImmutableWarning)]
    assert len(found) == 1 and found[0].filename == __file__
