"""Functions of PyTorch that JAX differentiates. Imports both frameworks.

Arguments are converted in place. Results and gradients are copied: PyTorch lets them share memory and may write to it;
JAX takes its arrays as constant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import of_kind
from ._in_jax import function_of
from ._of_torch import Recorded, check_arguments, converted, ends, plain

if TYPE_CHECKING:
    from collections.abc import Callable


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of JAX that runs this one of PyTorch."""
    return function_of(function, _run, torch.Tensor, "PyTorch")


def _run(
    called: Callable[[list[Any]], list[Any]], inputs: list[Any], records: bool
) -> tuple[list[Any], Recorded | None]:
    if not records:
        views = plain(inputs)
        results = called(views)
        check_arguments(views, "JAX")
        _check_parameters(any(y.requires_grad for y in results))
        return results, None
    with torch.inference_mode(False), torch.enable_grad():
        views = converted(inputs)
        results = called(views)
    check_arguments(views, "JAX")
    own = {id(view) for view in views}
    _check_parameters(any(id(leaf) not in own for leaf in ends(results)))
    return results, Recorded(views, results)


def _check_parameters(used: bool) -> None:
    if used:
        text = (
            "the function uses parameters of PyTorch, which would get no gradient: pass them as arguments, with "
            "torch.func.functional_call(module, parameters, x), freeze them with requires_grad_(False), or call it "
            "under torch.no_grad()"
        )
        raise of_kind("argument", text)
