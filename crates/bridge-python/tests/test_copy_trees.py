"""``tb.copy`` of many tensors at once: trees and lists, on the host, with NumPy as the judge."""

from __future__ import annotations

import collections
import dataclasses
import gc
import math
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")

DTYPES = ["bool", "int16", "float32", "float64", "complex128"]


def view(random: np.random.Generator, shape: list[int], dtype: str) -> np.ndarray:
    """Return a random view of random numbers, of this shape: permuted, with gaps, and backwards."""
    order = [int(axis) for axis in random.permutation(len(shape))]
    steps = [int(step) for step in random.choice([-2, -1, 1, 1, 3], len(shape))]
    whole = random.integers(0, 2 if dtype == "bool" else 100, [shape[axis] * 3 for axis in order]).astype(dtype)
    placed = whole.transpose([int(axis) for axis in np.argsort(order)])
    return placed[(..., *(slice(None, None, step) for step in steps))][(..., *(slice(length) for length in shape))]


def leaf(random: np.random.Generator, small: bool) -> tuple[Any, Any, np.ndarray]:
    """Return a source, a target of the same dtype, and what the target is to have."""
    dtype = DTYPES[int(random.integers(len(DTYPES)))]
    shape = [int(length) for length in random.integers(0 if small else 1, 6 if small else 40, random.integers(0, 4))]
    target = view(random, shape, dtype)
    repeated = [1 if random.random() < 0.2 else length for length in shape]
    source = view(random, repeated[int(random.integers(0, 2)) :] if repeated and repeated[0] == 1 else repeated, dtype)
    expected = np.empty(shape, dtype)
    np.copyto(expected, source)
    forwards = [all(stride >= 0 for stride in array.strides) for array in (source, target)]
    if forwards[0] and random.random() < 0.5:
        source = torch.from_numpy(source)
    if forwards[1] and random.random() < 0.5:
        target = torch.from_numpy(target)
    return source, target, expected


def tree(random: np.random.Generator, depth: int = 0) -> tuple[Any, Any, Any]:
    """Return trees of one structure: of sources, of targets, and of what these are to have."""
    kind = int(random.integers(6)) if depth < 3 else 5
    children = [tree(random, depth + 1) for _ in range(random.integers(1, 4))] if kind < 4 else []
    sources, targets, expected = ([child[side] for child in children] for side in range(3))
    names = [f"n{index}" for index in range(len(children))]
    if kind == 0:
        return sources, targets, expected
    if kind == 1:
        return tuple(sources), targets, expected
    if kind == 2:
        # In another order.
        return dict(list(zip(names, sources, strict=True))[::-1]), dict(zip(names, targets, strict=True)), expected
    if kind == 3:
        return (
            collections.OrderedDict(zip(names, sources, strict=True)),
            dict(zip(names, targets, strict=True)),
            expected,
        )
    return leaf(random, random.random() < 0.5) if kind == 5 else (None, 3, None)


def compare(target: Any, expected: Any) -> int:
    """Compare bit by bit. Return the number of tensors."""
    if isinstance(expected, list):
        targets = target.values() if isinstance(target, dict) else target
        return sum(compare(one, two) for one, two in zip(targets, expected, strict=True))
    if expected is None:
        return 0
    array = np.asarray(target)
    assert array.dtype == expected.dtype and array.shape == expected.shape
    assert array.tobytes() == expected.tobytes()
    return 1


@pytest.mark.parametrize("seed", range(60))
def test_any_tree_is_copied_into_any_tree(seed: int) -> None:
    random = np.random.default_rng(seed)
    parts = [tree(random) for _ in range(3)]
    sources, targets, expected = ([part[side] for part in parts] for side in range(3))
    held: list[Any] = [sources, [np.ones(3)]], [targets, [np.zeros(3)]]
    assert tb.copy(held[0], out=held[1]) is held[1]
    assert compare(held[1], [expected, [np.ones(3)]]) >= 1


def test_slices_of_one_tensor_are_filled_together() -> None:
    whole = np.zeros((8, 12), np.float32)
    parts = [np.full((8, 3), float(index), np.float32) for index in range(4)]
    tb.copy(parts, out=[whole[:, 3 * index : 3 * index + 3] for index in range(4)])
    np.testing.assert_array_equal(whole, np.concatenate(parts, axis=1))
    columns = [whole[:, column] for column in range(12)]
    tb.copy([np.full(8, column, np.float32) for column in range(12)], out=columns)
    np.testing.assert_array_equal(whole, np.tile(np.arange(12, dtype=np.float32), (8, 1)))


@pytest.mark.parametrize("seed", range(40))
def test_any_tensor_is_copied_and_nothing_but_the_target_is_written(seed: int) -> None:
    random = np.random.default_rng(seed)
    dtype = DTYPES[seed % len(DTYPES)]
    source = view(random, [int(length) for length in random.integers(1, 8, random.integers(0, 5))], dtype)
    part = (..., *(slice(1, 1 + 2 * length, 2) for length in source.shape))
    base = np.zeros([2 * length + 1 for length in source.shape], dtype)
    expected, target = base.copy(), base[part]
    expected[part] = source
    assert tb.copy(source, out=target) is target
    np.testing.assert_array_equal(base, expected)


class Named(NamedTuple):
    """A named tuple."""

    weight: Any
    bias: Any


@dataclasses.dataclass
class Layer:
    """A dataclass."""

    weight: Any
    name: str = ""


def test_named_tuples_and_dataclasses_are_walked() -> None:
    target = {"a": Named(torch.zeros(2), torch.zeros(3)), "b": Layer(np.zeros(4, np.float32), "layer")}
    source = {"b": Layer(torch.ones(4), "other"), "a": Named(np.ones(2, np.float32), np.ones(1, np.float32))}
    assert tb.copy(source, out=target) is target
    assert target["a"].weight.sum() == 2 and target["a"].bias.sum() == 3 and target["b"].weight.sum() == 4


def test_weights_that_stand_twice_are_copied() -> None:
    source, target = torch.arange(6.0), torch.zeros(6)
    tb.copy({"head": source, "embedding": source[:]}, out={"head": target, "embedding": target[:]})
    assert torch.equal(source, target)


def test_an_empty_tree_is_nothing() -> None:
    assert tb.copy([], out=[]) == []
    assert tb.copy({"a": {}}, out={"a": {}}) == {"a": {}}


def read_only() -> np.ndarray:
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    return array


def cycle() -> list[Any]:
    held: list[Any] = [np.zeros(3, np.float32)]
    held.append(held)
    return held


X = np.zeros(8, np.float32)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


#: Source and target, the kind of the error, its place in the tree, and what it says there.
REFUSED: dict[str, tuple[Callable[[], tuple[Any, Any]], str, str, str]] = {
    "shape": (lambda: ([ones(2)], [np.zeros(3, np.float32)]), "layout", "[0]", "a tensor of"),
    "dtype": (lambda: ([np.ones(3)], [np.zeros(3, np.float32)]), "dtype", "[0]", "elements of dtype float64"),
    "read-only": (lambda: ([ones(3)], [read_only()]), "read_only", "[0]", "the target is read"),
    "two targets": (
        lambda: ([ones(4)] * 2, [X[:4], X[3:7]]),
        "layout",
        "[1] and tree[1]['a'][0]",
        "the two targets share memory",
    ),
    "a target and another source": (
        lambda: ([ones(4), X[2:6]], [X[:4], np.zeros(4, np.float32)]),
        "layout",
        "[1] and tree[1]['a'][0]",
        "the target of one shares memory with the source",
    ),
    "a target and its source": (lambda: ([X[2:6]], [X[:4]]), "layout", "[0]", "the tensor and the target share"),
    "a missing key": (lambda: ({"x": X}, {"y": X[:4]}), "argument", "['y']", "the source has nothing here"),
    "a missing key of many": (
        lambda: ({index: 0 for index in range(300)}, {index: X[:0] for index in range(400)}),
        "argument",
        "[300]",
        "the source has nothing here",
    ),
    "one key more": (lambda: ({"x": X, "y": X}, {"x": X[:4]}), "argument", "['y']", "the target has nothing here"),
    "one more": (lambda: ([X, X], [X[:4]]), "argument", "", "the target holds 1 object and the source 2"),
    "a list for a tensor": (
        lambda: ([[X]], [X[:4]]),
        "argument",
        "[0]",
        "the target is a tensor and the source a list of tensors",
    ),
    "a tensor for a list": (lambda: (X, [X[:4]]), "argument", "", "the target is a list and the source a"),
    "a list for a dict": (lambda: ([X], {0: X[:4]}), "argument", "", "pass trees of the same structure"),
    "a number for a tensor": (lambda: ([3], [X]), "not_a_tensor", "[0]", ""),
    "a tensor for a number": (lambda: ([X, X[:4]], [ones(8), 3]), "argument", "[1]", "the target is a int"),
    "a cycle": (lambda: (cycle(), cycle()), "argument", "[1]", "holds itself"),
    "requires grad": (lambda: ([X], [torch.zeros(8, requires_grad=True)]), "requires_grad", "[0]", "detach"),
}


def refused(case: str, call: Callable[..., Any], first: np.ndarray) -> None:
    make, kind, place, text = REFUSED[case]
    source, target = make()
    with pytest.raises(tb.BridgeError, match=re.escape(f"tree[1]['a']{place}: ") + f".*{text}") as error:
        call([np.ones(5, np.float32), {"a": source}], out=[first, {"a": target}])
    assert error.value.kind == kind
    assert not first.any() and not X.any()


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_names_its_place_and_writes_nothing(case: str) -> None:
    refused(case, tb.copy, np.zeros(5, np.float32))


def test_a_trace_has_every_tensor() -> None:
    with tb.trace() as trace:
        tb.copy([np.ones(3), np.ones(4)], out=[torch.zeros(3, dtype=torch.float64), np.zeros(4)])
    events = [event for event in trace.events if event.operation == "copy"]
    assert [event.path for event in events] == ["copy", "copy"]
    assert [event.nbytes for event in events] == [24, 32]
    assert [(event.source, event.target) for event in events] == [("numpy", "torch"), ("numpy", "numpy")]
    with tb.trace() as trace, pytest.raises(tb.BridgeError):
        tb.copy([np.ones(3), np.ones(4)], out=[torch.zeros(4, dtype=torch.float64), np.zeros(4)])
    assert [(event.path, event.target) for event in trace.events] == [("failed", "torch")]


def test_sources_are_released() -> None:
    source, target = [np.ones(1000) for _ in range(20)], [np.zeros(1000) for _ in range(20)]
    before = [sys.getrefcount(array) for array in source + target]
    for _ in range(5):
        tb.copy(source, out=target)
    assert [sys.getrefcount(array) for array in source + target] == before
    assert all(array.sum() == 1000 for array in target)


def test_a_copier_copies_again() -> None:
    sources = {"a": [torch.zeros(3), np.zeros((4, 5), np.float32)], "step": 1}
    targets = {"a": (np.zeros(3, np.float32), torch.zeros(5, 4).t()), "step": 2}
    update = tb.copier(sources, out=targets)
    assert (len(update), repr(update)) == (2, "<Copier of 2 tensors>")
    assert not targets["a"][0].any(), "nothing is copied before the call"
    for value in (1.0, 2.0):
        sources["a"][0].fill_(value)
        sources["a"][1][...] = 10 * value
        assert update() is targets
        assert targets["a"][0].tolist() == [value] * 3
        assert bool((targets["a"][1] == 10 * value).all())
    one = tb.copier(sources["a"][0], out=targets["a"][0])
    assert repr(one) == "<Copier of 1 tensor>"
    sources["a"][0].fill_(7)
    assert one() is targets["a"][0] and targets["a"][0].tolist() == [7] * 3


def test_a_copier_keeps_its_tensors_and_lets_them_go() -> None:
    source, target = np.ones(5), np.zeros(5)
    counts = sys.getrefcount(source), sys.getrefcount(target)
    update = tb.copier([source], out=[target])
    update()
    assert sys.getrefcount(source) > counts[0]
    del update
    assert (sys.getrefcount(source), sys.getrefcount(target)) == counts


class Held(list[Any]):
    """A tree that may keep its copier."""


def test_a_tree_that_keeps_its_copier_is_collected() -> None:
    tree: Any = Held([np.zeros(3)])
    tree.update = tb.copier([np.ones(3)], out=tree)
    gone = weakref.ref(tree)
    del tree
    gc.collect()
    assert gone() is None


def test_an_unchecked_copier_notices_it_beside_memory_that_stays() -> None:
    source, target = torch.ones(3), np.zeros(3, np.float32)
    update = tb.copier([source], out=[target], check=False)
    update()
    source.data = torch.full((3,), 7.0)
    with pytest.raises(tb.BridgeError, match=r"tree\[0\]: .* another address"):
        update()
    assert target.tolist() == [1, 1, 1]


def test_an_unchecked_copier_copies_views_as_they_were() -> None:
    source, target = torch.arange(12.0), torch.zeros(12)
    src, out = list(source.split(3)), list(target.split(3))
    update = tb.copier(src, out=out, check=False)
    src[2].data = torch.full((3,), 7.0)
    update()
    assert torch.equal(source, target), "what the view was is copied"
    src[0].data = torch.full((3,), 7.0)
    with pytest.raises(tb.BridgeError, match=r"tree\[0\]: .* another address"):
        update()


#: Methods of PyTorch that replace the memory of a tensor.
REPLACE: dict[str, Callable[[Any], Any]] = {
    "emptied": lambda tensor: tensor.untyped_storage().resize_(0),
    "set": lambda tensor: tensor.set_(torch.zeros(3)),
    "swapped": lambda tensor: torch.utils.swap_tensors(tensor, torch.zeros(3)),
    "data": lambda tensor: setattr(tensor, "data", torch.full((3,), 7.0)),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("replace", REPLACE)
def test_a_copier_notices_memory_of_each_tensor_that_was_replaced(replace: str, check: bool) -> None:
    for place in range(8):
        src, out = [torch.ones(3) for _ in range(4)], [torch.zeros(3) for _ in range(4)]
        update = tb.copier(src, out=out, check=check)
        update()
        assert all(bool((one == 1).all()) for one in out)
        REPLACE[replace]((src + out)[place])
        with pytest.raises(tb.BridgeError, match=rf"tree\[{place % 4}\]"):
            update()


def test_autograd_notices_each_write_of_a_copy() -> None:
    whole, alone = torch.zeros(4), torch.zeros(2)
    out = [alone, np.zeros(2, np.float32), whole[:2], whole[2:]]
    before = alone._version, whole._version
    tb.copy([torch.ones(2)] * 4, out=out)
    assert (alone._version, whole._version) >= (before[0] + 1, before[1] + 2)
    counted = [torch.zeros(2) for _ in range(3)]
    tb.copy([torch.ones(2)] * 3, out=counted)
    assert [tensor._version for tensor in counted] == [1, 1, 1]
    with torch.inference_mode():
        out = [torch.zeros(2), torch.zeros(2)]
    tb.copy([torch.ones(2)] * 3, out=[*out, counted[0]])
    assert counted[0]._version == 2 and out[1].tolist() == [1, 1]
    with torch.inference_mode():
        assert [x.tolist() for x in tb.copy([torch.ones(2)] * 2, out=out)] == [[1, 1]] * 2


@pytest.mark.parametrize("check", [True, False])
def test_autograd_notices_each_write_of_a_copier(check: bool) -> None:
    whole, alone = torch.zeros(4), torch.zeros(2)
    out = [whole[:2], whole[2:], alone.detach(), np.zeros(2, np.float32)]
    update = tb.copier([torch.ones(2)] * 4, out=out, check=check)
    for _ in range(2):
        before = whole._version, alone._version, out[1]._version
        update()
        after = whole._version, alone._version, out[1]._version
        assert all(then < now for then, now in zip(before, after, strict=True))


def test_autograd_notices_a_write_to_a_tensor_that_counts_anew() -> None:
    base = torch.zeros(4, 4)
    view = base[1:3]
    update = tb.copier([torch.ones(2, 4)], out=[view])
    torch.utils.swap_tensors(view, view.data)
    before = view._version
    update()
    assert view._version > before


def test_a_copier_refuses_a_write_that_was_forbidden() -> None:
    target = np.zeros(3)
    update = tb.copier([np.ones(3)], out=[target])
    target.flags.writeable = False
    with pytest.raises(tb.BridgeError, match="read-only"):
        update()
    assert not target.any()


def test_a_copier_refuses_what_has_changed() -> None:
    source, target = torch.ones(6), torch.zeros(6)
    update = tb.copier({"w": [torch.ones(2), source]}, out={"w": [torch.zeros(2), target]})
    update()
    target.zero_()
    source.resize_(0)
    with pytest.raises(tb.BridgeError, match=r"tree\['w'\]\[1\]: changed since .*: a tensor of shape \[0\]") as error:
        update()
    assert error.value.kind == "layout"
    source.untyped_storage().resize_(0)
    source.set_(torch.ones(6).untyped_storage(), 0, (6,))
    with pytest.raises(tb.BridgeError, match=r"tree\['w'\]\[1\]: the source has another address or layout") as error:
        update()
    assert error.value.kind == "layout" and not target.any()
    target.requires_grad_(True)
    with pytest.raises(tb.BridgeError, match="requires"):
        update()


#: Changes of one tensor, each in one respect, and how each is undone.
CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "shape": (lambda t: t.transpose_(0, -1), lambda t: t.transpose_(0, -1)),
    "strides": (lambda t: t.as_strided_(t.shape, [7] * t.ndim), lambda t: t.as_strided_(t.shape, STRIDES[t.ndim])),
    "offset": (lambda t: t.as_strided_(t.shape, t.stride(), 1), lambda t: t.as_strided_(t.shape, t.stride(), 0)),
    "dtype": (
        lambda t: setattr(t, "data", t.view(torch.float64)),
        lambda t: setattr(t, "data", t.view(torch.complex64)),
    ),
    "conjugation": (lambda t: torch._C._set_conj(t, True), lambda t: torch._C._set_conj(t, False)),
    "negation": (lambda t: torch._C._set_neg(t, True), lambda t: torch._C._set_neg(t, False)),
    "gradients": (lambda t: t.requires_grad_(True), lambda t: t.requires_grad_(False)),
    "dimensions": (lambda t: t.unsqueeze_(1), lambda t: t.squeeze_(1)),
}

#: The strides of a compact tensor of shape (2, 3, 2, 3, …).
STRIDES = {ndim: [math.prod((2, 3, 2, 3, 2, 3)[d + 1 : ndim]) for d in range(ndim)] for ndim in (2, 5, 6)}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ndim", STRIDES)
@pytest.mark.parametrize("side", [0, 1])
def test_a_copier_notices_each_change_of_a_tensor(change: str, ndim: int, side: int) -> None:
    """PyTorch stores up to five dimensions in the tensor itself, and more in a separate allocation."""

    def make(value: float) -> Any:
        memory = torch.full((4096,), value, dtype=torch.complex64)
        return memory.as_strided((2, 3, 2, 3, 2, 3)[:ndim], STRIDES[ndim])

    sides = make(1), make(0)
    update = tb.copier([torch.ones(2), sides[0]], out=[torch.zeros(2), sides[1]])
    do, undo = CHANGES[change]
    for _ in range(2):
        update()
        sides[1].zero_()
        do(sides[side])
        with pytest.raises(tb.BridgeError, match=r"^tree\[1\]: "):
            update()
        undo(sides[side])
        assert not sides[1].any(), "nothing is written"
        update()
        assert bool((sides[1] == sides[0]).all())


@pytest.mark.parametrize("case", ["shape", "two targets", "a missing key", "a number for a tensor", "requires grad"])
def test_a_copier_refuses_what_copy_refuses(case: str) -> None:
    refused(case, tb.copier, np.zeros(5, np.float32))


def test_a_copier_refuses_a_capsule() -> None:
    with pytest.raises(tb.BridgeValueError, match="consumes"):
        tb.copier([torch.ones(3).__dlpack__()], out=[torch.zeros(3)])


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize(
    ("before", "after"),
    [([4, 4, 4, 4], [8, 8]), ([3] * 8, [8, 8, 8]), ([5, 0, 2, 9], [1, 7, 0, 8]), ([16], [1] * 16), ([0], [0, 0])],
)
def test_shards_are_cut_anew(before: list[int], after: list[int], dim: int) -> None:
    axis = dim % 3
    whole = np.random.default_rng(1).random((sum(before),) * 1 + (3, 5)).swapaxes(0, axis)
    sources = np.split(whole, np.cumsum(before)[:-1], axis)
    targets = np.split(np.zeros_like(whole), np.cumsum(after)[:-1], axis)
    src, out = tb.reshard(sources, [torch.from_numpy(target) for target in targets], dim)
    assert len(src) == len(out) <= len(before) + len(after)
    tb.copy(src, out=out)
    np.testing.assert_array_equal(np.concatenate(targets, axis), whole)


def zeros(*shapes: int | tuple[int, ...]) -> list[np.ndarray]:
    return [np.zeros(shape) for shape in shapes]


#: Sources, targets, the dimension, and what is said of them.
SHARDS: list[tuple[Any, list[np.ndarray], Any, str]] = [
    (zeros(4), zeros(5), 0, "the sources have 4 elements along dimension 0 and the targets 5"),
    (zeros(4), zeros(4), 1, r"sources\[0\] has the shape \(4,\), without a dimension 1"),
    (zeros(3), zeros((3, 3)), 0, "may differ along dimension"),
    (zeros(2, 2), zeros((4, 2)), 0, "may differ along dimension"),
    (zeros((1, 3), (2, 3)), zeros((2, 6)), 1, "may differ along dimension"),
    (zeros((2, 1)), zeros((2, 3)), 0, "may differ along dimension"),
    ([[1.0]], zeros(2), 0, r"sources\[0\] is a list"),
    ([None], zeros(2), 0, "no shape"),
    (None, zeros(2), 0, "pass a list of tensors"),
    (zeros(2), zeros(2), 0.5, "dim is 0.5: it must be an integer"),
    ([torch.eye(2).to_sparse()], zeros((1, 2), (1, 2)), 0, "pass dense tensors"),
]


@pytest.mark.parametrize(("sources", "targets", "dim", "text"), SHARDS)
def test_shards_that_do_not_fit_are_refused(sources: Any, targets: Any, dim: Any, text: str) -> None:
    with pytest.raises(tb.BridgeError, match=text) as error:
        tb.reshard(sources, targets, dim)
    assert error.value.kind == "layout" or "may differ" not in text


def test_shards_may_come_from_a_generator() -> None:
    target = np.zeros(4)
    src, out = tb.reshard((np.full(2, float(i)) for i in range(2)), (part for part in [target]))
    tb.copy(src, out=out)
    assert target.tolist() == [0, 0, 1, 1]


def test_the_same_elements_with_another_deferred_operation_are_another_copy() -> None:
    source = torch.randn(20, dtype=torch.complex64)
    target = torch.zeros_like(source)
    with pytest.raises(tb.BridgeError, match="the two targets share memory"):
        tb.copy([source, source.conj()], out=[target, target])
    update = tb.copier([source] * 10, out=[torch.zeros_like(source) for _ in range(10)])
    update()
    source.data = source.data.conj()
    with pytest.raises(tb.BridgeError, match="prepare the copies again|make a new copier"):
        update()
