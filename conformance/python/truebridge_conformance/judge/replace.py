"""Calls the package instead of a framework's function, and counts how often."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import truebridge

Function = Callable[..., Any]

#: Whether this thread is inside the package, which calls functions of the frameworks as well: these stay their own.
_inside = threading.local()

#: The calls that reached the package, and the last of them in words.
_calls = 0
_last = ""


@dataclass(frozen=True)
class Replaced:
    """A function of a framework in whose place the package is called."""

    #: Where tests look it up, such as ``numpy.from_dlpack``; ``module.*`` is every function of a module.
    name: str
    #: Returns what is called, from the framework's own function.
    make: Callable[[Function], Function]
    #: Which calls are taken over. The others stay the framework's.
    when: Callable[..., bool] = lambda *_args, **_keywords: True


def importing(target: truebridge.Target, by_default: bool | None = None) -> Callable[[Function], Function]:
    """Return the replacement of a ``from_dlpack``: a conversion, with the keywords of the array API.

    ``by_default`` is what ``copy`` is without the keyword.
    """

    def make(_native: Function) -> Function:
        def convert(x: Any, /, device: Any = None, copy: bool | None = by_default) -> Any:
            return truebridge.convert(x, target, device=device, copy=copy)

        return convert

    return make


def lending(native: Function) -> Function:
    """Return the replacement of an import by a library without an adapter: it takes a loan of the package."""

    def take(x: Any, /, *args: Any, **keywords: Any) -> Any:
        return native(truebridge.lend(x), *args, **keywords)

    return take


def lending_all(native: Function) -> Function:
    """Return the replacement of a function of such a library, each of whose tensors is a loan."""

    def take(*args: Any, **keywords: Any) -> Any:
        loaned = {name: _loan(x) for name, x in keywords.items()}
        return native(*map(_loan, args), **loaned)

    return take


def _loan(x: Any) -> Any:
    return truebridge.lend(x) if hasattr(x, "__dlpack__") else x


def exchanging(library: str) -> Callable[..., bool]:
    """Return which calls of a library's functions have tensors of others."""

    def is_of_another(x: Any) -> bool:
        return hasattr(x, "__dlpack__") and not type(x).__module__.startswith(library)

    def when(*args: Any, **keywords: Any) -> bool:
        return any(map(is_of_another, (*args, *keywords.values())))

    return when


def of_another_framework(framework: str) -> Callable[..., bool]:
    """Return which calls of a general function exchange memory: those with a device's memory of another framework."""

    def when(x: Any, *args: Any, **keywords: Any) -> bool:
        own = type(x).__module__.startswith(framework)
        return not own and not args and keywords.keys() <= {"copy"} and hasattr(x, "__cuda_array_interface__")

    return when


def calls() -> int:
    """Return how many calls have reached the package."""
    return _calls


def last() -> str:
    """Return the last call in words, such as ``numpy.from_dlpack(ndarray of int8 (2, 3), copy=False)``."""
    return _last


def install(replaced: Iterable[Replaced]) -> list[str]:
    """Replace the functions that this framework has. Return their names."""
    return [row.name for row in replaced if any([_install(row, name) for name in _names(row)])]


def _names(row: Replaced) -> list[str]:
    module, _, attribute = row.name.rpartition(".")
    if attribute != "*":
        return [row.name]
    functions = {
        name for name, value in vars(_owner(module)).items() if callable(value) and not isinstance(value, type)
    }
    return [f"{module}.{name}" for name in sorted(functions) if not name.startswith("_")]


def _install(row: Replaced, name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    owner = _owner(module)
    native = getattr(owner, attribute, None)
    if native is None:
        return False
    setattr(owner, attribute, _counted(row, name, native, row.make(native)))
    return True


def _owner(name: str) -> Any:
    """Return a module, or an object in one: some of TensorFlow's names lie in objects that load modules."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        parent, _, attribute = name.rpartition(".")
        return getattr(_owner(parent), attribute, None) if parent else None


def _counted(row: Replaced, name: str, native: Function, ours: Function) -> Function:
    @functools.wraps(native)
    def replaced(*args: Any, **keywords: Any) -> Any:
        global _calls, _last
        if getattr(_inside, "package", False) or not row.when(*args, **keywords):
            return native(*args, **keywords)
        _calls += 1
        _last = _words(name, args, keywords)
        _inside.package = True
        try:
            return ours(*args, **keywords)
        finally:
            _inside.package = False

    return replaced


def _words(name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    tensors = [_tensor(x) for x in args]
    return f"{name}({', '.join([*tensors, *(f'{key}={value}' for key, value in keywords.items())])})"


def _tensor(x: Any) -> str:
    kind = type(x).__name__
    try:
        return f"{kind} of {x.dtype} {tuple(x.shape)}"
    except Exception:  # Tests pass objects of every kind.
        return kind
