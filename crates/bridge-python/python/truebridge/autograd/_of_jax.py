"""Functions of JAX whose runs are recorded, for nodes of other frameworks. Imports JAX.

A run is two compiled functions: the forward pass, which returns the results and what the derivative needs, and the
backward pass. Both are compiled once for each form of the arguments, so a step costs what it costs in JAX.

A run is recorded as its linearisation, which is transposed for the results that have a gradient, and no others: zeros
for the rest would make NaN of an infinite slope, and zeros of a gradient that is none.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.extend.core import Literal

from ..errors import of_kind
from ._leaves import filled, results_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Run(NamedTuple):
    """A run of a computation, and the linear function that is its derivative there."""

    computation: Computation
    #: Arrays.
    inputs: list[Any]
    #: The results as the function has returned them.
    results: Any
    linear: Linear

    @property
    def outputs(self) -> list[Any]:
        """The results, one after another."""
        leaves: list[Any] = jax.tree.leaves(self.results)
        return leaves

    def reached(self, wanted: Sequence[int], given: Sequence[int]) -> tuple[int, ...]:
        """Return the inputs among ``wanted`` on which the outputs ``given`` depend."""
        reached = frozenset[int]().union(*(self.linear.form.depends.get(i, frozenset()) for i in given))
        return tuple(i for i in wanted if i in reached)

    def gradients(self, wanted: Sequence[int], given: Sequence[int], known: list[Any]) -> list[Any]:
        """Return the gradients of the inputs ``wanted``. ``known`` are those of the outputs ``given``."""
        made: list[Any] = self.computation.transposed(
            self.linear.form, tuple(wanted), tuple(given), self.linear.completed(self.inputs), known
        )
        return made

    def pulled(self, wanted: Sequence[int], given: Sequence[int], known: list[Any]) -> Run:
        """Return a run that computes these gradients from the inputs and ``known``, so that it has a derivative."""
        computation = self.computation.pulled(len(self.inputs), tuple(wanted), tuple(given))
        return computation.recorded([*self.inputs, *known])


class Computation:
    """A function of arrays, and its derivatives, compiled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._computed = jax.jit(self._checked)
        self._linearized = jax.jit(self._linearize, static_argnums=0)
        self.transposed = jax.jit(_transposed, static_argnums=(0, 1, 2))
        self.pulled = functools.cache(self._pulled)

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the function, and record nothing."""
        return self._computed(*inputs)

    def recorded(self, inputs: list[Any], wanted: Sequence[int] | None = None) -> Run:
        """Run the function. ``wanted`` are the inputs whose gradients may be asked for."""
        wanted = range(len(inputs)) if wanted is None else wanted
        wanted = tuple(i for i in wanted if differentiable(inputs[i]))
        return Run(self, inputs, *self._linearized(wanted, *inputs))

    def _checked(self, *inputs: Any) -> Any:
        results = self._function(*inputs)
        results_at(jax.tree.leaves(results), jax.Array, "JAX")
        return results

    def _linearize(self, wanted: tuple[int, ...], *inputs: Any) -> tuple[Any, Linear]:
        at: list[int] = []
        tree: Any = None

        def function(*given: Any) -> tuple[list[Any], list[Any]]:
            nonlocal at, tree
            leaves, tree = jax.tree.flatten(self._checked(*filled(inputs, wanted, given)))
            at = [i for i, leaf in enumerate(leaves) if differentiable(leaf)]
            return [leaves[i] for i in at], filled(leaves, at, [None] * len(at))

        made, linear, rest = jax.linearize(function, *[inputs[i] for i in wanted], has_aux=True)
        arrays, function_of = jax.tree.flatten(linear)
        # XLA would copy an input to return it.
        own = {id(x): i for i, x in enumerate(inputs)}
        places = tuple(own.get(id(x)) for x in arrays)
        specs = tuple(jax.ShapeDtypeStruct(inputs[i].shape, inputs[i].dtype) for i in wanted)
        closed = jax.make_jaxpr(linear)(*specs)
        reached = _reach(closed.jaxpr, [frozenset([i]) for i in wanted])
        form = Form(function_of, places, wanted, at, specs, dict(zip(at, reached, strict=True)))
        results = jax.tree.unflatten(tree, filled(rest, at, made))
        return results, Linear([x for x, i in zip(arrays, places, strict=True) if i is None], form)

    def _pulled(self, count: int, wanted: tuple[int, ...], given: tuple[int, ...]) -> Computation:
        """Return the gradients of the inputs as a function of these ``count`` and of gradients of the outputs."""

        def gradients(*arrays: Any) -> list[Any]:
            inputs, known = list(arrays[:count]), list(arrays[count:])
            results, linear = self._linearize(wanted, *inputs)
            return Run(self, inputs, results, linear).gradients(wanted, given, known)

        return Computation(gradients)


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """What is known of a linear function when it is traced. The compiled function returns the same object each time."""

    function: Any
    #: For each of its arrays the input that it is, or ``None``.
    places: Sequence[int | None]
    #: The inputs of the computation that it takes the tangents of, and their shapes and dtypes.
    wanted: Sequence[int]
    #: The outputs of the computation that it returns the tangents of.
    at: Sequence[int]
    specs: Sequence[Any]
    #: The inputs on which each output depends.
    depends: dict[int, frozenset[int]]


@jax.tree_util.register_pytree_node_class
class Linear:
    """The derivative of a run: the arrays that it needs next to the inputs, and its form."""

    def __init__(self, arrays: Sequence[Any], form: Form) -> None:
        self.arrays = arrays
        self.form = form

    def tree_flatten(self) -> tuple[Sequence[Any], Form]:
        """Return the arrays, and what is not computed."""
        return self.arrays, self.form

    @classmethod
    def tree_unflatten(cls, form: Form, arrays: Sequence[Any]) -> Linear:
        """Return the derivative of these."""
        return cls(arrays, form)

    def completed(self, inputs: Sequence[Any]) -> list[Any]:
        """Return all arrays of the function."""
        arrays = iter(self.arrays)
        return [next(arrays) if i is None else inputs[i] for i in self.form.places]


def _transposed(form: Form, wanted: tuple[int, ...], given: tuple[int, ...], arrays: Any, known: Any) -> list[Any]:
    """Return the gradients of the inputs ``wanted``."""
    linear = jax.tree.unflatten(form.function, arrays)
    places = [form.at.index(i) for i in given]

    def chosen(*tangents: Any) -> list[Any]:
        made = linear(*tangents)
        return [made[i] for i in places]

    # JAX transposes, the others transpose and conjugate.
    found = jax.linear_transpose(chosen, *form.specs)([jax.numpy.conj(x) for x in known])
    return [jax.numpy.conj(found[form.wanted.index(i)]) for i in wanted]


def _reach(jaxpr: Any, reached: list[frozenset[int]]) -> list[frozenset[int]]:
    """Return what each result of a program depends on, where each argument depends on ``reached``."""
    known = dict(zip(jaxpr.invars, reached, strict=True))

    def of(variable: Any) -> frozenset[int]:
        return frozenset() if isinstance(variable, Literal) else known.get(variable, frozenset())

    for equation in jaxpr.eqns:
        inputs = [of(x) for x in equation.invars]
        inner = equation.params.get("jaxpr") if equation.primitive.name in _CALLS else None
        if inner is None:
            # A loop or a branch: all its results depend on all that it uses.
            found = [frozenset[int]().union(*inputs)] * len(equation.outvars)
        else:
            found = _reach(getattr(inner, "jaxpr", inner), inputs)
        known.update(zip(equation.outvars, found, strict=True))
    return [of(x) for x in jaxpr.outvars]


#: Operations that call a program, once and with their own arguments.
_CALLS = frozenset(["jit", "pjit", "closed_call", "checkpoint", "remat2"])


def differentiable(x: Any) -> bool:
    """Return whether an array of JAX can have a gradient."""
    return bool(jax.numpy.issubdtype(x.dtype, jax.numpy.inexact))


class Functions:
    """A function of trees, as a computation for each form of its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.made: dict[Any, Computation] = {}

    def __reduce__(self) -> Any:
        """Leave out what is compiled."""
        return Functions, (self.function,)

    def of(self, leaves: Sequence[Any], at: Sequence[int], tree: Any) -> Computation:
        """Return the computation on the leaves ``at``. The others are part of its form."""
        rest = filled(list(leaves), at, [None] * len(at))
        try:
            key = (tree, tuple(at), tuple(_constant(leaf) for leaf in rest))
            found = self.made.get(key)
        except TypeError as error:
            text = "an argument that is not a tensor is a constant of the compiled function, and has to be hashable"
            raise of_kind("argument", f"{text}: {error}") from error
        if found is None:
            found = self.made[key] = Computation(functools.partial(self._called, rest, tuple(at), tree))
        return found

    def _called(self, rest: list[Any], at: tuple[int, ...], tree: Any, *inputs: Any) -> Any:
        args, kwargs = jax.tree.unflatten(tree, filled(rest, at, inputs))
        return self.function(*args, **kwargs)


def _constant(leaf: Any) -> Any:
    """Return what tells a constant from others: ``1``, ``1.0`` and ``True`` are equal, and so are both zeros."""
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf
