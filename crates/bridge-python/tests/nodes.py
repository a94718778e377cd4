"""Two nodes of Ray in one machine, and actors on them, for the tests of what passes between them."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import truebridge as tb
from truebridge import _core, processes
from truebridge_conformance.others import wait_until

ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")

#: Seconds that any answer of Ray may take.
PATIENCE = 120

#: Elements of a tensor that is not small.
MANY = 1 << 16

#: An address that only this machine reaches. Ray does not replace it by one of the network, as it does 127.0.0.1.
LOOPBACK = "127.0.0.2"

NAMES = tb.ray.register()


def sending(framework: str) -> Any:
    """Return a method of actors whose result passes by the transport of a framework."""

    @ray.method(tensor_transport=NAMES[framework])
    def call(self: Any, function: Callable[..., Any], *args: Any) -> Any:
        return function(self, *args)

    return call


def let_nixl_sleep() -> None:
    """Let the thread of NIXL, which polls without end and keeps a core busy, sleep for a millisecond between."""
    from ray.experimental.rdt.nixl_tensor_transport import NixlTensorTransport

    made = NixlTensorTransport._make_nixl_agent

    def make(self: Any, backend: str) -> Any:
        from nixl import _bindings

        config = _bindings.nixlAgentConfig

        class Sleeping(config):  # type: ignore[misc, valid-type]
            # NIXL sets it to 0 for every agent.
            pthrDelay = property(lambda self: 1000, lambda self, _: config.pthrDelay.__set__(self, 1000))  # noqa: N815

        _bindings.nixlAgentConfig = Sleeping
        try:
            return made(self, backend)
        finally:
            _bindings.nixlAgentConfig = config

    NixlTensorTransport._make_nixl_agent = make


class Actor:
    """Runs the functions that it receives, returns their results by a transport, and keeps some."""

    kept: Any = None

    def __init__(self) -> None:
        # Also where Ray starts the actor again.
        tb.ray.register()
        let_nixl_sleep()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self, *args)

    torch, jax, tensorflow, cupy, numpy = map(sending, ("torch", "jax", "tensorflow", "cupy", "numpy"))


class Cluster:
    """Two nodes, with two actors on the first, where the tests run as well, and one on the second."""

    def __init__(self, **options: Any) -> None:
        from ray.cluster_utils import Cluster as Nodes

        options = {"num_cpus": 2, "object_store_memory": 100 << 20, "node_ip_address": LOOPBACK, **options}
        head = {**options, "include_dashboard": False, "resources": {"near": 100}}
        self.nodes = Nodes(initialize_head=True, head_node_args=head)
        self.nodes.add_node(**options, resources={"far": 100})
        ray.init(address=self.nodes.address, _node_ip_address=LOOPBACK, log_to_driver=False)
        self.near, self.beside, self.far = self.actor("near"), self.actor("near"), self.actor("far")

    def actor(self, node: str, **options: Any) -> Any:
        return ray.remote(num_cpus=0, resources={node: 1}, **options)(Actor).remote()

    def close(self) -> None:
        ray.shutdown()
        self.nodes.shutdown()


def held() -> tuple[int, int, int]:
    """Return the shares of this process, the leases on them, and the objects that Ray's transports have."""
    gc.collect()
    now = processes.held()
    return now["shares"], now["leases"], len(tb.ray._rdt._held)


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
def started(folder: Any, *modules: str, **options: Any) -> Iterator[Cluster]:
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
    _core.ipc_close()
    let_nixl_sleep()
    cluster = Cluster(**options)
    yield cluster
    cluster.close()
    _core.ipc_close()
    patch.undo()
    for module in (__name__, *modules):
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[module])


def settle(cluster: Cluster) -> None:
    """Wait until no actor shares anything, and until none has anything of another."""
    actors = (cluster.near, cluster.beside, cluster.far)
    for actor in actors:
        answer(actor, keep, None)
    # The traceback of an error keeps references until the garbage of its process is collected.
    wait_until(lambda: {held(), *(answer(actor, lambda self: held()) for actor in actors)} == {(0, 0, 0)})
    for actor in actors:
        # The frameworks have hundreds of thousands of objects, which no later collection visits.
        answer(actor, lambda self: gc.freeze())
