"""A store: tensors that outlive the process that has put them, and the store itself."""

from __future__ import annotations

import asyncio
import collections
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import stores
import truebridge as tb
from stores import store
from truebridge_conformance.others import wait_until


def ran(code: str, path: str) -> None:
    subprocess.run([sys.executable, "-c", code, path], check=True)


PUT = """
import sys
import numpy as np
import truebridge as tb
layers = [np.ones(3, np.float32)]
tb.connect(sys.argv[1]).put("weights", {"w": np.arange(6.0).reshape(2, 3), "layers": layers, "step": 7})
"""


def test_what_is_put_outlives_its_process(path: str) -> None:
    with store(path), tb.connect(path) as client:
        ran(PUT, path)
        tree = client.get("weights", "numpy")
        assert tree["step"] == 7
        np.testing.assert_array_equal(tree["w"], np.arange(6.0).reshape(2, 3))
        np.testing.assert_array_equal(tree["layers"][0], np.ones(3, np.float32))
        assert client.stored() == (128, sys.maxsize * 2 + 1)
        client.remove("weights")
        np.testing.assert_array_equal(tree["layers"][0], np.ones(3, np.float32))
        del tree
        wait_until(lambda: client.stored() == (0, sys.maxsize * 2 + 1))


def test_what_is_put_is_a_copy(path: str) -> None:
    weights = np.zeros(3)
    with store(path), tb.connect(path) as client:
        version = client.put("weights", weights)
        weights[:] = 7
        np.testing.assert_array_equal(client.get("weights", "numpy", version=version), np.zeros(3))


def test_what_is_open_outlives_a_killed_store(path: str) -> None:
    with store(path), tb.connect(path) as client:
        ran(PUT, path)
        version, tree = client.get_versioned("weights", "numpy")
    # The store was killed.
    np.testing.assert_array_equal(tree["w"], np.arange(6.0).reshape(2, 3))
    again = tb.convert(tree["w"], "numpy")
    assert np.shares_memory(again, tree["w"])
    with store(path), tb.connect(path) as late:
        # The connection was closed before, and hands nothing over.
        assert late.list() == {} and version > 0


def test_the_next_store_is_handed_everything(path: str) -> None:
    process = stores.started(path)
    try:
        with tb.connect(path) as writer, tb.connect(path) as reader:
            ran(PUT, path)
            version, tree = reader.get_versioned("weights", "numpy")
            own = writer.put("own", np.full(5, 3.0))
            for _ in range(3):
                stores.ended(process)
                np.testing.assert_array_equal(tb.convert(tree["w"], "numpy"), np.arange(6.0).reshape(2, 3))
                with pytest.raises(tb.BridgeConnectionError):
                    reader.list()
                process = stores.started(path)
                with tb.connect(path) as late:
                    wait_until(lambda late=late: set(late.list()) == {"weights", "own"})  # type: ignore[misc]
                    assert {name: found[0] for name, found in late.list().items()} == {"weights": version, "own": own}
                    np.testing.assert_array_equal(late.get("own", "numpy"), np.full(5, 3.0))
                    np.testing.assert_array_equal(late.get("weights", "numpy")["w"], tree["w"])
            assert writer.put("own", np.zeros(1)) > max(own, version)
    finally:
        stores.ended(process)


def test_another_connection_hands_over_what_a_closed_one_has_found(path: str) -> None:
    with store(path) as first:
        finder = tb.connect(path)
        finder.put("weights", np.arange(3))
        found = finder.get("weights", "numpy")
        other = tb.connect(path)
        finder.close()
        stores.ended(first)
        with store(path), tb.connect(path) as late:
            wait_until(lambda: "weights" in late.list())
            np.testing.assert_array_equal(late.get("weights", "numpy"), found)
            late.remove("weights")
            wait_until(lambda: not other.list())
        other.close()


def test_a_named_tuple_is_copied_into_what_a_store_makes_of_it(path: str) -> None:
    pair = collections.namedtuple("pair", "w b")
    with store(path), tb.connect(path) as client:
        trained = pair(np.ones(2), np.ones(1))
        made = client.empty(trained, "numpy")
        tb.copy(trained, out=made)
        client.put("weights", made)
        out = pair(np.zeros(2), np.zeros(1))
        tb.copy(client.get("weights", "numpy"), out=out)
        np.testing.assert_array_equal(out.w, trained.w)
        with pytest.raises(tb.BridgeError):
            tb.copy(client.get("weights", "numpy"), out=collections.namedtuple("three", "a b c")(*[np.zeros(1)] * 3))


def test_few_descriptors_are_not_all_taken_by_silent_connections(path: str) -> None:
    code = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
sys.argv = ["truebridge", "store", sys.argv[1]]
runpy.run_module("truebridge", run_name="__main__")
"""
    process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    silent = [socket.socket(socket.AF_UNIX) for _ in range(48)]
    try:
        for one in silent:
            one.connect(path)
        # One process has half of the connections.
        ran("import sys, truebridge as tb; assert tb.connect(sys.argv[1]).list() == {}", path)
    finally:
        for one in silent:
            one.close()
        stores.ended(process)


def test_publications_go_on_and_their_newest_version_stays(path: str) -> None:
    process = stores.started(path)
    try:
        out = np.full(1000, -1.0)
        with tb.connect(path) as client:
            subscription = client.subscribe("weights", out=out)
            with tb.connect(path) as trainer:
                publication = trainer.publish("weights", np.full(1000, 0.0))
                for value in range(1, 40):
                    if value % 10 == 5:
                        stores.ended(process)
                        process = stores.started(path)
                    publication.update(np.full(1000, float(value)))
                    publication.wait()
                    assert subscription.wait(10) == publication.version
                    assert (out == value).all()
            fresh = np.empty(1000)
            with tb.connect(path) as late:
                late.subscribe("weights", out=fresh).refresh()
            assert (fresh == 39).all()
    finally:
        stores.ended(process)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_version_that_an_ended_store_had_passed_on_is_not_written_again(path: str, how: signal.Signals) -> None:
    process = stores.started(path)
    try:
        with tb.connect(path) as trainer, tb.connect(path) as reader:
            publication = trainer.publish("weights", np.full(100_000, 0.0))
            held = reader.get("weights", "numpy")
            process.send_signal(how)
            process.wait()
            stores.ended(process)
            process = stores.started(path)
            for value in range(1, 8):
                publication.update(np.full(100_000, float(value)))
                publication.wait()
                assert (held == 0).all()
    finally:
        stores.ended(process)


def test_memory_of_empty_is_handed_over_in_place(path: str) -> None:
    torch: Any = pytest.importorskip("torch")
    with store(path), tb.connect(path) as client:
        like = {"w": torch.empty(1000, 3, device="meta", dtype=torch.bfloat16), "b": np.empty((), np.int64)}
        made = client.empty(like, "torch")
        assert (made["w"].dtype, tuple(made["w"].shape), made["b"].dtype) == (torch.bfloat16, (1000, 3), torch.int64)
        assert not made["w"].any()
        made["w"].fill_(3)
        client.put("weights", made)
        made["b"].fill_(9)
        seen = client.get("weights", "numpy")
        assert (seen["b"], int(seen["w"].astype(np.float32).sum())) == (9, 9000), "one memory"
        found = client.stored()
        assert found is not None and 6000 < found[0] < 8000
        client.put("again", {"row": made["w"][2]})
        assert client.stored() == found, "memory counts once"
        del made
        assert client.get("weights", "numpy")["b"] == 9
        seen["w"][:] = 0
        assert int(client.get("weights", "numpy")["w"].astype(np.float32).sum()) == 9000, "writes are private"


def test_a_put_has_more_descriptors_than_one_send(path: str) -> None:
    with store(path), tb.connect(path) as client:
        made = [client.empty(np.empty(2, np.int32), "numpy") for _ in range(600)]
        for number, array in enumerate(made):
            array[:] = number
        client.put("weights", made)
        found = client.get("weights", "numpy")
        assert [int(array[1]) for array in found] == list(range(600))
        made[-1][:] = 9
        assert found[-1][0] == 9, "one memory"
        with pytest.raises(tb.BridgeError) as caught:
            client.put("more", [client.empty(np.empty(1), "numpy") for _ in range(1013)])
        assert caught.value.kind == "argument"


def test_files_are_read_into_memory_that_is_handed_over(path: str, tmp_path: Path) -> None:
    weights = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(3)}
    for name in ("w.safetensors", "w.npz"):
        tb.save(tmp_path / name, weights)
    tb.save(tmp_path / "one.npy", weights["w"])
    with store(path), tb.connect(path) as client:
        for name in ("w.safetensors", "w.npz"):
            loaded = tb.load(tmp_path / name, "numpy", into=client)
            before = client.stored()
            client.put(name, loaded)
            for key, value in weights.items():
                np.testing.assert_array_equal(client.get(name, "numpy")[key], value)
            loaded["b"][0] = 5
            assert client.get(name, "numpy")["b"][0] == 5, "one memory"
            assert before is not None
        one = tb.load(tmp_path / "one.npy", "numpy", into=client)
        client.put("one", one)
        np.testing.assert_array_equal(client.get("one", "numpy"), weights["w"])


def test_bytes_are_counted_and_bounded(path: str) -> None:
    with store(path, "--max-bytes", "1K"), tb.connect(path) as client:
        client.put("a", np.zeros(64))
        assert client.stored() == (512, 1024)
        with pytest.raises(tb.BridgeMemoryError, match="--max-bytes"):
            client.put("b", np.zeros(65))
        assert set(client.list()) == {"a"}
        client.put("b", np.zeros(64))
        with pytest.raises(tb.BridgeMemoryError):
            client.put("a", np.zeros(1))
        np.testing.assert_array_equal(client.get("a", "numpy"), np.zeros(64))


def test_a_server_of_names_is_no_store_unless_it_says_so(path: str) -> None:
    with tb.serve(path) as names:
        assert names.stored() is None
    with tb.serve(path, persistent=True, max_bytes=100) as names:
        assert names.stored() == (0, 100)
        names.put("a", np.zeros(3))
        assert asyncio.run(names.stored_async()) == (64, 100)
        assert asyncio.run(names.empty_async(np.zeros(3), "numpy")).shape == (3,)
    with pytest.raises(tb.BridgeValueError, match="max_bytes"):
        tb.serve(path, persistent=True, max_bytes=-1)


def test_a_read_only_version_is_opened_where_that_is_promised(path: str) -> None:
    torch: Any = pytest.importorskip("torch")
    with store(path), tb.connect(path) as client:
        client.put("weights", np.ones(3), writing="never")
        with pytest.raises(tb.BridgeError, match="read_only=True"):
            client.get("weights", "torch")
        assert client.get("weights", "torch", read_only=True).sum() == 3
        assert asyncio.run(client.get_async("weights", "torch", read_only=True)).sum() == 3
        assert torch.equal(client.get_versioned("weights", "torch", read_only=True)[1], torch.ones(3).double())


@pytest.mark.parametrize(
    ("like", "kind"),
    [
        (object(), "not_a_tensor"),
        ({}, "not_a_tensor"),
        (np.array(["text"]), "dtype"),
        (SimpleNamespace(shape=(1 << 70,), dtype="float32"), "argument"),
        (SimpleNamespace(shape=(-1,), dtype="float32"), "argument"),
        (SimpleNamespace(shape=(1.5,), dtype="float32"), "not_a_tensor"),
        (SimpleNamespace(shape=(1 << 50,), dtype="float32"), "out_of_memory"),
    ],
)
def test_what_describes_no_tensor_is_refused(path: str, like: Any, kind: str) -> None:
    with tb.serve(path, persistent=True) as names, pytest.raises(tb.BridgeError) as raised:
        names.empty(like, "numpy")
    assert raised.value.kind == kind


def test_a_connection_that_has_done_nothing_goes_on_with_the_next_store(path: str) -> None:
    process = stores.started(path)
    try:
        with tb.connect(path) as idle, tb.connect(path) as writer:
            version = writer.put("a", np.zeros(3))
            stores.ended(process)
            with pytest.raises(tb.BridgeConnectionError):
                idle.list()
            assert list(idle.watch("a", timeout=0.05)) == [], "a watch waits"
            process = stores.started(path)
            wait_until(lambda: list(idle.list()) == ["a"])
            assert next(idle.watch("a")) == version
    finally:
        stores.ended(process)


def test_a_watch_ends_with_its_connection_and_many_hold_nothing_up(path: str) -> None:
    async def watched(client: tb.processes.Client) -> str:
        try:
            async for _ in client.watch_async("none"):
                pass
        except tb.BridgeConnectionError as error:
            return str(error)
        return "no error"

    async def main() -> None:
        with store(path), tb.connect(path) as client, tb.connect(path) as other:
            other.put("weights", np.ones(1))
            watches = [asyncio.create_task(watched(client)) for _ in range(40)]
            await asyncio.sleep(0.3)
            for _ in range(20):
                assert (await asyncio.wait_for(other.get_async("weights", "numpy"), 10))[0] == 1
            assert not any(watch.done() for watch in watches)
            client.close()
            assert all("closed" in text for text in await asyncio.wait_for(asyncio.gather(*watches), 30))

    asyncio.run(main())


def test_descriptors_are_left_for_connections(path: str) -> None:
    code = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
sys.argv[1:1] = ["store"]
runpy.run_module("truebridge", run_name="__main__")
"""
    command = [sys.executable, "-c", code, path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("stores")
        with tb.connect(path) as client:
            with pytest.raises(tb.BridgeMemoryError, match="open files"):
                for number in range(200):
                    client.put(f"{number}", np.zeros(1))
            assert number == 100
            with tb.connect(path) as other:
                assert len(other.list()) == number and other.get("0", "numpy") == 0
    finally:
        stores.ended(process)


def test_a_fork_of_an_ended_store_does_not_block_the_path(path: str) -> None:
    code = """
import os, sys, time
import truebridge as tb
names = tb.serve(sys.argv[1], persistent=True)
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print("up", flush=True)
time.sleep(60)
"""
    server = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline() == "up\n"
    child = int(Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()[0])
    try:
        stores.ended(server)
        with store(path), tb.connect(path) as client:
            assert client.stored() is not None
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_command_ends_by_a_signal_and_says_what_is_wrong(path: str) -> None:
    process = stores.started(path, "--max-bytes", "1.5GiB")
    second = subprocess.run(
        [sys.executable, "-m", "truebridge", "store", path], capture_output=True, text=True, check=False
    )
    assert second.returncode == 2 and "gone" not in second.stderr and path in second.stderr
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert process.stdout is not None and "next store" in process.stdout.read()
    process.stdout.close()
    assert not os.path.exists(path)
    wrong = [sys.executable, "-m", "truebridge", "store", path, "--max-bytes", "many"]
    assert "60G" in subprocess.run(wrong, capture_output=True, text=True, check=False).stderr


def test_a_store_imports_no_framework_and_starts_no_driver(path: str) -> None:
    with store(path) as process, tb.connect(path) as client:
        client.put("a", np.zeros(3))
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert not any(name in maps for name in ("numpy", "torch", "libcuda"))


def test_processes_that_are_killed_at_random_lose_nothing_and_leave_nothing(path: str) -> None:
    words = {
        "imports": "",
        "full": "np.full(shape, value)",
        "target": "numpy",
        "device": "cpu",
        "read": "np.asarray(x)",
    }
    stores.at_random(path, words)
