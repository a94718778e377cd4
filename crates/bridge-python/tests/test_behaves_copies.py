"""Views and the package's own objects are copied and pickled as values, and subclasses cross as what they are."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from memory import counts
from test_errors import fake

torch: Any = pytest.importorskip("torch")


def address(tensor: Any) -> int:
    found: int = tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr()
    return found


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "pickle of a tree": lambda x: pickle.loads(pickle.dumps({"a": [x]}))["a"][0],
}


@pytest.mark.parametrize("make", [lambda: tb.to_torch(np.arange(4.0)), lambda: tb.to_numpy(torch.arange(4.0))])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_view_owns_its_memory(way: str, make: Callable[[], Any]) -> None:
    view = make()
    with_copy = tb.stats()["leased"]
    own = COPIES[way](view)
    assert tb.stats()["leased"] == with_copy
    assert type(own) is type(view) and address(own) != address(view)
    own[0] = 7
    assert view.tolist() == [0, 1, 2, 3]
    del view
    gc.collect()
    assert own.tolist() == [7, 1, 2, 3]


def test_a_shallow_copy_is_that_of_the_framework() -> None:
    """``copy.copy`` of a torch tensor shares the memory, of an array it does not: with views as without."""
    tensor, array = tb.to_torch(np.arange(4.0)), tb.to_numpy(torch.arange(4.0))
    other = copy.copy(tensor)
    assert address(other) == address(tensor) and address(copy.copy(array)) != address(array)
    seen = counts()["released"]
    del tensor
    assert tb.stats()["released"] == seen and other.tolist() == [0, 1, 2, 3]


def values() -> list[object]:
    with tb.trace() as trace:
        tb.to_torch(np.ones(2))
    with pytest.raises(tb.BridgeError) as caught:
        tb.to_torch(np.ones(2)[::-1], copy=False)
    ticket = tb.share(np.ones(1))
    tb.revoke(ticket)
    plans = [tb.plan(np.ones(3)[::step], "torch") for step in (1, -1)]
    return [*plans, ticket, trace.events, caught.value, tb.profile("numpy"), tb.stats()]


def test_the_objects_of_the_package_are_values() -> None:
    for value in values():
        for way in (copy.copy, *COPIES.values()):
            again = way(value)
            assert type(again) is type(value)
            if isinstance(value, tb.BridgeError):
                assert (again.kind, again.args) == (value.kind, value.args)
            else:
                assert again == value
            assert repr(again) == repr(value)


def test_equal_plans_say_the_same() -> None:
    same, other = (tb.plan(np.ones(3), "torch") for _ in range(2)), tb.plan(np.ones(3)[::-1], "torch")
    assert len({*same}) == 1 and other not in same
    assert (other.zero_copy, other.nbytes, other.copied_by) == (False, 24, "host")


class Named(torch.Tensor):  # type: ignore[misc]
    """A subclass as people write them, with an attribute and a function of its own."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return super().__torch_function__(function, types, arguments, keywords or {})


class Raising(torch.Tensor):  # type: ignore[misc]
    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise AssertionError("never called")


class Dispatching(torch.Tensor):  # type: ignore[misc]
    @staticmethod
    def __new__(cls, inner: Any) -> Any:  # noqa: PLW0211
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("never called")


#: Classes that cross as the plain tensor that they hold.
CROSS: dict[str, Callable[[Path], Any]] = {
    "matrix": lambda _: np.array([[1.0, 2.0]]).view(np.matrix),
    "memmap": lambda path: memmap(path),
    "field of a recarray": lambda _: np.rec.fromarrays([np.array([1.0, 2.0])], names="a").a,
    "parameter": lambda _: torch.nn.Parameter(torch.tensor([1.0, 2.0]), requires_grad=False),
    "buffer": lambda _: torch.nn.Buffer(torch.tensor([1.0, 2.0])),
    "torch function": lambda _: torch.tensor([1.0, 2.0]).as_subclass(Named),
    "raising torch function": lambda _: torch.tensor([1.0, 2.0]).as_subclass(Raising),
    "inference": lambda _: inference(),
}


def memmap(path: Path) -> Any:
    array = np.memmap(path / "array", dtype=np.float64, mode="w+", shape=(2,))
    array[:] = [1, 2]
    return array


def inference() -> Any:
    with torch.inference_mode():
        return torch.tensor([1.0, 2.0])


@pytest.mark.parametrize("target", ["numpy", "torch"])
@pytest.mark.parametrize("case", CROSS)
def test_a_subclass_crosses_as_a_plain_tensor(case: str, target: str, tmp_path: Path) -> None:
    source = CROSS[case](tmp_path)
    result = tb.convert(source, target, copy=False)
    assert type(result) in (np.ndarray, torch.Tensor)
    assert np.ravel(result).tolist() == [1, 2]
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(case == "inference"):
        assert address(result) == address(source)
        source[..., 1] = 5
    assert np.ravel(result).tolist() == [1, 5]


def transformed(transform: Callable[..., Any]) -> Callable[[Callable[[Any], Any]], Any]:
    return lambda call: transform(lambda x: (call(x), x.sum())[1])(torch.ones(2, 2))


def tracked(call: Callable[[Any], Any]) -> Any:
    return torch.func.jvp(lambda x: (call(x), x.sum())[1], (torch.ones(2),), (torch.ones(2),))


#: Tensors that hold no memory of their own, and classes whose memory is not their value: the call, the words.
REFUSED: dict[str, tuple[Callable[[Callable[[Any], Any]], Any], str]] = {
    "masked": (lambda call: call(np.ma.masked_array([1.0, 2.0], [0, 1])), "filled"),
    "masked without a mask": (lambda call: call(np.ma.masked_array([1.0, 2.0])), "filled"),
    "records": (lambda call: call(np.rec.fromarrays([np.ones(2)], names="a")), "convert each by itself"),
    "fake": (lambda call: call(fake()), "plain tensor"),
    "dispatching": (lambda call: call(Dispatching(torch.ones(2))), "plain tensor"),
    "vmap": (transformed(torch.func.vmap), "outside of the transform"),
    "functionalize": (transformed(torch.func.functionalize), "outside of the transform"),
    "jvp": (tracked, "outside of the transform"),
    "uninitialised": (lambda call: call(torch.nn.UninitializedBuffer()), "call the module once"),
    "storage": (lambda call: call(torch.ones(2).untyped_storage()), "not a tensor"),
}


@pytest.mark.parametrize("call", [tb.to_numpy, tb.to_torch, lambda x: tb.plan(x, "numpy"), lambda x: tb.share(x)])
@pytest.mark.parametrize("case", REFUSED)
def test_a_class_without_plain_memory_is_refused(case: str, call: Callable[[Any], Any]) -> None:
    run, words = REFUSED[case]
    with pytest.raises(tb.BridgeTypeError, match=words):
        run(call)


def test_a_transform_of_gradients_is_refused_with_and_without_detach() -> None:
    for detach in (False, True):
        with pytest.raises(tb.BridgeError) as caught:
            torch.func.grad(lambda x: (tb.to_numpy(x, detach=detach), x.sum())[1])(torch.ones(2))  # noqa: B023
        assert caught.value.kind == ("not_a_tensor" if detach else "requires_grad")


@pytest.mark.parametrize("make", [lambda: np.arange(1000.0), lambda: torch.arange(1000.0)])
def test_a_callback_of_the_source_runs_when_the_last_view_is_dropped(make: Callable[[], Any]) -> None:
    source = make()
    is_array = isinstance(source, np.ndarray)
    heard: list[int] = []
    # A view holds an array, but of a torch tensor its storage.
    watched = weakref.ref(source, lambda _: heard.append(1))
    view = tb.to_torch(source) if is_array else tb.to_numpy(source)
    part, again = view[10:], tb.convert(view, "numpy" if is_array else "torch")
    live = counts()["released"]
    del source, view
    gc.collect()
    if is_array:
        assert watched() is not None and not heard
    del part
    assert float(again[999]) == 999 and tb.stats()["released"] == live
    del again
    gc.collect()
    assert heard == [1] and tb.stats()["released"] == live + 2


def test_a_view_keeps_nothing_but_the_memory() -> None:
    """What only the source's tree held is dropped with it."""

    class Batch(dict[str, Any]):
        pass

    batch = Batch(x=np.ones(4), y=np.ones(4))
    dropped, kept = weakref.ref(batch["y"]), weakref.ref(batch["x"])
    view, gone = tb.to_torch(batch["x"]), weakref.ref(batch)
    del batch
    assert gone() is None and dropped() is None and kept() is not None
    del view
    assert kept() is None


def test_cycles_through_views_are_collected() -> None:
    class Holder(np.ndarray):
        view: Any

    array = np.arange(4.0).view(Holder)
    watched = weakref.ref(array)
    cycle: list[Any] = [array]
    cycle.append(cycle)
    cycle.append(tb.to_torch(array))
    del array, cycle
    gc.collect()
    assert watched() is None
