"""Tensors of CUDA devices between the actors of Ray, on two nodes in one machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from truebridge_conformance.others import wait_until

ray = pytest.importorskip("ray")
torch: Any = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from nodes import MANY, NAMES, PATIENCE, Cluster, answer, held, keep, settle, started  # noqa: E402

FRAMEWORKS = ("torch", "cupy", "jax", "tensorflow")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    patch = pytest.MonkeyPatch()
    # All actors see all devices.
    patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    with started(tmp_path_factory.mktemp("ipc"), __name__, num_gpus=1) as cluster:
        yield cluster
    patch.undo()


@pytest.fixture(autouse=True)
def _nothing_stays_shared(cluster: Cluster) -> Iterator[None]:
    yield
    settle(cluster)


def counted(self: Any, framework: str, count: int, slow: int = 0) -> Any:
    """Return a tree with the numbers up to ``count`` on a GPU, which are there after ``slow`` multiplications."""
    x = torch.zeros(count, device="cuda")
    big = torch.ones(4096, 4096, device="cuda")
    for _ in range(slow):
        big = big @ big
    x.copy_(torch.arange(count, device="cuda", dtype=torch.float32))
    if framework != "torch":
        __import__(framework)
        x = tb.convert(x, framework, copy=True)
    if self is not None:
        self.kept = x
    return {"x": x, "step": 7}


def seen(self: Any, tree: Any) -> Any:
    """Return the framework of a tree's tensor, its device, and whether its elements are right."""
    x = tb.to_torch(tree["x"], read_only=True)
    wrong = (x != torch.arange(len(x), device=x.device)).sum()
    return type(tree["x"]).__module__.partition(".")[0], x.device.type, int(wrong) == 0


def module(framework: str) -> str:
    return {"jax": "jaxlib"}.get(framework, framework)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_tensor_of_each_framework_reaches_both_nodes_in_order(cluster: Cluster, framework: str) -> None:
    pytest.importorskip(framework)
    for count in (MANY, 1 << 22):
        for _ in range(5):
            ref = getattr(cluster.near, framework).remote(counted, framework, count, 20)
            for actor in (cluster.beside, cluster.far):
                assert answer(actor, seen, ref) == (module(framework), "cuda", True)
            assert seen(None, ray.get(ref, timeout=PATIENCE)) == (module(framework), "cuda", True)
        put = ray.put(counted(None, framework, count), _tensor_transport=NAMES[framework])
        for actor in (cluster.beside, cluster.far):
            assert answer(actor, seen, put) == (module(framework), "cuda", True)


def test_memory_is_that_of_the_sender_on_its_node_and_another_elsewhere(cluster: Cluster) -> None:
    ref = cluster.near.torch.remote(counted, "torch", MANY)

    def write(self: Any, tree: Any) -> None:
        tree["x"].fill_(5)
        torch.cuda.synchronize()

    answer(cluster.far, write, ref)
    assert answer(cluster.near, lambda self: float(self.kept[-1])) == MANY - 1
    answer(cluster.beside, write, ref)
    assert answer(cluster.near, lambda self: float(self.kept[-1])) == 5


def test_the_sender_reuses_memory_after_the_last_reader(cluster: Cluster) -> None:
    def made(self: Any) -> Any:
        return torch.full((1 << 22,), 3.0, device="cuda")

    def summed(self: Any, x: Any) -> None:
        big = torch.ones(4096, 4096, device="cuda")
        for _ in range(50):
            big = big @ big
        # It is read long after the view is dropped.
        self.kept = x.sum()

    def overwrites(self: Any) -> None:
        for _ in range(8):
            torch.full((1 << 22,), 9.0, device="cuda")

    for _ in range(10):
        answer(cluster.beside, summed, cluster.near.torch.remote(made))
        answer(cluster.near, overwrites)
        assert answer(cluster.beside, lambda self: float(self.kept)) == 3.0 * (1 << 22)


def test_devices_are_chosen_and_may_be_several_in_one_object(cluster: Cluster) -> None:
    def mixed(self: Any) -> Any:
        return [torch.ones(MANY, device="cuda"), torch.ones(MANY), np.ones(3)]

    for actor in (cluster.beside, cluster.far):
        places = answer(actor, lambda self, x: [str(y.device) for y in x], cluster.near.torch.remote(mixed))
        assert places == ["cuda:0", "cpu", "cpu"]
        for device in ("cpu", "cuda:0"):
            answer(actor, lambda self, device: tb.ray.register(device=device), device)
            places = answer(actor, lambda self, x: [str(y.device) for y in x[:2]], cluster.near.torch.remote(mixed))
            assert places == [device] * 2
        answer(actor, lambda self: tb.ray.register())


def test_tensors_are_received_into_buffers(cluster: Cluster) -> None:
    for actor in (cluster.near, cluster.far):
        for device in ("cuda", "cpu"):
            ref = actor.torch.remote(counted, "torch", MANY, 10)
            buffer = torch.zeros(MANY, device=device)
            ray.experimental.set_target_for_ref(ref, [buffer])
            tree = ray.get(ref, timeout=PATIENCE)
            assert tree["x"] is buffer and seen(None, tree)[1:] == (device, True)


def test_memory_of_the_device_does_not_grow(cluster: Cluster) -> None:
    def used(self: Any) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    for receiver in (cluster.beside, cluster.far):

        def rounds(count: int, receiver: Any = receiver) -> int:
            for _ in range(count):
                ref = cluster.near.torch.remote(lambda self: torch.ones(1 << 20, device="cuda"))
                assert answer(receiver, lambda self, x: len(x), ref) == 1 << 20
            del ref
            wait_until(lambda: answer(cluster.near, lambda self: held()) == (0, 0, 0))
            return max(answer(actor, used) for actor in (cluster.near, receiver))

        before = rounds(50)
        assert rounds(500) - before < 1 << 20


def test_a_receiver_that_is_killed_frees_what_it_has(cluster: Cluster) -> None:
    for node in ("near", "far"):
        reader = cluster.actor(node)
        ref = cluster.near.torch.remote(counted, "torch", MANY)
        answer(reader, keep, ref)
        ray.kill(reader)
        wait_until(lambda: answer(cluster.near, lambda self: held())[1] == 0)
        assert answer(cluster.beside, seen, ref) == ("torch", "cuda", True)


def test_an_actor_without_a_gpu_is_told(cluster: Cluster) -> None:
    blind = {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}
    ref = cluster.near.torch.remote(counted, "torch", MANY)
    for node in ("near", "far"):
        actor = cluster.actor(node, runtime_env=blind)
        with pytest.raises(ray.exceptions.RayError, match="device='cpu'|[Cc][Uu][Dd][Aa]"):
            answer(actor, seen, ref)
        ray.kill(actor)
