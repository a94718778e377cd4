"""Two nodes of Ray in one machine, and actors on them, for the tests of what passes between them."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from truebridge import processes
from truebridge_conformance.others import wait_until

ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")

#: Seconds that any answer of Ray may take.
PATIENCE = 120

#: Elements of a tensor that is worth a ticket.
MANY = 1 << 16

#: An address of this machine alone, which Ray does not replace, as it does 127.0.0.1, by one of the network.
LOOPBACK = "127.0.0.2"


class Actor:
    """Runs what it is sent, and keeps what it shall."""

    kept: Any = None

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self, *args)

    def filled(self, value: int) -> Any:
        return torch.full((MANY,), value)

    def total(self, x: Any) -> int:
        return int(x.sum())


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
        hook = {"worker_process_setup_hook": "truebridge.ray.register"}
        ray.init(address=self.nodes.address, _node_ip_address=LOOPBACK, runtime_env=hook, log_to_driver=False)
        tb.ray.register()
        self.near, self.beside, self.far = self.actor("near"), self.actor("near"), self.actor("far")

    def actor(self, node: str, kind: type = Actor) -> Any:
        return ray.remote(num_cpus=0, resources={node: 1})(kind).remote()

    def close(self) -> None:
        tb.ray.unregister()
        ray.shutdown()
        self.nodes.shutdown()


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
    """Return whether the elements of a tensor lie in a file in memory, as those of tickets do."""
    address = tb.to_numpy(x).ctypes.data
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if first <= address < last:
                return "/memfd:truebridge" in line
    return False


@contextmanager
def started(folder: Any, *modules: str) -> Iterator[Cluster]:
    """Start nodes, which share through a folder. Workers receive the functions of the modules by value."""
    for module in (__name__, *modules):
        # Workers know neither these modules nor where they are.
        ray.cloudpickle.register_pickle_by_value(sys.modules[module])
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Ray lets workers wait for everything else on the machine, and here for other tests.
    patch.setenv("RAY_worker_niceness", "0")
    patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    folder.chmod(0o700)
    patch.setenv("TRUEBRIDGE_IPC", str(folder))
    # What it logs has a traceback, which keeps references as long as pytest keeps the log.
    patch.setattr(logging.getLogger("ray._private.serialization"), "disabled", True)
    processes._core.ipc_close()
    cluster = Cluster()
    yield cluster
    cluster.close()
    processes._core.ipc_close()
    patch.undo()
    for module in (__name__, *modules):
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[module])


def settle(cluster: Cluster) -> None:
    """Wait until no actor shares anything, and until none has anything of another."""
    actors = (cluster.near, cluster.beside, cluster.far)
    for actor in actors:
        answer(actor, keep, None)
    # The traceback of an error keeps references until the garbage of its process is collected.
    wait_until(lambda: {held(), *(answer(actor, lambda self: held()) for actor in actors)} == {(0, 0)})


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
