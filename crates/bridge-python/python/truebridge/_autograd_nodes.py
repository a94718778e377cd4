"""Computations of PyTorch as nodes of TensorFlow's tapes, and as operations of its graphs.

A node keeps what PyTorch has recorded between its inputs and outputs. Its gradient is a node as well, whose graph is
recorded only where the gradient is differentiated.

An operation runs many times before TensorFlow asks for a gradient: in a loop, in calls under one tape, on several
threads. So each run has a tensor of TensorFlow that holds its record, and the gradient of the operation reads that
tensor. The record is dropped with it.
"""

from __future__ import annotations

import functools
import threading
import uuid
import weakref
from typing import TYPE_CHECKING, Any

import tensorflow as tf
import torch

from . import _core
from ._spans import overlaps, span
from .autograd import filled
from .errors import of_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Recorded:
    """Inputs and outputs in PyTorch. The outputs know how they depend on the inputs.

    ``None`` stands for an input that is not differentiable, and for an output that depends on no input.
    """

    def __init__(self, inner: list[Any], outer: Sequence[Any], lock: Any = None) -> None:
        self.inner = inner
        self.outer = outer
        #: Gradients of the inner tensors pass through their ``.grad``, one at a time.
        self.lock = lock or threading.RLock()


@functools.cache
def anchor() -> Any:
    """Return a variable, which every tape watches when it is read: an input of nodes that have parameters."""
    with tf.init_scope(), tf.name_scope(""), tf.device("CPU:0"):
        return tf.Variable(0.0, name="truebridge")


def node(
    inputs: Sequence[Any], values: Sequence[Any], record: Callable[[], Recorded], *, adds: bool = True
) -> list[Any]:
    """Return the values as eager tensors of TensorFlow, of which a tape knows how they depend on the inputs.

    ``values`` are tensors of PyTorch, or ``None``, and ``record`` returns what differentiates them. ``adds`` tells
    whether their gradients are added to those of parameters.
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
            text = "this gradient runs in PyTorch, one at a time: pass experimental_use_pfor=False to tape.jacobian"
            raise of_kind("argument", text)
        # A forward accumulator asks for the gradients of all results, notes none, and wants only their derivatives.
        backward = bool(used)
        given = sorted(used) or range(len(tensors))
        known = [tf.convert_to_tensor(gradients[i]) for i in given]
        made, again = _differentiated(record(), [at[i] for i in given], known, adds=adds and backward)
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

#: The records of runs, by the address of the tensor that holds each.
_HELD: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class _Held:
    """The memory of a tensor of TensorFlow, which holds the record of a run."""

    def __init__(self, record: Callable[[], Recorded], device: Any) -> None:
        self.record = record
        self.memory = torch.zeros(1, dtype=torch.int64, device=device)
        _HELD[self.memory.data_ptr()] = self

    @property
    def __array_interface__(self) -> Any:
        if self.memory.is_cuda:
            raise AttributeError("this memory is on a device")
        return self.memory.numpy().__array_interface__

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.memory.__cuda_array_interface__


def operation(inputs: Sequence[Any], specs: Sequence[Any], step: Callable[..., Any]) -> list[Any]:
    """Return tensors of the graph, as the specs describe them, which ``step`` computes whenever the graph runs.

    ``step`` takes the inputs as eager tensors. It returns eager tensors, and what differentiates them. The last input
    is a tensor of floating-point numbers, which is where the operation runs.
    """

    def run(*inputs: Any) -> list[Any]:
        tensors, record = step(*inputs)
        return [*tensors, _core.to_tensorflow(_Held(record, _core.to_torch(inputs[-1]).device), copy=False)]

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

    def step(held: Any, *tensors: Any) -> tuple[list[Any], Callable[[], Recorded]]:
        known, inputs = tensors[: len(given)], tensors[len(given) :]
        found, again = _differentiated(_record(held), given, list(known))

        def record() -> Recorded:
            # The inputs of this operation have another order than those of the node.
            made = again()
            inner = [None, *made.inner[len(inputs) :], *made.inner[: len(inputs)]]
            return Recorded(inner, [made.outer[i] for i in wanted], made.lock)

        made = copied([found[i] for i in wanted])
        return [tf.zeros_like(inputs[i]) if x is None else x for i, x in zip(wanted, made, strict=True)], record

    known = [tf.convert_to_tensor(gradients[i]) for i in given]
    specs = [tf.TensorSpec(inputs[i].shape, inputs[i].dtype) for i in wanted]
    with tf.device(op.device):
        made = operation([held, *known, *inputs], specs, step)
    return filled([None] * len(inputs), wanted, made)


def _record(held: Any) -> Recorded:
    found = _HELD.get(_core.to_torch(held).data_ptr())
    if found is None:
        raise of_kind("argument", "TensorFlow has copied the record of this run: take the gradient on its device")
    record: Recorded = found.record()
    return record


def differentiable(tensor: Any) -> bool:
    """Return whether a tensor of TensorFlow can have a gradient."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _differentiated(
    record: Recorded, given: Sequence[int], known: list[Any], *, adds: bool = True
) -> tuple[list[Any], Callable[[], Recorded]]:
    """Return the gradients of the inner tensors, or ``None``, and what differentiates them.

    ``known`` are the gradients of the outer tensors ``given``. Those of parameters are added to ``.grad``, if ``adds``.
    """
    at = [k for k, i in enumerate(given) if record.outer[i] is not None and record.outer[i].requires_grad]
    targets = [record.outer[given[k]] for k in at]
    with torch.inference_mode(False):
        found = (_backward if adds else _gradients)(record, targets, crossed([known[k] for k in at]))

    @functools.cache
    def again() -> Recorded:
        with torch.inference_mode(False):
            sent = crossed([known[k] for k in at])
            wanted = [i for i, x in enumerate(found) if x is not None]
            inner = [record.inner[i] for i in wanted]
            # PyTorch takes no empty list: no result depends on any input.
            made = torch.autograd.grad(targets, inner, sent, create_graph=True) if inner else []
        outer = filled([None] * len(record.inner), wanted, made)
        return Recorded([*record.inner, *filled([None] * len(known), at, sent)], outer, record.lock)

    return found, again


def _gradients(record: Recorded, targets: list[Any], gradients: list[Any]) -> list[Any]:
    """Return the gradients of the inner tensors, or ``None``."""
    at = [i for i, x in enumerate(record.inner) if x is not None and x.requires_grad]
    if not targets or not at:
        return [None] * len(record.inner)
    inner = [record.inner[i] for i in at]
    found = torch.autograd.grad(targets, inner, gradients, retain_graph=True, allow_unused=True)
    return filled([None] * len(record.inner), at, found)


def _backward(record: Recorded, targets: list[Any], gradients: list[Any]) -> list[Any]:
    """Return the gradients of the inner tensors, or ``None``. Those of parameters are added to ``.grad``."""
    if not targets:
        return [None] * len(record.inner)
    with record.lock:
        torch.autograd.backward(targets, gradients, retain_graph=True)
        found = [None if x is None else x.grad for x in record.inner]
        for x in record.inner:
            if x is not None:
                x.grad = None
    # PyTorch writes to ``.grad`` later, and may have made it of memory that it was handed or that another has.
    spans = [span(gradient) for gradient in gradients]
    for leaf in ends(targets):
        if leaf.grad is not None:
            if overlaps(leaf.grad, spans):
                leaf.grad = leaf.grad.clone()
            spans.append(span(leaf.grad))
    return found


def ends(targets: Sequence[Any]) -> Iterator[Any]:
    """Yield the tensors in whose ``.grad`` the gradients of these end."""
    waiting = [target.grad_fn for target in targets]
    yield from (target for target in targets if target.grad_fn is None and target.requires_grad)
    seen = set()
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        waiting.extend(after for after, _ in function.next_functions)
        if isinstance(leaf := getattr(function, "variable", None), torch.Tensor):
            yield leaf


def copied(values: Sequence[Any]) -> list[Any]:
    """Return tensors of PyTorch, or ``None``, as eager tensors in memory that nothing else has."""
    at = [i for i, value in enumerate(values) if value is not None]
    return filled(list(values), at, _core.to_tensorflow([values[i].detach() for i in at], copy=True))


def crossed(tensors: Sequence[Any]) -> list[Any]:
    """Return eager tensors in PyTorch, each as the beginning of a graph."""
    # Each is an object of its own, so that a tensor that is passed twice has a gradient for each time.
    views = [view.detach() for view in _core.to_torch(list(tensors))]
    return [view.requires_grad_() if view.is_floating_point() or view.is_complex() else view for view in views]
