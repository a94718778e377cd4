"""The pairs that the bench measures: how to make a tensor, and both conversions."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from truebridge._frameworks.table import ALL
from truebridge.diagnostics import measure
from truebridge_conformance import subjects
from truebridge_conformance.subjects import Bench, Stream

#: Bytes between small tensors over one buffer: TensorFlow takes no smaller steps in place.
STEP = 64
#: The most that a transfer costs, as a multiple of what no conversion can avoid, on a CUDA device.
OVER_FLOOR = 1.25
#: The legacy default stream.
DEFAULT = Stream(0)

Call = Callable[[Any], Any]
Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass
class Setting:
    """A pair with one choice of streams: how to make the tensor, both conversions, and the bar for their ratio."""

    path: str
    streams: str
    make: Callable[[int], Any]
    ours: Call
    native: Call
    bar: float | None
    #: Context of the measurement (the consumer's stream).
    inside: Context
    #: Called before every batch: waits for the device, and submits work where the device must be busy.
    before: Callable[[], Any]
    #: Whether slices of a tensor share its memory.
    slices: bool
    #: Converts a view back to the source's framework, where that is measured, too.
    back: Call | None
    #: Streams of which the second must wait for the first: at the conversion, and where the view is dropped.
    pairs: list[tuple[int, int]]
    #: Streams in which one more event is needed: the one after which memory of unknown reuse waits.
    records: list[int]
    #: The bar for the ratio to the floor.
    floor_bar: float | None

    def floor(self, tensor: Any) -> Call:
        """Return the calls that no conversion can avoid, for ``tensor``, which must live as long."""
        from truebridge_conformance._conformance import Floor, borrowed

        source, target = self.path.split("→")
        seen = borrowed(tensor)
        rows, columns = seen["shape"]
        # `Floor.convert` is a built-in method, as the functions of the package are.
        memory = (seen["data"], (rows, columns), int(seen["device"].partition(":")[2] or -1))
        return Floor(source, target, memory, self.pairs, self.records).convert

    def parts(self, count: int) -> list[Any]:
        """Return ``count`` small tensors, no two at one address."""
        if not self.slices:
            return [self.make(1 << 10) for _ in range(count)]
        whole = self.make(-(-count * STEP // 1024) * 1024).reshape(-1, STEP // 4)
        return [whole[index] for index in range(count)]


def all_on(device: str) -> list[Setting]:
    """Return the settings of the installed frameworks on a device: ``auto``, ``cpu`` or ``cuda``."""
    kinds = [kind for kind in ("cuda", "cpu") if device in ("auto", kind)]
    return [setting for kind in kinds for setting in _on(kind)]


def _on(kind: str) -> Iterator[Setting]:
    known = {name: bench for name in ALL if (bench := subjects.bench(name, kind)) is not None}
    streams = {name: bench.stream() for name, bench in known.items() if bench.stream is not None}
    for source, bench in known.items():
        for (target, chosen), bar in bench.bars.items():
            # A host has no streams to choose.
            if target in known and (chosen == "host") == (kind == "cpu"):
                yield _setting(Pair(source, target, bench, known[target], kind), chosen, bar, streams)


@dataclass
class Pair:
    """Two frameworks on a device, and what the benches need of both."""

    source: str
    target: str
    of_source: Bench
    of_target: Bench
    kind: str

    def native(self) -> tuple[Call, Callable[[], Any]]:
        """Return the frameworks' own method, and what waits for the device."""
        index = 0 if self.kind == "cuda" else None
        source, target = (
            ALL[name].side(importlib.import_module(ALL[name].kind[0].partition(".")[0]), index)
            for name in (self.source, self.target)
        )
        return measure.native((source, target)), lambda: [side.wait() for side in (source, target)]

    def streams(self, chosen: str, streams: dict[str, Stream]) -> tuple[Stream, Stream]:
        """Return the streams of both. If one framework has only one stream, the other uses the default stream."""
        if not chosen.startswith("cross"):
            return DEFAULT, DEFAULT
        source, target = (streams[name] for name in (self.source, self.target))
        if source.only or target.only:
            return source if source.only else DEFAULT, target if target.only else DEFAULT
        return source, target


def _setting(pair: Pair, chosen: str, bar: float | None, streams: dict[str, Stream]) -> Setting:
    import truebridge

    native, wait = pair.native()
    source, target = pair.streams(chosen, streams)

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        with source.inside(), target.inside():
            yield

    def occupy() -> None:
        """Submit milliseconds of work to the current streams of both."""
        wait()
        # One of two frameworks that share a stream is enough.
        for work in {source.handle: pair.of_source.occupy, target.handle: pair.of_target.occupy}.values():
            work()

    differs = source.handle != target.handle
    return Setting(
        f"{pair.source}→{pair.target}",
        chosen,
        pair.of_source.make,
        getattr(truebridge, f"to_{pair.target}"),
        native,
        bar,
        inside,
        occupy if chosen.endswith("busy") else wait,
        slices=pair.of_source.slices,
        back=getattr(truebridge, f"to_{pair.source}") if pair.target in pair.of_source.back else None,
        pairs=[(source.handle, target.handle), (target.handle, source.handle)] if differs else [],
        records=[source.handle] if pair.of_source.unknown_reuse else [],
        floor_bar=None if pair.kind == "cpu" else OVER_FLOOR,
    )
