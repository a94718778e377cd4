"""Tensors for another host: the time until they are there, beside NIXL alone.

Another process on this host shares tensors with ``reach="hosts"``, and this one opens them: *ours*, a tensor for each
piece of memory, and *ours, rows*, one tensor whose rows are the pieces. NIXL alone reads the same pieces, with one
descriptor for each: *NIXL*, from memory that is registered and between agents that
are connected beforehand, and *NIXL, first*, which does both for this read. Set ``UCX_TLS=tcp,cuda_copy`` to measure the
network's way.

    python bench.py --hosts --report out --device cuda:0 --to cuda:1,cuda:0
"""

from __future__ import annotations

import statistics
import tempfile
import time
from ast import literal_eval
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benches.reports import Verdict, conclude, page
from benches.rounds import options, several
from truebridge_conformance import host
from truebridge_conformance.others import Other

MIB = 1 << 20
#: Bytes of each of many pieces, and how many of them there are, on a GPU and on the host.
PIECE, MANY = 44_000, (112_000, 2_000)
#: Bytes between two pieces.
GAP = 96
#: The bars: the part of NIXL's speed for one piece, and how many times faster many pieces are.
ONE_PIECE, THAN_MANY = 0.9, 50.0

#: What the process that shares knows. A ticket has at most 65,536 tensors.
KNOWS = """
import torch
import truebridge as tb
from base64 import b64encode
from truebridge import _agents
tb.processes.configure(address="127.0.0.1")
def make(count, nbytes, gap):
    global block, wide
    rows, columns = (torch.arange(length, device=device).to(torch.uint8) for length in (count, nbytes))
    wide = torch.empty(count, nbytes + gap, dtype=torch.uint8, device=device)
    block = wide[:, :nbytes]
    torch.add(rows[:, None], columns, out=block)
    torch.cuda.synchronize() if device != "cpu" else None
def share(held):
    parts = [held[start : start + (1 << 16)] for start in range(0, len(held), 1 << 16)]
    return [tb.share(part, reach="hosts", expires=3600).text for part in parts]
def alone():
    global agent, memory
    agent = _agents.nixl_agent((block.device.type, block.device.index or 0))
    memory = agent.register_memory([(wide.data_ptr(), wide.nbytes, block.device.index or 0, "")], kind)
    return b64encode(agent.get_agent_metadata()).decode(), block.data_ptr(), block.device.index or 0
"""


@dataclass
class Row:
    """One way and number of pieces: the median, in milliseconds, and whether all elements were right."""

    what: str
    to: str
    count: int
    mib: float
    milliseconds: float
    right: bool


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench_hosts.json`` and ``.md``. Return 0 when every bar is met."""
    gpus = len(host.describe("torch")["gpus"])
    usual = {"default": "cuda:0" if gpus else "cpu", "help": "where the tensors are (default: %(default)s)"}
    ends = ["cuda:0", "cuda:1"][:gpus] or ["cpu"]
    to = {"default": ends, "type": several(str), "help": f"where they go (default: {','.join(ends)})"}
    one = {"default": 512, "type": int, "metavar": "MIB", "help": "MiB of one piece (default: %(default)s)"}
    many = {"default": MANY[not gpus], "type": int, "help": "number of many pieces (default: %(default)s)"}
    given = options(argv, "hosts", __doc__, 5, device=usual, to=to, one=one, many=many)
    rows = []
    for count, nbytes in ((1, given.one * MIB), (given.many, PIECE)):
        for end in given.to:
            rows += measure(given.device, end, count, nbytes, given.rounds)
    verdicts, about = judge(rows), host.describe("torch")
    return conclude(given.report, "bench_hosts", markdown(about, rows, verdicts), about, rows, verdicts)


def measure(device: str, to: str, count: int, nbytes: int, rounds: int) -> list[Row]:
    """Measure every way for pieces of one size, from a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        other = Other(TRUEBRIDGE_IPC=folder)
        try:
            other(f"device, kind = {device!r}, {_kind(device)!r}")
            other.define(KNOWS)
            other(f"make({count}, {nbytes}, {GAP})")
            ways: list[tuple[str, Callable[..., tuple[Any, ...]]]] = [
                ("ours", _ours),
                ("ours, rows", _rows),
                ("NIXL", _alone),
                ("NIXL, first", _first),
            ]
            return [
                _timed(what, to, count, nbytes, rounds, *way(other, to, count, nbytes))
                for what, way in ways
                if count > 1 or way is not _rows
            ]
        finally:
            other.kill()


def _timed(
    what: str,
    to: str,
    count: int,
    nbytes: int,
    rounds: int,
    call: Callable[[], Any],
    found: Callable[[], Sequence[Any]],
    clear: Callable[[], Any],
) -> Row:
    call()
    right = _is_right(found())
    figures = []
    for _ in range(rounds):
        clear()
        start = time.perf_counter_ns()
        call()
        figures.append((time.perf_counter_ns() - start) / 1e6)
    right = right and _is_right(found())
    clear()
    return Row(what, to, count, count * nbytes / MIB, statistics.median(figures), right)


def _kind(device: str) -> str:
    return "DRAM" if device == "cpu" else "VRAM"


def _ours(other: Other, to: str, *_: int) -> tuple[Any, ...]:
    return _opening(other("share(list(block.unbind()))"), to)


def _rows(other: Other, to: str, *_: int) -> tuple[Any, ...]:
    call, found, clear = _opening(other("share([block])"), to)
    return call, lambda: found()[0].unbind(), clear


def _opening(shared: str, to: str) -> tuple[Any, ...]:
    import truebridge as tb

    texts = literal_eval(shared)
    found: list[Any] = []

    def call() -> None:
        for text in texts:
            found.extend(tb.open(text, "torch", device=to))

    return call, lambda: found, found.clear


class _Nixl:
    """NIXL alone, in this process."""

    def __init__(self, other: Other, to: str, count: int, nbytes: int) -> None:
        import torch

        from truebridge import _agents

        about, self.address, self.theirs = literal_eval(other("alone()"))
        self.metadata, self.kinds = b64decode(about), (_kind(to), literal_eval(other("kind")))
        self.count, self.nbytes = count, nbytes
        self.block = torch.zeros(count, nbytes, dtype=torch.uint8, device=to)
        self.index = self.block.device.index or 0
        self.agent = _agents.nixl_agent((self.block.device.type, self.index))

    def connect(self) -> None:
        self.memory = self.agent.register_memory(
            [(self.block.data_ptr(), self.block.nbytes, self.index, "")], self.kinds[0]
        )
        self.peer = self.agent.add_remote_agent(self.metadata)

    def end(self) -> None:
        self.agent.remove_remote_agent(self.peer)
        self.agent.deregister_memory(self.memory)

    def read(self) -> None:
        ends = (
            self.agent.get_xfer_descs(
                [(start + number * step, self.nbytes, index) for number in range(self.count)], kind
            )
            for start, step, index, kind in zip(
                (self.block.data_ptr(), self.address),
                (self.nbytes, self.nbytes + GAP),
                (self.index, self.theirs),
                self.kinds,
                strict=True,
            )
        )
        handle = self.agent.initialize_xfer("READ", *ends, self.peer)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE", state
        self.agent.release_xfer_handle(handle)

    def first(self) -> None:
        self.connect()
        self.read()
        self.end()


def _alone(other: Other, to: str, count: int, nbytes: int) -> tuple[Any, ...]:
    nixl = _Nixl(other, to, count, nbytes)
    nixl.connect()
    return nixl.read, nixl.block.unbind, nixl.block.zero_


def _first(other: Other, to: str, count: int, nbytes: int) -> tuple[Any, ...]:
    nixl = _Nixl(other, to, count, nbytes)
    return nixl.first, nixl.block.unbind, nixl.block.zero_


def _is_right(found: Sequence[Any]) -> bool:
    import torch

    rows, columns = (
        torch.arange(length, device=found[0].device).to(torch.uint8) for length in (len(found), found[0].nbytes)
    )
    return all(torch.equal(one, row + columns) for one, row in zip(found, rows, strict=True))


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Compare with the bars."""
    found = {(row.what, row.to, row.count): row.milliseconds for row in rows}
    verdicts = []
    for row in (row for row in rows if row.what.startswith("ours")):
        times, one = found["NIXL", row.to, row.count] / row.milliseconds, row.count == 1
        kind = "rows" if row.what == "ours, rows" else "pieces"
        what = "one piece: part of NIXL's speed" if one else f"{row.count:,} {kind}: times faster than NIXL"
        verdicts.append(Verdict.at_least(f"to {row.to}, {what}, at least", times, ONE_PIECE if one else THAN_MANY))
    wrong = sum(not row.right for row in rows)
    return [*verdicts, Verdict.at_most("rows with a wrong element: at most", wrong, 0)]


def markdown(about: dict[str, Any], rows: Sequence[Row], verdicts: Sequence[Verdict]) -> str:
    """Return the report."""

    def line(row: Row) -> str:
        speed = row.mib * MIB / row.milliseconds / 1e6
        return f"{row.what} | {row.to} | {row.count:,} | {row.mib:,.0f} | {row.milliseconds:,.2f} | {speed:,.2f}"

    lines = [line(row) for row in rows]
    return page(about, "Between two processes.", "way | to | :pieces | :MiB | :ms | :GB/s", lines, verdicts)
