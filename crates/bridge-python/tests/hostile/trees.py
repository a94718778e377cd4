"""Trees of tensors, and containers that do not behave."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import truebridge as tb
from hostile.subjects import Case, Subject, raise_named, used_capsule

VALUES = [1.0, 2.0]


@dataclasses.dataclass
class Layer:
    weight: Any = None
    rest: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A dataclass without a dict that cannot be assigned to."""

    weight: Any = None
    rest: Any = None


class Registry(dict):  # type: ignore[type-arg]
    """A subclass of a container."""


class Point(NamedTuple):
    x: Any
    rest: Any


class Producer:
    """A tensor of no framework."""

    def __init__(self, before: Callable[[], Any] = lambda: None) -> None:
        self.array, self.before = np.array(VALUES), before

    def __dlpack__(self, **_: Any) -> Any:
        self.before()
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return (1, 0)


def struct(children: list[Any]) -> Any:
    """A struct sequence of two elements."""
    import torch

    return torch.return_types.max((children[0], children[1]))


def two(children: list[Any]) -> list[Any]:
    """Return the first two, ``None`` where there are fewer."""
    return [*children, None, None][:2]


CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "dict": lambda children: dict(enumerate(children)),
    "list": list,
    "tuple": tuple,
    "named": lambda children: Point(*two(children)),
    "struct": lambda children: struct(two(children)),
    "dataclass": lambda children: Layer(*two(children)),
    "frozen": lambda children: Frozen(*two(children)),
    "registry": lambda children: Registry({("key", i): child for i, child in enumerate(children)}),
}


def torch_tensor() -> Any:
    import torch

    return torch.tensor(VALUES)


LEAVES: dict[str, Callable[[], Any]] = {
    "array": lambda: np.array(VALUES),
    "tensor": torch_tensor,
    "capsule": lambda: np.array(VALUES).__dlpack__(),
    "producer": Producer,
    "number": lambda: 3,
    "text": lambda: "text",
    "none": lambda: None,
}


def made(node: Any, shared: Any) -> Any:
    if isinstance(node, list):
        return CONTAINERS[node[0]]([made(child, shared) for child in node[1:]])
    return shared if node == "same" else LEAVES[node]()


def parts(tree: Any) -> list[Any]:
    """What a container holds; nothing for a leaf."""
    if isinstance(tree, dict):
        return list(tree.values())
    if isinstance(tree, (list, tuple)):
        return list(tree)
    return [tree.weight, tree.rest] if isinstance(tree, (Layer, Frozen)) else []


def is_tensor(leaf: Any) -> bool:
    """Whether the package converts it."""
    return type(leaf).__name__ in ("ndarray", "Tensor", "Producer", "PyCapsule")


def holds_tensor(tree: Any) -> bool:
    """Whether a tensor is anywhere in it."""
    return is_tensor(tree) or any(map(holds_tensor, parts(tree)))


def difference(before: Any, after: Any, target: str) -> str:
    """What is wrong with a converted tree: other containers, other values, tensors of another framework."""
    if parts(before):
        inside = zip(parts(before), parts(after), strict=True)
        kind = "" if type(after) is type(before) else f"{type(before).__name__} became {type(after).__name__}"
        return kind or next((words for pair in inside if (words := difference(*pair, target))), "")
    if is_tensor(before):
        if type(after).__module__.partition(".")[0] != target:
            return f"a {type(before).__name__} became a {type(after).__name__}"
        return "" if after.tolist() == VALUES else f"other values: {after!r:.100}"
    return "" if after is before or after == before else f"{before!r} became {after!r:.100}"


class Later:
    """An object whose methods raise after ``armed`` was set."""

    def __init__(self, word: str, methods: list[str]) -> None:
        self.armed = False

        def method(name: str) -> Any:
            def call(this: Any, *_: Any) -> Any:
                return raise_named(word) if self.armed else {"__hash__": 1, "__eq__": False}.get(name, "key")

            return call

        self.made = type("Key", (), {name: method(name) for name in methods})()


def hostile_key(word: str, methods: list[str]) -> Any:
    """A dict with a key whose methods raise."""
    later = Later(word, methods)
    tree = {later.made: Producer(), 1: np.array(VALUES)}
    later.armed = True
    return tree


def key_that_raises_later(word: str) -> Any:
    """A dict with a key that raises from the first export on."""
    later = Later(word, ["__hash__", "__eq__"])

    def arm() -> None:
        later.armed = True

    return {1: Producer(arm), later.made: np.array(VALUES)}


def raising(base: type, method: str, word: str) -> Any:
    """An instance of a subclass with a method that raises."""
    return type("Raising", (base,), {method: lambda self, *_: raise_named(word)})()


def filled(container: Any) -> Any:
    """A container that does not behave, with a tensor in it, whatever its methods do."""
    if isinstance(container, dict):
        dict.__setitem__(container, 0, np.array(VALUES))
    else:
        list.append(container, np.array(VALUES))
    return container


def with_copy(answer: Callable[[], Any]) -> Any:
    """A list with its own ``__copy__``."""
    return type("Copied", (list,), {"__copy__": lambda self: answer()})([np.array(VALUES)])


def cycle(make: Callable[[], Any], close: Callable[[Any], Any]) -> Any:
    tree = make()
    close(tree)
    return [tree]


def nested(depth: int) -> Any:
    tree: Any = np.array(VALUES)
    for _ in range(depth):
        tree = [tree]
    return tree


def changing(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A container that a tensor in it changes when it is exported."""
    tree[0] = Producer(lambda: change(tree))
    return tree


def dataclass_with(word: str, **methods: Any) -> Any:
    """An instance of a dataclass with methods that raise, made without its ``__init__``."""
    raised = {name: lambda self, *_, **__: raise_named(word) for name, found in methods.items() if found is None}
    cls = dataclasses.dataclass(type("Odd", (Layer,), raised))
    tree = object.__new__(cls)
    object.__getattribute__(tree, "__dict__").update(weight=np.array(VALUES), rest=None)
    return tree


def fields_of(fields: Any) -> Any:
    return type("Imitation", (), {"__dataclass_fields__": fields, "weight": np.array(VALUES)})()


class RaisingClass(type):
    word = "ValueError"

    def __getattr__(cls, _: str) -> Any:
        return raise_named(cls.word)


def named_with(**attributes: Any) -> Any:
    odd = {name: classmethod(found) if callable(found) else found for name, found in attributes.items()}
    return tuple.__new__(type("Odd", (Point,), odd), (np.array(VALUES), [np.array(VALUES)]))


def struct_with(new: Callable[..., Any]) -> Any:
    """A tuple that looks like a struct sequence, whose class makes no others."""
    return tuple.__new__(type("Struct", (tuple,), {"n_sequence_fields": 1, "__new__": new}), (np.array(VALUES),))


HOSTILE: dict[str, Callable[[str], Any]] = {
    "cycle": lambda _: cycle(lambda: [np.array(VALUES)], lambda tree: tree.append(tree)),
    "cycle of a dataclass": lambda _: cycle(Layer, lambda tree: setattr(tree, "rest", {"tree": tree})),
    "deep": lambda _: nested(101),
    "very deep": lambda _: nested(50_000),
    "wide": lambda _: [np.array(VALUES)] * 3000,
    "keys that raise": lambda word: hostile_key(word, ["__hash__", "__eq__"]),
    "keys that raise later": key_that_raises_later,
    "keys that cannot be printed": lambda word: hostile_key(word, ["__repr__"]) | {2: used_capsule()},
    "a dict that raises": lambda word: filled(raising(dict, "__setitem__", word)),
    "a list that raises": lambda word: filled(raising(list, "__setitem__", word)),
    "a copy that raises": lambda word: with_copy(lambda: raise_named(word)),
    "a copy of another class": lambda _: with_copy(lambda: 3),
    "a list that shrinks": lambda _: changing([None, np.array(VALUES)], lambda tree: tree.clear()),
    "a dict that changes": lambda _: changing({0: None, 1: np.array(VALUES)}, lambda tree: tree.clear()),
    "an init that raises": lambda word: dataclass_with(word, __init__=None, __post_init__=None),
    "a dataclass that takes no values": lambda word: dataclass_with(word, __setattr__=None),
    "fields that raise": lambda word: dataclass_with(word, __getattribute__=None),
    "fields that are none": lambda _: fields_of(3),
    "a class that raises": lambda word: RaisingClass("Raising", (), {"word": word})(),
    "a named tuple that raises": lambda word: named_with(_make=lambda *_: raise_named(word)),
    "a named tuple of another class": lambda _: named_with(_make=lambda *_: 3),
    "fewer names than elements": lambda _: named_with(_fields=("x",)),
    "names that are none": lambda _: named_with(_fields=3),
    "a struct that raises": lambda word: struct_with(lambda *_: raise_named(word)),
    "a producer that raises": lambda word: [np.array(VALUES), Producer(lambda: raise_named(word))],
    "a used capsule": lambda _: {"used": used_capsule(), "good": np.array(VALUES)},
    "a capsule twice": lambda _: [capsule := np.array(VALUES).__dlpack__(), {"again": capsule}, (capsule,)],
}


def tree(case: Case) -> Subject:
    """A tree that is planned, and then converted."""
    word = case["hostile"]
    sound = word == "none"
    root = made(case["tree"], np.array(VALUES))
    if not sound:
        odd = HOSTILE[word](case["raises"])
        root = odd if word == "very deep" else [root, odd]
    wrong: list[str] = []

    def act(target: str, copy: bool | None) -> Any:
        try:
            tb.plan(root, target, copy=copy)
        except tb.BridgeError:
            pass
        result = tb.convert(root, target, copy=copy)
        if sound:
            wrong.append(difference(root, result, target))
        return None

    raised = {case["raises"]} & {"KeyboardInterrupt", "SystemExit", "MemoryError", "RecursionError"}
    must = sound and case["copy"] is None and holds_tensor(root)
    return Subject(act, must_convert=must, may_raise=raised, wrong_after=lambda: "; ".join(filter(None, wrong)))
