"""Tensors between the actors of Ray by this package's tensor transports, on two nodes in one machine."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from programs import Warm
from truebridge import _core
from truebridge_conformance.others import wait_until

ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")

from nodes import (  # noqa: E402
    LOOPBACK,
    MANY,
    NAMES,
    PATIENCE,
    Cluster,
    answer,
    held,
    is_shared,
    keep,
    ones,
    settle,
    started,
)

FRAMEWORKS = ("torch", "jax", "tensorflow", "numpy")
#: Elements of a tensor that the sender copies for its node when a receiver asks.
LARGE = 1 << 19


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # The tests count what this process shares, and other tests leave shares that end by their time.
    _core.ipc_close()
    with started(tmp_path_factory.mktemp("ipc"), __name__) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _nothing_stays_shared(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames:
        settle(request.getfixturevalue("cluster"))


#: Actors that a test is done with and another may restart or kill: to start one takes seconds.
SPARE: dict[str, list[Any]] = {"near": [], "far": []}


def spare(cluster: Cluster, node: str) -> Any:
    return SPARE[node].pop() if SPARE[node] else cluster.actor(node, max_restarts=1)


def counted(self: Any, framework: str, count: int) -> Any:
    """Return a tree with the numbers up to ``count`` in a framework."""
    if self is not None:
        __import__(framework)
    return {"x": tb.convert(np.arange(count, dtype=np.float32), framework, copy=True), "step": 7}


def seen(self: Any, tree: Any) -> Any:
    """Return the framework of a tree's tensor, whether it is shared, and what its elements are."""
    x, array = tree["x"], tb.to_numpy(tree["x"])
    is_right = tree["step"] == 7 and bool((array == np.arange(len(array), dtype=np.float32)).all())
    return type(x).__module__.partition(".")[0], is_shared(x), is_right


def module(framework: str) -> str:
    return {"jax": "jaxlib"}.get(framework, framework)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_tensor_of_each_framework_reaches_both_nodes(cluster: Cluster, framework: str) -> None:
    pytest.importorskip(framework)
    for count in (MANY, LARGE):
        ref = getattr(cluster.near, framework).remote(counted, framework, count)
        assert answer(cluster.beside, seen, ref) == (module(framework), True, True)
        assert answer(cluster.far, seen, ref) == (module(framework), False, True)
        assert seen(None, ray.get(ref, timeout=PATIENCE)) == (module(framework), True, True)
        # The actor that made it has the tensor itself.
        assert answer(cluster.near, seen, ref) == (module(framework), False, True)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_driver_puts_a_tensor_for_both_nodes(cluster: Cluster, framework: str) -> None:
    pytest.importorskip(framework)
    for count in (MANY, LARGE):
        ref = ray.put(counted(None, framework, count), _tensor_transport=NAMES[framework])
        for actor, shared in ((cluster.beside, True), (cluster.far, False)):
            assert answer(actor, seen, ref) == (module(framework), shared, True)
        del ref
        wait_until(lambda: held() == (0, 0, 0))


def test_an_object_has_tensors_of_several_frameworks_and_layouts(cluster: Cluster) -> None:
    tensorflow, jax = pytest.importorskip("tensorflow"), pytest.importorskip("jax")

    def made(self: Any) -> Any:
        import jax
        import tensorflow

        matrix = torch.arange(2 * MANY, dtype=torch.float64).reshape(2, MANY)
        return {
            "torch": [torch.ones(MANY, dtype=torch.bfloat16), matrix.T[1:], torch.zeros(()), torch.ones(0, 3)],
            "jax": (jax.numpy.full((3, 5), 2, jax.numpy.bfloat16),),
            "tensorflow": tensorflow.fill([3], 4),
            "numpy": np.ones(3),
            "none": None,
        }

    for maker in ("torch", "tensorflow"):
        for actor, shared in ((cluster.near, True), (cluster.far, False)):
            x = ray.get(getattr(actor, maker).remote(made), timeout=PATIENCE)
            first, view, scalar, empty = x["torch"]
            assert first.dtype is torch.bfloat16 and first.float().sum() == MANY
            assert view.shape == (MANY - 1, 2) and view[0].tolist() == [1, MANY + 1]
            assert scalar.shape == () and empty.shape == (0, 3) and x["none"] is None
            assert isinstance(x["jax"][0], jax.Array) and float(x["jax"][0].sum()) == 30
            assert isinstance(x["tensorflow"], tensorflow.Tensor) and x["tensorflow"].numpy().tolist() == [4] * 3
            assert x["numpy"].tolist() == [1, 1, 1]
            assert is_shared(first.view(torch.int16)) == is_shared(view) == shared


def test_the_receiver_chooses_the_framework(cluster: Cluster) -> None:
    pytest.importorskip("jax")
    ref = cluster.near.torch.remote(counted, "torch", MANY)
    for actor, shared in ((cluster.beside, True), (cluster.far, False)):
        for target in ("jax", "numpy"):
            answer(actor, lambda self, target: tb.ray.register(target=target), target)
            assert answer(actor, seen, ref) == (module(target), shared, True)
        answer(actor, lambda self: tb.ray.register())
        assert answer(actor, seen, ref) == ("torch", shared, True)
    with tb.ray.receiving("numpy", device="cpu"):
        assert type(ray.get(ref, timeout=PATIENCE)["x"]) is np.ndarray
    assert type(ray.get(ref, timeout=PATIENCE)["x"]) is torch.Tensor

    def awaited(self: Any, refs: Any) -> Any:
        with tb.ray.receiving("jax"):
            return seen(self, ray.get(refs[0]))

    assert answer(cluster.far, awaited, [ref]) == ("jaxlib", False, True)


def test_tensors_are_received_into_buffers(cluster: Cluster) -> None:
    pytest.importorskip("jax")
    for framework in ("torch", "jax"):
        for actor in (cluster.near, cluster.far):
            ref = getattr(actor, framework).remote(counted, framework, MANY)
            buffer = torch.zeros(MANY)
            ray.experimental.set_target_for_ref(ref, [buffer])
            assert ray.get(ref, timeout=PATIENCE)["x"] is buffer
            assert buffer.tolist() == list(range(MANY))
            small = torch.zeros(3)
            ray.experimental.set_target_for_ref(ref, [small])
            with pytest.raises(ValueError, match="[Ss]hape"):
                ray.get(ref, timeout=PATIENCE)
            ray.experimental.rdt.set_target_device_for_ref(ref, "cpu")
            assert seen(None, ray.get(ref, timeout=PATIENCE))[::2] == (module(framework), True)


def test_memory_is_private_and_freed_after_the_last_reference_and_the_last_reader(cluster: Cluster) -> None:
    ref = cluster.near.torch.remote(ones)
    answer(cluster.beside, keep, ref)
    mine = ray.get(ref, timeout=PATIENCE)
    assert answer(cluster.near, lambda self: held()) == (1, 2, 1)
    del ref
    # The share has ended, which frees nothing as long as there are readers.
    wait_until(lambda: answer(cluster.near, lambda self: held()) == (1, 2, 0))
    assert mine.sum() == MANY
    mine[:] = 0
    assert answer(cluster.beside, lambda self: float(self.kept.sum())) == MANY
    del mine
    answer(cluster.beside, keep, None)
    wait_until(lambda: answer(cluster.near, lambda self: held()) == (0, 0, 0))


def test_actors_send_to_one_another_at_once(cluster: Cluster) -> None:
    actors = (cluster.near, cluster.beside, cluster.far)
    for _ in range(10):
        refs = [actor.torch.remote(counted, "torch", LARGE) for actor in actors]
        found = [other.call.remote(seen, ref) for other in actors for ref in refs]
        assert all(is_right for _, _, is_right in ray.get(found, timeout=PATIENCE))


def resident(self: Any) -> int:
    """Return the bytes of memory that only this process has."""
    return sum(
        int(value) << 10 for value in re.findall(r"Private_\w+:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text())
    )


@pytest.mark.parametrize("node", ["beside", "far"])
def test_memory_does_not_grow(cluster: Cluster, node: str) -> None:
    receiver = getattr(cluster, node)

    def after_rounds() -> list[int]:
        for _ in range(30):
            ref = cluster.near.torch.remote(lambda self: torch.ones(LARGE))
            assert answer(receiver, lambda self, x: len(x), ref) == LARGE
        del ref
        wait_until(lambda: answer(cluster.near, lambda self: held()) == (0, 0, 0))
        return [answer(actor, resident) for actor in (cluster.near, receiver)]

    # The allocators of PyTorch and Ray keep some tensors' memory for the next ones, for each thread. What leaks grows
    # each time.
    sizes = [after_rounds()]
    while len(sizes) < 12:
        sizes.append(after_rounds())
        if all(after - was < 1 << 20 for was, after in zip(*sizes[-2:], strict=True)):
            return
    pytest.fail(f"memory grows: {sizes}")


def test_a_receiver_without_the_framework_or_the_device_gets_an_error(cluster: Cluster) -> None:
    pytest.importorskip("jax")
    ref = cluster.near.jax.remote(counted, "jax", MANY)

    def loses_jax(self: Any) -> None:
        sys.modules["jax"] = None  # type: ignore[assignment]

    def has_all_again(self: Any) -> None:
        del sys.modules["jax"]
        tb.ray.register()

    for node in ("near", "far"):
        actor = cluster.actor(node, max_restarts=1)
        answer(actor, loses_jax)
        with pytest.raises(ray.exceptions.RayError, match="JAX|jax"):
            answer(actor, seen, ref)
        answer(actor, lambda self: tb.ray.register(target="torch"))
        assert answer(actor, seen, ref) == ("torch", node == "near", True)
        if not torch.cuda.is_available():
            answer(actor, lambda self: tb.ray.register(target="torch", device="cuda:0"))
            with pytest.raises(ray.exceptions.RayError, match="[Cc][Uu][Dd][Aa]|GPU"):
                answer(actor, seen, ref)
        answer(actor, has_all_again)
        SPARE[node].append(actor)


def test_without_nixl_the_object_store_moves_tensors_with_one_warning(cluster: Cluster) -> None:
    pytest.importorskip("jax")

    def has_none(self: Any) -> None:
        tb.ray._rdt._has_nixl.cache_clear()
        self.kept, tb.ray._rdt._has_nixl = (tb.ray._rdt._has_nixl, warnings.showwarning), lambda: False
        self.warned = []
        warnings.showwarning = lambda message, *_: self.warned.append(str(message))

    def has_it_again(self: Any) -> list[str]:
        tb.ray._rdt._has_nixl, warnings.showwarning = self.kept
        tb.ray._rdt._warn.cache_clear()
        return self.warned

    sender, reader = spare(cluster, "near"), spare(cluster, "far")
    for actor in (sender, reader):
        answer(actor, has_none)
    for framework in ("torch", "jax"):
        made = getattr(sender, framework).remote(counted, framework, LARGE)
        put = ray.put(counted(None, framework, LARGE), _tensor_transport=NAMES[framework])
        for ref in (made, put):
            assert answer(reader, seen, ref) == (module(framework), False, True)
    answer(sender, has_it_again)
    (one,) = answer(reader, has_it_again)
    assert "this process has no PyTorch with NIXL" in one and "pip install torch nixl" in one
    SPARE["near"].append(sender), SPARE["far"].append(reader)


def test_an_actor_that_starts_again_sends_and_receives(cluster: Cluster) -> None:
    actor = spare(cluster, "near")
    lost = actor.torch.remote(counted, "torch", LARGE)
    first = answer(actor, lambda self: os.getpid())
    with pytest.raises(ray.exceptions.RayError):
        answer(actor, lambda self: os._exit(1))

    def answers() -> Any:
        try:
            return answer(actor, lambda self: os.getpid()) != first
        except ray.exceptions.RayError:
            return False

    wait_until(answers)
    for receiver in (cluster.beside, cluster.far):
        with pytest.raises(ray.exceptions.RayError, match="started again"):
            answer(receiver, seen, lost)
        assert answer(receiver, seen, actor.torch.remote(counted, "torch", LARGE))[2]
    assert answer(actor, seen, cluster.far.torch.remote(counted, "torch", LARGE))[2]
    SPARE["near"].append(actor)


def test_a_receiver_that_is_killed_frees_what_it_has(cluster: Cluster) -> None:
    for node in ("near", "far"):
        reader = spare(cluster, node)
        ref = cluster.near.torch.remote(counted, "torch", LARGE)
        answer(reader, keep, ref)
        ray.kill(reader)
        wait_until(lambda: answer(cluster.near, lambda self: held())[1] == 0)
        # The sender lives on, and so does the object.
        assert answer(cluster.beside, seen, ref) == ("torch", True, True)
        del ref
        wait_until(lambda: answer(cluster.near, lambda self: held()) == (0, 0, 0))


def test_objects_are_lost_with_the_actor_that_made_them(cluster: Cluster) -> None:
    maker = spare(cluster, "near")
    process = Path(f"/proc/{answer(maker, lambda self: os.getpid())}")
    refs = {count: maker.torch.remote(counted, "torch", count) for count in (MANY, LARGE)}
    mine = {count: ray.get(ref, timeout=PATIENCE) for count, ref in refs.items()}
    # This does not wait for the end of the process.
    ray.kill(maker)
    wait_until(lambda: not process.exists())
    for count, ref in refs.items():
        assert float(mine[count]["x"][-1]) == count - 1
        for actor in (cluster.beside, cluster.far):
            with pytest.raises(ray.exceptions.RayError):
                ray.get(actor.call.remote(seen, ref), timeout=PATIENCE)
        with pytest.raises((ray.exceptions.RayError, tb.BridgeConnectionError)):
            ray.get(ref, timeout=PATIENCE)


def test_a_time_out_of_the_caller_holds_while_the_sender_is_stopped(cluster: Cluster) -> None:
    for sender in (cluster.near, cluster.far):
        ref = sender.torch.remote(counted, "torch", LARGE)
        ray.wait([ref], timeout=PATIENCE)
        process = answer(sender, lambda self: os.getpid())
        os.kill(process, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(ray.exceptions.GetTimeoutError):
                ray.get(ref, timeout=0.5)
            assert time.monotonic() - began < 30
        finally:
            os.kill(process, signal.SIGCONT)
        assert seen(None, ray.get(ref, timeout=PATIENCE))[2]


def test_a_task_that_raises_leaves_nothing(cluster: Cluster) -> None:
    def fails(self: Any) -> Any:
        raise ArithmeticError("of the task")

    ref = cluster.near.torch.remote(fails)
    for actor in (cluster.beside, cluster.far):
        with pytest.raises(ArithmeticError, match="of the task"):
            answer(actor, seen, ref)


def test_what_cannot_be_shared_is_pickled(cluster: Cluster) -> None:
    def made(self: Any) -> Any:
        dense = torch.ones(MANY)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        grad = torch.ones(3, requires_grad=True)
        return [grad, torch.eye(4).to_sparse(), dense, torch.nn.Linear(2, 2), "text", nested]

    for actor in (cluster.beside, cluster.far):
        grad, sparse, dense, linear, text, nested = ray.get(actor.torch.remote(made), timeout=PATIENCE)
        assert grad.requires_grad and sparse.is_sparse and text == "text" and linear(torch.ones(2)).shape == (2,)
        assert is_shared(dense) == (actor is cluster.beside) and [len(x) for x in nested.unbind()] == [2, 3]
    nothing = cluster.near.torch.remote(lambda self: {"step": 7})
    assert answer(cluster.far, lambda self, x: x, nothing) == ray.get(nothing, timeout=PATIENCE) == {"step": 7}


def test_memory_that_tensors_share_or_may_not_write_goes_too(cluster: Cluster) -> None:
    def made(self: Any) -> Any:
        x, pending = torch.arange(2.0 * MANY), torch.tensor([1 + 2j]).conj()
        constant = np.arange(3.0)
        constant.flags.writeable = False
        return [x[:4], x[:8], x[4:], x.view(torch.int32)[:2], pending, pending.imag, torch.ones(0, 3), constant]

    for actor in (cluster.near, cluster.far):
        first, second, rest, bits, conjugate, imaginary, empty, constant = ray.get(
            actor.numpy.remote(made), timeout=PATIENCE
        )
        assert first.tolist() == [0, 1, 2, 3] and second.tolist() == list(range(8)) and bits.tolist() == [0, 0x3F800000]
        assert rest[-1] == 2 * MANY - 1 and conjugate.tolist() == [1 - 2j] and imaginary.tolist() == [-2]
        assert empty.shape == (0, 3) and constant.tolist() == [0, 1, 2]
    put = ray.put([np.broadcast_to(np.float32(7), (2, MANY)), np.zeros((0, 2))], _tensor_transport=NAMES["numpy"])
    for actor in (cluster.beside, cluster.far):
        assert answer(actor, lambda self, x: (float(x[0].min()), x[0].shape, x[1].shape), put) == (7, (2, MANY), (0, 2))


def test_tensorflow_passes_strings_and_numbers(cluster: Cluster) -> None:
    pytest.importorskip("tensorflow")

    def made(self: Any) -> Any:
        import tensorflow

        return {"label": tensorflow.constant(["cat"]), "x": tensorflow.ones(3)}

    for actor in (cluster.beside, cluster.far):
        tree = ray.get(actor.tensorflow.remote(made), timeout=PATIENCE)
        assert tree["label"].numpy().tolist() == [b"cat"] and tree["x"].numpy().tolist() == [1] * 3


def test_ordinary_tasks_pass_tensors_as_ever(cluster: Cluster) -> None:
    pytest.importorskip("tensorflow"), pytest.importorskip("jax")

    def made(self: Any) -> Any:
        return [counted(self, framework, MANY) for framework in FRAMEWORKS]

    # After a transport took out tensors of the same classes, too.
    for framework in FRAMEWORKS:
        ray.get(getattr(cluster.near, framework).remote(counted, framework, 3), timeout=PATIENCE)
    for actor in (cluster.near, cluster.far):
        trees = answer(actor, made)
        assert [seen(None, tree) for tree in trees] == [(module(framework), False, True) for framework in FRAMEWORKS]
        assert all(
            is_right for *_, is_right in answer(actor, lambda self, x: [seen(self, y) for y in x], ray.put(trees))
        )


def test_awaiting_is_done_on_a_thread(cluster: Cluster) -> None:
    async def total(ref: Any) -> float:
        return float((await asyncio.to_thread(ray.get, ref))["x"].sum())

    for actor in (cluster.near, cluster.far):
        assert asyncio.run(total(actor.torch.remote(counted, "torch", 5))) == 10


def test_wrong_use_is_a_typed_error(cluster: Cluster) -> None:
    with pytest.raises(tb.BridgeValueError, match="'mxnet'"):
        tb.ray.register(target="mxnet")  # type: ignore[arg-type]
    with pytest.raises(tb.BridgeValueError, match="'mxnet'"), tb.ray.receiving("mxnet"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="TRUEBRIDGE_MXNET"):
        ray.put([torch.ones(3)], _tensor_transport="truebridge_mxnet")
    plain = ray.remote(num_cpus=0, resources={"near": 1})(type("Plain", (), {"same": lambda self, x: x})).remote()
    with pytest.raises(ValueError, match="enable_tensor_transport"):
        plain.same.options(tensor_transport=NAMES["torch"]).remote(3)
    # It receives tensors all the same.
    assert ray.get(plain.same.remote(cluster.far.torch.remote(ones)), timeout=PATIENCE).sum() == MANY
    ray.kill(plain)


def test_ray_may_be_missing_or_unknown(beside_torch: Warm) -> None:
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
sys.modules["ray.experimental.rdt"] = None
try:
    tb.ray
except tb.BridgeImportError as error:
    assert ray.__version__ in str(error), error
    del sys.modules["ray.experimental.rdt"]
from ray._private.serialization import SerializationContext
del SerializationContext.serialize_rdt_objects
try:
    tb.ray.register()
except tb.BridgeImportError as error:
    assert ray.__version__ in str(error), error
    print("typed")
"""
    done = beside_torch.run(code)
    assert done.stdout == "typed\n", done.stderr


def test_what_an_earlier_connection_left_is_freed(cluster: Cluster, beside_torch: Warm) -> None:
    done = beside_torch.run(
        f"""
import ray, torch
import truebridge as tb
names = tb.ray.register()
shares = []
for _ in range(2):
    ray.init(address={cluster.nodes.address!r}, _node_ip_address="{LOOPBACK}", log_to_driver=False)
    ref = ray.put([torch.ones(3)], _tensor_transport=names["torch"])
    shares.append(tb.processes.held()["shares"])
    ray.shutdown()
print(shares)
"""
    )
    assert done.stdout.endswith("[1, 1]\n"), done.stderr


def block(number: int) -> str:
    """Return a block of the page."""
    page = (Path(__file__).parents[3] / "docs" / "several-machines.md").read_text()
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)[number]


def test_the_page_runs(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow"), pytest.importorskip("jax")
    # On the nodes of these tests, which are made by the same calls.
    code, count = re.subn(r"nodes = Cluster\(.*\)(  #.*)?\nnodes\.add_node\(.*\)\n", "", block(0))
    address = f'address="{cluster.nodes.address}", _node_ip_address="{LOOPBACK}"'
    program = tmp_path / "page.py"
    program.write_text(code.replace("address=nodes.address", address).replace('"other"', '"far"'))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=3 * PATIENCE, check=False)
    assert (count, done.returncode) == (1, 0), done.stderr


def test_the_page_runs_without_ray(beside_torch: Warm) -> None:
    pytest.importorskip("jax")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    done = beside_torch.run(block(1).replace("29511", port))
    assert done.returncode == 0, done.stderr
