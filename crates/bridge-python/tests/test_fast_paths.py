"""Fast paths of PyTorch and NumPy are in use, a version without them takes a slower one, and wrappers change nothing.

The adapters look a fast path up once in a process. The suite judges the slower ones by all properties, as the adapters
`torch-capsules` and `numpy-interface`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import truebridge as tb
from programs import Warm

torch: Any = pytest.importorskip("torch")


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


def test_without_the_fast_paths_the_slower_ones_are_taken(beside_torch: Warm) -> None:
    ran = beside_torch.run("""
import contextlib, gc, importlib, weakref
import numpy, torch
torch.from_numpy(numpy.zeros(1)).numpy()  # loads what PyTorch needs of NumPy
with contextlib.suppress(ImportError):
    import ml_dtypes
umath = "numpy._core._multiarray_umath" if hasattr(numpy, "_core") else "numpy.core._multiarray_umath"
del torch.Tensor.__dlpack_c_exchange_api__, vars(importlib.import_module(umath))["_ARRAY_API"]
import truebridge as tb

for array in (numpy.arange(24.0).reshape(4, 6)[:, ::2].T, numpy.arange(6)[::-1], numpy.zeros((0, 3)), numpy.ones(())):
    back = tb.to_numpy(tb.to_torch(array))
    assert back.dtype == array.dtype and numpy.array_equal(back, array)
    in_place = array.size > 0 and min(array.strides, default=0) >= 0
    assert numpy.shares_memory(back, array) == in_place == (tb.plan(array, "torch").zero_copy and array.size > 0)

# Memory lives as long as its view, and what is freed is refused.
for change in (lambda t: setattr(t, "data", torch.zeros(1)), lambda t: t.set_()):
    memory = numpy.arange(4, dtype=numpy.float32)
    kept = weakref.ref(memory)
    tensor = torch.from_numpy(memory)
    view = tb.to_numpy(tensor)
    del memory
    change(tensor)
    del tensor
    gc.collect()
    assert kept() is not None and view.tolist() == [0, 1, 2, 3]
    del view
    gc.collect()
    assert kept() is None, "nothing returned the memory"
whole = torch.ones(1000)
part = whole[500:]
for nbytes, kind in ((400, "layout"), (0, "not_a_tensor")):
    whole.untyped_storage().resize_(nbytes)
    try:
        raise AssertionError(tb.to_numpy(part).shape)
    except tb.BridgeError as error:
        assert error.kind == kind, error
""")
    assert ran.returncode == 0, ran.stderr


#: Arrays that are in place, copied or refused.
ARRAYS = {
    "compact": np.arange(24.0).reshape(2, 3, 4),
    "steps": np.arange(24).reshape(4, 6)[::2, 1::2].T,
    "backwards": np.arange(6, dtype=np.float16)[::-1],
    "without elements": np.zeros((3, 0), np.uint8),
    "a number": np.ones((), np.complex64),
    "read-only": np.broadcast_to(np.ones(3, np.float32), (2, 3)),
}


@pytest.mark.parametrize("wrapper", [tb.trace, tb.debug])
@pytest.mark.parametrize("source", ["numpy", "torch"])
@pytest.mark.parametrize("name", ARRAYS)
def test_what_a_wrapper_watches_ends_as_without_it(name: str, source: str, wrapper: Any) -> None:
    array = ARRAYS[name]
    x = array if source == "numpy" else torch.from_numpy(array.copy()).conj()

    def ended(target: str, copy: bool | None) -> list[object]:
        try:
            result = tb.convert(x, target, copy=copy)  # type: ignore[call-overload]
            seen = tb.to_numpy(result)
        except tb.BridgeError as error:
            return [type(error), error.kind, str(error)]
        in_place = source == "numpy" and np.shares_memory(seen, array)
        return [type(result), seen.tolist(), seen.strides, in_place, seen.flags.writeable]

    for target in ("numpy", "torch"):
        for copy in (None, True, False):
            expected = ended(target, copy)
            with wrapper():
                assert ended(target, copy) == expected, (target, copy)
