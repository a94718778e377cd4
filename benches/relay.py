"""Cost of a transfer between two adapters in Rust, without Python: only that of the contract and of the events."""

from __future__ import annotations

import argparse
import contextlib
import statistics
from dataclasses import dataclass

#: Bytes of the tensor: 256 x 256 float32.
NBYTES = 1 << 18
#: The most nanoseconds that a transfer takes on the GPU host, by streams.
BARS = {"same": 300.0, "cross": 900.0}


@dataclass
class Relayed:
    """One choice of streams: the median of the rounds, in nanoseconds."""

    streams: str
    ours: float
    bar: float | None
    passed: bool


def measure(options: argparse.Namespace) -> list[Relayed]:
    """Return the rows of the device that the options choose."""
    from truebridge_conformance._conformance import relay

    def row(streams: str, address: int, device: int, pair: tuple[int, int] | None) -> Relayed:
        rounds = [relay(address, device, pair, options.batch) for _ in range(options.rounds + 1)]
        ours, bar = statistics.median(rounds[1:]), BARS.get(streams)
        return Relayed(streams, ours, bar, passed=bar is None or ours <= bar)

    rows = []
    with contextlib.suppress(ImportError):
        import torch

        if options.device != "cuda":
            memory = torch.empty(NBYTES, dtype=torch.uint8)
            rows.append(row("host", memory.data_ptr(), -1, None))
        if options.device != "cpu" and torch.cuda.is_available():
            memory = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")
            one, other = torch.cuda.Stream().cuda_stream, torch.cuda.Stream().cuda_stream
            for streams, pair in (("same", (one, one)), ("cross", (one, other))):
                rows.append(row(streams, memory.data_ptr(), memory.device.index, pair))
            torch.cuda.synchronize()
    return rows


def markdown(rows: list[Relayed]) -> list[str]:
    """Return the lines of a table."""
    lines = ["| Rust to Rust | ours, ns | bar, ns | verdict |", "|---|--:|--:|---|"]
    for row in rows:
        bar, word = ("none", "no bar") if row.bar is None else (f"{row.bar:,.0f}", "met" if row.passed else "MISSED")
        lines.append(f"| {row.streams} | {row.ours:,.0f} | {bar} | {word} |")
    return lines
