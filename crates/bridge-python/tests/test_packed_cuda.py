"""``tb.copy`` and ``tb.copier`` of trees that change memory: small tensors are packed on their way.

PyTorch judges the values: it brings both sides to the host, and copies or casts there.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")
cupy: Any = pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from casting import CASTS, DTYPES, bits, cast, numbers, pair, same, view  # noqa: E402
from devices import work  # noqa: E402

#: Cycles of a kernel of some milliseconds.
LATE = 10_000_000
ROUNDS = 20
UP, DOWN = ("cpu", "cuda"), ("cuda", "cpu")
DIRECTIONS = [UP, DOWN]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
ACROSS = pytest.param(("cuda:0", "cuda:1"), marks=two_gpus)
KINDS = [torch.uint8, torch.int16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128]


def piece(random: np.random.Generator, direction: tuple[str, str]) -> tuple[Any, Any]:
    """Return a source and a target of one shape: small, mostly, and sometimes too large to be packed."""
    kind = KINDS[int(random.integers(len(KINDS)))]
    shape = [int(length) for length in random.integers(0, 30, random.integers(0, 4))]
    if shape and random.random() < 0.4:
        shape[-1] = int(random.integers(100, 3000))
    if random.random() < 0.02:
        shape = [3, 700_001]
    repeated = [1 if random.random() < 0.1 else length for length in shape]
    source = view(random, repeated, kind, direction[0]).expand(shape)
    return source, view(random, shape, kind, direction[1])


def base(tensor: Any) -> Any:
    """Return all bytes of the memory of a tensor, on the host."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).cpu()


def checked(pairs: list[tuple[Any, Any]], *, again: int = 1) -> None:
    """Copy all together, and compare all memory of the targets with what PyTorch writes into it on the host."""
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    expected = []
    for source, target in pairs:
        memory = base(target)
        there = torch.empty(0, dtype=target.dtype).set_(
            memory.untyped_storage(), target.storage_offset(), target.shape, target.stride()
        )
        there.copy_(source.cpu().resolve_conj().resolve_neg())
        expected.append(memory)
    for _ in range(again):
        tb.copy(sources, out=targets)
    for index, (target, wanted) in enumerate(zip(targets, expected, strict=True)):
        said = index, target.shape, target.stride(), sources[index].stride(), target.dtype
        assert torch.equal(base(target), wanted), said


@pytest.mark.parametrize("direction", [*DIRECTIONS, ACROSS])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 400])
@pytest.mark.parametrize("seed", range(8))
def test_any_tree_is_copied_as_pytorch_copies_it(seed: int, count: int, direction: tuple[str, str]) -> None:
    random = np.random.default_rng([seed, count])
    checked([piece(random, direction) for _ in range(count)], again=2)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_pending_operations_are_applied(direction: tuple[str, str]) -> None:
    sources = [torch.randn(33, 65, dtype=torch.complex64, device=direction[0]).conj() for _ in range(10)]
    sources += [torch.randn(100, dtype=torch.complex128, device=direction[0]).conj().imag for _ in range(10)]
    sources += [torch.randn(100, dtype=torch.complex64, device=direction[0]) for _ in range(10)]
    checked([(source, torch.zeros(source.shape, dtype=source.dtype, device=direction[1])) for source in sources])


def test_the_frameworks_of_both_sides_are_any() -> None:
    random = np.random.default_rng(3)
    arrays = [random.random((index % 7 + 1, 2 * index + 1), np.float32)[:, ::2] for index in range(100)]
    there = [cupy.zeros(array.shape[::-1], np.float32).T for array in arrays]
    tb.copy(arrays, out=there)
    back = [np.zeros(array.shape, np.float32) for array in arrays]
    tb.copy(there, out=back)
    pinned = [torch.zeros(array.shape).pin_memory() for array in arrays]
    tb.copy(there, out=pinned)
    again = [torch.zeros(array.shape, device="cuda") for array in arrays]
    tb.copy(pinned, out=again)
    for array, *others in zip(arrays, there, back, pinned, again, strict=True):
        np.testing.assert_array_equal(others[0].get(), array)
        for other in others[1:]:
            np.testing.assert_array_equal(np.asarray(tb.to_numpy(other, device="cpu")), array)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_more_than_a_block(direction: tuple[str, str]) -> None:
    """700 tensors of 300 KB are 210 MB: two blocks. Others are larger than one."""
    sources = [
        torch.randint(0, 256, (300_000 + index,), dtype=torch.uint8, device=direction[0]) for index in range(700)
    ]
    sources[5] = torch.randint(0, 256, (200_000_003,), dtype=torch.uint8, device=direction[0])
    targets = [torch.zeros(source.shape, dtype=torch.uint8, device=direction[1]) for source in sources]
    for _ in range(2):
        tb.copy(sources, out=targets)
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(target.to(source.device), source)
            target.zero_()


# --- casts


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize(("source", "to"), CASTS)
def test_every_number_is_cast_as_pytorch_casts_it(source: str, to: str, count: int, direction: tuple[str, str]) -> None:
    values = numbers(source, np.random.default_rng(1))
    parts = list(values.tensor_split(count))
    sources = [part.to(direction[0]) for part in parts]
    targets = [torch.zeros(part.shape, dtype=DTYPES[to], device=direction[1]) for part in parts]
    if count == 1:
        tb.copy(sources[0], out=targets[0], dtype=to)
    else:
        tb.copy(sources, out=targets, dtype=to)
    same(torch.cat([bits(target.cpu()) for target in targets]).view(DTYPES[to]), values.to(DTYPES[to]))


@pytest.mark.parametrize("direction", [*DIRECTIONS, ACROSS])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 200])
@pytest.mark.parametrize("seed", range(6))
def test_any_trees_are_cast(seed: int, count: int, direction: tuple[str, str]) -> None:
    random = np.random.default_rng([seed, count])
    to = list(DTYPES)[seed]
    pairs = []
    for _ in range(count):
        source, target = pair(random, to, direction[0])
        pairs.append((source, view(random, list(target.shape), DTYPES[to], direction[1])))
    # Other tensors between them, which are copied.
    integers = (
        torch.randint(0, 100, (33, 65), device=direction[0]),
        torch.zeros(33, 65, dtype=torch.int64, device=direction[1]),
    )
    both = [*pairs, integers]
    tb.copy([source for source, _ in both], out=[target for _, target in both], dtype=to)
    for source, target in pairs:
        same(target.cpu(), cast(source.cpu(), target.cpu()))
    assert torch.equal(integers[0].cpu(), integers[1].cpu())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_large_tensors_are_cast_in_the_move(direction: tuple[str, str]) -> None:
    for turned in (False, True):
        source = torch.randn(3001, 2003, device=direction[0])
        source = source.t() if turned else source
        target = torch.zeros(source.shape, dtype=torch.bfloat16, device=direction[1])
        tb.copy(source, out=target, dtype="bfloat16")
        assert torch.equal(target.cpu(), source.cpu().bfloat16())
        back = torch.zeros(source.shape, device=direction[0])
        tb.copy(target, out=back, dtype="float32")
        assert torch.equal(back.cpu(), target.cpu().float())


# --- copiers


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("direction", [*DIRECTIONS, ("cuda", "cuda")])
def test_a_copier_copies_again_in_any_stream(direction: tuple[str, str], dtype: Any, check: bool) -> None:
    sources = [torch.zeros(100 + index, device=direction[0]) for index in range(50)]
    kind = DTYPES[dtype] if dtype else torch.float32
    targets = [torch.zeros(source.shape, dtype=kind, device=direction[1]) for source in sources]
    update = tb.copier(sources, out=targets, dtype=dtype, check=check)
    for value in range(1, 1 + ROUNDS):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE)
            torch._foreach_zero_(sources)
            torch._foreach_add_(sources, value)
            update()
            # The next step, before the copies on the device have run.
            torch._foreach_zero_(sources)
            seen = [target.clone() for target in targets]
        stream.synchronize()
        assert all(bool((copy == value).all()) for copy in seen)


def test_a_copier_of_both_directions_and_of_copies_in_place() -> None:
    random = np.random.default_rng(1)
    sources = {"up": [], "down": [], "there": [], "here": []}
    targets: dict[str, list[Any]] = {name: [] for name in sources}
    for name, (here, there) in zip(sources, [*DIRECTIONS, ("cuda", "cuda"), ("cpu", "cpu")], strict=True):
        for index in range(20):
            sources[name].append(torch.from_numpy(random.random((index + 1, 77), np.float32)).to(here))
            targets[name].append(torch.zeros(77, index + 1, device=there).t())
    update = tb.copier(sources, out=targets)
    for _ in range(3):
        assert update() is targets
        for name, tensors in sources.items():
            for source, target in zip(tensors, targets[name], strict=True):
                assert torch.equal(source.cpu(), target.cpu())
                source.add_(1)


@pytest.mark.usefixtures("leaks_nothing")
def test_the_memory_of_a_copier_is_returned() -> None:
    for _ in range(ROUNDS):
        sources = [torch.ones(5000, device="cuda") for _ in range(20)]
        targets = [np.zeros(5000, np.float32) for _ in sources]
        tb.copier(sources, out=targets)()
        tb.copier(targets, out=sources)()
        assert all((target == 1).all() for target in targets)


# --- the order of the work


@pytest.mark.parametrize(("count", "length", "delays"), [(200, 1000, [1] * ROUNDS), (100, 5000, [10] + [0] * 59)])
def test_the_sources_on_the_host_may_be_overwritten_at_once(count: int, length: int, delays: list[int]) -> None:
    """Some trees fit into the first two staging buffers. Others use these again while no copy has run."""
    stream = cupy.cuda.Stream(non_blocking=True)
    sources = [np.zeros(length + index, np.float32) for index in range(count)]
    late = 0
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        results = []
        for value, delay in enumerate(delays, 1):
            torch.cuda._sleep(delay * LATE)
            targets = [torch.zeros(source.shape, device="cuda") for source in sources]
            for source in sources:
                source.fill(value)
            tb.copy(sources, out=targets)
            late += not stream.done
            results.append(targets)
        for source in sources:
            source.fill(-1)
        for value, targets in enumerate(results, 1):
            assert all(bool((target == value).all()) for target in targets), value
    assert late, "the kernel is too short for this test"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_tree_is_few_copies_and_few_kernels(direction: tuple[str, str]) -> None:
    sources = [torch.rand(1000 + 7 * index, device=direction[0]) for index in range(2000)]
    targets = [torch.zeros(source.shape, device=direction[1]) for source in sources]
    found = work(lambda: tb.copy(sources, out=targets))
    # 64 MB, in pieces of at least half a MiB, and a table.
    assert len([name for name in found if "pieces" in name]) == 1 and len(found) < 130, (len(found), set(found))
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source.cpu(), target.cpu())


def test_threads_move_trees_at_once() -> None:

    def move(number: int) -> None:
        sources = [np.full(3000 + index, number, np.int32) for index in range(200)]
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                there = [torch.zeros(source.shape, dtype=torch.int32, device="cuda") for source in sources]
                back = [np.zeros_like(source) for source in sources]
                tb.copy(sources, out=there)
                tb.copy(there, out=back)
                assert all(map(np.array_equal, sources, back))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(move, range(1, 9)))


@two_gpus
@pytest.mark.parametrize("prepared", [False, True])
def test_the_streams_of_two_devices_wait_for_each_other(prepared: bool) -> None:
    first, second = torch.cuda.Stream("cuda:0"), torch.cuda.Stream("cuda:1")
    # The last one is too large to be packed.
    sources = [torch.zeros(length, device="cuda:0") for length in [*range(5000, 5300), 3_000_000]]
    targets = [torch.zeros(source.shape, device="cuda:1") for source in sources]
    update = tb.copier(sources, out=targets)
    for device in (0, 1):
        torch.cuda.synchronize(device)
    for value in range(1, 1 + ROUNDS):
        with torch.cuda.stream(first):
            torch.cuda._sleep(LATE)
            torch._foreach_zero_(sources)
            torch._foreach_add_(sources, value)
        with torch.cuda.stream(second):
            torch.cuda._sleep(LATE)
            torch._foreach_zero_(targets)
        with torch.cuda.stream(first), torch.cuda.stream(second):
            # Both are current, each on its device.
            update() if prepared else tb.copy(sources, out=targets)
        with torch.cuda.stream(first):
            torch._foreach_zero_(sources)
        with torch.cuda.stream(second):
            seen = [target.clone() for target in targets]
        second.synchronize()
        assert all(bool((copy == value).all()) for copy in seen), value


# --- errors, progress, memory


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_captured_stream_moves_nothing(direction: tuple[str, str]) -> None:
    sources = [torch.ones(10 + index, device=direction[0]) for index in range(20)]
    targets = [torch.zeros(10 + index, device=direction[1]) for index in range(20)]
    update = tb.copier(sources, out=targets)
    graph, kept = torch.cuda.CUDAGraph(), torch.ones(5, device="cuda")
    with torch.cuda.graph(graph):
        kept.add_(1)
        for call in (update, lambda: tb.copy(sources, out=targets)):
            with pytest.raises(tb.BridgeError) as caught:
                call()
            assert caught.value.kind == "captured"
    graph.replay()
    torch.cuda.synchronize()
    assert not any(bool(target.any()) for target in targets)
    update()
    assert all(bool((target == 1).all()) for target in targets)


@pytest.mark.usefixtures("leaks_nothing")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_progress_has_one_total_and_an_exception_ends_it(direction: tuple[str, str], dtype: Any) -> None:
    class Enough(Exception):
        """Of a user."""

    sources = [torch.ones(100_000, device=direction[0]) for _ in range(3000)]
    sources.append(torch.ones(50_000_000, device=direction[0]))
    kind = DTYPES[dtype] if dtype else torch.float32
    targets = [torch.zeros(source.shape, dtype=kind, device=direction[1]) for source in sources]
    itemsize = 4 if direction == UP else targets[0].element_size()
    total = itemsize * sum(source.numel() for source in sources)
    told: list[tuple[float, float]] = []
    tb.copy(sources, out=targets, dtype=dtype, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told) and told[-1] == (total, total) and {whole for _, whole in told} == {total}
    assert all(bool((target == 1).all()) for target in targets)

    def stop(done: float, whole: float) -> None:
        raise Enough(done)

    with pytest.raises(Enough):
        tb.copy(sources, out=targets, dtype=dtype, progress=stop)
    torch.cuda.synchronize()
    for target in targets:
        target.zero_()
    tb.copy(sources, out=targets, dtype=dtype)
    assert all(bool((target == 1).all()) for target in targets)


@pytest.mark.usefixtures("leaks_nothing")
@pytest.mark.parametrize("direction", [*DIRECTIONS, ("cuda", "cuda")])
def test_nothing_is_left_of_many_trees(direction: tuple[str, str]) -> None:
    sources = list(torch.rand(10_000, 64, device=direction[0]).unbind())
    targets = list(torch.zeros(10_000, 64, device=direction[1]).unbind())
    tb.copy(sources, out=targets)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(20):
        tb.copy(sources, out=targets)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= free - ((8 if direction == ("cuda", "cuda") else 16) << 20)
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(sources[::100], targets[::100], strict=True))
