"""Functions of JAX as nodes of PyTorch's autograd. Imports both frameworks.

Arguments and parameters are converted in place. Results and gradients are copied: arrays of JAX never change, may share
their memory, and JAX computes derivatives from them; PyTorch writes to its tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import torch

from .. import _core
from ..errors import of_kind
from ._in_torch import Node, Writes, check_devices, check_forward_mode, check_writes, copied
from ._leaves import tensors_at
from ._of_jax import Functions, Run, differentiable

if TYPE_CHECKING:
    from collections.abc import Callable


def wrapped(function: Callable[..., Any], variables: Any) -> Any:
    """Return the module of PyTorch that runs this function of JAX."""
    return JAXFunction(function, variables)


class Record:
    """What JAX knows of one node, without the inputs, which are PyTorch's: what JAX has computed never changes."""

    def __init__(self, run: Run, tensors: list[Any]) -> None:
        self.run = run._replace(inputs=[])
        self.targets = run.outputs
        self.writes = Writes(tensors)

    def differentiated(
        self, tensors: Any, wanted: list[int], given: list[int], known: list[Any]
    ) -> tuple[list[int], Any]:
        """Return the inputs that have a gradient, and these gradients."""
        at = self.run.reached(wanted, given)
        if not at:
            return [], []
        check_writes(self.writes.reach(tensors), "a hook on saved tensors saved the tensor itself, and no copy")
        run = self.run._replace(inputs=_converted(list(tensors)))
        if torch.is_grad_enabled():
            depends = [*tensors, *known]
            made = Node.apply(lambda: Record(run.pulled(at, given, _converted(known)), depends), *depends)
        else:
            made = copied(run.gradients(at, given, _converted(known)))
        return list(at), made


class JAXFunction(torch.nn.Module):  # type: ignore[misc]
    """A function of JAX. Its parameters are copies of arrays, which the function takes as its first argument."""

    def __init__(self, function: Callable[..., Any], variables: Any) -> None:
        super().__init__()
        self.functions = Functions(function)
        leaves, tree = jax.tree.flatten(variables)
        self.variables = torch.nn.ParameterList([_parameter(leaf) for leaf in leaves])
        #: The container of the parameters, with their numbers in it.
        self.form = () if variables is None else (jax.tree.unflatten(tree, range(len(leaves))),)

    # Dynamo cannot look into JAX: it compiles what is before and what is after.
    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        parameters = list(self.variables)
        args = (*jax.tree.map(parameters.__getitem__, self.form), *args)
        leaves, tree = jax.tree.flatten((args, kwargs))
        at = tensors_at(leaves, torch.Tensor, jax.Array, "PyTorch", "truebridge.to_torch")
        computation, tensors = self.functions.of(leaves, at, tree), [leaves[i] for i in at]
        check_devices(tensors)
        check_forward_mode(tensors, "JAX")
        wanted = [i for i, tensor in enumerate(tensors) if tensor.requires_grad] if torch.is_grad_enabled() else []
        if not wanted:
            leaves, tree = jax.tree.flatten(computation(_converted(tensors)))
            return jax.tree.unflatten(tree, copied(leaves))
        results: Any = None

        def step() -> Record:
            nonlocal results
            run = computation.recorded(_converted(tensors), wanted)
            results = jax.tree.structure(run.results)
            return Record(run, tensors)

        made = Node.apply(step, *tensors)
        return jax.tree.unflatten(results, made)


def _parameter(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        raise of_kind("not_a_tensor", f"variables= holds a {type(leaf).__name__}; expected jax.Array")
    if not differentiable(leaf):
        text = f"an array in variables= is {leaf.dtype} and has no gradient: let the function hold it"
        raise of_kind("dtype", text)
    return torch.nn.Parameter(_core.convert_inside(leaf, "torch", copy=True))


def _converted(tensors: list[Any]) -> list[Any]:
    arrays: list[Any] = _core.convert_inside(tensors, "jax", detach=True)
    return arrays
