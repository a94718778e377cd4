"""Functions of PyTorch as nodes of TensorFlow's tapes. Imports both frameworks.

A node keeps the inputs and outputs of one call, with the graph that PyTorch has recorded between them. Its gradient is
a node as well, whose graph is recorded only where the gradient is differentiated.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import tensorflow as tf
import torch

from . import _core
from ._spans import overlaps, span
from .autograd import filled, results_at, tensors_at
from .errors import of_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    #: Inputs and outputs in PyTorch. The outputs know how they depend on the inputs.
    Graph = tuple[list[Any], Sequence[Any]]


def wrapped(function: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
    """Return the function of TensorFlow that runs this one of PyTorch."""
    specs = [] if outputs is None else tf.nest.flatten(outputs)
    if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
        raise of_kind("argument", "outputs is a tf.TensorSpec, or a container of them: one for each result")

    # There is nothing in it for AutoGraph, which would warn of modules of PyTorch.
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator, unused-ignore]
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = [_plain(leaf) for leaf in tf.nest.flatten((args, kwargs))]
        at = tensors_at(leaves, tf.Tensor, torch.Tensor, "TensorFlow", "tensor_bridge.to_tensorflow")
        inputs = [leaves[i] for i in at]

        def run(*inputs: Any) -> tuple[Any, list[Any]]:
            """Return the results as PyTorch has them, and their leaves in TensorFlow."""
            results: Any = None
            where: list[int] = []

            def graph() -> Graph:
                nonlocal results
                views = _crossed(inputs)
                _check_devices(views)
                positional, named = tf.nest.pack_sequence_as((args, kwargs), filled(leaves, at, views))
                with torch.enable_grad():
                    results = function(*positional, **named)
                flat = tf.nest.flatten(results)
                where.extend(results_at(flat, torch.Tensor, "PyTorch"))
                return views, [flat[i] for i in where]

            made = functools.cache(graph)
            tensors = _node(inputs, lambda: made()[1], made)
            return results, filled([None] * len(tf.nest.flatten(results)), where, tensors)

        if tf.executing_eagerly():
            return tf.nest.pack_sequence_as(*run(*inputs))
        if outputs is None:
            text = "a tf.function is traced before PyTorch runs: pass outputs=tf.TensorSpec(…) to tf_function"
            raise of_kind("argument", text)

        def described(*inputs: Any) -> list[Any]:
            results, tensors = run(*inputs)
            _check_described(outputs, specs, results, tensors)
            return tensors

        made = tf.py_function(described, inputs, [spec.dtype for spec in specs])
        for tensor, spec in zip(made, specs, strict=True):
            tensor.set_shape(spec.shape)
        return tf.nest.pack_sequence_as(outputs, made)

    wrapper: Callable[..., Any] = call
    return wrapper


def _plain(leaf: Any) -> Any:
    # Variables of Keras are no variables of TensorFlow, but become tensors by this method.
    is_variable = isinstance(leaf, tf.Variable) or hasattr(leaf, "__tf_tensor__")
    return tf.convert_to_tensor(leaf) if is_variable else leaf


def _node(inputs: Sequence[Any], values: Callable[[], Sequence[Any]], graph: Callable[[], Graph]) -> list[Any]:
    """Return the values as tensors of TensorFlow, of which a tape knows how they depend on the inputs.

    ``values`` computes them in PyTorch, ``graph`` with what is needed to differentiate them.
    """
    views: list[Any] = _core.to_tensorflow([value.detach() for value in values()])
    if not inputs or not views:
        return views

    def gradient(*gradients: Any) -> list[Any]:
        inner, outer = graph()
        given = [i for i, y in enumerate(outer) if y.requires_grad and gradients[i] is not None]
        known = [gradients[i] for i in given]
        targets = [outer[i] for i in given]
        at: list[int] = []

        def first() -> list[Any]:
            found = _backward(inner, targets, _crossed(known)) if given else []
            at.extend(i for i, x in enumerate(found) if x is not None)
            return [found[i] for i in at]

        @functools.cache
        def again() -> Graph:
            sent = _crossed(known)
            made = torch.autograd.grad(targets, [inner[i] for i in at], sent, create_graph=True)
            return [*inner, *sent], made

        found = _node([*inputs, *known], first, again)
        return filled([None] * len(inputs), at, found)

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def node(*_: Any) -> tuple[list[Any], Any]:
        return views, gradient

    tensors: list[Any] = node(*inputs)
    return tensors


def _backward(inner: list[Any], targets: list[Any], gradients: list[Any]) -> list[Any]:
    """Return the gradients of the inputs, or ``None``. Those of parameters are added to ``.grad``."""
    torch.autograd.backward(targets, gradients, retain_graph=True)
    found = [x.grad for x in inner]
    for x in inner:
        x.grad = None
    # PyTorch writes to ``.grad`` later, and may have made it of memory that it was handed.
    spans = [span(gradient) for gradient in gradients]
    for leaf in _leaves(targets):
        if leaf.grad is not None and overlaps(leaf.grad, spans):
            leaf.grad = leaf.grad.clone()
    return found


def _leaves(targets: list[Any]) -> list[Any]:
    """Return the tensors in whose ``.grad`` the gradients of these end."""
    waiting = [target.grad_fn for target in targets]
    seen = set()
    found = []
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        waiting.extend(after for after, _ in function.next_functions)
        if isinstance(leaf := getattr(function, "variable", None), torch.Tensor):
            found.append(leaf)
    return found


def _crossed(tensors: Sequence[Any]) -> list[Any]:
    # Each is an object of its own, so that a tensor that is passed twice has a gradient for each time.
    views = [view.detach() for view in _core.to_torch(list(tensors))]
    return [view.requires_grad_() if view.is_floating_point() or view.is_complex() else view for view in views]


def _check_devices(tensors: list[Any]) -> None:
    # TensorFlow keeps integers on the host; where the function needs them is for the function to say.
    devices = sorted({str(tensor.device) for tensor in tensors if tensor.requires_grad})
    if len(devices) > 1:
        raise of_kind("device", f"tensors are on {' and '.join(devices)}: move them to one device first")


def _check_described(outputs: Any, specs: list[Any], results: Any, tensors: list[Any]) -> None:
    """Compare the results with what ``outputs`` says: the graph relies on it."""
    same = len(specs) == len(tensors)
    for spec, tensor in zip(specs, tensors, strict=False):
        same = same and tensor is not None and spec.is_compatible_with(tensor)
    if not same:
        shown = ", ".join("None" if tensor is None else f"{tensor.dtype.name}{tensor.shape}" for tensor in tensors)
        raise of_kind("argument", f"the function returned {shown:.200}, which outputs= does not describe")
