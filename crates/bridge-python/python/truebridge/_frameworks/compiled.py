"""Makes ``torch.compile`` break its graph at the functions of this package, without a warning.

PyTorch's compiler warns of functions in C that it does not know, once for each. Here it gets a stand-in for each, which
it may not look into. The functions themselves stay as they are, so a call costs what it did.
"""

from __future__ import annotations

import sys
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

from .. import _core
from ..errors import BridgeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_COMPILER = "torch._dynamo"


def watch() -> None:
    """Register the functions now if PyTorch's compiler is loaded, and else when it is imported."""
    if _COMPILER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Finds nothing but the compiler, once."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _COMPILER:
            return None
        from importlib.machinery import PathFinder

        if _Finder in sys.meta_path:
            sys.meta_path.remove(_Finder)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register() -> None:
    from contextlib import suppress

    compiler = sys.modules["torch"].compiler
    for function in vars(_core).values():
        if isinstance(function, BuiltinFunctionType):
            # A compiler that knows the function already, or knows no stand-ins, works as well, with its warning.
            with suppress(AttributeError, ValueError):
                stand_in = compiler.disable(_stand_in(function), reason=_REASON.format(function.__name__))
                compiler.substitute_in_graph(function, skip_signature_check=True)(stand_in)
    # The compiler sees the frames that run inside of a function, and would compile those of NumPy's extension dtypes,
    # which are imported at first use.
    if "numpy" in sys.modules:
        with suppress(BridgeError):
            _core.profile("numpy")


_REASON = "truebridge.{} works on the memory of real tensors: call it outside of the graph"


def _stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
    def stand_in(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    return stand_in
