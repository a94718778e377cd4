"""Computations of other frameworks as nodes of TensorFlow's tapes, and as operations of its graphs. Imports TensorFlow.

A node keeps what its framework has recorded between its inputs and outputs. Its gradient is a node as well, which is
recorded only where the gradient is differentiated.

An operation runs many times before TensorFlow asks for a gradient: in a loop, in calls under one tape, on several
threads. So each run has a tensor of TensorFlow that holds its record, and the gradient of the operation reads that
tensor. The record is dropped with it.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import tensorflow as tf

from .. import _core
from ..errors import of_kind
from ._held import Held, record_in
from ._leaves import filled, results_at, tensors_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Recorded(Protocol):
    """A computation that its framework has recorded: what it has of the inputs and the outputs of a node."""

    def differentiated(
        self, given: Sequence[int], known: list[Any], *, adds: bool = True
    ) -> tuple[list[Any], Callable[[], Recorded]]:
        """Return the gradients of the inputs, or ``None``, and what differentiates them.

        ``known`` are eager tensors, the gradients of the outputs ``given``. Those of parameters are added to theirs, if
        ``adds``.
        """

    def reordered(self, inputs: Sequence[int | None], outputs: Sequence[int]) -> Recorded:
        """Return the same with these inputs and outputs. ``None`` stands for an input that has no gradient."""

    def memory_for(self, beside: Any) -> Any:
        """Return eight bytes of fresh memory on the device of a tensor."""


class Call(NamedTuple):
    """The arguments of a function: a container, its leaves, and which of them are tensors."""

    structure: Any
    leaves: list[Any]
    at: list[int]
    own: Any
    name: str

    def packed(self, views: list[Any]) -> Any:
        """Return the arguments with these tensors."""
        return tf.nest.pack_sequence_as(self.structure, filled(self.leaves, self.at, views))

    def flat(self, results: Any) -> list[Any]:
        """Return what is in the results: tensors of the framework of the function, and ``None``."""
        leaves: list[Any] = tf.nest.flatten(results)
        results_at(leaves, self.own, self.name)
        return leaves


class Made(NamedTuple):
    """What a run has made."""

    results: Any
    leaves: list[Any]
    record: Recorded
    #: Whether the function uses parameters that are trained.
    trained: bool


def function_of(run: Callable[[Call, list[Any]], Made], own: Any, name: str, outputs: Any) -> Callable[..., Any]:
    """Return the function of TensorFlow that ``run`` runs in the framework ``name``, with tensors of type ``own``."""
    specs = [] if outputs is None else tf.nest.flatten(outputs)
    if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
        raise of_kind("argument", "outputs is a tf.TensorSpec, or a container of them: one for each result")

    # There is nothing in it for AutoGraph, which would warn of modules of PyTorch.
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator, unused-ignore]
    def function(*args: Any, **kwargs: Any) -> Any:
        leaves = [_plain(leaf) for leaf in tf.nest.flatten((args, kwargs))]
        at = tensors_at(leaves, tf.Tensor, own, "TensorFlow", "truebridge.to_tensorflow")
        call, inputs = Call((args, kwargs), leaves, at, own, name), [leaves[i] for i in at]

        if tf.executing_eagerly():
            made = run(call, inputs)
            record = made.record
            if made.trained:
                # For the parameters a tape records the node, whether or not it watches an argument.
                inputs, record = (
                    [*inputs, anchor().value()],
                    record.reordered([*range(len(at)), None], range(len(made.leaves))),
                )
            return tf.nest.pack_sequence_as(made.results, node(inputs, made.leaves, lambda: record))
        if not tf.compat.v1.get_default_graph().building_function:
            raise of_kind("argument", "this runs eagerly and in a tf.function: call it outside of graphs of version 1")
        if outputs is None:
            text = f"a tf.function is traced before {name} runs: pass outputs=tf.TensorSpec(…) to tf_function"
            raise of_kind("argument", text)

        def step(*given: Any) -> tuple[list[Any], Callable[[], Recorded], Callable[[Any], Any]]:
            made = run(call, list(given[:-1]))
            tensors = copied(made.leaves)
            _check_described(outputs, specs, made.results, tensors)
            record = made.record.reordered([*range(len(at)), None], range(len(tensors)))
            return tensors, lambda: record, record.memory_for

        return tf.nest.pack_sequence_as(outputs, operation([*inputs, anchor().value()], specs, step))

    wrapper: Callable[..., Any] = function
    return wrapper


def _plain(leaf: Any) -> Any:
    # Variables of Keras are not variables of TensorFlow, but become tensors by this method.
    is_variable = isinstance(leaf, tf.Variable) or hasattr(leaf, "__tf_tensor__")
    return tf.convert_to_tensor(leaf) if is_variable else leaf


def _check_described(outputs: Any, specs: list[Any], results: Any, tensors: list[Any]) -> None:
    """Compare the results with what ``outputs`` says: the graph relies on it."""
    same = len(specs) == len(tensors) and _form(outputs) == _form(results)
    for spec, tensor in zip(specs, tensors, strict=False):
        same = same and tensor is not None and spec.is_compatible_with(tensor)
    if not same:
        shown = ", ".join("None" if tensor is None else f"{tensor.dtype.name}{tensor.shape}" for tensor in tensors)
        raise of_kind("argument", f"the function returned {shown:.200}, which outputs= does not describe")


def _form(structure: Any) -> Any:
    """Return how a container is made of its leaves. A list and a tuple of the same leaves are alike."""
    if isinstance(structure, Mapping):
        return {key: _form(inner) for key, inner in structure.items()}
    return [_form(inner) for inner in structure] if isinstance(structure, list | tuple) else None


@functools.cache
def anchor() -> Any:
    """Return a variable, which every tape watches when it is read: an input of nodes that have parameters."""
    with tf.init_scope(), tf.name_scope(""), tf.device("CPU:0"):
        return tf.Variable(0.0, name="truebridge")


def node(
    inputs: Sequence[Any], values: Sequence[Any], record: Callable[[], Recorded], *, adds: bool = True
) -> list[Any]:
    """Return the values as eager tensors of TensorFlow, of which a tape knows how they depend on the inputs.

    ``values`` are tensors of another framework, or ``None``, and ``record`` returns what differentiates them. ``adds``
    tells whether their gradients are added to those of parameters.
    """
    tensors = copied(values)
    at = [i for i, tensor in enumerate(tensors) if tensor is not None]
    if not inputs or not at:
        return tensors
    return filled(tensors, at, _recorded(inputs, [tensors[i] for i in at], at, record, adds))


def _recorded(
    inputs: Sequence[Any], tensors: list[Any], at: list[int], record: Callable[[], Recorded], adds: bool
) -> list[Any]:
    """Return the tensors, which are the values ``at`` these places, as a node of the tapes."""
    used: set[int] = set()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator, unused-ignore]
    def gradient(*gradients: Any) -> list[Any]:
        if not tf.executing_eagerly():
            text = "this gradient runs outside of TensorFlow, one at a time: pass experimental_use_pfor=False to "
            raise of_kind("argument", text + "tape.jacobian")
        # A forward accumulator asks for the gradients of all results, notes none, and wants only their derivatives.
        backward = bool(used)
        given = sorted(used) or range(len(tensors))
        known = [tf.convert_to_tensor(gradients[i]) for i in given]
        made, again = record().differentiated([at[i] for i in given], known, adds=adds and backward)
        used.clear()
        return node([*inputs, *known], made, again, adds=backward)[: len(inputs)]

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def computed(*_: Any) -> tuple[list[Any], Any]:
        return tensors, gradient

    return [_marked(tensor, i, used) for i, tensor in enumerate(computed(*inputs))]


def _marked(tensor: Any, number: int, used: set[int]) -> Any:
    """Return a result that notes when a tape takes its gradient: for others the node gets zeros."""

    def gradient(given: Any) -> Any:
        used.add(number)
        return given

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def mark(tensor: Any) -> tuple[Any, Any]:
        return tensor, gradient

    return mark(tensor)


#: The gradient of ``operation``. Another copy of this package has another one.
_GRADIENT = f"Truebridge{uuid.uuid4().hex}"


def operation(inputs: Sequence[Any], specs: Sequence[Any], step: Callable[..., Any]) -> list[Any]:
    """Return tensors of the graph, as the specs describe them, which ``step`` computes whenever the graph runs.

    ``step`` takes the inputs as eager tensors. It returns eager tensors, what differentiates them, and the function
    that makes memory next to a tensor. The last input is a tensor of floating-point numbers, which is where the
    operation runs.
    """

    def run(*inputs: Any) -> list[Any]:
        tensors, record, memory_for = step(*inputs)
        return [*tensors, _core.convert_inside(Held(record, memory_for(inputs[-1]), "<i8"), "tensorflow", copy=False)]

    # A tape looks for the gradient of an operation by its type, and for that of a function in its graph.
    @tf.function(autograph=False)  # type: ignore[untyped-decorator, unused-ignore]
    def computed(*inputs: Any) -> list[Any]:
        with tf.compat.v1.get_default_graph().gradient_override_map({"EagerPyFunc": _GRADIENT}):
            made = tf.py_function(run, inputs, [*(spec.dtype for spec in specs), tf.int64])
        for tensor, spec in zip(made, specs, strict=False):
            tensor.set_shape(spec.shape)
        return list(made)

    made: list[Any] = computed(*inputs)[:-1]
    return made


@tf.RegisterGradient(_GRADIENT)  # type: ignore[untyped-decorator, unused-ignore]
def _gradient(op: Any, *gradients: Any) -> list[Any]:
    """Return the gradients of the inputs of an operation, by another operation. Zeros stand for no gradient."""
    inputs, held = list(op.inputs), op.outputs[-1]
    given = [i for i, y in enumerate(op.outputs) if differentiable(y)]
    wanted = [i for i, x in enumerate(inputs) if differentiable(x)]

    def step(held: Any, *tensors: Any) -> tuple[list[Any], Callable[[], Recorded], Callable[[Any], Any]]:
        known, inputs = tensors[: len(given)], tensors[len(given) :]
        run = _record(held)
        found, again = run.differentiated(given, list(known))

        def record() -> Recorded:
            # The inputs of this operation have another order than those of the node.
            count = len(inputs)
            return again().reordered([None, *range(count, count + len(known)), *range(count)], wanted)

        made = copied([found[i] for i in wanted])
        made = [tf.zeros_like(inputs[i]) if x is None else x for i, x in zip(wanted, made, strict=True)]
        return made, record, run.memory_for

    known = [tf.convert_to_tensor(gradients[i]) for i in given]
    specs = [tf.TensorSpec(inputs[i].shape, inputs[i].dtype) for i in wanted]
    with tf.device(op.device):
        made = operation([held, *known, *inputs], specs, step)
    return filled([None] * len(inputs), wanted, made)


def _record(held: Any) -> Recorded:
    record = record_in(held)
    if record is None:
        raise of_kind(
            "argument", "the gradient is computed on another device than the function: compute both on one device"
        )
    found: Recorded = record()
    return found


def differentiable(tensor: Any) -> bool:
    """Return whether a tensor of TensorFlow can have a gradient."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def copied(values: Sequence[Any]) -> list[Any]:
    """Return tensors of another framework, or ``None``, as eager tensors in memory that nothing else has."""
    at = [i for i, value in enumerate(values) if value is not None]
    return filled(list(values), at, _core.convert_inside([values[i] for i in at], "tensorflow", copy=True, detach=True))
