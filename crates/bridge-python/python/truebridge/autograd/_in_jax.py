"""Computations of other frameworks as functions that JAX differentiates. Imports JAX.

JAX passes on only arrays. So each recorded run has an array that holds its record, as a result and as a residual, and
the gradient reads that array: the function runs once, whatever the order of the derivative. The record is dropped with
the array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .. import _core
from ..errors import of_kind
from ._held import Held, record_in
from ._leaves import filled, results_at, tensors_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    #: Returns tensors of the other framework, or ``None``, made of arrays, and their record if that is asked for.
    Step = Callable[[list[Any], bool], tuple[list[Any], "Recorded | None"]]
    #: Does so by a function of a list of tensors.
    Run = Callable[[Callable[[list[Any]], list[Any]], list[Any], bool], tuple[list[Any], "Recorded | None"]]


class Recorded(Protocol):
    """A computation that its framework has recorded."""

    def pulled(
        self, wanted: Sequence[int], given: Sequence[int], known: list[Any], records: bool
    ) -> tuple[list[Any], Recorded | None]:
        """Return the gradients of the inputs ``wanted``, or ``None``, and if ``records`` how they were computed.

        ``known`` are arrays, the gradients of the outputs ``given``. The inputs of the record are those of this one,
        ``known``, and the array that holds this one.
        """


def function_of(function: Callable[..., Any], run: Run, own: Any, name: str) -> Callable[..., Any]:
    """Return the function of JAX that runs this one of the framework ``name``, with tensors of the types ``own``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        leaves = [
            _core.convert_inside(x, "jax", copy=True) if isinstance(x, np.ndarray | np.generic) else x for x in leaves
        ]
        at = tensors_at(leaves, jax.Array, own, "JAX", "truebridge.to_jax")
        form: Any = None

        def called(views: list[Any]) -> list[Any]:
            nonlocal form
            positional, named = jax.tree.unflatten(tree, filled(leaves, at, views))
            flat, form = jax.tree.flatten(function(*positional, **named))
            results_at(flat, own, name)
            return list(flat)

        def step(inputs: list[Any], records: bool) -> tuple[list[Any], Recorded | None]:
            made: tuple[list[Any], Recorded | None] = run(called, inputs, records)
            return made

        made = _node(step, [leaves[i] for i in at], name)
        return jax.tree.unflatten(form, made)

    return call


def _node(step: Step, inputs: list[Any], name: str) -> list[Any]:
    """Return what ``step`` makes of the inputs, as arrays of which JAX knows how they depend on the inputs."""
    made: list[Any] = _custom(step, name)(*inputs)[:-1]
    return made


def _custom(step: Step, name: str, always: bool = False) -> Callable[..., Any]:
    """Return the function of JAX. Its last result holds the record of a run that is differentiated, or ``always``."""

    def values(inputs: Sequence[Any], records: bool) -> list[Any]:
        arrays = _concrete(inputs, name)
        made, record = step(arrays, records)
        results = _copied(made)
        return [*results, _NOTHING if record is None else _holding(record, [*results, *arrays])]

    @jax.custom_vjp  # type: ignore[untyped-decorator, unused-ignore]
    def computed(*inputs: Any) -> list[Any]:
        return values(inputs, always)

    def forward(*given: Any) -> Any:
        inputs = [x.value for x in given]
        # A derivative of higher order: JAX differentiates this function as well.
        traced = any(isinstance(x, jax.core.Tracer) for x in inputs)
        made = _custom(step, name, always=True)(*inputs) if traced else values(inputs, True)
        wanted = [i for i, x in enumerate(given) if x.perturbed and differentiable(x.value)]
        # Keys of a dict are no values for JAX.
        return made, (made[-1], inputs, dict.fromkeys(wanted))

    def backward(residual: Any, gradients: list[Any]) -> Any:
        holder, inputs, wanted = residual
        given = [i for i, x in enumerate(gradients[:-1]) if _is_known(x)]
        found = [None] * len(inputs)
        if wanted and given:

            def pulled(arrays: list[Any], records: bool) -> tuple[list[Any], Recorded | None]:
                record = record_in(arrays[-1])
                if record is None:
                    raise of_kind(
                        "argument",
                        "the gradient is computed on another device than the function: compute both on one device",
                    )
                made: tuple[list[Any], Recorded | None] = record.pulled(
                    list(wanted), given, arrays[len(inputs) : -1], records
                )
                return made

            made = _node(pulled, [*inputs, *_conjugated([gradients[i] for i in given]), holder], name)
            found = filled(found, list(wanted), _conjugated(made))
        return tuple(found)

    computed.defvjp(forward, backward, symbolic_zeros=True)
    made: Callable[..., Any] = computed
    return made


def _conjugated(gradients: list[Any]) -> list[Any]:
    """Return gradients as the others define them, or as JAX does, which transposes and does not conjugate."""
    return [x if x is None or not jax.numpy.iscomplexobj(x) else jax.numpy.conj(x) for x in gradients]


def _is_known(gradient: Any) -> bool:
    """Return whether this is the gradient of a result that is used and has one."""
    return gradient is not None and not isinstance(gradient, SymbolicZero) and gradient.dtype != jax.dtypes.float0


def differentiable(x: Any) -> bool:
    """Return whether an array of JAX can have a gradient."""
    return bool(jax.numpy.issubdtype(x.dtype, jax.numpy.inexact))


#: Stands for an array that holds a record.
_NOTHING: Any = np.zeros(2, np.uint32)


def _holding(record: Recorded, beside: list[Any]) -> Any:
    """Return an array that holds a record, on the device of an array."""
    device = next((x.device for x in beside if x is not None), None)
    return _core.convert_inside(
        Held(record, jax.numpy.zeros(2, jax.numpy.uint32, device=device), "<u4"), "jax", copy=False
    )


def _copied(tensors: Sequence[Any]) -> list[Any]:
    """Return tensors of another framework, or ``None``, as arrays in memory that nothing else has."""
    at = [i for i, x in enumerate(tensors) if x is not None]
    return filled(list(tensors), at, _core.convert_inside([tensors[i] for i in at], "jax", copy=True, detach=True))


def _concrete(inputs: Sequence[Any], name: str) -> list[Any]:
    """Return the inputs as arrays: ``jax.grad`` passes on the numbers that it was given."""
    if any(isinstance(x, jax.core.Tracer) for x in inputs):
        text = f"a function of {name} runs outside of what JAX traces: call it outside of jit, vmap, pmap, scan and "
        raise of_kind("argument", text + "checkpoint, and compile what is before it and what is after it")
    return [x if isinstance(x, jax.Array) else jax.numpy.asarray(x) for x in inputs]
