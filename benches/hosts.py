"""Tensors for another host: the time until they are there, beside NIXL alone.

Another process on this host shares tensors with ``reach="hosts"``, and this one opens them: *ours*. NIXL alone reads
the same pieces of memory, with one descriptor for each, from memory that is registered beforehand: *NIXL*. Set
``UCX_TLS=tcp`` to measure the network's way.

    python bench.py --hosts --report out --device cuda:0 --to cuda:1
"""

from __future__ import annotations

import statistics
import tempfile
import time
from ast import literal_eval
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benches.reports import Verdict, conclude, page
from benches.rounds import options
from truebridge_conformance import host
from truebridge_conformance.others import Other

MIB = 1 << 20
#: Bytes of each of many pieces, and how many of them there are, on a GPU and on the host.
PIECE, MANY = 44_000, (112_000, 2_000)
#: The bars: the part of NIXL's speed for one piece, and how many times faster many pieces are.
ONE_PIECE, THAN_MANY = 0.9, 50.0

#: What the process that shares knows.
KNOWS = """
import torch
import truebridge as tb
from base64 import b64encode
from truebridge import _agents
tb.processes.configure(address="127.0.0.1")
def make(count, nbytes):
    global block, held
    block = torch.arange(count * nbytes, dtype=torch.int32, device=device).to(torch.uint8).view(count, nbytes)
    held = list(block.unbind())
    torch.cuda.synchronize() if device != "cpu" else None
def share():
    return tb.share(held, reach="hosts").text
def alone():
    global agent, memory
    agent = _agents.nixl_agent()
    memory = agent.register_memory([(block.data_ptr(), block.nbytes, block.device.index or 0, "")], kind)
    return b64encode(agent.get_agent_metadata()).decode(), block.data_ptr()
"""


@dataclass
class Row:
    """One way and number of pieces: the median, in milliseconds, and whether all elements were right."""

    what: str
    count: int
    mib: float
    milliseconds: float
    right: bool


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench_hosts.json`` and ``.md``. Return 0 when every bar is met."""
    has_gpu = bool(host.describe("torch")["gpus"])
    usual = {"default": "cuda:0" if has_gpu else "cpu", "help": "where the tensors are (default: %(default)s)"}
    to = {"default": None, "help": "where they go (default: the same)"}
    one = {"default": 512, "type": int, "metavar": "MIB", "help": "MiB of one piece (default: %(default)s)"}
    many = {"default": MANY[not has_gpu], "type": int, "help": "number of many pieces (default: %(default)s)"}
    given = options(argv, "hosts", __doc__, 5, device=usual, to=to, one=one, many=many)
    rows = []
    for count, nbytes in ((1, given.one * MIB), (given.many, PIECE)):
        rows += measure(given.device, given.to or given.device, count, nbytes, given.rounds)
    verdicts, about = judge(rows), host.describe("torch")
    return conclude(given.report, "bench_hosts", markdown(about, rows, verdicts), about, rows, verdicts)


def measure(device: str, to: str, count: int, nbytes: int, rounds: int) -> list[Row]:
    """Measure both ways for pieces of one size, and a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        other = Other(TRUEBRIDGE_IPC=folder)
        try:
            other(f"device, kind = {device!r}, {_kind(device)!r}")
            other.define(KNOWS)
            other(f"make({count}, {nbytes})")
            ways = {"ours": _ours(other, to), "NIXL": _alone(other, to, count, nbytes)}
            rows = []
            for what, (call, right) in ways.items():
                call()
                figures = []
                for _ in range(rounds):
                    start = time.perf_counter_ns()
                    call()
                    figures.append((time.perf_counter_ns() - start) / 1e6)
                rows.append(Row(what, count, count * nbytes / MIB, statistics.median(figures), right()))
            return rows
        finally:
            other.kill()


def _kind(device: str) -> str:
    return "DRAM" if device == "cpu" else "VRAM"


def _ours(other: Other, to: str) -> tuple[Any, Any]:
    import truebridge as tb

    text = literal_eval(other("share()"))
    found: list[Any] = []

    def call() -> None:
        found[:] = tb.open(text, "torch", device=to)

    return call, lambda: _is_right(found)


def _alone(other: Other, to: str, count: int, nbytes: int) -> tuple[Any, Any]:
    import torch

    from truebridge import _agents

    metadata, address = literal_eval(other("alone()"))
    agent, block = _agents.nixl_agent(), torch.zeros(count, nbytes, dtype=torch.uint8, device=to)
    index, kind = block.device.index or 0, literal_eval(other("kind"))
    agent.register_memory([(block.data_ptr(), block.nbytes, index, "")], _kind(to))
    peer = agent.add_remote_agent(b64decode(metadata))

    def pieces(start: int) -> list[tuple[int, int, int]]:
        return [(start + number * nbytes, nbytes, index) for number in range(count)]

    def call() -> None:
        own = agent.get_xfer_descs(pieces(block.data_ptr()), _kind(to))
        theirs = agent.get_xfer_descs(pieces(address), kind)
        handle = agent.initialize_xfer("READ", own, theirs, peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state
        agent.release_xfer_handle(handle)

    return call, lambda: _is_right(block.unbind())


def _is_right(found: Sequence[Any]) -> bool:
    import torch

    nbytes = found[0].nbytes
    elements = torch.arange(len(found) * nbytes, dtype=torch.int32, device=found[0].device).to(torch.uint8)
    return all(torch.equal(one, right) for one, right in zip(found, elements.view(-1, nbytes), strict=True))


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Compare with the bars."""
    found = {(row.what, row.count): row.milliseconds for row in rows}
    one, many = (row.count for row in rows if row.what == "ours")
    return [
        Verdict.at_least(
            "one piece: part of NIXL's speed, at least", found["NIXL", one] / found["ours", one], ONE_PIECE
        ),
        Verdict.at_least(
            f"{many:,} pieces: times faster than NIXL, at least", found["NIXL", many] / found["ours", many], THAN_MANY
        ),
        Verdict.at_most("rows with a wrong element: at most", sum(not row.right for row in rows), 0),
    ]


def markdown(about: dict[str, Any], rows: Sequence[Row], verdicts: Sequence[Verdict]) -> str:
    """Return the report."""

    def line(row: Row) -> str:
        speed = row.mib * MIB / row.milliseconds / 1e6
        return f"{row.what} | {row.count:,} | {row.mib:,.0f} | {row.milliseconds:,.2f} | {speed:,.2f}"

    lines = [line(row) for row in rows]
    return page(about, "Between two processes.", "way | :pieces | :MiB | :ms | :GB/s", lines, verdicts)
