"""Tensors between the actors of Ray, on two nodes in one machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from truebridge import processes
from truebridge_conformance.others import wait_until

ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")

from nodes import (  # noqa: E402
    LOOPBACK,
    MANY,
    PATIENCE,
    AsyncActor,
    Cluster,
    answer,
    held,
    is_shared,
    keep,
    ones,
    pigeon,
    settle,
    started,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # The tests count what this process shares, and other tests leave shares that end by their time.
    processes._core.ipc_close()
    with started(tmp_path_factory.mktemp("ipc"), __name__) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _nothing_stays_shared(cluster: Cluster) -> Iterator[None]:
    yield
    settle(cluster)


def test_a_tensor_of_one_node_is_received_in_place(cluster: Cluster) -> None:
    ref = cluster.near.call.remote(ones)
    answer(cluster.beside, keep, ref)
    assert answer(cluster.beside, lambda self: (type(self.kept), is_shared(self.kept))) == (torch.Tensor, True)
    assert answer(cluster.near, lambda self: held()) == (1, 1)
    mine = ray.get(ref, timeout=PATIENCE)
    assert is_shared(mine) and mine.sum() == MANY
    # Each receiver sees its own writes alone.
    mine[:] = 0
    assert answer(cluster.beside, lambda self: float(self.kept.sum())) == MANY


def test_every_framework_and_every_container(cluster: Cluster) -> None:
    tensorflow = pytest.importorskip("tensorflow")

    def made(self: Any) -> Any:
        import tensorflow

        matrix = torch.arange(2 * MANY, dtype=torch.float64).reshape(2, MANY)
        return {"torch": [torch.ones(MANY, dtype=torch.bfloat16)], "view": matrix.T[1:], "tf": (tensorflow.ones(MANY),)}

    for actor in (cluster.near, cluster.far):
        x = ray.get(actor.call.remote(made), timeout=PATIENCE)
        assert x["torch"][0].dtype is torch.bfloat16 and x["torch"][0].float().sum() == MANY
        assert x["view"].shape == (MANY - 1, 2) and x["view"][0].tolist() == [1, MANY + 1]
        assert isinstance(x["tf"][0], tensorflow.Tensor) and float(tensorflow.reduce_sum(x["tf"][0])) == MANY
        near = actor is cluster.near
        assert [is_shared(tensor) for tensor in (x["torch"][0].view(torch.int16), x["tf"][0])] == [near, near]
        del x


def test_a_tensor_of_another_node_is_copied_once_at_each_end(cluster: Cluster) -> None:
    ref = cluster.near.call.remote(ones)
    answer(cluster.far, keep, ref)
    assert answer(cluster.far, lambda self: (is_shared(self.kept), float(self.kept.sum()))) == (False, MANY)
    # The task that has copied for Ray has given its lease back.
    wait_until(lambda: answer(cluster.near, lambda self: held()) == (1, 0))


def test_a_share_ends_with_the_last_reference_and_stays_with_its_readers(cluster: Cluster) -> None:
    ref = cluster.near.call.remote(ones)
    outer = ray.put([ref])
    del ref
    assert ray.get(ray.get(outer, timeout=PATIENCE)[0], timeout=PATIENCE).sum() == MANY
    wait_until(lambda: answer(cluster.near, lambda self: held()) == (1, 0))
    mine = ray.get(ray.get(outer, timeout=PATIENCE)[0], timeout=PATIENCE)
    again = ray.get(ray.get(outer, timeout=PATIENCE)[0], timeout=PATIENCE)
    assert answer(cluster.near, lambda self: held()) == (1, 2)
    del outer
    # The share has ended, which frees nothing as long as there are readers, and both of them are.
    wait_until(lambda: answer(cluster.near, lambda self: len(tb.ray._ends)) == 0)
    assert answer(cluster.near, lambda self: held()) == (1, 2)
    assert tb.to_numpy(mine).sum() == tb.to_numpy(again).sum() == MANY
    del mine, again
    wait_until(lambda: answer(cluster.near, lambda self: held()) == (0, 0))


def test_an_argument_is_shared_until_its_task_has_ended(cluster: Cluster) -> None:
    answer(cluster.near, lambda self, x: None, torch.ones(MANY))
    wait_until(lambda: held() == (0, 0))
    # A function that is an argument is shared like one, with its tensors.
    x = torch.ones(MANY)
    assert answer(cluster.near, lambda self: is_shared(x))
    wait_until(lambda: held() == (0, 0))
    answer(cluster.near, keep, torch.ones(MANY))
    wait_until(lambda: len(tb.ray._ends) == 0)
    assert held() == (1, 1)
    assert answer(cluster.near, lambda self: float(tb.to_numpy(self.kept).sum())) == MANY


def test_an_actor_that_is_killed_frees_its_leases(cluster: Cluster) -> None:
    reader = cluster.actor("near")
    ref = ray.put(torch.ones(MANY))
    answer(reader, keep, ref)
    assert held() == (1, 1)
    ray.kill(reader)
    wait_until(lambda: held() == (1, 0))
    del ref
    wait_until(lambda: held() == (0, 0))


def test_a_tensor_is_lost_with_the_actor_that_made_it(cluster: Cluster) -> None:
    maker = cluster.actor("near")
    ref = maker.call.remote(ones)
    mine = ray.get(ref, timeout=PATIENCE)
    ray.kill(maker)
    assert mine.sum() == MANY
    for actor in (cluster.beside, cluster.far):
        with pytest.raises(ray.exceptions.RayError, match="has ended|does not send it"):
            wait_until(lambda actor=actor: answer(actor, lambda self, x: None, ref))
    with pytest.raises(ConnectionError):
        wait_until(lambda: tb.to_numpy(mine) is None)


def test_a_worker_stays_until_what_it_returned_is_dropped(cluster: Cluster) -> None:
    task = ray.remote(num_cpus=0, resources={"near": 1}, max_calls=1)(lambda: torch.ones(MANY))
    ref = task.remote()
    for _ in range(2):
        assert ray.get(ref, timeout=PATIENCE).sum() == MANY


def test_the_tensors_of_an_object_share_one_reference(cluster: Cluster) -> None:
    ref = ray.put({number: torch.full((MANY,), number) for number in range(20)})
    assert (held(), len(tb.ray._ends)) == ((20, 0), 1)
    other = ray.put(torch.ones(MANY))
    assert (held(), len(tb.ray._ends)) == ((21, 0), 2)
    assert answer(cluster.near, lambda self, tree: [int(x[0]) for x in tree.values()], ref) == list(range(20))
    del ref
    wait_until(lambda: held() == (1, 0))
    del other


def test_ray_passes_as_ever_what_is_not_worth_a_ticket_or_has_none(cluster: Cluster) -> None:
    grad = torch.ones(MANY, requires_grad=True)
    named = torch.ones(MANY)
    named.label = "weights"
    sparse = torch.eye(400).to_sparse()
    ref = ray.put([torch.ones(3), grad, named, sparse, np.ones(MANY)])
    assert held() == (0, 0)
    small, grad, named, sparse, array = ray.get(ref, timeout=PATIENCE)
    assert small.tolist() == [1, 1, 1] and grad.requires_grad and named.label == "weights" and sparse.is_sparse
    assert not array.flags.writeable
    # Ray has no references to the functions of tasks: their tensors go with them.
    x = torch.ones(MANY)
    total = ray.remote(num_cpus=0, resources={"far": 1})(lambda: float(x.sum()))
    assert ray.get(total.remote(), timeout=PATIENCE) == MANY
    assert held() == (0, 0)


def test_a_compiled_graph_passes_as_ever(cluster: Cluster) -> None:
    from ray.dag import InputNode

    first, second = cluster.actor("near"), cluster.actor("near")
    with InputNode() as given:
        graph = second.total.bind(first.filled.bind(given)).experimental_compile()
    assert [ray.get(graph.execute(value), timeout=PATIENCE) for value in range(3)] == [0, MANY, 2 * MANY]
    graph.teardown(kill_actors=True)


def test_a_module_arrives_with_its_parameters(cluster: Cluster) -> None:
    module = torch.nn.Linear(512, 512)
    ref = ray.put(module)
    assert held() == (1, 0)
    other = ray.get(ref, timeout=PATIENCE)
    assert torch.equal(other.weight, module.weight) and other.weight.requires_grad
    assert is_shared(other.weight.detach())


def test_the_receiver_chooses_framework_and_device(cluster: Cluster) -> None:
    def received(self: Any, x: Any) -> Any:
        return type(x).__name__, float(x.sum())

    def chooses(self: Any, **choices: Any) -> None:
        tb.ray.register(**choices)

    ref = ray.put(torch.ones(MANY))
    for actor in (cluster.near, cluster.far):
        answer(actor, lambda self: tb.ray.register(target="numpy", device="cpu"))
        assert answer(actor, received, ref) == ("ndarray", MANY)
        answer(actor, lambda self: tb.ray.register(device="cuda:0"))
        if not torch.cuda.is_available():
            with pytest.raises(ray.exceptions.RayError, match="[Cc][Uu][Dd][Aa]"):
                answer(actor, received, ref)
        else:
            assert answer(actor, lambda self, x: str(x.device), ref) == "cuda:0"
        answer(actor, lambda self: tb.ray.register())


def test_numpy_is_shared_where_asked_for(cluster: Cluster) -> None:
    tb.ray.register(["numpy"], smallest=0)
    try:
        ref = ray.put([np.arange(3), np.float32(1), torch.ones(MANY), np.array(["text"], dtype=object), np.ones(())])
        assert held() == (2, 0)
        for actor in (cluster.near, cluster.far):
            assert answer(actor, lambda self, x: (x[0].tolist(), x[0].flags.writeable, x[4].shape), ref) == (
                [0, 1, 2],
                True,
                (),
            )
    finally:
        tb.ray.register()


def test_a_time_can_be_set(cluster: Cluster) -> None:
    tb.ray.register(expires=0.01)
    try:
        ref = ray.put(torch.ones(MANY))
        wait_until(lambda: held() == (0, 0))
        with pytest.raises(ray.exceptions.RayError, match="expired|no such share"):
            ray.get(ref, timeout=PATIENCE)
    finally:
        tb.ray.register()


def test_references_can_be_awaited_on_one_node(cluster: Cluster) -> None:
    async def total(ref: Any) -> float:
        return float((await ref).sum())

    near, far = cluster.near.call.remote(ones), cluster.far.call.remote(ones)
    assert asyncio.run(total(near)) == MANY
    with pytest.raises(ray.exceptions.RayError, match="asyncio.to_thread"):
        asyncio.run(total(far))
    actor = cluster.actor("near", AsyncActor)
    assert ray.get(actor.awaited.remote([near]), timeout=PATIENCE) == MANY
    assert ray.get([actor.total.remote(ref) for ref in (near, far)], timeout=PATIENCE) == [MANY, MANY]
    ray.kill(actor)


def test_a_tensor_transport_goes_between_nodes(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("ray.experimental.rdt")
    pigeon(None, str(tmp_path))
    answer(cluster.far, pigeon, str(tmp_path))
    tb.ray.register(["torch", "numpy"], transport="pigeon")
    try:
        source = torch.ones(MANY)
        ref = ray.put([source, np.ones(MANY)])
        # What is sent is as it was.
        source[:] = 0
        (sent,) = os.listdir(tmp_path)
        for device, received in ((None, [sent]), ("cpu", [sent, sent])):
            answer(cluster.far, lambda self, device: tb.ray.register(device=device), device)
            assert answer(cluster.far, lambda self, x: [float(y.sum()) for y in x], ref) == [MANY, MANY]
            assert (tmp_path / "received").read_text().split() == received
        assert answer(cluster.near, lambda self, x: [is_shared(y) for y in x], ref) == [True, True]
        del ref
        wait_until(lambda: os.listdir(tmp_path) == ["received"])
    finally:
        tb.ray.register()
        answer(cluster.far, lambda self: tb.ray.register())


def test_a_process_may_stop_sending(cluster: Cluster) -> None:
    before = ray.put(torch.ones(MANY))
    tb.ray.unregister()
    try:
        ref = ray.put(torch.ones(MANY))
        assert held() == (1, 0)
        assert answer(cluster.far, lambda self, x, y: float((x + y).sum()), before, ref) == 2 * MANY
    finally:
        tb.ray.register()


def test_wrong_arguments_are_typed_errors(cluster: Cluster) -> None:
    with pytest.raises(tb.BridgeValueError, match="'mxnet'"):
        tb.ray.register(["mxnet"])
    for transport, said in (("owl", "'owl'"), ("gloo", "needs the sender")):
        with pytest.raises(tb.BridgeValueError, match=said):
            tb.ray.register(transport=transport)


def test_ray_may_be_missing_or_unknown() -> None:
    code = """
import sys
import truebridge as tb
sys.modules["ray"] = None
try:
    tb.ray
except tb.BridgeImportError as error:
    assert error.kind == "missing" and "pip install ray" in str(error)
    del sys.modules["ray"]
import ray
del ray._private.serialization.SerializationContext.is_in_band_serialization
try:
    tb.ray.register()
except tb.BridgeImportError as error:
    assert ray.__version__ in str(error), error
    print("typed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout == "typed\n", done.stderr


#: Runs the page, and looks at what is left.
PAGE = f"""
import re, sys
import ray
import truebridge as tb
from truebridge import processes
blocks = re.findall(r"```python\\n(.*?)```", open(sys.argv[1]).read(), re.DOTALL)
(block,) = [block for block in blocks if "import ray" in block]
here = 'ray.init(address="local", _node_ip_address="{LOOPBACK}", include_dashboard=False, num_cpus=1, '
assert "ray.init(" in block
exec(block.replace("ray.init(", here))
ref = ray.put(torch.ones(1 << 20))
ray.shutdown()
assert processes.held()["shares"] >= 1
tb.ray.unregister()
assert processes.held()["shares"] == 0
print("done")
"""


def test_the_page_runs_and_nothing_is_shared_after_a_shutdown(cluster: Cluster) -> None:
    page = Path(__file__).parents[3] / "docs" / "processes.md"
    command = [sys.executable, "-c", PAGE, str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout.endswith("done\n"), done.stderr
