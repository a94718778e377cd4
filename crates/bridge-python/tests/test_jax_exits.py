"""Processes that end while views of JAX, PyTorch, TensorFlow and NumPy over one another's memory are alive.

Some of the memory is of a producer whose deleter is the C library's ``free``: a second call aborts the process.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest

from programs import Warm, complaints

FRAMEWORKS = ("jax", "tensorflow", "torch")
for framework in FRAMEWORKS:
    pytest.importorskip(framework)

#: Between them each framework is imported before each other one.
ORDERS = (FRAMEWORKS, FRAMEWORKS[::-1])

SETUP = """
import sys
sys.modules["tensorflow.python.pywrap_dlopen_global_flags"] = None
import {imports}
import atexit, ctypes, gc, os, threading, time
import jax, numpy as np, tensorflow, torch
import truebridge as tb
from capsules import CPU, FLOAT, Legacy, new_capsule

libc = ctypes.CDLL(None)
libc.aligned_alloc.restype = ctypes.c_void_p
libc.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
free = ctypes.cast(libc.free, ctypes.c_void_p).value

class Freed:
    "A float32 vector of 64 ones, in one block with what describes it."

    def __dlpack_device__(self):
        return CPU, 0

    def __dlpack__(self, **_):
        block = libc.aligned_alloc(64, 1024)
        data = (ctypes.c_float * 64).from_address(block + 256)
        data[:] = [1.0] * 64
        ctypes.c_int64.from_address(block + 192).value = 64
        managed = Legacy.from_address(block)
        managed.deleter = free
        tensor = managed.tensor
        tensor.data, tensor.device_type, tensor.device_id, tensor.ndim = block + 256, CPU, 0, 1
        tensor.code, tensor.bits, tensor.lanes, tensor.byte_offset = FLOAT, 32, 1, 0
        tensor.shape = ctypes.cast(block + 192, ctypes.POINTER(ctypes.c_int64))
        tensor.strides = None
        return new_capsule(block, b"dltensor", None)

step = jax.jit(lambda x: x * 2)
targets = ["jax", "torch", "tensorflow", "numpy"]

def views():
    "Views of every framework over the memory of every other one, and over that of the producer."
    sources = [jax.numpy.ones(64), torch.ones(64), tensorflow.ones(64), Freed()]
    made = [tb.convert(source, target, read_only=True) for source in sources for target in targets]
    made += [tb.convert(view, target, read_only=True) for view in made[-4:] for target in targets]
    return made + [step(view) for view in made if isinstance(view, jax.Array)]

def use(views):
    for view in views:
        assert float(tb.to_numpy(view).sum()) in (64.0, 128.0)

use(views())
# Each has been released once: JAX does so on its own threads.
patience = time.monotonic() + 60
while (stats := tb.stats())["leased"] != stats["released"]:
    assert time.monotonic() < patience, stats
    gc.collect()
    jax.numpy.ones(1).block_until_ready()
    time.sleep(0.01)
kept = views()
# Some are dropped, in another order.
turn = {turn}
for index in sorted(range(len(kept)), key=lambda index: index * turn % 17)[::2]:
    kept[index] = None
gc.collect()
use(view for view in kept if view is not None)
"""

#: How the program ends, and its exit code.
ENDINGS = {
    "hooks": (
        """
        def drop():
            while kept:
                kept.pop(turn % len(kept))
            use(views())
        atexit.register(drop)
        late = views()
        atexit.register(late.clear)
        del late
        """,
        0,
    ),
    # Not daemon threads that run: Python 3.11 ends them inside of JAX and PyTorch, which then abort, with or without
    # this package.
    "threads": (
        """
        holding, never = threading.Barrier(3), threading.Event()
        def hold():
            held = views()
            holding.wait()
            never.wait()
        for _ in range(2):
            threading.Thread(target=hold, daemon=True).start()
        threading.Thread(target=lambda: [use(views()) for _ in range(5)]).start()
        holding.wait()
        """,
        0,
    ),
    "at once": ("pending = [step(tb.to_jax(Freed())) for _ in range(10)]; os._exit(0)", 0),
    "exception": (
        """
        sys.excepthook = lambda kind, *_: kind is IndexError or print(kind, file=sys.stderr)
        def deep(depth):
            held = views()
            return deep(depth - 1) if depth else held[100]
        deep(5)
        """,
        1,
    ),
    # The last program of an order, and the only one that no fork comes before.
    "alive": ("sys.keep = kept + [kept]", 0),
}


@pytest.fixture(scope="module", params=ORDERS, ids=",".join)
def order(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return tuple(request.param)


@pytest.fixture(scope="module")
def warm(order: tuple[str, ...]) -> Iterator[Warm]:
    process = Warm(*order)
    yield process
    process.close()


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_without_a_word(order: tuple[str, ...], ending: str, warm: Warm) -> None:
    setup = SETUP.format(imports=", ".join(order), turn=3 + ORDERS.index(order))
    code, status = ENDINGS[ending]
    done = (warm.end if ending == "alive" else warm.run)(setup + textwrap.dedent(code))
    assert (done.returncode, complaints(done.stderr)) == (status, [])
