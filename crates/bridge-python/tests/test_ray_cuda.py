"""Tensors of a CUDA device between the actors of Ray, on two nodes in one machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import truebridge as tb

ray = pytest.importorskip("ray")
torch: Any = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from nodes import MANY, PATIENCE, Cluster, answer, keep, settle, started  # noqa: E402


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(tmp_path_factory.mktemp("ipc"), __name__) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _nothing_stays_shared(cluster: Cluster) -> Iterator[None]:
    yield
    settle(cluster)


def made(self: Any) -> Any:
    self.kept = torch.ones(MANY, device="cuda")
    return self.kept


def test_a_tensor_of_one_node_is_received_in_place(cluster: Cluster) -> None:
    ref = cluster.near.call.remote(made)
    mine = ray.get(ref, timeout=PATIENCE)
    assert mine.is_cuda and float(mine.sum()) == MANY
    # One memory: each sees what the other writes.
    mine[:] = 2
    torch.cuda.synchronize()
    assert answer(cluster.near, lambda self: float(self.kept.sum())) == 2 * MANY
    answer(cluster.beside, keep, ref)
    assert answer(cluster.beside, lambda self: float(self.kept.sum())) == 2 * MANY


def test_every_framework_is_received(cluster: Cluster) -> None:
    tensors = {"torch": torch.ones(MANY, device="cuda")}
    if pytest.importorskip("cupy"):
        tensors["cupy"] = tb.to_cupy(torch.full((MANY,), 2.0, device="cuda"))
    ref = ray.put(tensors)

    def seen(self: Any, tree: Any) -> Any:
        return {name: (str(tb.to_torch(x).device), float(x.sum())) for name, x in tree.items()}

    expected = {"torch": ("cuda:0", MANY), "cupy": ("cuda:0", 2 * MANY)}
    for actor in (cluster.near, cluster.far):
        assert answer(actor, seen, ref) == {name: expected[name] for name in tensors}


def test_the_receiver_chooses_the_device(cluster: Cluster) -> None:
    there, here = ray.put(torch.ones(MANY, device="cuda")), ray.put(torch.full((MANY,), 3.0))
    for actor in (cluster.near, cluster.far):
        for device in ("cpu", "cuda:0"):
            answer(actor, lambda self, device: tb.ray.register(device=device), device)
            for ref, value in ((there, 1), (here, 3)):
                found = answer(actor, lambda self, x: (str(x.device), float(x.sum())), ref)
                assert found == (device, value * MANY)
        answer(actor, lambda self: tb.ray.register())


def test_an_actor_that_is_killed_frees_its_leases(cluster: Cluster) -> None:
    reader = cluster.actor("near")
    ref = ray.put(torch.ones(MANY, device="cuda"))
    answer(reader, keep, ref)
    ray.kill(reader)
    del ref
