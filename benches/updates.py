"""Updates of weights that another process has: published versions, compared with a fence in place.

A trainer, which is another process, changes its weights, and this process, the engine, receives them at the addresses
that it has. *published*: the trainer calls ``update`` and the engine ``refresh``. *in place*: the engine has shared its
weights for writing. At a point of its choice it shares a small tensor, which says that its work on the old weights is
enqueued. The trainer opens that, copies into the engine's weights, and shares another small tensor, which the
engine opens before it goes on. So each device waits for the other one, and no host does. *plain* is one copy of the
same bytes in one process.

    python bench.py --updates --report out
"""

from __future__ import annotations

import statistics
import tempfile
import time
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benches.reports import Verdict, conclude, page
from benches.rounds import options
from truebridge_conformance import host
from truebridge_conformance.others import Other

MIB = 1 << 20
#: The weights: how many there are, and the elements of each, on a GPU and on the host.
WEIGHTS = (291, (2048, 1366)), (30, (64, 64))
#: Rounds that do not count: memory is mapped, and kernels are loaded.
FIRST = 3

#: What the trainer knows. Its functions print when they began, and how long they took.
KNOWS = """
import time, torch
def finished():
    torch.cuda.synchronize() if device != "cpu" else None
def make(count, shape, path):
    global client, weights, publication
    weights = [torch.zeros(shape, device=device) for _ in range(count)]
    client = tb.connect(path)
    publication = client.publish("weights", weights)
def train(value):
    for number, weight in enumerate(weights):
        weight.fill_(value + number)
    finished()
def attach(ticket):
    global theirs, mark
    theirs, mark = tb.open(ticket, "torch"), torch.zeros(1, device=device)
def update():
    start = time.perf_counter()
    publication.update()
    return start, time.perf_counter() - start
def write(ticket):
    start = time.perf_counter()
    tb.open(ticket, "torch")
    tb.copy(weights, out=theirs)
    return tb.share(mark).text, time.perf_counter() - start
"""


@dataclass
class Row:
    """One path: medians in milliseconds, until the weights are there and of either host; whether they are right."""

    what: str
    mib: float
    milliseconds: float
    trainer: float
    engine: float
    right: bool


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench_updates.json`` and ``.md``. Return 0 if every update was right."""
    gpus = len(host.describe("torch")["gpus"])
    usual = {"default": "cuda:0" if gpus else "cpu", "help": "where the weights are (default: %(default)s)"}
    given = options(argv, "updates", __doc__, 20, device=usual)
    rows = measure(given.device, given.rounds)
    verdicts = [Verdict.at_most("wrong updates: at most", sum(not row.right for row in rows), 0)]
    about = host.describe("torch")
    return conclude(given.report, "bench_updates", markdown(about, rows, verdicts), about, rows, verdicts)


def measure(device: str, rounds: int) -> list[Row]:
    """Measure all paths."""
    import torch

    import truebridge as tb

    count, shape = WEIGHTS[device == "cpu"]
    with tempfile.TemporaryDirectory() as folder:
        tb.processes.configure(folder=folder)
        trainer = Other(TRUEBRIDGE_IPC=folder)
        try:
            with tb.serve(f"{folder}/names"), tb.connect(f"{folder}/names") as client:
                trainer(f"device = {device!r}")
                trainer.define(KNOWS)
                trainer(f"make({count}, {shape}, {folder + '/names'!r})")
                made = [torch.zeros(shape, device=device) for _ in range(count)]
                # Also on the host, where a share is a copy, these are the shared weights.
                ticket = tb.share(made, writing="shared", expires=3600)
                weights = tb.open(ticket, "torch")
                trainer(f"attach({ticket.text!r})")
                engine = Engine(device, trainer, weights, client.subscribe("weights", out=weights))
                engine.refresh()
                ways = (("published", engine.published), ("in place", engine.in_place), ("plain", engine.plain))
                return [engine.timed(what, way, rounds) for what, way in ways]
        finally:
            trainer.kill()


class Engine:
    """The process that receives updates."""

    def __init__(self, device: str, trainer: Other, weights: Any, subscription: Any) -> None:
        """Keep the weights, and make tensors of the same shapes."""
        import torch

        self.finished = (lambda: None) if device == "cpu" else torch.cuda.synchronize
        self.trainer, self.weights, self.subscription = trainer, weights, subscription
        self.mark = torch.zeros(1, device=device)
        self.like = [torch.zeros_like(weight) for weight in weights]
        self.value = 0

    def refresh(self) -> float:
        """Receive the next version. Return the seconds of the host that the last call took."""
        while True:
            start = time.perf_counter()
            if self.subscription.refresh() is not None:
                return time.perf_counter() - start

    def published(self) -> tuple[float, float, float]:
        """Return when the update began, and the seconds of both hosts."""
        self.trainer.begin("update()")
        engine = self.refresh()
        start, trainer = literal_eval(self.trainer.end())
        return start, trainer, engine

    def in_place(self) -> tuple[float, float, float]:
        """Return the same."""
        import truebridge as tb

        start = time.perf_counter()
        ticket = tb.share(self.mark)
        shared = time.perf_counter()
        ready, trainer = literal_eval(self.trainer(f"write({ticket.text!r})"))
        opening = time.perf_counter()
        tb.open(ready, "torch")
        return start, trainer, shared - start + time.perf_counter() - opening

    def plain(self) -> tuple[float, float, float]:
        """Return the same, for one copy in this process, of what it has."""
        import truebridge as tb

        start = time.perf_counter()
        tb.copy(self.weights, out=self.like)
        return start, 0.0, time.perf_counter() - start

    def is_right(self) -> bool:
        """Return whether the weights are those that the trainer had."""
        ends = [(weight.min().item(), weight.max().item()) for weight in self.weights]
        return ends == [(self.value + number,) * 2 for number in range(len(ends))]

    def timed(self, what: str, way: Callable[[], tuple[float, float, float]], rounds: int) -> Row:
        """Measure one path."""
        figures, right = [], True
        for _ in range(FIRST + rounds):
            if what != "plain":
                self.value += 1
                self.trainer(f"train({self.value})")
            self.finished()
            start, *hosts = way()
            self.finished()
            figures.append([1e3 * (time.perf_counter() - start), *(1e3 * seconds for seconds in hosts)])
            right = right and self.is_right()
        mib = sum(weight.nbytes for weight in self.weights) / MIB
        there, trainer, engine = (statistics.median(column) for column in zip(*figures[FIRST:], strict=True))
        return Row(what, mib, there, trainer, engine, right)


def markdown(about: dict[str, Any], rows: list[Row], verdicts: list[Verdict]) -> str:
    """Return the report."""
    lines = [
        f"{row.what} | {row.mib:,.0f} | {row.milliseconds:.2f} | {row.trainer:.2f} | {row.engine:.2f}" for row in rows
    ]
    head = "way | :MiB | :ms until they are there | :ms of the trainer's host | :ms of the engine's host"
    return page(about, "Updates of weights between two processes.", head, lines, verdicts)
