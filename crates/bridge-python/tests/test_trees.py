"""Trees of tensors: each container keeps its kind, each leaf shares its memory, and errors name the path to it."""

from __future__ import annotations

import collections
import dataclasses
import gc
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest

import memory
import truebridge as tb
from capsules import Wrapper

torch: Any = pytest.importorskip("torch")


class Point(NamedTuple):
    x: Any
    label: str


@dataclasses.dataclass
class Layer:
    weight: Any
    name: str = "layer"
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.made += 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    weight: Any
    bias: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    weight: Any


class Registry(dict):  # type: ignore[type-arg]
    """A subclass with an attribute."""

    tag = "none"


def ones() -> torch.Tensor:
    return torch.ones(2)


def shares(array: Any, tensor: torch.Tensor) -> bool:
    return isinstance(array, np.ndarray) and array.ctypes.data == tensor.data_ptr()


def test_every_container_keeps_its_kind_and_every_leaf_its_memory() -> None:
    leaves = [ones() for _ in range(9)]
    registry = Registry(t=leaves[7])
    registry.tag = "mine"
    tree = {
        "list": [leaves[0], 1],
        3: (leaves[1], "text"),
        "point": Point(leaves[2], "p"),
        "layer": Layer(leaves[3]),
        "frozen": Frozen(leaves[4], bias={"t": leaves[5]}),
        "slotted": Slotted(leaves[6]),
        "registry": registry,
        "default": collections.defaultdict(list, t=leaves[8]),
    }
    out = tb.to_numpy(tree)
    assert list(out) == list(tree) and type(out) is dict
    assert shares(out["list"][0], leaves[0]) and out["list"][1] == 1 and type(out["list"]) is list
    assert shares(out[3][0], leaves[1]) and out[3][1] == "text" and type(out[3]) is tuple
    assert type(out["point"]) is Point and shares(out["point"].x, leaves[2]) and out["point"].label == "p"
    layer = out["layer"]
    assert type(layer) is Layer and shares(layer.weight, leaves[3]) and (layer.name, layer.made) == ("layer", 1)
    assert type(out["frozen"]) is Frozen and shares(out["frozen"].weight, leaves[4])
    assert shares(out["frozen"].bias["t"], leaves[5])
    assert type(out["slotted"]) is Slotted and shares(out["slotted"].weight, leaves[6])
    assert type(out["registry"]) is Registry and shares(out["registry"]["t"], leaves[7])
    assert out["registry"].tag == "mine"
    assert type(out["default"]) is collections.defaultdict and out["default"].default_factory is list
    assert shares(out["default"]["t"], leaves[8])
    # The tree itself is as it was.
    assert tree["list"][0] is leaves[0] and tree["layer"].weight is leaves[3]  # type: ignore[index, attr-defined]


def test_the_state_of_a_module_goes_there_and_back() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = module.state_dict()
    arrays = tb.convert(state, "numpy")
    assert type(arrays) is collections.OrderedDict and list(arrays) == list(state)
    assert arrays._metadata is state._metadata
    assert all(shares(arrays[name], tensor) for name, tensor in state.items())
    arrays["0.weight"][:] = 5
    assert module[0].weight.sum().item() == 60
    back = tb.to_torch(arrays)
    assert all(back[name].data_ptr() == state[name].data_ptr() for name in state)
    module.load_state_dict(back)


def test_results_of_torch_are_trees() -> None:
    result = tb.to_numpy(torch.tensor([[1.0, 3.0], [4.0, 2.0]]).max(dim=1))
    assert type(result) is torch.return_types.max
    assert result.values.tolist() == [3, 4] and isinstance(result.indices, np.ndarray)


def test_leaves_of_several_frameworks() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    array = np.arange(3.0)
    tree = [torch.ones(2), array, tensorflow.constant([1.0, 2.0]), Wrapper(np.ones(4))]
    out = tb.to_torch(tree)
    assert [type(leaf) for leaf in out] == [torch.Tensor] * 4
    assert out[0].data_ptr() == tree[0].data_ptr() and out[1].data_ptr() == array.ctypes.data
    assert out[2].tolist() == [1, 2]


@pytest.mark.parametrize(
    "leaf", [None, 1, 1.5, "a", b"a", np.float32(2), np.str_("a"), torch.float32, torch.Tensor, {}]
)
def test_leaves_that_are_no_tensors_pass_through(leaf: object) -> None:
    assert tb.to_numpy([leaf, ones()])[0] is leaf


def test_a_tensor_that_stands_twice_is_one_result() -> None:
    tensor, shared = ones(), [ones()]
    out = tb.to_numpy({"a": tensor, "b": [tensor, shared], "c": shared})
    assert out["a"] is out["b"][0]
    assert out["b"][1] is out["c"] and out["c"] is not shared


def test_sharing_keeps_a_wide_tree_small() -> None:
    tree: list[Any] = [ones()]
    for _ in range(60):
        tree = [tree, tree]
    out = tb.to_numpy(tree)
    while isinstance(out, list):
        assert all(item is out[0] for item in out)
        out = out[0]
    assert out.sum() == 2


def test_containers_without_tensors_are_not_copied() -> None:
    plain, empty = {"a": [1, 2]}, collections.Counter()  # type: ignore[var-annotated]
    out = tb.to_numpy([plain, empty, (1, 2), ones()])
    assert out[0] is plain and out[1] is empty


def test_the_arguments_hold_for_each_leaf() -> None:
    tree = {"a": ones(), "b": torch.ones(2, 3).T}
    copies = tb.to_numpy(tree, copy=True)
    assert not any(shares(copies[name], tensor) for name, tensor in tree.items())
    assert tb.to_numpy(tree, device="cpu")["b"].shape == (3, 2)
    with pytest.raises(tb.BridgeValueError, match=r"^tree\['a'\]: .*cuda:0"):
        tb.to_numpy(tree, device="cuda:0")


def test_plans_of_a_tree() -> None:
    plans = tb.plan({"a": [ones(), 3], "b": Point(np.ones(3)[::-1], "p")}, "torch")
    assert plans["a"][0].zero_copy and plans["a"][1] == 3
    assert plans["b"].x.reason == "negative strides" and plans["b"].label == "p"


def bad() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def cycle() -> list[Any]:
    tree: list[Any] = [ones()]
    tree.append({"again": tree})
    return tree


def deep(levels: int) -> Any:
    tree: Any = ones()
    for _ in range(levels):
        tree = [tree]
    return tree


@dataclasses.dataclass
class Uncopied:
    weight: Any

    def __copy__(self) -> Uncopied:
        raise ZeroDivisionError("planned")


class BadKey:
    def __repr__(self) -> str:
        raise ZeroDivisionError("planned")


class BadAttribute:
    @property
    def __dlpack__(self) -> object:
        raise ZeroDivisionError("planned")


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "key": ({"layers": [ones(), {"w": bad()}]}, BufferError, r"^tree\['layers'\]\[1\]\['w'\]: .*detach"),
    "field": ([Layer(bad())], BufferError, r"^tree\[0\].weight: .*detach"),
    "element": ((Point(bad(), "p"),), BufferError, r"^tree\[0\].x: .*detach"),
    "struct": ([torch.eye(2).to_sparse(), ones()], TypeError, r"^tree\[0\]: .*to_dense"),
    "strings": ({"a": np.array(["text"])}, TypeError, r"^tree\['a'\]: .*counterpart"),
    "no repr": ({BadKey(): bad()}, BufferError, r"^tree\[\?\]: .*detach"),
    "cycle": (cycle(), ValueError, r"^tree\[1\]\['again'\]: .*holds itself"),
    "deep": (deep(101), ValueError, r"^tree(\[0\])*: more than 100 containers"),
    "no copy": ([{"a": Uncopied(ones())}], RuntimeError, r"^tree\[0\]\['a'\]: .*ZeroDivisionError: planned"),
    "attribute": ([ones(), BadAttribute()], RuntimeError, r"^tree\[1\]: .*ZeroDivisionError: planned"),
    "numbers": ([1, [2]], TypeError, "^list is not a tensor"),
    "texts": ({"a": "b"}, TypeError, "^dict is not a tensor"),
    "class": (Layer, TypeError, "not a tensor"),
    "empty field": (Layer("x"), TypeError, "Layer is not a tensor"),
}


@pytest.mark.parametrize("empty", [[], (), {}, [[], {}]], ids=repr)
def test_an_empty_container_is_returned_itself(empty: Any) -> None:
    assert tb.to_numpy(empty) is empty and tb.plan(empty, "torch") is empty


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_the_path(name: str) -> None:
    tree, error, text = REFUSED[name]
    with pytest.raises(error, match=text) as caught:
        tb.to_numpy(tree)
    assert isinstance(caught.value, tb.BridgeError)
    if name != "no copy":
        with pytest.raises(error, match=text):
            tb.plan(tree, "numpy")


def test_the_depth_is_a_bound_and_no_more() -> None:
    out = tb.to_numpy(deep(100))
    while isinstance(out, list):
        out = out[0]
    assert out.sum() == 2


def test_an_error_releases_what_was_converted() -> None:
    tree = [torch.ones(2) for _ in range(20)]
    watched = [weakref.ref(tensor) for tensor in tree]
    tree.append(bad())
    before = memory.views()
    with pytest.raises(tb.BridgeBufferError):
        tb.to_numpy(tree)
    del tree
    gc.collect()
    assert not any(ref() is not None for ref in watched)
    memory.eventually(lambda: memory.views() == before)


def test_interrupts_pass_through() -> None:
    class Interrupted:
        @property
        def __dlpack__(self) -> object:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tb.to_numpy([ones(), Interrupted()])


def test_a_tree_that_changes_while_it_is_walked() -> None:
    tree: dict[str, Any] = {}

    class Growing:
        @property
        def __dlpack__(self) -> object:
            tree[f"key {len(tree)}"] = 1
            raise AttributeError

    tree.update(a=Growing(), b=ones())
    out = tb.to_numpy(tree)
    assert shares(out["b"], tree["b"]) and out["a"] is tree["a"]


def test_a_capsule_in_a_tree_is_consumed() -> None:
    tensor = ones()
    tree = [torch.utils.dlpack.to_dlpack(tensor)]
    assert shares(tb.to_numpy(tree)[0], tensor)
    with pytest.raises(tb.BridgeBufferError, match=r"^tree\[0\]: ") as caught:
        tb.to_numpy(tree)
    assert caught.value.kind == "consumed"


def test_a_dataclass_that_is_a_tensor_is_one() -> None:
    @dataclasses.dataclass
    class Wrapped(Wrapper):
        tensor: Any

    wrapped = Wrapped(ones())
    assert shares(tb.to_numpy(wrapped), wrapped.tensor)
    assert shares(tb.to_numpy([wrapped])[0], wrapped.tensor)
