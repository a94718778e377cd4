"""``progress=`` of moves between the host and a CUDA device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

#: A move of so many bytes takes several looks.
MANY = 1 << 31
HOST: Any = np.arange(MANY // 4, dtype=np.int32)


def down(progress: Any) -> Any:
    return tb.to_numpy(torch.from_numpy(HOST).cuda(), device="cpu", progress=progress)


def up(progress: Any) -> Any:
    return tb.to_torch(HOST, device="cuda", progress=progress).cpu().numpy()


def into(progress: Any) -> Any:
    return tb.copy(HOST, out=torch.zeros(len(HOST), dtype=torch.int32, device="cuda"), progress=progress).cpu().numpy()


@pytest.mark.parametrize("move", [down, up, into])
def test_a_move_is_told_to_its_end(move: Callable[[Any], Any]) -> None:
    told: list[tuple[float, float]] = []
    moved = move(lambda done, total: told.append((done, total)))
    assert (moved == HOST).all()
    assert told == sorted(told) and told[-1] == (MANY, MANY) and {total for _, total in told} == {MANY}


@pytest.mark.parametrize("move", [down, up, into])
def test_an_exception_ends_a_move_and_leaves_nothing(move: Callable[[Any], Any], monkeypatch: Any) -> None:
    class Enough(Exception):
        """Of a user."""

    def stop(done: float, total: float) -> None:
        raise Enough(done)

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, stats = torch.cuda.memory_allocated(), tb.stats()
    with pytest.raises(Enough):
        move(stop)
    gc.collect()
    torch.cuda.synchronize()
    after = tb.stats()
    assert torch.cuda.memory_allocated() == before
    assert after["leased"] - stats["leased"] == after["released"] - stats["released"]
    assert after["leaked"] == stats["leaked"]
    assert (move(None) == HOST).all()


def test_a_tree_has_one_total() -> None:
    parts = {"a": HOST[: 1 << 28], "b": [HOST[1 << 28 :], 3]}
    told: list[tuple[float, float]] = []
    moved = tb.to_torch(parts, device="cuda", progress=lambda done, total: told.append((done, total)))
    assert {total for _, total in told} == {MANY} and told[-1][0] == MANY and told == sorted(told)
    assert (moved["b"][0].cpu().numpy() == parts["b"][0]).all()


def test_a_copied_tree_has_one_total_and_tensors_in_place_are_not_of_it() -> None:
    source = {"a": HOST[: 1 << 28], "b": torch.ones(8, device="cuda")}
    target = {"a": torch.zeros(1 << 28, dtype=torch.int32, device="cuda"), "b": torch.zeros(8, device="cuda")}
    told: list[tuple[float, float]] = []
    tb.copy(source, out=target, progress=lambda done, total: told.append((done, total)))
    assert {total for _, total in told} == {1 << 30} and told[-1][0] == 1 << 30
    assert (target["a"].cpu().numpy() == source["a"]).all() and target["b"].sum() == 8


def test_the_function_may_move_tensors_itself() -> None:
    told: list[tuple[float, float]] = []

    def tell(done: float, total: float) -> None:
        told.append((done, total))
        assert tb.to_torch(HOST[: 1 << 25], device="cuda")[-1] == (1 << 25) - 1

    assert (up(tell) == HOST).all()
    assert {total for _, total in told} == {MANY} and told == sorted(told)


def test_an_exception_at_the_end_of_a_move_ends_the_call() -> None:
    def stop(done: float, total: float) -> None:
        if done == total:
            raise StopIteration

    for move in (down, up, into):
        with pytest.raises(StopIteration):
            move(stop)


def test_memory_that_is_pinned_is_one_step() -> None:
    told: list[tuple[float, float]] = []
    pinned = torch.ones(1 << 24).pin_memory()
    tb.to_torch(pinned, device="cuda", progress=lambda done, total: told.append((done, total)))
    assert told == [(1 << 26, 1 << 26)]
