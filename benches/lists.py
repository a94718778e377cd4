"""Lists of tensors that a bench copies in one call, and the paths of doing so that frameworks and the driver have."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from truebridge_conformance.others import Other

#: Shapes of a dense model, by its width: the hidden width, the words, and the layers.
HIDDEN, WORDS, LAYERS = 11008 / 4096, 32000 / 4096, 32
#: Those of a mixture of experts: the hidden width of an expert, the width of keys and values, and the experts.
EXPERT, KEYS, EXPERTS = 14336 / 4096, 1024 / 4096, 8


@dataclass
class Lists:
    """Sources with their targets, and two buffers of as many bytes for one plain copy."""

    sources: Sequence[Any]
    targets: Sequence[Any]
    source: Any
    target: Any


def equal(device: str, to: str, count: int, nbytes: int) -> Lists:
    """Return slices of one buffer and of another, in random order, and both buffers."""
    import torch

    source = torch.randint(0, 256, (count * nbytes,), dtype=torch.uint8, device=device)
    return slices(source, torch.zeros_like(source, device=to), count)


def slices(source: Any, target: Any, count: int) -> Lists:
    """Return slices of one buffer and of another, in random order."""
    nbytes = len(source) // count
    order = list(range(count))
    random.Random(1).shuffle(order)
    places = target.split(nbytes)
    return Lists(source.split(nbytes), [places[place] for place in order], source, target)


@contextmanager
def elsewhere(device: str, to: str, count: int, nbytes: int) -> Iterator[Lists]:
    """Return slices of one buffer of another process, and of one here."""
    import torch

    import truebridge as tb

    other = Other()
    try:
        made = f"torch.randint(0, 256, ({count * nbytes},), dtype=torch.uint8, device={device!r})"
        other(f"import torch; source = {made}")
        source = tb.open(other.text("tb.share(source).text"), "torch")
        yield slices(source, torch.zeros_like(source, device=to), count)
    finally:
        other.kill()


def weights(device: str, to: str, width: int) -> Lists:
    """Return the weights of a dense model of 7 billion parameters, bfloat16, each a separate tensor."""
    import torch

    hidden, words = int(width * HIDDEN), int(width * WORDS)
    square, up, down = (width, width), (hidden, width), (width, hidden)
    layer = [square, square, square, square, up, up, down, (width,), (width,)]
    shapes = [(words, width), *layer * LAYERS, (width,), (words, width)]
    sources = [filled(torch.empty(shape, dtype=torch.bfloat16, device=device)) for shape in shapes]
    return beside(sources, [torch.empty(shape, dtype=torch.bfloat16, device=to) for shape in shapes])


def shards(device: str, to: str, width: int) -> Lists:
    """Return two layers of a mixture of experts that go from four shards by rows to two by rows or by columns.

    So do weights from a trainer with FSDP to an engine that is parallel in tensors. Each shard is a separate tensor,
    and the routers and norms are whole in the engine.
    """
    import torch

    import truebridge as tb

    hidden, keys = int(width * EXPERT), int(width * KEYS)
    by_rows = [(width, width), (keys, width), (keys, width), *[(hidden, width)] * (2 * EXPERTS)]
    by_columns = [(width, width), *[(width, hidden)] * EXPERTS]
    whole = [(EXPERTS, width), (width,), (width,)]
    sources: list[Any] = []
    targets: list[Any] = []

    def made(shape: tuple[int, ...], parts: int, dim: int, there: str) -> list[Any]:
        lengths = [shape[dim] * (part + 1) // parts - shape[dim] * part // parts for part in range(parts)]
        shapes = [(*shape[:dim], length, *shape[dim + 1 :]) for length in lengths]
        return [torch.empty(shape, dtype=torch.bfloat16, device=there) for shape in shapes]

    for shape, parts, dim in [
        *((shape, 2, 0) for shape in by_rows * 2),
        *((shape, 2, 1) for shape in by_columns * 2),
        *((shape, 1, 0) for shape in whole * 2),
    ]:
        old, new = [filled(part) for part in made(shape, 4, 0, device)], made(shape, parts, dim, to)
        if dim:
            columns = [part.shape[dim] for part in new]
            old = [column for part in old for column in part.split(columns, dim)]
            rows = [part.shape[0] for part in old[::parts]]
            new = [piece for row in zip(*(part.split(rows) for part in new), strict=True) for piece in row]
            sources, targets = sources + old, targets + new
            continue
        src, out = tb.reshard(old, new)
        sources, targets = sources + src, targets + out
    return beside(sources, targets)


def filled(tensor: Any) -> Any:
    """Fill a tensor of bfloat16 with any numbers from 0 to 2: PyTorch's copies change the bits of a NaN."""
    import torch

    tensor.view(torch.int16).random_(0, 1 << 14)
    return tensor


def beside(sources: Sequence[Any], targets: Sequence[Any]) -> Lists:
    """Return the lists with two buffers."""
    import torch

    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in sources)
    buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=side[0].device) for side in (sources, targets)]
    return Lists(sources, targets, *buffers)


def selected(lists: Lists) -> Callable[[], Any]:
    """Return ``torch.index_select`` of slices of two buffers. The first eight bytes say where a slice is."""
    import torch

    count = len(lists.sources)
    source, target = (side.view(count, -1) for side in (lists.source, lists.target))
    place = [(tensor.data_ptr() - target.data_ptr()) // target.shape[1] for tensor in lists.targets]
    index = torch.empty(count, dtype=torch.int64)
    index[torch.tensor(place)] = torch.arange(count)
    index = index.to(source.device)
    kind = torch.int32 if source.shape[1] % 4 == 0 else torch.uint8
    return lambda: torch.index_select(source.view(kind), 0, index, out=target.view(kind))


def batched(lists: Lists) -> Callable[[], Any] | None:
    """Return the driver's ``cuMemcpyBatchAsync``; ``None`` where it has none, refuses these, or a piece has gaps."""
    pairs = list(zip(lists.sources, lists.targets, strict=True))
    if not all(source.is_contiguous() and target.is_contiguous() for source, target in pairs):
        return None
    call: Any = getattr(ctypes.CDLL("libcuda.so.1"), "cuMemcpyBatchAsync_v2", None)
    words = ctypes.c_size_t * len(pairs)
    from_, to = (words(*(pair[side].data_ptr() for pair in pairs)) for side in range(2))
    sizes = words(*(source.numel() * source.element_size() for source, _ in pairs))
    # One CUmemcpyAttributes for all: in the order of the stream, without hints on where the memory is. The stream is
    # that of the thread, which the default stream waits for, because the default one is refused.
    attributes, first, stream = (ctypes.c_int * 6)(1), ctypes.c_size_t(0), ctypes.c_void_p(2)
    about = ctypes.c_size_t(len(pairs)), attributes, ctypes.byref(first), ctypes.c_size_t(1), stream

    def copy() -> int:
        return int(call(to, from_, sizes, *about))

    return copy if call is not None and copy() == 0 else None
