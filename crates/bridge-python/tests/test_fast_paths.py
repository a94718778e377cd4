"""Random conversions have the same results by every way: fast paths are switched off, one by one and as the calls come.

The adapters of PyTorch and NumPy look a fast path up once in a process, and have a slower one where a version lacks it.
Traces and `debug` wrap the adapters; they are switched on and off between the calls.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from programs import Warm

torch: Any = pytest.importorskip("torch")


#: What hides a fast path before the package looks it up.
HIDE = {
    "exchange of PyTorch": "del torch.Tensor.__dlpack_c_exchange_api__",
    "C API of NumPy": "del vars(importlib.import_module(umath))['_ARRAY_API']",
}

#: Draws conversions, and prints how each ended. `hidden` are lines of `HIDE`.
PROGRAM = """
import contextlib, importlib, json, random
import numpy, torch
umath = "numpy._core._multiarray_umath" if hasattr(numpy, "_core") else "numpy.core._multiarray_umath"
torch.from_numpy(numpy.zeros(1)).numpy()  # loads what PyTorch needs of NumPy
with contextlib.suppress(ImportError):
    import ml_dtypes
for line in {hidden!r}:
    exec(line)
import truebridge as tb

draw = random.Random({seed})
DTYPES = ["bool", "uint8", "int16", "int64", "float16", "float32", "complex64"]
MAKE = {{"numpy": lambda array: array, "torch": torch.from_numpy}}

def drawn(steps):
    shape = [draw.choice([0, 1, *range(1, 5)]) for _ in range(draw.randrange(5))]
    array = numpy.arange(64 * 4**len(shape)).astype(draw.choice(DTYPES))[: numpy.prod(shape, dtype=int)].reshape(shape)
    array = array.transpose(draw.sample(range(array.ndim), array.ndim))
    for axis in range(array.ndim):
        array = numpy.moveaxis(numpy.moveaxis(array, axis, 0)[:: draw.choice(steps)], 0, axis)
    return array

def outcome(array, source, target, options):
    tensor = MAKE[source](array)
    if source == "torch" and draw.random() < 0.2:
        tensor = tensor.requires_grad_(tensor.is_floating_point()).conj()
        array = array.conj()
    plan = tb.plan(tensor, target, **options)
    result = tb.convert(tensor, target, **options)
    seen = result if target == "numpy" else result.numpy()
    order = options.get("permute", range(array.ndim))
    assert seen.dtype == array.dtype and numpy.array_equal(seen, array.transpose(order)), "other elements"
    shared = array.size > 0 and numpy.shares_memory(seen, array)
    assert array.size == 0 or shared == plan.zero_copy, "the plan was not followed"
    back = tb.convert(result, source)
    same = tuple(back.shape) == seen.shape
    return [str(plan), shared, list(seen.strides) if shared else None, same, seen.flags.writeable]

ended = []
for _ in range(200):
    source, target = draw.choice(list(MAKE)), draw.choice(list(MAKE))
    array = drawn([1, 1, 2, -1] if source == "numpy" else [1, 1, 2])
    if source == "numpy":
        array.flags.writeable = draw.random() < 0.7
    options = {{"copy": draw.choice([None, None, True, False])}}
    if draw.random() < 0.3:
        options["permute"] = draw.sample(range(array.ndim), array.ndim)
    switched = [on for on in (tb.trace, tb.debug) if draw.random() < 0.2]
    with contextlib.ExitStack() as stack:
        for on in switched:
            stack.enter_context(on())
        try:
            ended.append(outcome(array, source, target, options))
        except tb.errors.BridgeError as error:
            ended.append([type(error).__name__, error.kind])
print(json.dumps(ended))
"""


def ended(warm: Warm, seed: int, *paths: str) -> list[list[object]]:
    ran = warm.run(PROGRAM.format(seed=seed, hidden=[HIDE[path] for path in paths]))
    assert ran.returncode == 0, ran.stderr
    outcomes: list[list[object]] = json.loads(ran.stdout)
    return outcomes


@pytest.mark.parametrize("seed", range(2))
def test_results_are_the_same_by_every_path(seed: int, beside_torch: Warm) -> None:
    fast = ended(beside_torch, seed)
    assert {outcome[1] for outcome in fast if len(outcome) > 2} == {True, False}
    assert {outcome[1] for outcome in fast if len(outcome) == 2} >= {"requires_grad"}
    assert len({str(outcome) for outcome in fast}) > 50
    for paths in (["exchange of PyTorch"], ["C API of NumPy"], list(HIDE)):
        assert ended(beside_torch, seed, *paths) == fast, f"without {paths}"


def test_the_fast_path_of_pytorch_is_the_one_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), "this PyTorch has no fast path"
    tensor, array = torch.arange(3.0), np.arange(3.0)
    tb.to_numpy(tensor)  # looks the paths up

    def slow(*_: object) -> None:
        raise AssertionError("Python was asked")

    for name in ("__dlpack__", "detach", "is_conj", "is_neg", "untyped_storage"):
        monkeypatch.setattr(torch.Tensor, name, slow)
    there, back = tb.to_numpy(tensor), tb.to_torch(array)
    monkeypatch.undo()
    assert there.tolist() == back.tolist() == [0, 1, 2]


def test_the_fast_path_of_numpy_is_the_one_in_use(beside_torch: Warm) -> None:
    ran = beside_torch.run("""
import numpy

def slow(x, asarray=numpy.asarray):
    asked.append(type(x))
    return asarray(x)

asked, numpy.asarray = [], slow
import truebridge as tb

array = numpy.arange(6.0)[::-2]
assert tb.to_numpy(array).tolist() == [5, 3, 1] and not asked, asked
""")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("change", ["t.data = torch.zeros(1)", "t.set_()"])
def test_memory_lives_as_long_as_its_view_without_the_fast_path(change: str, beside_torch: Warm) -> None:
    ran = beside_torch.run(f"""
import gc, threading, weakref
import numpy, torch
{HIDE["exchange of PyTorch"]}
import truebridge as tb

memory = numpy.arange(4, dtype=numpy.float32)
kept, address = weakref.ref(memory), memory.ctypes.data
t = torch.from_numpy(memory)
view = tb.to_numpy(t)
del memory
{change}
del t
gc.collect()
assert kept() is not None and view.ctypes.data == address and view.tolist() == [0, 1, 2, 3]
thread = threading.Thread(target=lambda: globals().pop("view"))
thread.start()
thread.join()
gc.collect()
assert kept() is None, "nothing returned the memory"
""")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(("size", "kind"), [(400, "layout"), (0, "not_a_tensor")])
def test_a_view_beyond_its_storage_is_refused_without_the_fast_path(size: int, kind: str, beside_torch: Warm) -> None:
    ran = beside_torch.run(f"""
import torch
{HIDE["exchange of PyTorch"]}
import truebridge as tb

whole = torch.ones(1000)
view = whole[500:]
whole.untyped_storage().resize_({size})
try:
    print(tb.to_numpy(view).shape)
except tb.BridgeError as error:
    print(error.kind)
""")
    assert (ran.stdout.strip(), ran.returncode) == (kind, 0), ran.stderr
