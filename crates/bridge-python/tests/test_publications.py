"""Publications: whole versions, in memory that is used again, whatever becomes of the processes."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import killed
import truebridge as tb
from truebridge import processes
from truebridge_conformance.others import Other, wait_until

torch: Any = pytest.importorskip("torch")


def weights(value: float, kind: str = "numpy") -> dict[str, Any]:
    made = {
        "w": np.full((3, 5), value, np.float32),
        "layers": [np.full(7, float(value)), np.full((), value, np.float32)],
    }
    return made if kind == "numpy" else tb.convert(made, kind, copy=True)


def test_a_version_is_what_the_tensors_held(path: str) -> None:
    tree, out = weights(0), weights(-1, "torch")
    with tb.serve(path) as names:
        publication = names.publish("weights", tree)
        subscription = names.subscribe("weights", out=out)
        first = publication.wait()
        assert (subscription.version, subscription.refresh(), subscription.version) == (0, first, first)
        assert subscription.refresh() is None
        addresses = [out["w"].data_ptr(), *(x.data_ptr() for x in out["layers"])]
        for value in range(1, 20):
            tree["w"][:] = value
            tree["layers"][0][:] = value
            tree["layers"][1][...] = value
            publication.update()
            version = publication.wait()
            assert version == publication.version > first
            tree["w"][:] = -7
            assert subscription.refresh() == version
            for x in [out["w"], *out["layers"]]:
                assert (x == value).all()
        assert addresses == [out["w"].data_ptr(), *(x.data_ptr() for x in out["layers"])]


def test_a_tree_may_be_another_one_each_time(path: str) -> None:
    """Arrays of JAX cannot change: each step has new ones."""
    with tb.serve(path) as names:
        publication = names.publish("weights", weights(0))
        publication.update(weights(3, "torch"))
        assert (names.get("weights", "numpy")["w"] == 3).all()
        strided = weights(4)
        strided["w"] = np.full((5, 3), 4, np.float32).T
        publication.update(strided)
        assert (names.get("weights", "torch")["w"] == 4).all()


def test_a_view_of_a_version_stays_as_it_is(path: str) -> None:
    tree = weights(0)
    with tb.serve(path) as names:
        publication = names.publish("weights", tree, slots=3)
        held = names.get("weights", "numpy")
        for value in range(1, 10):
            tree["w"][:] = value
            publication.update()
        assert (held["w"] == 0).all()
        assert (names.get("weights", "numpy")["w"] == 9).all()


def test_without_a_free_slot_an_update_is_refused(path: str) -> None:
    with tb.serve(path) as names:
        publication = names.publish("weights", weights(0))
        held = names.get("weights", "numpy")
        publication.update(timeout=0)
        start = time.monotonic()
        with pytest.raises(tb.BridgeError, match="slots") as caught:
            publication.update(timeout=0.3)
        assert caught.value.kind == "busy"
        assert 0.2 < time.monotonic() - start < 5
        version = publication.version
        del held
        gc.collect()
        publication.update(weights(5))
        assert publication.wait() > version
        assert (names.get("weights", "numpy")["w"] == 5).all()


def test_memory_is_used_again(path: str) -> None:
    with tb.serve(path) as names:
        publication = names.publish("weights", weights(0))
        subscription = names.subscribe("weights", out=weights(0))
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            publication.update()
            names.get("weights", "numpy")
            subscription.refresh()
        wait_until(lambda: processes.held()["shares"] == 1)
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 4


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"w": np.zeros((3, 5), np.float32)}, r"tree\['layers'\]\[0\] is not in the tree"),
        ({**weights(0), "more": np.zeros(1)}, r"tree\['more'\] is not published"),
        ({**weights(0), "w": np.zeros((1, 5), np.float32)}, r"tree\['w'\].*shape"),
        ({**weights(0), "w": np.zeros((3, 4), np.float32)}, r"tree\['w'\].*shape"),
        ({**weights(0), "layers": [np.zeros(7), np.zeros((), np.float64)]}, r"tree\['layers'\]\[1\].*float64"),
        ({**weights(0), "w": torch.zeros(3, 5, requires_grad=True)}, r"tree\['w'\].*detach"),
        (3, "is not in the tree"),
        (np.zeros(3), "is not in the tree"),
    ],
)
def test_what_does_not_fit_is_not_published(path: str, tree: Any, match: str) -> None:
    with tb.serve(path) as names:
        publication = names.publish("weights", weights(0))
        version = publication.wait()
        with pytest.raises(tb.BridgeError, match=match):
            publication.update(tree)
        assert names.get_versioned("weights", "numpy")[0] == version
        # The slot is free again; the other one soon after the version in it is displaced.
        publication.update(timeout=0)
        publication.update()


@pytest.mark.parametrize(
    ("out", "match"),
    [
        ({"w": np.zeros((3, 5), np.float32)}, r"tree\['layers'\]\[0\] is not to be received"),
        ({**weights(0), "more": np.zeros(1)}, r"tree\['more'\] is not published"),
        ({**weights(0), "w": np.zeros((3, 4), np.float32)}, r"tree\['w'\].*shape"),
        ({**weights(0), "w": np.zeros((2, 3, 5), np.float32)}, r"tree\['w'\].*shape"),
        (np.zeros(3), "not to be received"),
        ({**weights(0), "w": np.zeros((3, 5), np.float16)}, r"tree\['w'\].*float16"),
    ],
)
def test_what_does_not_fit_is_not_received(path: str, out: Any, match: str) -> None:
    with tb.serve(path) as names:
        names.publish("weights", weights(1))
        subscription = names.subscribe("weights", out=out)
        with pytest.raises(tb.BridgeError, match=match):
            subscription.refresh()
        assert subscription.version == 0
        assert not np.any(out["w"] if isinstance(out, dict) else out)


def test_the_order_of_keys_does_not_matter(path: str) -> None:
    with tb.serve(path) as names:
        names.publish("weights", {"a": np.full(2, 1.0), "b": (np.full(2, 2.0),)})
        out = {"b": [np.zeros(2)], "a": np.zeros(2)}
        assert names.subscribe("weights", out=out).refresh() is not None
        assert (out["a"][0], out["b"][0][0]) == (1.0, 2.0)


def test_what_stands_beside_the_tensors_may_change(path: str) -> None:
    with tb.serve(path) as names:
        tree = {"w": np.zeros(3), "step": 0, "more": [None, "text"]}
        publication = names.publish("weights", tree)
        subscription = names.subscribe("weights", out={"w": np.ones(3), "step": -1, "more": (1.5, "text")})
        for step in (1, True, 1.0, 2):
            tree["step"] = step
            publication.update()
            found = names.get("weights", "numpy")
            assert (found["step"], type(found["step"])) == (step, type(step))
            assert found["more"] == [None, "text"]
            assert subscription.refresh() == publication.wait()


def test_elements_are_cast_in_the_copy(path: str) -> None:
    with tb.serve(path) as names:
        x = np.linspace(-3, 3, 100, dtype=np.float32)
        names.publish("weights", {"w": x, "count": np.arange(3)})
        out = {"w": torch.zeros(100, dtype=torch.bfloat16), "count": torch.zeros(3, dtype=torch.int64)}
        assert names.subscribe("weights", out=out, dtype="bfloat16").refresh() is not None
        assert torch.equal(out["w"], torch.from_numpy(x).to(torch.bfloat16))
        assert out["count"].tolist() == [0, 1, 2]
        with pytest.raises(tb.BridgeValueError, match="float13"):
            names.subscribe("weights", out=out, dtype="float13")  # type: ignore[arg-type]


def test_a_tree_in_another_order_is_the_same_tree(path: str) -> None:
    """``jax.tree.map`` sorts keys."""
    with tb.serve(path) as names:
        publication = names.publish("weights", {"w": np.full(2, 1.0), "b": (np.full(2, 2.0), np.full(2, 3.0)), "s": 1})
        publication.update({"b": (np.full(2, 20.0), np.full(2, 30.0)), "s": 2, "w": np.full(2, 10.0)})
        found = names.get("weights", "numpy")
        assert (found["w"][0], found["b"][0][0], found["b"][1][0], found["s"]) == (10.0, 20.0, 30.0, 2)
        assert list(found) == ["b", "s", "w"]
        out = {"s": 0, "w": np.zeros(2), "b": [np.zeros(2), np.zeros(2)]}
        assert names.subscribe("weights", out=out).refresh() == publication.version
        assert (out["w"][0], out["b"][0][0], out["b"][1][0]) == (10.0, 20.0, 30.0)


def test_tied_weights_are_kept_once(path: str) -> None:
    def model() -> Any:
        made = torch.nn.ModuleDict({"in": torch.nn.Embedding(5, 3), "out": torch.nn.Linear(3, 5, bias=False)})
        made["out"].weight = made["in"].weight
        return made

    trained, served = model(), model()
    with tb.serve(path) as names:
        publication = names.publish("weights", trained.state_dict())
        assert names.list()["weights"][1] == "2 tensors, 60 bytes"
        assert names.subscribe("weights", out=served.state_dict()).refresh() == publication.version
        assert torch.equal(served["out"].weight, trained["in"].weight)


def test_readers_of_the_host_see_their_own_writes_alone(path: str) -> None:
    with tb.serve(path) as names:
        publication = names.publish("weights", np.zeros(4))
        mine, other, jax = names.get("weights", "torch"), names.get("weights", "numpy"), np.zeros(4)
        mine += 100
        assert other.tolist() == [0, 0, 0, 0]
        assert names.subscribe("weights", out=jax).refresh() is not None
        assert jax.tolist() == [0, 0, 0, 0]
        del mine, other
        gc.collect()
        for value in range(1, 4):
            publication.update(np.full(4, float(value)))
            assert names.get("weights", "numpy").tolist() == [value] * 4


def test_what_a_client_published_ends_with_it(path: str) -> None:
    def open_files() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def publish(name: str) -> None:
        with tb.connect(path) as client:
            publication = client.publish(name, np.zeros(1000))
            publication.update()
        with pytest.raises(tb.BridgeConnectionError, match="closed"):
            publication.update()

    with tb.serve(path) as names:
        publish("first")
        wait_until(lambda: not names.list() and processes.held()["shares"] == 0)
        files, threads = open_files()
        for index in range(20):
            publish(f"n{index}")
        wait_until(lambda: not names.list() and processes.held()["shares"] == 0)
        # Each had 8 descriptors and a thread. Those of earlier tests may end meanwhile.
        wait_until(lambda: open_files()[0] <= files + 8 and open_files()[1] <= threads + 1)


def test_a_subscription_keeps_no_connection(path: str) -> None:
    with tb.serve(path) as names:
        client = tb.connect(path)
        client.put("mine", np.zeros(3))
        subscription = client.subscribe("mine", out=np.zeros(3))
        assert subscription.refresh() is not None
        client.close()
        wait_until(lambda: not names.list())
        with pytest.raises(tb.BridgeConnectionError, match="closed"):
            subscription.refresh()
        # A connection that is not closed lives as long as its subscription.
        names.put("theirs", np.ones(3))
        out = np.zeros(3)
        subscription = tb.connect(path).subscribe("theirs", out=out)
        gc.collect()
        assert subscription.refresh() is not None
        assert out.tolist() == [1, 1, 1]


def test_a_process_ends_quietly_whatever_is_open(tmp_path: Path) -> None:
    program = """
import sys, numpy as np, truebridge as tb
names = tb.serve(sys.argv[1])
publication = names.publish("w", np.zeros(4))
held = names.get("w", "numpy")
for close in sys.argv[2:]:
    {"names": names, "publication": publication}[close].close()
"""
    for close in ([], ["names"], ["publication"], ["publication", "names"]):
        command = [sys.executable, "-c", program, str(tmp_path / "names"), *close]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert (done.returncode, done.stderr) == (0, ""), close


def test_the_end_of_a_publication_ends_an_update_that_waits(path: str) -> None:
    with tb.serve(path) as names:
        publication = names.publish("weights", weights(0))
        held = [names.get("weights", "numpy")]
        publication.update()
        held.append(names.get("weights", "numpy"))
        kinds: list[Any] = []

        def update() -> None:
            try:
                publication.update(timeout=60)
            except tb.BridgeError as error:
                kinds.append(error.kind)

        thread = threading.Thread(target=update)
        thread.start()
        time.sleep(0.2)
        version = publication.version
        publication.close()
        thread.join(10)
        assert kinds == ["gone"]
        del held
        gc.collect()
        assert names.get_versioned("weights", "numpy")[0] == version


def test_what_was_put_can_be_received(path: str) -> None:
    with tb.serve(path) as names:
        out = weights(0, "torch")
        subscription = names.subscribe("weights", out=out)
        assert subscription.refresh() is None
        assert subscription.wait(timeout=0.1) is None
        version = names.put("weights", weights(3))
        assert subscription.wait(timeout=5) == version
        assert (out["w"] == 3).all()


def test_a_single_tensor_is_a_tree(path: str) -> None:
    with tb.serve(path) as names:
        publication, out = names.publish("x", np.arange(4.0)), torch.zeros(4, dtype=torch.float64)
        subscription = names.subscribe("x", out=out)
        assert subscription.refresh() == publication.version
        assert out.tolist() == [0, 1, 2, 3]


def test_wrong_arguments(path: str) -> None:
    with tb.serve(path) as names:
        for name, tree, slots in (("", weights(0), 2), ("x", weights(0), 1), ("x", {}, 2), ("x", "text", 2)):
            with pytest.raises(tb.BridgeError):
                names.publish(name, tree, slots=slots)
        with pytest.raises(tb.BridgeValueError):
            names.subscribe("\n", out=weights(0))
        alone = names.publish("alone", np.zeros(3))
        for tree in (5, {}, [], {"a": 1}):
            with pytest.raises(tb.BridgeTypeError, match="holds no tensor"):
                alone.update(tree)
        publication = names.publish("x", weights(0))
        publication.close()
        publication.close()
        with pytest.raises(tb.BridgeConnectionError, match="closed"):
            publication.update()
        # The newest version stays.
        assert (names.get("x", "numpy")["w"] == 0).all()
    with pytest.raises(tb.BridgeConnectionError):
        names.publish("x", weights(0))


def test_the_end_of_the_names_is_an_error(path: str) -> None:
    names = tb.serve(path)
    publication, subscription = names.publish("x", weights(0)), names.subscribe("x", out=weights(0))
    names.close()
    for call in (publication.update, subscription.refresh):
        with pytest.raises(tb.BridgeConnectionError):
            call()


def test_a_forked_process_does_not_publish(path: str) -> None:
    with tb.serve(path) as names:
        publication = names.publish("x", weights(0))
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                try:
                    publication.update(timeout=0)
                except tb.BridgeConnectionError as error:
                    status = 0 if error.kind == "gone" else 2
                del publication
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        publication.update()
        assert publication.wait() > 0


#: A trainer and an engine that run until they are killed. Every element of a version has one value.
TRAINER = """
import sys, numpy as np, truebridge as tb
tree = [np.zeros(1 << 18, np.float32) for _ in range(4)]
publication = tb.connect(sys.argv[1]).publish("weights", tree)
print("up", flush=True)
step = 0
while True:
    step += 1
    for x in tree:
        x[:] = step
    publication.update()
"""
ENGINE = """
import sys, numpy as np, truebridge as tb
out = [np.full(1 << 18, -1, np.float32) for _ in range(4)]
subscription = tb.connect(sys.argv[1]).subscribe("weights", out=out)
print("up", flush=True)
while True:
    if subscription.refresh() is not None:
        assert all((x == out[0][0]).all() for x in out), "torn"
"""


def test_either_side_may_be_killed_at_any_time(path: str) -> None:
    out = [np.full(1 << 18, -1, np.float32) for _ in range(4)]
    programs = {"trainer": TRAINER, "engine": ENGINE}
    killed.at_random(path, programs, out, lambda: all((x == out[0][0]).all() for x in out))


def test_another_process_receives(path: str) -> None:
    other = Other()
    try:
        with tb.serve(path) as names:
            tree = weights(2)
            publication = names.publish("weights", tree)
            other("out = {'w': np.zeros((3, 5), np.float32), 'layers': [np.zeros(7), np.zeros((), np.float32)]}")
            other(f"subscription = tb.connect({path!r}).subscribe('weights', out=out)")
            newest = publication.wait()
            assert other("subscription.refresh()") == repr(newest)
            assert other("subscription") == f"<Subscription to 'weights', version {newest}>"
            assert other("(out['w'].sum(), out['layers'][0].sum())") == repr((np.float32(30.0), np.float64(14.0)))
            tree["w"][:] = 3
            publication.update()
            assert other("subscription.wait(5)") == repr(publication.wait())
            assert other("out['w'].sum()") == repr(np.float32(45.0))
            assert other("subscription.refresh()") == "None"
    finally:
        other.kill()
