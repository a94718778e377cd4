"""A store of device memory: what is put there outlives its process, and the store, which has no context."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import killed
import stores
import truebridge as tb
from stores import store
from truebridge_conformance.others import Other

torch: Any = pytest.importorskip("torch")


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


PUT = """
import os, signal, sys
import torch
import truebridge as tb
client = tb.connect(sys.argv[1])
weights = {"w": torch.zeros(1000, 300, device="cuda"), "b": torch.zeros(5, device="cuda", dtype=torch.bfloat16)}
# The writes are still to run when the tensors are put.
torch.cuda._sleep(400_000_000)
weights["w"] += 3
weights["b"] += 4
client.put("weights", weights)
os.kill(os.getpid(), signal.SIGKILL)
"""


def put_and_killed(path: str) -> None:
    assert subprocess.run([sys.executable, "-c", PUT, path], check=False).returncode == -9


def test_what_is_put_outlives_its_killed_process_and_its_work_has_run(path: str) -> None:
    with store(path) as process, tb.connect(path) as client:
        put_and_killed(path)
        tree = client.get("weights", "torch")
        assert tree["w"].is_cuda and bool((tree["w"] == 3).all()) and bool((tree["b"] == 4).all())
        assert "libcuda" not in Path(f"/proc/{process.pid}/maps").read_text()
        found = client.stored()
        assert found is not None and found[0] == 2 << 20


@pytest.mark.parametrize("target", ["torch", "cupy", "jax"])
def test_each_framework_reads_in_place_after_the_end_of_the_store(path: str, target: str) -> None:
    pytest.importorskip(target)
    with store(path), tb.connect(path) as client:
        put_and_killed(path)
        one, other = client.get("weights", target)["w"], client.get("weights", "torch")["w"]
    other += 1
    torch.cuda.synchronize()
    assert float(tb.to_numpy(one, device="cpu").sum()) == 4 * 300_000
    assert tb.convert(one, "torch").data_ptr() == other.data_ptr()


def test_the_next_store_is_handed_device_memory(path: str) -> None:
    process = stores.started(path)
    try:
        with tb.connect(path) as writer, tb.connect(path) as reader:
            put_and_killed(path)
            version, tree = reader.get_versioned("weights", "torch")
            own = writer.put("own", torch.full((7,), 5.0, device="cuda"))
            for _ in range(3):
                stores.ended(process)
                process = stores.started(path)
                until = time.monotonic() + 10
                with tb.connect(path) as late:
                    while {name: found[0] for name, found in late.list().items()} != {"weights": version, "own": own}:
                        assert time.monotonic() < until
                        time.sleep(0.01)
                    assert bool((late.get("own", "torch") == 5).all())
                    assert bool((late.get("weights", "torch")["w"] == tree["w"]).all())
    finally:
        stores.ended(process)


def test_memory_of_empty_is_handed_over_in_place(path: str) -> None:
    with store(path), tb.connect(path) as client:
        like = {"w": torch.empty(1000, 3, device="meta", dtype=torch.bfloat16), "b": torch.empty(5, device="meta")}
        made = client.empty(like, "torch", device="cuda:0")
        made["w"].fill_(3)
        made["b"].fill_(1)
        client.put("weights", made)
        made["b"].fill_(9)
        torch.cuda.synchronize()
        seen = client.get("weights", "torch")
        assert bool((seen["b"] == 9).all()) and bool((seen["w"] == 3).all()), "one memory"
        seen["b"].fill_(2)
        torch.cuda.synchronize()
        assert bool((made["b"] == 2).all()) and seen["b"].data_ptr() != made["b"].data_ptr()
        del made
        again = client.get("weights", "torch")
        assert again["b"].data_ptr() == seen["b"].data_ptr() and bool((again["b"] == 2).all())


def test_a_file_is_read_into_memory_that_is_handed_over(path: str, tmp_path: Path) -> None:
    tb.save(tmp_path / "w.safetensors", {"w": np.arange(100_000, dtype=np.float32), "b": torch.ones(3).bfloat16()})
    with store(path), tb.connect(path) as client:
        loaded = tb.load(tmp_path / "w.safetensors", "torch", device="cuda:0", into=client)
        client.put("weights", loaded)
        seen = client.get("weights", "torch")
        assert seen["b"].dtype == torch.bfloat16 and bool((seen["b"] == 1).all())
        assert bool((seen["w"] == torch.arange(100_000, device="cuda")).all())
        loaded["w"].zero_()
        torch.cuda.synchronize()
        assert not seen["w"].any(), "one memory"


def test_a_model_is_built_in_a_pool_and_handed_over_in_place(path: str) -> None:
    with store(path), tb.connect(path) as client:
        pool = client.pool()
        assert pool is client.pool()
        with torch.cuda.use_mem_pool(pool):
            model = torch.nn.Sequential(torch.nn.Linear(2000, 3000), torch.nn.Linear(3000, 10)).cuda()
        outside = torch.ones(1000, device="cuda")
        state = {**{name: x.detach() for name, x in model.state_dict().items()}, "outside": outside}
        client.put("model", state)
        seen = client.get("model", "torch")
        for name, tensor in state.items():
            assert torch.equal(seen[name], tensor), name
        with torch.no_grad():
            model[0].weight.fill_(7)
            outside.fill_(7)
        torch.cuda.synchronize()
        assert bool((seen["0.weight"] == 7).all()), "in place"
        assert bool((seen["outside"] == 1).all()), "a copy"
        # The memory is not used again as long as the store or a reader has it.
        addresses = {x.data_ptr() for x in state.values()}
        del model, state, tensor
        with torch.cuda.use_mem_pool(pool):
            others = [torch.zeros(2000, 3000, device="cuda") for _ in range(4)]
        torch.cuda.synchronize()
        assert not addresses & {x.data_ptr() for x in others}
        assert bool((seen["0.weight"] == 7).all())
        client.remove("model")
        with torch.cuda.use_mem_pool(pool):
            others += [torch.zeros(2000, 3000, device="cuda") for _ in range(4)]
        torch.cuda.synchronize()
        assert bool((seen["0.weight"] == 7).all())
        del seen
        until = time.monotonic() + 10
        while not addresses & {x.data_ptr() for x in others}:
            assert time.monotonic() < until, "the memory is never used again"
            with torch.cuda.use_mem_pool(pool):
                others.append(torch.zeros(2000, 3000, device="cuda"))
            time.sleep(0.1)


def test_a_slot_that_a_killed_store_had_passed_on_is_not_written_again(path: str) -> None:
    process = stores.started(path)
    try:
        with tb.connect(path) as trainer, tb.connect(path) as reader:
            publication = trainer.publish("weights", torch.zeros(100_000, device="cuda"))
            publication.wait()
            held = reader.get("weights", "torch")
            stores.ended(process)
            process = stores.started(path)
            for value in range(1, 8):
                publication.update(torch.full((100_000,), float(value), device="cuda"))
                publication.wait()
                assert not held.any()
            assert bool((reader.get("weights", "torch") == 7).all())
    finally:
        stores.ended(process)


def test_a_reader_that_is_slow_gives_the_memory_back_when_its_work_has_run(path: str) -> None:
    with store(path), tb.connect(path) as trainer, tb.connect(path) as reader:
        publication = trainer.publish("weights", torch.zeros(1 << 20, device="cuda"))
        publication.wait()
        sums = []
        for value in range(1, 12):
            seen = reader.get("weights", "torch")
            torch.cuda._sleep(20_000_000)
            sums.append((value - 1, seen.sum()))
            del seen
            publication.update(torch.full((1 << 20,), float(value), device="cuda"))
            publication.wait()
        for value, total in sums:
            assert float(total) == value * float(1 << 20)


def test_nothing_is_left_on_the_device(path: str) -> None:
    with store(path), tb.connect(path) as client:
        client.put("weights", torch.zeros(1000, device="cuda"))
        before = free_bytes()
        for _ in range(20):
            client.put("weights", torch.zeros(16 << 20, device="cuda"))
            assert float(client.get("weights", "torch").sum()) == 0
        client.put("weights", torch.zeros(1000, device="cuda"))
        until = time.monotonic() + 20
        while free_bytes() < before - (4 << 20):
            assert time.monotonic() < until, (before, free_bytes())
            time.sleep(0.05)


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free: int = torch.cuda.mem_get_info()[0]
    return free


def test_processes_that_are_killed_at_random_lose_nothing_and_leave_nothing(path: str) -> None:
    pytest.importorskip("cupy")
    before = free_bytes()
    stores.at_random(
        path,
        {
            "imports": "import cupy as cp",
            "full": "cp.full(shape, value)",
            "target": "cupy",
            "device": "cuda:0",
            "read": "cp.asnumpy(x)",
        },
    )
    until = time.monotonic() + 20
    while free_bytes() < before - (4 << 20):
        assert time.monotonic() < until, (before, free_bytes())
        time.sleep(0.05)


# Publications on a GPU: whole versions, without a wait, whatever is killed.


#: Cycles of the device's clock: some hundred milliseconds.
DELAY = 200_000_000


def weights(value: float) -> dict[str, Any]:
    return {
        "w": torch.full((300, 50), value, device="cuda"),
        "half": [torch.full((i,), value, dtype=torch.float16, device="cuda") for i in (0, 1, 7, 4096)],
        "steps": torch.full((), int(value), device="cuda"),
        "host": torch.full((5,), value),
    }


def values(tree: dict[str, Any]) -> set[float]:
    leaves = [tree["w"], *tree["half"], tree["steps"], tree["host"]]
    return {value for leaf in leaves for value in leaf.flatten().double().tolist()}


def test_an_update_waits_for_nothing_and_holds_what_was_there(path: str) -> None:
    tree, out = weights(0), weights(-1)
    with tb.serve(path) as names:
        publication = names.publish("weights", tree, slots=3)
        subscription = names.subscribe("weights", out=out)
        publication.wait()
        for value in range(1, 6):
            torch.cuda._sleep(DELAY)
            for leaf in (tree["w"], *tree["half"], tree["steps"], tree["host"]):
                leaf.fill_(value)
            start = time.monotonic()
            publication.update()
            took = time.monotonic() - start
            # The host copies only its own tensor.
            for leaf in (tree["w"], *tree["half"], tree["steps"], tree["host"]):
                leaf.fill_(-7)
            torch.cuda._sleep(DELAY)
            assert took < 0.05, "the host waited"
            version = publication.wait()
            assert subscription.refresh() == version
            assert values(out) == {value}


def test_a_refresh_waits_for_nothing(path: str) -> None:
    tree, out = weights(0), weights(-1)
    with tb.serve(path) as names:
        publication = names.publish("weights", tree)
        subscription = names.subscribe("weights", out=out)
        side = torch.cuda.Stream()
        for value in range(1, 11):
            for leaf in (tree["w"], *tree["half"], tree["steps"], tree["host"]):
                leaf.fill_(value)
            publication.update()
            version = publication.wait()
            with torch.cuda.stream(side):
                torch.cuda._sleep(DELAY)
                before = out["w"].clone()
                start = time.monotonic()
                assert subscription.refresh() == version
                assert time.monotonic() - start < 0.05, "the host waited"
                after = out["w"].clone()
            side.synchronize()
            assert (before == (value - 1 if value > 1 else -1)).all()
            assert (after == value).all()


def test_a_graph_reads_whole_versions(path: str) -> None:
    """The engine of another process trains; the graph here adds up what it reads."""
    trainer = Other()
    try:
        with tb.serve(path) as names:
            trainer("import torch; tree = [torch.zeros(1 << 20, device='cuda') for _ in range(8)]")
            trainer(f"publication = tb.connect({path!r}).publish('weights', tree)")
            trainer("publication.wait() and None")
            out = [torch.zeros(1 << 20, device="cuda") for _ in range(8)]
            subscription = names.subscribe("weights", out=out)
            assert subscription.wait(timeout=30) is not None
            low, high = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
            graph = torch.cuda.CUDAGraph()
            torch.stack([x.amin() for x in out])
            with torch.cuda.graph(graph):
                low.copy_(torch.stack([x.amin() for x in out]))
                high.copy_(torch.stack([x.amax() for x in out]))
            trainer.begin("for step in range(200): [x.fill_(step) for x in tree]; publication.update()\n")
            seen, until = set(), time.monotonic() + 60
            while 199.0 not in seen and time.monotonic() < until:
                subscription.refresh()
                for _ in range(3):
                    graph.replay()
                    both = {*low.tolist(), *high.tolist()}
                    assert len(both) == 1, f"torn: {both}"
                    seen |= both
            assert 199.0 in seen
            trainer.end("")
    finally:
        trainer.kill()


@pytest.mark.parametrize("kind", ["jax", "cupy"])
def test_other_frameworks_publish(path: str, kind: str) -> None:
    pytest.importorskip(kind)
    with tb.serve(path) as names:
        out = {"w": torch.zeros(300, 50, device="cuda")}
        publication = names.publish("weights", tb.convert({"w": torch.ones(300, 50, device="cuda")}, kind, copy=True))
        subscription = names.subscribe("weights", out=out)
        publication.wait()
        assert subscription.refresh() is not None
        assert (out["w"] == 1).all()
        for value in range(2, 20):
            tree = tb.convert({"w": torch.full((300, 50), float(value), device="cuda")}, kind, copy=True)
            publication.update(tree)
            del tree
            publication.wait()
            assert subscription.refresh() is not None
            assert (out["w"] == value).all()


TRAINER = f"""
import sys, torch, truebridge as tb
tree = [torch.zeros(8 << 20, device="cuda") for _ in range(4)]
publication = tb.connect(sys.argv[1]).publish("weights", tree)
publication.wait()
print("up", flush=True)
step = 0
while True:
    step += 1
    for x in tree:
        x.fill_(step)
        torch.cuda._sleep({DELAY // 100})
    publication.update()
"""
ENGINE = f"""
import sys, torch, truebridge as tb
out = [torch.full((8 << 20,), -1.0, device="cuda") for _ in range(4)]
subscription = tb.connect(sys.argv[1]).subscribe("weights", out=out)
print("up", flush=True)
while True:
    torch.cuda._sleep({DELAY // 100})
    if subscription.refresh() is not None:
        assert torch.stack([x.amin() for x in out] + [x.amax() for x in out]).unique().numel() == 1, "torn"
"""


def test_either_side_may_be_killed_at_any_time(path: str) -> None:
    out = [torch.full((8 << 20,), -1.0, device="cuda") for _ in range(4)]

    def is_whole() -> bool:
        return bool(torch.stack([x.amin() for x in out] + [x.amax() for x in out]).unique().numel() == 1)

    killed.at_random(path, {"trainer": TRAINER, "engine": ENGINE}, out, is_whole)
    torch.cuda.synchronize()
