"""Publications on a GPU: whole versions, without a wait, whatever is killed."""

from __future__ import annotations

import time
from typing import Any

import pytest

import killed
import truebridge as tb
from truebridge_conformance.others import Other

torch: Any = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

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
            # The host's tensor alone is copied by the host.
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
