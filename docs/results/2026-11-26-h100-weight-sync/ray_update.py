"""The time of one update of an engine's weights: truebridge's publish, torch.multiprocessing, and ways of Ray.

A trainer and an engine are two actors of Ray, two processes on one GPU. The time counts from the call in the trainer,
whose weights are finished, until the engine's own tensors, whose addresses never change, hold the new weights and its
device is idle. In every way the trainer may change its weights at once.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path

import ray

WAYS = {
    "publish": "`publish`, `update`, `refresh`",
    "mp": "a clone of each tensor, `torch.multiprocessing`",
    "ray_numpy": "Ray: `ray.put` of NumPy arrays on the host, `ray.get`",
    "ray_plain": "Ray: `ray.put` of the tensors as they are, `ray.get`",
    "tb_ray": "a clone of each tensor, Ray with `truebridge.ray.register`",
    "ray_ipc_get": "the same, `ray.get` by the engine",
    "ray_ipc": "a clone of each tensor, Ray with `_tensor_transport=\"cuda_ipc\"`",
}


def shapes_of(what: str) -> tuple[list[tuple[int, ...]], str]:
    if what == "small":
        return [(64, 1024)] * int(os.environ.get("COUNT", "300")), "float32"
    h, m, v = 4096, 11008, 32000
    layer = [(h // 4, h)] * 4 + [(m // 4, h)] * 2 + [(h // 4, m)] + [(h // 4,)] * 2
    return layer * int(os.environ.get("LAYERS", "32")) + [(v // 4, h), (h // 4,), (v // 4, h)], "bfloat16"


class Side:
    """What both actors do."""

    def __init__(self) -> None:
        import torch
        import torch.multiprocessing

        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cpu":
            torch.multiprocessing.set_sharing_strategy("file_system")

    def finished(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def make(self, what: str) -> int:
        shapes, dtype = shapes_of(what)
        self.weights = [self.torch.zeros(s, dtype=getattr(self.torch, dtype), device=self.device) for s in shapes]
        self.finished()
        return sum(w.nbytes for w in self.weights)

    def ready(self) -> int:
        return os.getpid()


class Trainer(Side):
    def begin(self, way: str, path: str) -> None:
        if way == "publish":
            import truebridge as tb

            self.publication = tb.connect(path).publish("weights", self.weights, slots=2)
        elif way == "mp":
            from multiprocessing.connection import Client

            self.connection = Client(path, "AF_UNIX")
        elif way == "tb_ray":
            import truebridge as tb

            tb.ray.register()

    def update(self, way: str, number: int, engine) -> tuple[float, float, float, bool]:
        torch = self.torch
        for w in self.weights:
            w.fill_(number)
        self.finished()
        start = time.perf_counter()
        kept = answer = None
        if way == "publish":
            self.publication.update(timeout=60)
        elif way == "mp":
            from multiprocessing.reduction import ForkingPickler

            kept = [w.clone() for w in self.weights]
            self.connection.send_bytes(ForkingPickler.dumps(kept))
        else:
            if way == "ray_plain":
                ref = ray.put(self.weights)
            elif way == "ray_numpy":
                ref = ray.put([w.view(torch.int16 if w.element_size() == 2 else w.dtype).cpu().numpy() for w in self.weights])
            elif way == "tb_ray":
                ref = ray.put([w.clone() for w in self.weights])
            else:
                ref = ray.put([w.clone() for w in self.weights], _tensor_transport="cuda_ipc")
            kept = ref
            answer = engine.take.remote([ref] if way == "ray_ipc_get" else ref, way, number)
        host = time.perf_counter() - start
        if way in ("publish", "mp"):
            answer = engine.took.remote()
        end, there, right = ray.get(answer)
        del kept
        return end - start, host, there, right


class Engine(Side):
    def begin(self, way: str, path: str) -> None:
        import threading

        self.results: list = []
        self.more = threading.Event()
        if way == "publish":
            import truebridge as tb

            self.subscription = tb.connect(path).subscribe("weights", out=self.weights)
            threading.Thread(target=self._refreshes, daemon=True).start()
        elif way == "mp":
            from multiprocessing.connection import Listener

            self.listener = Listener(path, "AF_UNIX")
            threading.Thread(target=self._receives, daemon=True).start()
        elif way == "tb_ray":
            import truebridge as tb

            tb.ray.register()

    def check(self) -> int:
        low = min(float(w.min()) for w in self.weights)
        high = max(float(w.max()) for w in self.weights)
        return int(high) if low == high else -1

    def _refreshes(self) -> None:
        try:
            while True:
                start = time.perf_counter()
                if self.subscription.refresh() is not None:
                    there = time.perf_counter() - start
                    self.finished()
                    self.results.append((time.perf_counter(), there, self.check()))
                time.sleep(0.00002)
        except BaseException:
            traceback.print_exc()

    def _receives(self) -> None:
        try:
            connection = self.listener.accept()
            import pickle

            while True:
                sent = connection.recv_bytes()
                start = time.perf_counter()
                self.torch._foreach_copy_(self.weights, pickle.loads(sent))
                there = time.perf_counter() - start
                self.finished()
                self.results.append((time.perf_counter(), there, self.check()))
        except EOFError:
            pass
        except BaseException:
            traceback.print_exc()

    def forget(self) -> None:
        time.sleep(0.3)
        self.results.clear()

    def took(self) -> tuple[float, float, int]:
        until = time.monotonic() + 60
        while not self.results:
            if time.monotonic() > until:
                raise TimeoutError("no update")
            time.sleep(0.0005)
        return self.results.pop(0)

    def take(self, weights: list, way: str, number: int) -> tuple[float, float, int]:
        start = time.perf_counter()
        torch = self.torch
        if way == "ray_ipc_get":
            weights = ray.get(weights[0])
        if way == "ray_numpy":
            import warnings

            warnings.simplefilter("ignore")
            dtype = self.weights[0].dtype
            weights = [torch.from_numpy(x).view(dtype) for x in weights]
        torch._foreach_copy_(self.weights, weights)
        there = time.perf_counter() - start
        self.finished()
        return time.perf_counter(), there, self.check()

    def plain(self) -> float:
        """A copy of as many bytes in this process, in ms."""
        torch, others = self.torch, [torch_like.clone() for torch_like in self.weights]
        taken = []
        for _ in range(7):
            self.finished()
            start = time.perf_counter()
            torch._foreach_copy_(self.weights, others)
            self.finished()
            taken.append((time.perf_counter() - start) * 1e3)
        return statistics.median(taken)


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    ways = sys.argv[2].split(",") if len(sys.argv) > 2 else list(WAYS)
    whats = sys.argv[3].split(",") if len(sys.argv) > 3 else ["small", "7B/4"]
    seconds = float(os.environ.get("SECONDS_EACH", "6"))
    store = int(float(os.environ.get("STORE_GIB", "24")) * 2**30)
    try:
        import torch

        gpu = torch.cuda.is_available()
    except Exception:
        gpu = False
    ray.init(num_cpus=16, num_gpus=1 if gpu else None, object_store_memory=store, include_dashboard=False,
             logging_level="warning")
    fraction = {"num_gpus": 0.03} if gpu else {}
    import truebridge as tb

    folder = tempfile.mkdtemp(dir="/tmp")
    pairs = {}
    for what in whats:
        for way in ways:
            pairs[what, way] = [
                ray.remote(num_cpus=0.1, **fraction, **({"enable_tensor_transport": True} if "ipc" in way else {}))(kind).remote()
                for kind in (Trainer, Engine)
            ]
    rows = []
    with tb.serve(Path(folder) / "names"):
        for number_of, ((what, way), (trainer, engine)) in enumerate(pairs.items()):
            row = {"weights": what, "way": way, "what": WAYS[way]}
            try:
                path = f"{folder}/names" if way == "publish" else f"{folder}/mp{number_of}"
                ray.get([trainer.ready.remote(), engine.ready.remote()], timeout=120)
                row["bytes"] = ray.get(trainer.make.remote(what), timeout=60)
                ray.get(engine.make.remote(what), timeout=60)
                if way == "publish":
                    row["plain_copy_ms"] = ray.get(engine.plain.remote(), timeout=60)
                ray.get(engine.begin.remote(way, path), timeout=60)
                ray.get(trainer.begin.remote(way, path), timeout=60)
                if way == "publish":
                    ray.get(engine.forget.remote(), timeout=60)
                taken, start, number, wrong = [], time.monotonic(), 0, 0
                while number < 40 and (time.monotonic() - start < seconds or number < 3):
                    number += 1
                    *times, value = ray.get(trainer.update.remote(way, number, engine), timeout=25 if "ipc" in way else 60)
                    wrong += value != number
                    taken.append([t * 1e3 for t in times])
                row["first_ms"] = taken[0][0]
                kept = taken[min(3, len(taken) - 2):]
                row["each"] = taken
                row["rounds"], row["wrong"] = len(kept), wrong
                for name, column in zip(("all_ms", "trainer_ms", "engine_ms"), zip(*kept)):
                    row[name] = statistics.median(column)
                row["all_ms_least_most"] = [min(t[0] for t in kept), max(t[0] for t in kept)]
            except BaseException as error:
                row["error"] = f"{type(error).__name__}: {str(error)[-700:]}"
            for actor in (trainer, engine):
                ray.kill(actor)
            rows.append(row)
            (out / "ray.json").write_text(json.dumps(rows, indent=1) + "\n")
            print({k: v for k, v in row.items() if k != "what"}, flush=True)
            time.sleep(0.5)
    lines = ["| weights | way | until the engine has them, ms | least, most | first | host of the trainer, ms | host of the engine, ms | rounds | wrong |",
             "|---|---|--:|---|--:|--:|--:|--:|--:|"]
    for r in rows:
        if "error" in r:
            lines.append(f"| {r['weights']} | {r['what']} | failed | | | | | | |")
        else:
            lines.append(f"| {r['weights']} | {r['what']} | {r['all_ms']:,.1f} | {r['all_ms_least_most'][0]:,.1f}, {r['all_ms_least_most'][1]:,.1f} "
                         f"| {r['first_ms']:,.1f} | {r['trainer_ms']:,.1f} | {r['engine_ms']:,.1f} | {r['rounds']} | {r['wrong']} |")
    (out / "ray.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
