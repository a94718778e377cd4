"""The fast paths of CuPy and PyTorch on a CUDA device are in use, and what is known of memory is true.

Each fast path has a slower one with the same results, so no other test notices which one it is.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import memory
import truebridge as tb
from programs import Warm

torch: Any = pytest.importorskip("torch")

cupy: Any = pytest.importorskip("cupy")


if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Return a function that has the use of these attributes of an object noted in the list that it returns."""
    names: list[str] = []

    def watch(owner: Any, *attributes: str) -> list[str]:
        for name in attributes:
            found = getattr(owner, name)

            def noted(*arguments: Any, name: str = name, found: Any = found, **keywords: Any) -> Any:
                names.append(name)
                return found(*arguments, **keywords)

            def read(self: Any, name: str = name, found: Any = found) -> Any:
                names.append(name)
                return found.__get__(self)

            monkeypatch.setattr(owner, name, noted if callable(found) else property(read))
        return names

    yield watch
    monkeypatch.undo()


# --- CuPy


def test_the_fields_of_an_array_of_cupy_are_read_without_python(asked: Callable[..., list[str]]) -> None:
    arrays = [cupy.arange(24, dtype="int16").reshape(2, 3, 4)[:, ::2], cupy.arange(3.0), cupy.zeros(())]
    expected = [array.get().tolist() for array in arrays]
    tb.to_torch(arrays[0])  # looks the fields up
    names = asked(cupy.ndarray, "data", "shape", "strides", "dtype", "_c_contiguous")
    views = [tb.to_torch(array) for array in arrays]
    assert names == []
    assert arrays[0].shape == (2, 2, 4) and names == ["shape"], "the test notices nothing"
    assert [view.tolist() for view in views] == expected


def test_an_array_of_cupy_is_made_without_its_constructor(asked: Callable[..., list[str]]) -> None:
    tensor = torch.arange(12.0, device="cuda").reshape(3, 4)
    names = asked(cupy.ndarray, "__init__")
    for view in (tb.to_cupy(tensor), tb.to_cupy(tensor.t())):
        assert view.shape in ((3, 4), (4, 3)) and names == []


def test_the_current_stream_of_cupy_is_read_without_python(beside_torch: Warm) -> None:
    ran = beside_torch.run("""
import cupy, torch

def noted(*device, found=cupy.cuda.get_current_stream):
    asked.append(device)
    return found(*device)

asked, cupy.cuda.get_current_stream = [], noted
import truebridge as tb

view = tb.to_torch(cupy.arange(4.0))
assert tb.to_cupy(view).tolist() == view.tolist() == [0, 1, 2, 3]
del view
assert not asked, asked
""")
    assert ran.returncode == 0, ran.stderr


class Pointer(cupy.cuda.MemoryPointer):  # type: ignore[misc]
    """A pointer of a class of the user's. Arrays with one are read by their attributes."""


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 3, 4), (48, 16, 4)),
        ((3, 4), (32, 8)),
        ((4, 3), (4, 16)),
        ((2, 3), (0, 4)),
        ((1, 3), (800, 4)),
        ((3, 1), (4, 800)),
        ((1, 1), (800, 400)),
        ((), ()),
        ((0, 3), (12, 4)),
    ],
)
def test_arrays_of_cupy_are_the_same_by_their_attributes(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    elements = cupy.arange(256, dtype="int32")
    fast, slow = (
        tb.to_torch(
            cupy.ndarray(shape, "int32", kind(elements.data.mem, elements.data.ptr - elements.data.mem.ptr), strides)
        )
        for kind in (cupy.cuda.MemoryPointer, Pointer)
    )
    assert slow.data_ptr() == fast.data_ptr() and slow.stride() == fast.stride()
    assert slow.shape == fast.shape == shape and slow.tolist() == fast.tolist()


class Array(cupy.ndarray):  # type: ignore[misc]
    """An array of a class of the user's."""

    def __dlpack__(self, **_: Any) -> object:
        raise AssertionError("it is read as that of a framework that is not known")


def test_arrays_of_a_class_that_extends_cupys_are_cupys() -> None:
    assert tb.to_torch(cupy.arange(4.0).view(Array)).tolist() == [0, 1, 2, 3]


def test_a_copier_notices_that_an_array_of_cupy_was_reshaped() -> None:
    source, target = cupy.arange(12.0).reshape(3, 4), cupy.zeros((3, 4))
    update = tb.copier([source], out=[target])
    update()
    assert bool((source == target).all())
    source.shape = (4, 3)
    with pytest.raises(tb.BridgeError, match=r"tree\[0\]"):
        update()


# --- PyTorch


@pytest.mark.parametrize("side", [False, True])
def test_a_stream_is_recorded_without_python(side: bool, asked: Callable[..., list[str]]) -> None:
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        tensor = torch.arange(4.0, device="cuda")
        tb.to_cupy(tensor)  # looks up what the allocator's memory is known by
        names = asked(torch.Tensor, "record_stream")
        asked(torch._C, "_has_Standard_Deleter")
        view = tb.to_cupy(tensor)
    assert names == []
    assert view.get().tolist() == [0, 1, 2, 3]


def test_the_first_conversion_starts_cuda_in_pytorch(beside_torch: Warm) -> None:
    for first in ("tb.to_torch(cupy.arange(4.0))", "tb.to_torch(numpy.arange(4.0), device='cuda')"):
        ran = beside_torch.run(f"""
import cupy, numpy, torch
import truebridge as tb

tb.to_torch(numpy.arange(4.0))
assert not torch.cuda.is_initialized(), "memory of the host needs no device"
view = {first}
assert torch.cuda.is_initialized()
assert view.tolist() == [0, 1, 2, 3]
""")
        assert ran.returncode == 0, ran.stderr


# --- when memory is reused


def spin(stream: Any) -> None:
    """Keep a stream busy for some tens of milliseconds."""
    code = 'extern "C" __global__ void spin(long long n) { long long s = clock64(); while (clock64() - s < n); }'
    with stream:
        cupy.RawKernel(code, "spin")((1,), (1,), (50_000_000,))


def kept(owner: Any, convert: Callable[[], Any]) -> int:
    """Return for how many views the package waits itself that are dropped while the owner's stream is busy.

    Where the host was so slow that the stream had ended when it looked, it does so once more.
    """
    convert()  # looks up what the memory is known by
    is_busy = False
    while not is_busy:
        torch.cuda.synchronize()
        assert memory.settled()["pending"] == 0
        view = [convert()]
        spin(owner)
        view.clear()
        waiting = int(tb.stats()["pending"])
        is_busy = not owner.done
    torch.cuda.synchronize()
    assert memory.settled()["pending"] == 0
    return waiting


def test_memory_of_cupys_pools_is_reused_in_the_order_of_its_own_stream() -> None:
    default, side = cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)

    def waiting(made: Any, exported: Any) -> int:
        with made:
            array = cupy.zeros(1 << 12)
        with exported:
            return kept(exported, lambda: tb.to_torch(array))

    for _ in range(2):
        for allocate in (None, cupy.cuda.MemoryPool().malloc, cupy.cuda.MemoryPool().malloc):
            with cupy.cuda.using_allocator(allocate or cupy.get_default_memory_pool().malloc):
                assert [waiting(default, default), waiting(side, side)] == [0, 0]
                assert [waiting(default, side), waiting(side, default)] == [1, 1]
    with cupy.cuda.using_allocator(cupy.cuda.memory.malloc_managed):
        assert waiting(default, default) == 1, "no pool"
    view = tb.to_cupy(torch.zeros(1 << 12, device="cuda"))
    assert kept(default, lambda: tb.to_torch(view)) == 0, "the view returns its memory in order"


def test_memory_of_pytorchs_allocator_is_reused_in_the_order_of_any_stream() -> None:
    default, side = torch.cuda.default_stream(), torch.cuda.Stream()

    def waiting(make: Callable[[], Any], made: Any, exported: Any) -> int:
        with torch.cuda.stream(made):
            tensor = make()
        with torch.cuda.stream(exported):
            return kept(cupy.cuda.ExternalStream(exported.cuda_stream), lambda: tb.to_cupy(tensor))

    def own() -> Any:
        return torch.zeros(1 << 12, device="cuda")

    def external() -> Any:
        return torch.from_dlpack(cupy.zeros(1 << 12))

    for _ in range(2):
        paths = [(default, default), (side, side), (default, side), (side, default)]
        assert [waiting(own, *streams) for streams in paths] == [0, 0, 0, 0]
        assert [waiting(external, default, stream) for stream in (default, side)] == [1, 1]


# Random programs of PyTorch and CuPy, whose handoffs take the fast paths and the slow ones in turn.
#
# Each program writes numbers, hands tensors over between streams, drops views early, and lets other tensors have their
# memory, while every stream lags behind. What it reads is compared with numbers that the host knows.
# ``TRUEBRIDGE_CASES`` sets the handoffs of each thread, ``TRUEBRIDGE_SEED`` the programs.


CASES = int(os.environ.get("TRUEBRIDGE_CASES", "400"))
SEED = int(os.environ.get("TRUEBRIDGE_SEED", "1"))
#: Elements of a tensor. Few lengths: memory that is dropped soon belongs to another tensor.
LENGTHS = (256, 4096, 1 << 20)
#: Cycles by which a write may lag behind.
DELAYS = (0, 1000, 100_000, 400_000)


class UserArray(cupy.ndarray):  # type: ignore[misc]
    """An array of a class of the user's."""


class Tensor(torch.Tensor):  # type: ignore[misc]
    """A tensor of a class of the user's."""


def another_path(x: Any, rng: random.Random) -> Any:
    """Return the same tensor, or one with the same elements whose handoff takes a slower path."""
    if rng.random() < 0.5:
        return x
    if isinstance(x, torch.Tensor):
        return x.as_subclass(Tensor)
    if rng.random() < 0.5:
        return x.view(UserArray)
    return cupy.ndarray(x.shape, x.dtype, Pointer(x.data.mem, x.data.ptr - x.data.mem.ptr), x.strides)


@dataclass(eq=False)
class Held:
    """A tensor: its newest view, the stream that has it, and the number in all elements."""

    x: Any
    stream: int
    number: int
    #: Who allocated it, in which stream, and how many elements.
    made: tuple[type, int, int]


class Program:
    """One thread's tensors. Each is used by one stream at a time, and ordered only by handoffs."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tensors: list[Held] = []
        self.seen: list[tuple[Any, str]] = []
        made = (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream())
        self.streams = [(one, cupy.cuda.ExternalStream(one.cuda_stream)) for one in made]
        own = cupy.cuda.Stream(non_blocking=True)
        self.streams.append((torch.cuda.ExternalStream(own.ptr), own))

    @contextlib.contextmanager
    def within(self, of_torch: int, of_cupy: int) -> Iterator[None]:
        """Make these streams current, of the same number in the usual case."""
        with torch.cuda.stream(self.streams[of_torch][0]), self.streams[of_cupy][1]:
            yield

    def make(self, made: tuple[type, int, int], delays: tuple[int, ...] = DELAYS) -> None:
        """Allocate a tensor, and write to it."""
        kind, stream, length = made
        with self.within(stream, stream):
            if kind is torch.Tensor:
                x = torch.empty((4, length // 4), dtype=torch.int32, device="cuda")
            else:
                x = cupy.empty((4, length // 4), dtype="int32")
        self.tensors.append(Held(x, stream, 0, made))
        self.write(self.tensors[-1], delays)

    def write(self, held: Held, delays: tuple[int, ...] = DELAYS) -> None:
        """Write a number to all elements, in the stream that has the tensor."""
        held.number = self.rng.randrange(1 << 30)
        with self.within(held.stream, held.stream):
            torch.cuda._sleep(self.rng.choice(delays))
            if isinstance(held.x, torch.Tensor):
                held.x.fill_(held.number)
            else:
                held.x.fill(held.number)

    def look(self, held: Held, what: str) -> None:
        """Compare all elements with the number, in the stream that has the tensor."""
        with self.within(held.stream, held.stream):
            self.seen.append(((held.x == held.number).all(), what))

    def hand_over(self, held: Held) -> None:
        """Convert a tensor to the other framework, for any of its streams. The previous view is dropped."""
        to = self.rng.choice((held.stream, self.rng.randrange(len(self.streams))))
        x = another_path(held.x, self.rng)
        with tb.trace() if self.rng.random() < 0.05 else contextlib.nullcontext():
            if isinstance(x, torch.Tensor):
                with self.within(held.stream, to):
                    held.x = tb.to_cupy(x)
            else:
                with self.within(to, held.stream):
                    held.x = tb.to_torch(x)
        held.stream = to
        if self.rng.random() < 0.3:
            held.x = held.x.T

    def replace(self, held: Held, number: int) -> None:
        """Read a tensor late, drop it, and let another one have its memory at once."""
        with self.within(held.stream, held.stream):
            torch.cuda._sleep(DELAYS[-1])
        self.look(held, f"before the drop {number}")
        self.tensors.remove(held)
        held.x = None
        self.make(held.made, DELAYS[:1])

    def step(self, number: int) -> None:
        """Do one thing to one tensor."""
        what = self.rng.random()
        if what < 0.1 or not self.tensors:
            kind = self.rng.choice((torch.Tensor, cupy.ndarray))
            self.make((kind, self.rng.randrange(len(self.streams)), self.rng.choice(LENGTHS)))
            return
        held = self.rng.choice(self.tensors)
        if what < 0.65:
            self.hand_over(held)
            self.look(held, f"after handoff {number}")
        elif what < 0.8:
            self.write(held)
            self.look(held, f"after the write {number}")
        elif what < 0.9:
            self.replace(held, number)
        else:
            self.tensors.remove(held)
        if len(self.seen) >= 200:
            self.check()
        if self.rng.random() < 0.005:
            self.rng.choice((torch.cuda.empty_cache, cupy.get_default_memory_pool().free_all_blocks))()

    def check(self) -> None:
        """Wait, and refuse what was not as written."""
        torch.cuda.synchronize()
        wrong = [what for flag, what in self.seen if not bool(flag)]
        self.seen.clear()
        assert not wrong, f"{len(wrong)} of the program read something else, first {wrong[0]}"


def run(seed: int, steps: int) -> None:
    program = Program(seed)
    for number in range(steps):
        program.step(number)
    program.check()


@pytest.mark.parametrize("threads", [1, 4])
def test_random_programs_read_what_was_written(threads: int) -> None:
    failed: list[BaseException] = []

    def guarded(seed: int) -> None:
        try:
            run(seed, CASES)
        except BaseException as error:
            failed.append(error)

    running = [threading.Thread(target=guarded, args=(SEED * 1000 + number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failed:
        raise failed[0]
