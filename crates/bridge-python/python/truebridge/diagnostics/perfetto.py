"""Trace events of Chrome, as Perfetto and ``chrome://tracing`` read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _core

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .events import Event


def timeline(events: Sequence[Event], names: Mapping[int, str], dropped: int) -> dict[str, Any]:
    """Return the calls of these events, in threads with these names, as a file's content."""
    calls: dict[int, list[Event]] = {}
    for event in events:
        calls.setdefault(event.call, []).append(event)
    threads = sorted({(event.pid, event.thread) for event in events})
    named = [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": names[thread]}}
        for pid, thread in threads
        if thread in names
    ]
    return {
        "traceEvents": named + [_slice(call) for call in calls.values()],
        "displayTimeUnit": "ns",
        "otherData": {"truebridge": _core.__version__, "dropped": dropped},
    }


def _slice(events: list[Event]) -> dict[str, Any]:
    """Return one call as a slice of Chrome's trace."""
    first = events[0]
    sources = "+".join(sorted({event.source or "?" for event in events}))
    what = f"{sources} → {first.target or '?'}"
    methods = sorted({f"{event.method}: {event.why}" if event.why else event.method for event in events})
    args: dict[str, Any] = {
        "path": ", ".join(methods),
        "nbytes": sum(event.nbytes for event in events),
        "tensors": first.tensors,
    }
    if len(events) == 1:
        args.update(device=first.device, dtype=first.dtype, shape=first.shape)
    streams = sorted({event.streams for event in events if event.streams is not None})
    if streams:
        args["streams"] = [f"{reader:#x} waits for {owner:#x}" for owner, reader in streams]
    return {
        "ph": "X",
        "name": what if first.tensors == 1 else f"{what} ({first.tensors} tensors)",
        "cat": first.operation,
        "ts": first.start / 1000,
        "dur": first.duration / 1000,
        "pid": first.pid,
        "tid": first.thread,
        "args": args,
    }
