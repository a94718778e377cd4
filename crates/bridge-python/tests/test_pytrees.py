"""Pytrees of JAX: a conversion keeps the structure of a tree, also of classes that are registered with JAX."""

from __future__ import annotations

import collections
import dataclasses
import functools
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

import truebridge as tb

np: Any = pytest.importorskip("numpy")
jax: Any = pytest.importorskip("jax")

jnp, tree_util = jax.numpy, jax.tree_util


@tree_util.register_pytree_node_class
class Scaled:
    """A node that Python does not know as a container: its values have other names than its attributes."""

    def __init__(self, values: Any, scale: Any, *, unit: str) -> None:
        self._values, self._scale, self.unit = values, scale, unit

    def tree_flatten(self) -> tuple[tuple[Any, ...], str]:
        return (self._values, self._scale), self.unit

    @classmethod
    def tree_unflatten(cls, unit: str, children: Any) -> Scaled:
        made = object.__new__(cls)
        made._values, made._scale = children
        made.unit = unit
        return made


@functools.partial(tree_util.register_dataclass, data_fields=["weight", "bias"], meta_fields=["name", "mask"])
@dataclasses.dataclass(frozen=True)
class Layer:
    weight: Any
    bias: Any
    name: str = "layer"
    #: An array that belongs to the structure, and so is not converted.
    mask: Any = None


class Keyed:
    def __init__(self, *values: Any) -> None:
        self.values = values


tree_util.register_pytree_with_keys(
    Keyed,
    lambda node: (tuple((tree_util.DictKey(f"k{i}"), value) for i, value in enumerate(node.values)), None),
    lambda _, values: Keyed(*values),
)


class Point(NamedTuple):
    x: Any
    label: Any


def ones() -> Any:
    return jnp.ones((4, 16))


TREES: dict[str, Any] = {
    "a class with static data": lambda: Scaled(ones(), [ones()], unit="m"),
    "a dataclass": lambda: Layer(ones(), None, "first"),
    "keys": lambda: Keyed(ones(), {"b": ones(), "a": None}),
    "a named tuple": lambda: Point(ones(), None),
    "None": lambda: {"a": None, "b": ones()},
    "an ordered dict": lambda: collections.OrderedDict(b=ones(), a=ones()),
    "a default dict": lambda: collections.defaultdict(list, b=ones()),
    "a partial": lambda: tree_util.Partial(max, ones(), key=ones()),
    "one inside another": lambda: [Scaled({"a": Layer(ones(), Keyed(ones()))}, (Point(ones(), 1),), unit="s")],
    "twice": lambda: (lambda node: [node, node])(Scaled(ones(), ones(), unit="m")),
}


@pytest.mark.parametrize("target", ["numpy", "torch", "tensorflow", "jax"])
@pytest.mark.parametrize("name", TREES)
def test_a_conversion_keeps_the_structure(name: str, target: str) -> None:
    pytest.importorskip(target)
    tree = TREES[name]()
    there = tb.convert(tree, target)  # type: ignore[call-overload]
    back = tb.to_jax(there)
    expected = tree_util.tree_structure(tree)
    assert tree_util.tree_structure(there) == expected == tree_util.tree_structure(back)
    kinds = {type(leaf) for leaf in tree_util.tree_leaves(there) if not isinstance(leaf, int)}
    assert kinds == {type(tb.convert(ones(), target))}  # type: ignore[call-overload]
    for one, other in zip(tree_util.tree_leaves(tree), tree_util.tree_leaves(back), strict=True):
        assert type(one) is type(other)
        if isinstance(one, jax.Array):
            assert one.unsafe_buffer_pointer() == other.unsafe_buffer_pointer()
    plans = tree_util.tree_leaves(tb.plan(tree, target))  # type: ignore[call-overload]
    assert sum(isinstance(plan, tb.Plan) for plan in plans) == len(plans) - plans.count(1)


def test_trees_of_other_frameworks_have_registered_nodes_too() -> None:
    torch = pytest.importorskip("torch")
    node = tb.to_numpy(Scaled(torch.ones(3), torch.zeros(2), unit="m"))
    assert type(node) is Scaled and node.unit == "m"
    assert (node._values.tolist(), node._scale.tolist()) == ([1, 1, 1], [0, 0])


def test_what_belongs_to_the_structure_stays() -> None:
    mask = np.ones(3, bool)
    layer = tb.to_numpy(Layer(ones(), ones(), "first", mask))
    assert layer.mask is mask and layer.name == "first" and isinstance(layer.weight, np.ndarray)


def test_a_node_that_stands_twice_is_made_once() -> None:
    node = Scaled(ones(), ones(), unit="m")
    first, second = tb.to_numpy([node, node])
    assert first is second and first is not node


def test_a_node_without_a_tensor_passes_through() -> None:
    node = Scaled(1, "text", unit="m")
    assert tb.to_numpy([node, ones()])[0] is node
    with pytest.raises(tb.BridgeTypeError, match="Scaled is not a tensor"):
        tb.to_numpy(node)


def test_a_class_that_is_registered_is_no_node() -> None:
    with pytest.raises(tb.BridgeTypeError, match="a class is not a tensor"):
        tb.to_numpy(Layer)


def cycle() -> Any:
    node = Scaled(ones(), None, unit="m")
    node._scale = [node]
    return node


@tree_util.register_pytree_node_class
class Failing(Scaled):
    @classmethod
    def tree_unflatten(cls, unit: str, children: Any) -> Scaled:
        raise ZeroDivisionError("planned")


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (lambda: [Layer(ones(), jax.random.key(0))], r"^tree\[0\]\.bias: keys of jax.random"),
        (lambda: Keyed(ones(), jax.random.key(0)), r"^tree\['k1'\]: keys of"),
        (lambda: Scaled(jax.random.key(0), 1, unit="m"), r"^tree\[<flat index 0>\]: keys of"),
        (cycle, "this container holds itself"),
        (lambda: [Failing(ones(), 1, unit="m")], r"^tree\[0\]: .*ZeroDivisionError: planned"),
    ],
)
def test_errors_name_the_path(tree: Any, text: str) -> None:
    before = tb.stats()["leased"] - tb.stats()["released"]
    with pytest.raises(tb.BridgeError, match=text):
        tb.to_numpy(tree())
    assert tb.stats()["leased"] - tb.stats()["released"] == before


def test_a_result_is_an_argument_of_a_compiled_function() -> None:
    torch = pytest.importorskip("torch")
    layer = tb.to_jax(Layer(torch.ones(3, 2), torch.ones(2)))
    apply = jax.jit(lambda layer, x: x @ layer.weight + layer.bias)
    assert tb.to_torch(apply(layer, jnp.ones((1, 3)))).tolist() == [[4, 4]]


def test_trees_import_no_jax() -> None:
    text = """
import sys, numpy as np, truebridge as tb
class Other: pass
print(type(tb.to_numpy([np.ones(3), Other()])[1]).__name__, "jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["Other", "False"]
