"""Trees of tensors as text, for tickets. truebridge_tf1 ships this file as well (so it is Python 3.6).

docs/design/ipc.md specifies the text.
"""
# ruff: noqa: UP006, UP035, UP045

import json
import math
import sys
from json.encoder import encode_basestring_ascii
from typing import Any, Dict, List, Optional, Tuple

from ..errors import of_kind

#: The most containers one inside another.
_DEEPEST = 100

#: More calls than it takes, one inside another, to read that.
_CALLS = 400

#: The most bytes of what describes a shared tree, and one in a file: it is read into memory as a whole.
_SHARED = 1 << 20
SAVED = 16 << 20

#: Fewer bytes than the text of a tensor, a number or a container has.
_LEAST = 7

#: Integers with thousands of digits, and texts with surrogates.
_UNKEPT = "a number or a text in the tree cannot be written as JSON: pass it as a tensor, or leave it out"

_UNKNOWN = "the other process describes the tree in another way: use one version of truebridge in both"

#: The text of a tensor by itself.
_ALONE = '["x",0]'

#: What a tree may hold in addition to tensors and lists.
_INNER = (type(None), bool, int, str, float, tuple, dict)


def flattened(x: Any) -> Tuple[List[Any], Optional[str]]:
    """Return the tensors of a tree, and the text that describes it; ``None`` for a tensor by itself."""
    leaves = []  # type: List[Any]
    text = _written(x, leaves, 0)
    return leaves, None if text == _ALONE else text


def described(x: Any) -> Tuple[List[Any], Any]:
    """Return the tensors of a tree, and the value whose text describes it."""
    leaves, text = flattened(x)
    return leaves, json.loads(text or _ALONE)


def text_of(tree: Any) -> Optional[str]:
    """Return the text that describes a tree; ``None`` for a tensor by itself."""
    text = json.dumps(tree, separators=(",", ":"), check_circular=False)
    return None if text == _ALONE else text


def shareable(x: Any) -> Tuple[List[Any], Optional[str]]:
    """Return what ``flattened`` does, of a tree that holds a tensor."""
    if least(x)[0] > _SHARED:
        raise of_kind("argument", f"the tree takes more than {_SHARED} bytes to describe: share it in parts")
    leaves, tree = flattened(x)
    if not leaves:
        text = "{} holds no tensor: share a tensor, or send this object as it is"
        raise of_kind("not_a_tensor", text.format(type(x).__name__))
    return leaves, tree


def tree_of(text: Optional[str], tensors: List[Any]) -> Any:
    """Return the tree that a text describes, with these tensors in it."""
    try:
        return tensors[0] if text is None else _built(json.loads(text), tensors)
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
        if is_own(error):
            raise
        raise of_kind("protocol", _UNKNOWN) from error


def paths(text: Optional[str]) -> List[str]:
    """Return the path to each tensor of the tree that a text describes, by its number; none for a tensor by itself."""
    found = {}  # type: Dict[int, str]
    try:
        if text is not None:
            _walk(json.loads(text), "tree", found)
        return [found[number] for number in range(len(found))]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        if is_own(error):
            raise
        raise of_kind("protocol", _UNKNOWN) from error


def is_own(error: Exception) -> bool:
    """Return whether it is a RecursionError of a program with few calls left, not the fault of what was read."""
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    return isinstance(error, RecursionError) and depth > sys.getrecursionlimit() - _CALLS


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


def least(x: Any) -> Tuple[int, int]:
    """Return fewer bytes than the text of a tree has, and than the names of its tensors have in a file.

    A container that occurs twice is written twice: a few levels can make a text without end, so it is counted first.
    """
    text, _, names = _counted(x, {}, 0)
    return text, names


def _counted(x: Any, met: Dict[int, Tuple[Any, Any]], depth: int) -> Tuple[int, int, int]:
    """Count the bytes of a text, the objects, and the bytes of their names. Each container is looked at once."""
    if not (type(x) is list or issubclass(type(x), (tuple, dict))) or depth > _DEEPEST:
        return _LEAST, 1, 0
    if id(x) not in met:
        # One that holds itself is refused by its depth.
        met[id(x)] = x, (_LEAST, 1, 0)
        text, objects, names = _LEAST, 0, 0
        for item in x.values() if isinstance(x, dict) else x:
            of_text, of_objects, of_names = _counted(item, met, depth + 1)
            # A step of a name has a character and a point.
            text, objects, names = text + of_text, objects + of_objects, names + of_names + 2 * of_objects
        met[id(x)] = x, (text, objects, names)
    counted = met[id(x)][1]  # type: Tuple[int, int, int]
    return counted


def _written(x: Any, leaves: List[Any], depth: int) -> str:
    """Return the text of a tree. It makes no lists of lists, which Python's collector would visit again and again."""
    if depth > _DEEPEST:
        text = "more than {} containers are nested: share their tensors apart"
        raise of_kind("argument", text.format(_DEEPEST))
    if type(x) is list:
        return _container("l", [_written(item, leaves, depth + 1) for item in x])
    # The type is asked, not the tensor: isinstance() would ask a tensor for its class once for each of these.
    if not issubclass(type(x), _INNER):
        leaves.append(x)
        return f'["x",{len(leaves) - 1}]'
    if isinstance(x, tuple):
        return _container("t", [_written(item, leaves, depth + 1) for item in x])
    if isinstance(x, dict):
        items = x.items()
        return _container("d", ["[" + _key(key) + "," + _written(item, leaves, depth + 1) + "]" for key, item in items])
    if isinstance(x, float) and not math.isfinite(x):
        return f'["f","{float(x)!r}"]'
    return '["p",' + _plain(x) + "]"


def _container(kind: str, items: List[str]) -> str:
    return '["' + kind + '",[' + ",".join(items) + "]]"


def _key(key: Any) -> str:
    if key is None or isinstance(key, (bool, int, str)):
        return _plain(key)
    text = "a key of a shared dict is a str, an int, a bool or None, not {}: use one of these"
    raise of_kind("argument", text.format(type(key).__name__))


def _plain(x: Any) -> str:
    """Return the text of a number, a text or ``None``, which is read back as the same."""
    try:
        text = encode_basestring_ascii(x) if type(x) is str else json.dumps(x)
        # Surrogates may be read as one character.
        kept = "\\ud" not in text or json.loads(text) == x
    except ValueError as error:
        raise of_kind("argument", f"{_UNKEPT}: {error}") from error
    if not kept:
        raise of_kind("argument", _UNKEPT)
    return text


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
