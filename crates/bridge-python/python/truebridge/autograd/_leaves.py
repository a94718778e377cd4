"""The leaves of the arguments and the results of a function: which are tensors, and how others are described."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import of_kind

if TYPE_CHECKING:
    from collections.abc import Sequence


def tensors_at(leaves: list[Any], own: Any, others: Any, name: str, call: str) -> list[int]:
    """Return the indices of the tensors among the leaves of the arguments.

    ``own`` are the types of the framework that ``name`` names. Tensors of ``others``, and of frameworks that neither
    names, are an error: their gradients would be lost.
    """
    for leaf in leaves:
        convertible = (
            isinstance(leaf, others) or hasattr(leaf, "__dlpack__") or hasattr(leaf, "__cuda_array_interface__")
        )
        if convertible and not isinstance(leaf, own):
            raise of_kind("not_a_tensor", f"{shown(leaf)} is not a tensor of {name}: call {call}(x) first")
    return [i for i, leaf in enumerate(leaves) if isinstance(leaf, own)]


def results_at(leaves: list[Any], own: Any, name: str) -> list[int]:
    """Return the indices of the tensors among the leaves of the results."""
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, own):
            text = f"the function returned {shown(leaf)}: return tensors of {name}, or containers of them; of= names "
            raise of_kind("not_a_tensor", text + "the framework of the function")
    return [i for i, leaf in enumerate(leaves) if leaf is not None]


def filled(leaves: Sequence[Any], at: Sequence[int], tensors: Any) -> list[Any]:
    """Return the leaves with these tensors at these indices."""
    made = list(leaves)
    for i, tensor in zip(at, tensors, strict=True):
        made[i] = tensor
    return made


def shown(x: Any) -> str:
    """Describe an object in an error, by its class."""
    module = type(x).__module__
    return f"an object of type {'' if module == 'builtins' else module + '.'}{type(x).__qualname__}"
