"""Containers beyond dict, list and tuple: each is converted whole, or refused with the path to what holds a tensor."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """As the BatchEncoding of transformers."""

    def __init__(self, data: Any, encodings: Any = None) -> None:
        super().__init__(data)
        self.encodings = encodings


class Elsewhere(list):  # type: ignore[type-arg]
    """A list whose elements are not where a list keeps them."""

    def __init__(self, items: Any = ()) -> None:
        super().__init__()
        self.items = list(items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.items[index] = value

    def append(self, value: Any) -> None:
        self.items.append(value)


class Twofold(dict):  # type: ignore[type-arg]
    """A dict that shows other elements than a dict would keep for it."""

    def items(self) -> Any:
        return [(key, value[0]) for key, value in super().items()]


class Shown(tuple):  # type: ignore[type-arg]
    """A tuple that shows other elements than a tuple keeps."""

    def __iter__(self) -> Iterator[Any]:
        return (item[0] for item in super().__iter__())


class Tagged(tuple):  # type: ignore[type-arg]
    """A tuple with an attribute."""

    tag: str


def tagged(tensor: Any) -> Tagged:
    made = Tagged([tensor])
    made.tag = "kept"
    return made


class Itself(dict):  # type: ignore[type-arg]
    """A dict whose copy is itself."""

    def __copy__(self) -> Itself:
        return self


class Attributes(dict):  # type: ignore[type-arg]
    """A dict whose elements are its attributes, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Table(Mapping[str, Any]):
    """A mapping whose copy would share its elements."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


class Row(Sequence[Any]):
    """A sequence."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    def __len__(self) -> int:
        return len(self.data)


class Slots:
    """An object without a dict."""

    __slots__ = ("weight",)

    def __init__(self, weight: Any) -> None:
        self.weight = weight


class Plain:
    """An object."""

    def __init__(self, weight: Any) -> None:
        self.layers = {"first": [weight]}


def ones() -> Any:
    return torch.ones(2)


#: How each container is made of a tensor, its class after a conversion, and how its element is read.
CONVERTED: dict[str, tuple[Callable[[Any], Any], type, Callable[[Any], Any]]] = {
    "UserDict": (lambda t: collections.UserDict(a=t), collections.UserDict, lambda c: c["a"]),
    "of UserDict": (lambda t: Encoding({"a": t}, "kept"), Encoding, lambda c: c["a"]),
    "UserList": (lambda t: collections.UserList([t]), collections.UserList, lambda c: c[0]),
    "deque": (lambda t: collections.deque([t], 3), collections.deque, lambda c: c[0]),
    "ChainMap": (lambda t: collections.ChainMap({"a": t}), dict, lambda c: c["a"]),
    "mappingproxy": (lambda t: types.MappingProxyType({"a": t}), types.MappingProxyType, lambda c: c["a"]),
    "ParameterDict": (lambda t: torch.nn.ParameterDict({"a": t}), dict, lambda c: c["a"]),
    "ParameterList": (lambda t: torch.nn.ParameterList([t]), list, lambda c: c[0]),
    "Mapping": (lambda t: Table({"a": t}), dict, lambda c: c["a"]),
    "Sequence": (lambda t: Row([t]), list, lambda c: c[0]),
    "list elsewhere": (lambda t: Elsewhere([t]), list, lambda c: c[0]),
    "dict elsewhere": (lambda t: Twofold(a=[t]), dict, lambda c: c["a"]),
    "tuple elsewhere": (lambda t: Shown([[t]]), tuple, lambda c: c[0]),
    "of tuple": (tagged, Tagged, lambda c: c[0] if c.tag == "kept" else None),
    "dict that copies itself": (lambda t: Itself(a=t), dict, lambda c: c["a"]),
    "attributes": (lambda t: Attributes(a=t), Attributes, lambda c: c.a),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_container_is_converted_and_stays_as_it_was(name: str) -> None:
    make, kind, element = CONVERTED[name]
    tensor, own = ones(), [1]
    tree = {"rows": [make(tensor)], "own": own}
    out = tb.to_numpy(tree, detach=True)
    made = element(out["rows"][0])
    assert type(out["rows"][0]) is kind and type(made) is np.ndarray and made.ctypes.data == tensor.data_ptr()
    assert out["own"] is own and tb.plan(tree, "numpy", detach=True)["own"] is own
    before = tree["rows"][0]
    found = next(iter(before.values() if isinstance(before, (Mapping, torch.nn.ParameterDict)) else before))
    if name != "dict elsewhere" and name != "tuple elsewhere":
        assert isinstance(found, torch.Tensor) and len(before) == 1
    assert isinstance(element(tb.to_numpy(make(ones()), detach=True)), np.ndarray)


@pytest.mark.parametrize("name", CONVERTED)
def test_a_container_is_copied_from_and_into(name: str) -> None:
    make = CONVERTED[name][0]
    source, target, again = torch.full((2,), 7.0), ones(), ones()
    into, into_again = make(target), make(again)
    for parameters in (into, into_again):
        if isinstance(parameters, torch.nn.Module):
            parameters.requires_grad_(False)
    tb.copy({"head": plain(name, source)}, out={"head": into})
    assert target.tolist() == [7, 7]
    tb.copier([into], out=[into_again])()
    assert again.tolist() == [7, 7]


def plain(name: str, tensor: Any) -> Any:
    """Return a dict or a list, whichever goes together with the container."""
    return {"a": tensor} if issubclass(CONVERTED[name][1], (Mapping, types.MappingProxyType)) else [tensor]


#: Objects that are not containers, and the path to the tensor in each.
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "namespace": (lambda t: types.SimpleNamespace(a=t), r"x\.a"),
    "Linear": (lambda _: torch.nn.Linear(1, 1), r"x\._parameters\['weight'\]"),
    "Sequential": (
        lambda _: torch.nn.Sequential(torch.nn.Linear(1, 1)),
        r"x\._modules\['0'\]\._parameters\['weight'\]",
    ),
    "object": (Plain, r"x\.layers\['first'\]\[0\]"),
    "slots": (Slots, r"x\.weight"),
    "set": (lambda t: {t}, r"x\.\*"),
    "frozenset": (lambda t: frozenset([t]), r"x\.\*"),
    "values": (lambda t: {"a": t}.values(), r"x\.\*"),
    "partial": (lambda t: functools.partial(print, t), r"x\.\*\[0\]"),
    "exception": (lambda t: ValueError("text", t), r"x\.\*\[1\]"),
    "iterator": (lambda t: iter([t]), r"x\.\*\[0\]"),
    "map": (lambda t: map(abs, (t,)), r"x\.\*\[0\]\.\*\[0\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_holds_a_tensor_and_is_not_a_container_is_refused(name: str) -> None:
    make, where = REFUSED[name]
    text = rf"^tree\['head'\]: .* holds a tensor \({where}\): pass (a dict|module\.state_dict)"
    source, target = ({"head": make(ones()), "x": ones()} for _ in range(2))
    calls: list[Callable[[], Any]] = [
        lambda: tb.to_numpy(source),
        lambda: tb.convert(source, "numpy"),
        lambda: tb.plan(source, "numpy"),
        lambda: tb.lend(source),
        lambda: tb.copy(source, out=target),
        lambda: tb.copier(source, out=target),
        lambda: tb.copy({"head": 1, "x": ones()}, out=target),
        lambda: tb.copy(source, out={"head": 1, "x": ones()}),
    ]
    for call in calls:
        with pytest.raises(tb.BridgeTypeError, match=text) as caught:
            call()
        assert caught.value.kind == "not_a_tensor"
    with pytest.raises(tb.BridgeTypeError, match=r"^tree\['head'\]: "):
        tb.share(source)
    # The arguments of a function are not a tree: it takes what it takes.
    assert tb.call(lambda head, x: head, source["head"], ones()) is source["head"]


class Scaled(list[Any]):
    def __init__(self, elements: list[Any], scale: Any) -> None:
        super().__init__(elements)
        self.scale, self.first, self.parent = scale, elements[0], None


@dataclasses.dataclass
class Fields(dict[str, Any]):
    scale: Any = None


def test_a_container_with_a_tensor_besides_its_elements_is_refused() -> None:
    fields = Fields({"scale": [ones()]})
    fields["x"] = ones()
    for tree, path in [(Scaled([ones()], ones()), r"x\.scale"), (fields, r"x\.scale\['scale'\]\[0\]")]:
        for call in (tb.to_numpy, lambda x: tb.plan(x, "numpy"), lambda x: tb.copy(x, out=x)):
            with pytest.raises(tb.BridgeTypeError, match=rf"holds a tensor \({path}\) that is not one of its"):
                call(tree)
    # The attributes of a parent are its own.
    tree = Scaled([ones()], 2)
    tree.parent = Scaled([ones(), tree], 3)
    converted = tb.to_numpy(tree)
    assert (type(converted), converted[0].tolist(), converted.scale) == (Scaled, [1, 1], 2)


@pytest.mark.parametrize("make", [lambda: Plain(ones()), lambda: Elsewhere([ones()])])
def test_what_leaves_the_process_names_the_path_too(make: Callable[[], Any], tmp_path: Path) -> None:
    tree = {"head": make(), "x": ones()}
    with tb.serve(str(tmp_path / "names")) as names:
        names.publish("weights", {"head": ones(), "x": ones()})
        calls: list[Callable[[], Any]] = [
            lambda: tb.share(tree),
            lambda: names.put("other", tree),
            lambda: names.publish("other", tree),
            lambda: names.subscribe("weights", out=tree).refresh(),
            lambda: tb.save(tmp_path / "x.npz", tree),
        ]
        for call in calls:
            with pytest.raises(tb.BridgeTypeError, match=r"head.*is not a tensor"):
                call()


@dataclasses.dataclass
class Config:
    name: str = "c"


class Broken:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise ZeroDivisionError


class Circle:
    def __init__(self) -> None:
        self.own, self.kind, self.function, self.module = self, Plain, ones, sys


def raised() -> Exception:
    tensor = ones()
    try:
        raise ValueError(tensor.shape[0])
    except ValueError as error:
        return error


PASSED: dict[str, Callable[[], Any]] = {
    "raised": raised,
    "generator": lambda: (x for x in [ones()]),
    "partial": lambda: functools.partial(print, 1),
    "method": lambda: Plain(ones()).__init__,
    "iterator": lambda: iter([1, 2]),
    "namespace": lambda: types.SimpleNamespace(a=1),
    "dataclass": Config,
    "object": lambda: Plain(1),
    "slots": lambda: Slots("text"),
    "broken": Broken,
    "circle": Circle,
    "UserString": lambda: collections.UserString("abc"),
    "deque": lambda: collections.deque([1, 2]),
    "UserDict": lambda: collections.UserDict(a=1),
    "mappingproxy": lambda: types.MappingProxyType({"a": 1}),
    "set": lambda: {1, 2},
    "range": lambda: range(10**15),
    "memoryview": lambda: memoryview(b"abc"),
    "array": lambda: array.array("d", bytes(8 << 20)),
    "Size": lambda: torch.Size([1, 2]),
    "module": torch.nn.Identity,
    "array of objects": lambda: types.SimpleNamespace(kinds=np.array([object()])),
    "many": lambda: types.SimpleNamespace(vocabulary={str(i): (i,) for i in range(2000)}),
}


@pytest.mark.parametrize("name", PASSED)
def test_what_holds_no_tensor_passes_through(name: str) -> None:
    leaf = PASSED[name]()
    tree = {"leaf": leaf, "x": ones()}
    assert tb.to_numpy(tree)["leaf"] is leaf
    out = {"leaf": leaf, "x": torch.zeros(2)}
    tb.copy(tree, out=out)
    assert out["x"].tolist() == [1, 1]


def test_interrupts_of_a_container_pass() -> None:
    class Interrupted(Row):
        def __len__(self) -> int:
            raise KeyboardInterrupt

        def __getitem__(self, index: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tb.to_numpy([ones(), Interrupted([])])


def test_an_error_of_a_container_names_its_path() -> None:
    class Failing(Row):
        def __getitem__(self, index: Any) -> Any:
            raise ZeroDivisionError("planned")

    with pytest.raises(tb.BridgeRuntimeError, match=r"^tree\[1\]: .*ZeroDivisionError: planned"):
        tb.to_numpy([ones(), Failing([])])
    assert tb.to_numpy([ones(), types.SimpleNamespace(a=Failing([]))])[0].sum() == 2


def test_attributes_of_modules_of_tensorflow() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    module = tensorflow.Module()
    module.a = [tensorflow.Variable([1.0]), [tensorflow.Variable([2.0])]]
    module.d = {"k": tensorflow.Variable([3.0])}
    module.t = (tensorflow.Variable([4.0]),)
    out = tb.to_torch({"a": module.a, "d": module.d, "t": module.t})
    leaves = [out["a"][0], out["a"][1][0], out["d"]["k"], out["t"][0]]
    assert [type(leaf) for leaf in leaves] == [torch.Tensor] * 4
    assert [leaf.tolist() for leaf in leaves] == [[1], [2], [3], [4]]
    assert (type(out["a"]), type(out["d"]), type(out["t"])) == (list, dict, tuple)
    assert len(module.variables) == 4
    target = [torch.zeros(1), [torch.zeros(1)]]
    tb.copy(module.a, out=target)
    assert target[1][0].tolist() == [2]
    with pytest.raises(tb.BridgeTypeError, match=r"^tree\['m'\]: .*Module .*holds a tensor"):
        tb.to_torch({"m": module, "x": ones()})
