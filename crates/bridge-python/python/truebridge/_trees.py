"""Trees of tensors as text, for tickets. truebridge_tf1 ships this file as well (so it is Python 3.6).

docs/design/ipc.md specifies the text.
"""
# ruff: noqa: UP006, UP035, UP045

import json
import math
from typing import Any, Dict, List, Optional, Tuple

from .errors import of_kind

#: The most containers one inside another.
_DEEPEST = 100

#: Integers with thousands of digits, and texts with surrogates.
_UNKEPT = "a number or a text beside the tensors cannot be kept as JSON: pass it as a tensor, or leave it out"

_UNKNOWN = "the other process describes no tree that this one knows: use one version of truebridge in both"

#: What a tree may hold beside tensors and lists.
_INNER = (type(None), bool, int, str, float, tuple, dict)


def flattened(x: Any) -> Tuple[List[Any], Optional[str]]:
    """Return the tensors of a tree, and the text that describes it; ``None`` for a tensor by itself."""
    leaves, tree = described(x)
    return leaves, text_of(tree)


def described(x: Any) -> Tuple[List[Any], Any]:
    """Return the tensors of a tree, and the value whose text describes it."""
    leaves = []  # type: List[Any]
    return leaves, _described(x, leaves, 0)


def text_of(tree: Any) -> Optional[str]:
    """Return the text that describes a tree; ``None`` for a tensor by itself."""
    if tree == ["x", 0]:
        return None
    try:
        text = json.dumps(tree, separators=(",", ":"), check_circular=False)
        kept = json.loads(text) == tree
    except ValueError as error:
        raise of_kind("argument", f"{_UNKEPT}: {error}") from error
    if not kept:
        raise of_kind("argument", _UNKEPT)
    return text


def shareable(x: Any) -> Tuple[List[Any], Optional[str]]:
    """Return what ``flattened`` does, of a tree that holds a tensor."""
    leaves, tree = flattened(x)
    if not leaves:
        text = "{} holds no tensor: share a tensor, or send this object as it is"
        raise of_kind("not_a_tensor", text.format(type(x).__name__))
    return leaves, tree


def tree_of(text: Optional[str], tensors: List[Any]) -> Any:
    """Return the tree that a text describes, with these tensors in it."""
    try:
        return tensors[0] if text is None else _built(json.loads(text), tensors)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise of_kind("protocol", _UNKNOWN) from error


def paths(text: Optional[str]) -> List[str]:
    """Return the path to each tensor of the tree that a text describes, by its number; none for a tensor by itself."""
    found = {}  # type: Dict[int, str]
    try:
        if text is not None:
            _walk(json.loads(text), "tree", found)
        return [found[number] for number in range(len(found))]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise of_kind("protocol", _UNKNOWN) from error


def _walk(tree: Any, path: str, found: Dict[int, str]) -> None:
    kind, value = tree
    if kind == "x":
        found[value] = path
    elif kind in ("l", "t"):
        for index, item in enumerate(value):
            _walk(item, f"{path}[{index}]", found)
    elif kind == "d":
        for key, item in value:
            _walk(item, f"{path}[{key!r}]", found)


def _described(x: Any, leaves: List[Any], depth: int) -> Any:
    if depth > _DEEPEST:
        text = "more than {} containers are nested: share their tensors apart"
        raise of_kind("argument", text.format(_DEEPEST))
    if type(x) is list:
        return ["l", [_described(item, leaves, depth + 1) for item in x]]
    # The type is asked, not the tensor: isinstance() would ask a tensor for its class once for each of these.
    if not issubclass(type(x), _INNER):
        leaves.append(x)
        return ["x", len(leaves) - 1]
    if x is None or isinstance(x, (bool, int, str)):
        return ["p", x]
    if isinstance(x, float):
        return ["p", x] if math.isfinite(x) else ["f", repr(x)]
    if isinstance(x, tuple):
        return ["t", [_described(item, leaves, depth + 1) for item in x]]
    return ["d", [[_key(key), _described(item, leaves, depth + 1)] for key, item in x.items()]]


def _key(key: Any) -> Any:
    if key is None or isinstance(key, (bool, int, str)):
        return key
    text = "a key of a shared dict is a str, an int, a bool or None, not {}: use one of these"
    raise of_kind("argument", text.format(type(key).__name__))


def _built(tree: Any, tensors: List[Any]) -> Any:
    kind, value = tree
    if kind == "x":
        return tensors[value]
    if kind == "p":
        return value
    if kind == "f":
        return float(value)
    if kind == "l":
        return [_built(item, tensors) for item in value]
    if kind == "t":
        return tuple(_built(item, tensors) for item in value)
    if kind == "d":
        return {key: _built(item, tensors) for key, item in value}
    raise ValueError(kind)
