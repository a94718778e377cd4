"""Random programs of PyTorch and CuPy, whose handoffs take the fast ways and the slow ones in turn.

Each program writes numbers, hands tensors over between streams, drops views early, and lets other tensors have their
memory, while every stream lags behind. What it reads is compared with numbers that the host knows.
``TRUEBRIDGE_CASES`` sets the handoffs of each thread, ``TRUEBRIDGE_SEED`` the programs.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")
cupy: Any = pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

CASES = int(os.environ.get("TRUEBRIDGE_CASES", "400"))
SEED = int(os.environ.get("TRUEBRIDGE_SEED", "1"))
#: Elements of a tensor. Few lengths: memory that is dropped soon belongs to another tensor.
LENGTHS = (256, 4096, 1 << 20)
#: Cycles by which a write may lag behind.
DELAYS = (0, 1000, 100_000, 400_000)


class Pointer(cupy.cuda.MemoryPointer):  # type: ignore[misc]
    """A pointer of a class of the user's. Arrays with one are read by their attributes."""


class Array(cupy.ndarray):  # type: ignore[misc]
    """An array of a class of the user's."""


class Tensor(torch.Tensor):  # type: ignore[misc]
    """A tensor of a class of the user's."""


def another_way(x: Any, rng: random.Random) -> Any:
    """Return the same tensor, or one with the same elements whose handoff takes a slower way."""
    if rng.random() < 0.5:
        return x
    if isinstance(x, torch.Tensor):
        return x.as_subclass(Tensor)
    if rng.random() < 0.5:
        return x.view(Array)
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
    """One thread's tensors. Each is used by one stream at a time, and ordered by handoffs alone."""

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
        """Convert a tensor to the other framework, for a stream of its own. The view before it is dropped."""
        to = self.rng.choice((held.stream, self.rng.randrange(len(self.streams))))
        x = another_way(held.x, self.rng)
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
