"""Tensors between the actors of Ray, on two nodes in one machine."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensor_bridge as tb
from tensor_bridge import processes
from tensor_bridge_conformance.others import wait_until

ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")

#: Seconds that any answer of Ray may take.
PATIENCE = 60

#: Elements of a tensor that is worth a ticket.
MANY = 1 << 16

#: An address of this machine alone, which Ray does not replace, as it does 127.0.0.1, by one of the network.
LOOPBACK = "127.0.0.2"


class Actor:
    """Runs what it is sent, and keeps what it shall."""

    kept: Any = None

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self, *args)


class AsyncActor:
    async def total(self, x: Any) -> float:
        return float(x.sum())

    async def awaited(self, refs: list[Any]) -> float:
        return float((await refs[0]).sum())


class Cluster:
    """Two nodes, with two actors on the first, where the tests run as well, and one on the second."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as Nodes

        options = {"num_cpus": 4, "object_store_memory": 100 << 20, "node_ip_address": LOOPBACK}
        head = {**options, "include_dashboard": False, "resources": {"near": 100}}
        self.nodes = Nodes(initialize_head=True, head_node_args=head)
        self.nodes.add_node(**options, resources={"far": 100})
        hook = {"worker_process_setup_hook": "tensor_bridge.ray.register"}
        ray.init(address=self.nodes.address, _node_ip_address=LOOPBACK, runtime_env=hook, log_to_driver=False)
        tb.ray.register()
        self.near, self.beside, self.far = self.actor("near"), self.actor("near"), self.actor("far")

    def actor(self, node: str, kind: type = Actor) -> Any:
        return ray.remote(num_cpus=0, resources={node: 1})(kind).remote()

    def close(self) -> None:
        tb.ray.unregister()
        ray.shutdown()
        self.nodes.shutdown()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # Workers know neither this module nor where it is.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    folder = tmp_path_factory.mktemp("ipc")
    folder.chmod(0o700)
    patch.setenv("TENSOR_BRIDGE_IPC", str(folder))
    # What it logs has a traceback, which keeps references as long as pytest keeps the log.
    patch.setattr(logging.getLogger("ray._private.serialization"), "disabled", True)
    cluster = Cluster()
    yield cluster
    cluster.close()
    patch.undo()
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def _nothing_stays_shared(cluster: Cluster) -> Iterator[None]:
    yield
    actors = (cluster.near, cluster.beside, cluster.far)
    for actor in actors:
        answer(actor, lambda self: setattr(self, "kept", None))
    # The traceback of an error keeps references until the garbage of its process is collected.
    wait_until(lambda: {held(), *(answer(actor, lambda self: held()) for actor in actors)} == {(0, 0)})


def held() -> tuple[int, int]:
    """Return the shares of this process, and the leases on them."""
    gc.collect()
    now = processes.held()
    return now["shares"], now["leases"]


def answer(actor: Any, function: Callable[..., Any], *args: Any) -> Any:
    return ray.get(actor.call.remote(function, *args), timeout=PATIENCE)


def ones(self: Any) -> Any:
    return torch.ones(MANY)


def keep(self: Any, x: Any) -> None:
    self.kept = x


def is_shared(x: Any) -> bool:
    """Return whether the elements of a tensor lie in a file in memory, as those behind tickets do."""
    address = tb.to_numpy(x).ctypes.data
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if first <= address < last:
                return "/memfd:tensor-bridge" in line
    return False


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
    # Ray has no references to functions: their tensors go with them.
    x = torch.ones(MANY)
    assert answer(cluster.far, lambda self: float(x.sum())) == MANY
    assert held() == (0, 0)


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


def pigeon(self: Any, folder: str) -> None:
    """Register a tensor transport, which sends by files of a folder, unless this process has it."""
    from ray.experimental import TensorTransportManager, TensorTransportMetadata, register_tensor_transport

    class Pigeon(TensorTransportManager):
        tensor_transport_backend = "PIGEON"
        is_one_sided = staticmethod(lambda: True)
        can_abort_transport = staticmethod(lambda: False)
        get_communicator_metadata = lambda self, *ends: None  # noqa: E731
        actor_has_tensor_transport = send_multiple_tensors = abort_transport = None

        def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: Any) -> Any:
            (tensor,) = rdt_object
            tensor.numpy().tofile(f"{folder}/{obj_id}")
            return TensorTransportMetadata([(tensor.shape, tensor.dtype)], "cpu")

        def recv_multiple_tensors(self, obj_id: str, about: Any, between: Any, target_buffers: Any = None) -> Any:
            ((shape, dtype),) = about.tensor_meta
            (received,) = target_buffers or [torch.empty(shape, dtype=dtype)]
            received.numpy()[:] = np.fromfile(f"{folder}/{obj_id}", np.float32)
            with open(f"{folder}/received", "a") as log:
                log.write(obj_id + "\n")
            return [received]

        def garbage_collect(self, obj_id: str, about: Any, tensors: Any) -> None:
            os.remove(f"{folder}/{obj_id}")

    register_tensor_transport("PIGEON", ["cpu"], Pigeon, torch.Tensor)


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
    with pytest.raises(tb.BridgeValueError, match="'jax'"):
        tb.ray.register(["jax"])
    for transport, said in (("owl", "'owl'"), ("gloo", "needs the sender")):
        with pytest.raises(tb.BridgeValueError, match=said):
            tb.ray.register(transport=transport)


def test_ray_may_be_missing_or_unknown() -> None:
    code = """
import sys
import tensor_bridge as tb
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
