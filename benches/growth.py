"""Cost of a transfer with many live views or many threads, compared with none and with one.

Both are measured in turns, so that a change of the host's speed affects both. A figure is the median over the turns, a
ratio the median of the ratios within a turn.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benches.settings import Call, Setting
from truebridge.diagnostics.measure import batch

#: Turns that count, after one that does not.
TURNS = 5
#: Bytes of the tensor that is transferred, at most.
SIZE = 1 << 18
#: The most that a transfer costs with a crowd, as a multiple of its cost without.
BAR = 1.3


@dataclass
class Growth:
    """One method of one pair: medians in nanoseconds, without and with a crowd, and their ratio."""

    path: str
    streams: str
    crowd: str
    alone: float
    crowded: float
    ratio: float
    #: The same ratio of the frameworks' own method, where it is measured.
    native: float | None
    bar: float | None
    passed: bool


def measure(setting: Setting, options: argparse.Namespace) -> list[Growth]:
    """Return the rows of a pair: with live views, there and back, and with threads."""
    if setting.streams not in ("host", "cross"):
        return []
    with setting.inside():
        tensor = setting.make(min(SIZE, options.max_size))
        ways = [(setting.path, setting.ours, tensor)]
        if setting.back is not None:
            ways.append((f"{setting.path}→{setting.path.partition('→')[0]}", setting.back, setting.ours(tensor)))
        rows = _beside_views(setting, options, ways)
        if not setting.streams.startswith("cross"):
            rows.append(_with_threads(setting, options, tensor))
        del ways, tensor
        setting.before()
    if setting.streams == "cross":
        # A thread starts out on the default streams.
        tensor = setting.make(min(SIZE, options.max_size))
        rows.append(_with_threads(setting, options, tensor))
    return rows


def _row(setting: Setting, path: str, crowd: str, turns: list[list[float]]) -> Growth:
    """Return a row of turns: ours without and with a crowd, and the native method likewise if it was measured."""
    alone, crowded = (statistics.median(figures) for figures in list(zip(*turns, strict=True))[:2])
    ratio = statistics.median(turn[1] / turn[0] for turn in turns)
    native = statistics.median(turn[3] / turn[2] for turn in turns) if len(turns[0]) > 2 else None
    # Threads share the interpreter: what that costs the native method, it costs ours.
    bar = None if setting.bar is None else BAR * max(native or 1, 1)
    return Growth(path, setting.streams, crowd, alone, crowded, ratio, native, bar, passed=bar is None or ratio <= bar)


def _beside_views(setting: Setting, options: argparse.Namespace, ways: list[tuple[str, Call, Any]]) -> list[Growth]:
    tensors = setting.parts(options.views)
    turns: list[list[list[float]]] = [[] for _ in ways]
    for turn in range(TURNS + 1):
        alone = [_warm(call, tensor, options.batch, setting.before) for _, call, tensor in ways]
        views = [setting.ours(tensor) for tensor in tensors]
        crowded = [_warm(call, tensor, options.batch, setting.before) for _, call, tensor in ways]
        del views
        gc.collect()
        setting.before()
        for taken, figures in zip(turns, zip(alone, crowded, strict=True), strict=True):
            if turn:
                taken.append(list(figures))
    crowd = f"{options.views:,} live views"
    return [_row(setting, path, crowd, taken) for (path, _, _), taken in zip(ways, turns, strict=True)]


def _warm(call: Call, tensor: Any, calls: int, before: Callable[[], Any]) -> float:
    """Measure a batch after one that does not count: making or dropping a crowd evicts the processor's caches."""
    batch(call, tensor, calls, before)
    return batch(call, tensor, calls, before)


def _with_threads(setting: Setting, options: argparse.Namespace, tensor: Any) -> Growth:
    turns = []
    for turn in range(TURNS + 1):
        figures = []
        for call in (setting.ours, setting.native):
            figures += [_threads(call, tensor, count, options, setting.before) for count in (1, options.threads)]
        if turn:
            turns.append(figures)
    return _row(setting, setting.path, f"{options.threads} threads", turns)


def _threads(call: Call, tensor: Any, count: int, options: argparse.Namespace, before: Callable[[], Any]) -> float:
    """Return nanoseconds per call of all threads together."""
    calls: int = options.batch * 10
    start = threading.Barrier(count + 1)

    def work() -> None:
        start.wait()
        for _ in range(calls):
            call(tensor)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    before()
    gc.disable()
    try:
        start.wait()
        started = time.perf_counter_ns()
        for thread in threads:
            thread.join()
        return (time.perf_counter_ns() - started) / (calls * count)
    finally:
        gc.enable()


def markdown(rows: list[Growth]) -> list[str]:
    """Return the lines of a table."""
    lines = ["| path | streams | beside | alone, ns | beside, ns | ratio | native ratio | bar | verdict |"]
    lines.append("|---|---|---|--:|--:|--:|--:|--:|---|")
    for row in rows:
        native = "–" if row.native is None else f"{row.native:.2f}"
        bar, word = ("none", "no bar") if row.bar is None else (f"{row.bar:.2f}", "met" if row.passed else "MISSED")
        figures = f"{row.alone:,.0f} | {row.crowded:,.0f} | {row.ratio:.2f} | {native} | {bar} | {word} |"
        lines.append(f"| {row.path} | {row.streams} | {row.crowd} | {figures}")
    return lines
