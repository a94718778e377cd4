"""``tb.copy`` of many tensors on a CUDA device: launches, graphs, copiers, and what is released when.

The properties ``elements`` and ``torn`` of the suite judge the values of any pieces, and who waits for whom.

Every target has as much memory as it needs, so that compute-sanitizer, with PYTORCH_NO_CUDA_MEMORY_CACHING=1, finds a
stray access.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")
cupy: Any = pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from devices import captured, work  # noqa: E402

#: Cycles of a kernel of some milliseconds.
LATE = 10_000_000
ROUNDS = 30


def test_slices_of_two_buffers_in_random_order() -> None:
    random = np.random.default_rng(5)
    source = torch.randint(0, 256, (3000 * 1001,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    places, order = random.permutation(3000), random.permutation(3000)
    sources = [source[1001 * place : 1001 * (place + 1)] for place in places]
    targets = [target[1001 * place : 1001 * (place + 1)] for place in order]
    tb.copy(sources, out=targets)
    expected = torch.empty_like(source)
    rows = torch.from_numpy(order).cuda(), torch.from_numpy(places).cuda()
    expected.view(3000, 1001)[rows[0]] = source.view(3000, 1001)[rows[1]]
    assert torch.equal(target, expected)


@pytest.mark.parametrize("seed", range(10))
def test_pieces_whose_addresses_and_lengths_16_divides(seed: int) -> None:
    random = np.random.default_rng([seed, 16])

    def rows(count: int, row: int) -> Any:
        """Return rows of so many times 16 bytes, with gaps and at any multiple of 16."""
        skip, gap = (int(random.integers(0, 4)) * 16 for _ in range(2))
        whole = torch.randint(0, 256, (count, row * 16 + skip + gap), dtype=torch.uint8, device="cuda")
        return whole[:, skip : skip + row * 16]

    # A block copies 4,096 vectors of 16 bytes, 1,024 at a time.
    lengths = [1, 2, 255, 256, 257, 1023, 1024, 1025, 2750, 4095, 4096, 4097, 9001]
    shapes = [(int(random.integers(1, 40)) if row < 300 else 1, row) for row in random.permutation(lengths * 3)]
    sources, targets = ([rows(count, int(row)) for count, row in shapes] for _ in range(2))
    tb.copy(sources, out=targets)
    assert all(torch.equal(*pair) for pair in zip(sources, targets, strict=True))


@pytest.mark.parametrize("to", [None, "bfloat16"])
def test_nothing_beside_the_targets_is_written(to: str | None) -> None:
    whole = torch.full((64, 1000), 7, dtype=torch.bfloat16 if to else torch.uint8, device="cuda")
    expected, kind = whole.clone(), torch.float32 if to else torch.uint8
    targets = [whole[row, 3 + row : 900 - row] for row in range(0, 64, 2)]
    tb.copy([torch.zeros(target.shape[0], dtype=kind, device="cuda") for target in targets], out=targets, dtype=to)
    for row in range(0, 64, 2):
        expected[row, 3 + row : 900 - row] = 0
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("to", [None, "bfloat16"])
def test_large_pieces_beside_small_ones(to: str | None) -> None:
    lengths = [1, 15, 16, 17, 16383, 16384, 16385, 65535, 65536, 65537, 100_000_001, 3, 1 << 24]
    kind, into = (torch.float32, torch.bfloat16) if to else (torch.uint8, torch.uint8)
    sources = [torch.randint(0, 100, (length,), dtype=kind, device="cuda") for length in lengths]
    targets = [torch.zeros(length, dtype=into, device="cuda") for length in lengths]
    tb.copy(sources, out=targets, dtype=to)
    assert all(torch.equal(target, source.to(into)) for source, target in zip(sources, targets, strict=True))


def test_it_is_one_kernel() -> None:
    sources = [torch.rand(1000 + index, device="cuda") for index in range(100)]
    targets = [torch.zeros_like(source) for source in sources]
    found = work(lambda: tb.copy(sources, out=targets))
    assert [name for name in found if "pieces" in name] and len(found) == 2, found


@pytest.mark.parametrize("to", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("count", [None, 1, 100])
@pytest.mark.parametrize("prepared", [False, True])
def test_copies_in_a_graph(prepared: bool, count: int | None, to: str | None) -> None:
    """Of a single tensor, of a list of one, and of many."""
    sources = [torch.rand(1000 + index, 3, device="cuda").t() for index in range(count or 1)]
    kind = getattr(torch, to or "float32")
    targets = [torch.zeros(source.shape, dtype=kind, device="cuda") for source in sources]
    x, out = (sources[0], targets[0]) if count is None else (sources, targets)
    update: Any = tb.copier(x, out=out, dtype=to) if prepared else lambda: tb.copy(x, out=out, dtype=to)
    graph = captured(update)
    # The memory of a copier stays with the graph: what is freed here is used again.
    del update
    gc.collect()
    other = tb.copier(targets, out=[torch.zeros_like(target) for target in targets])
    for value in range(1, 4):
        for source in sources:
            source.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert all(bool((target.float() == value).all()) for target in targets)
    other()


def test_a_copier_is_made_before_a_capture() -> None:
    sources = [torch.rand(1000 + index, device="cuda") for index in range(100)]
    targets = [torch.zeros_like(source) for source in sources]
    tb.copier(sources, out=targets)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        targets[0].add_(1)
        with pytest.raises(tb.BridgeError, match="before the capture") as error:
            tb.copier(sources, out=targets)
    assert error.value.kind == "captured"


def test_a_copier_that_is_made_leaves_the_capture_of_another_stream_whole() -> None:
    """CUDA forbids the legacy stream while a blocking stream is captured."""
    sources = [torch.full((100,), 3.0, device="cuda") for _ in range(300)]
    targets = [torch.zeros_like(source) for source in sources]
    counter, captured = cupy.zeros(4), cupy.cuda.Stream()
    torch.cuda.synchronize()
    with captured:
        captured.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        counter += 1
    with torch.cuda.stream(torch.cuda.Stream()):
        try:
            tb.copier(sources, out=targets)()
        except tb.BridgeError as error:
            assert error.kind == "captured"
    with captured:
        graph = captured.end_capture()
        graph.launch()
    torch.cuda.synchronize()
    assert counter.tolist() == [1, 1, 1, 1]
    tb.copier(sources, out=targets)()
    assert all(bool((target == 3).all()) for target in targets)


@pytest.mark.parametrize(("count", "calls"), [(100, 100), (20_000, 1)])
def test_the_host_does_not_wait(count: int, calls: int) -> None:
    source = torch.rand(count * 1000, device="cuda")
    target = torch.zeros_like(source)
    sources, targets = source.split(1000), target.split(1000)
    # The memory of the table is in the driver's pool, and the frameworks' calls are warm.
    tb.copy(sources, out=targets)
    torch.cuda.synchronize()
    target.zero_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200 * LATE)
        for _ in range(calls):
            tb.copy(sources, out=targets)
        assert not stream.query(), "the host has waited"
    torch.cuda.synchronize()
    assert torch.equal(source, target)


def test_a_copier_that_is_dropped_keeps_its_table_until_it_has_run() -> None:
    sources = [torch.full((1000,), 5.0, device="cuda") for _ in range(50)]
    targets = [torch.zeros_like(source) for source in sources]
    for _ in range(ROUNDS):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE)
            tb.copier(sources, out=targets)()
        # What is freed is used again at once.
        garbage = [tb.copier(targets[:10], out=[torch.zeros_like(target) for target in targets[:10]]) for _ in range(3)]
        stream.synchronize()
        assert all(bool((target == 5).all()) for target in targets)
        for target in targets:
            target.zero_()
        torch.cuda.synchronize()
        del garbage


@pytest.mark.usefixtures("leaks_nothing")
def test_the_memory_of_a_copier_is_returned_after_its_copies() -> None:
    for value in range(1, 1 + ROUNDS):
        sources = [torch.full((50_000,), float(value), device="cuda") for _ in range(20)]
        targets = [cupy.zeros(50_000, cupy.float32) for _ in sources]
        torch.cuda.synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            tb.copier(sources, out=targets)  # one that is never called
            update = tb.copier(sources, out=targets)
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                torch.cuda._sleep(LATE)
            update()
        del update, sources
        # PyTorch takes the memory of the sources again at once, in its own stream.
        garbage = [torch.full((50_000,), -1.0, device="cuda") for _ in range(40)]
        stream.synchronize()
        assert all(bool((target == value).all()) for target in targets)
        del garbage


def test_a_copier_of_a_view_makes_the_owner_wait() -> None:
    """CuPy's memory, seen by PyTorch, is read by the copier in PyTorch's stream: CuPy reuses it after that."""
    for value in range(1, 1 + ROUNDS):
        owned = [cupy.full(50_000, value, cupy.float32) for _ in range(20)]
        cupy.cuda.Device().synchronize()
        views = [tb.to_torch(array) for array in owned]
        targets = [torch.zeros(50_000, device="cuda") for _ in owned]
        update = tb.copier(views, out=targets)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE)
            update()
        del owned, views, update
        garbage = [cupy.full(50_000, -1, cupy.float32) for _ in range(40)]
        stream.synchronize()
        assert all(bool((target == value).all()) for target in targets)
        del garbage
