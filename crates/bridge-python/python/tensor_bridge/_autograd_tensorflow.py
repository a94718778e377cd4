"""Functions of PyTorch as nodes of TensorFlow's tapes. Imports both frameworks.

A node keeps the inputs and outputs of one call, with the graph that PyTorch has recorded between them. Its gradient is
a node as well, whose graph is recorded only where the gradient is differentiated.

Arguments are converted in place. Results and gradients are copied: PyTorch adds to gradients and writes to parameters
in place, and lets them share memory with what it returns; TensorFlow takes its tensors as constant.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf
import torch

from . import _core
from ._spans import overlaps, span
from .autograd import filled, results_at, tensors_at
from .errors import of_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    #: Inputs and outputs in PyTorch. The outputs know how they depend on the inputs. ``None`` stands for the anchor.
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

        def run(*inputs: Any, anchor: Any = None) -> tuple[Any, list[Any]]:
            """Return the results as PyTorch has them, and their leaves in TensorFlow."""
            with torch.inference_mode(False), torch.enable_grad():
                views = _crossed(inputs)
                _check_devices(views)
                positional, named = tf.nest.pack_sequence_as((args, kwargs), filled(leaves, at, views))
                results = function(*positional, **named)
            if any(view._version for view in views):
                text = "the function wrote to an argument, which TensorFlow takes as constant: write to a .clone()"
                raise of_kind("argument", text)
            flat = tf.nest.flatten(results)
            where = results_at(flat, torch.Tensor, "PyTorch")
            outer = [flat[i] for i in where]
            own = {id(view) for view in views}
            if any(id(leaf) not in own for leaf in _leaves(outer)):
                # For the parameters a tape records the node, whether or not it watches an argument.
                inputs = (*inputs, _anchor().value() if anchor is None else anchor)
                views.append(None)
            tensors = _node(inputs, lambda: outer, lambda: (views, outer))
            return results, filled([None] * len(flat), where, tensors)

        if tf.executing_eagerly():
            return tf.nest.pack_sequence_as(*run(*inputs))
        if outputs is None:
            text = "a tf.function is traced before PyTorch runs: pass outputs=tf.TensorSpec(…) to tf_function"
            raise of_kind("argument", text)

        def described(*inputs: Any) -> list[Any]:
            *carried, anchor = inputs
            results, tensors = run(*map(_restored, carried, dtypes), anchor=anchor)
            _check_described(outputs, specs, results, tensors)
            return tensors

        dtypes = [x.dtype for x in inputs]
        carried = [*map(_carried, inputs), _anchor().value()]
        made = tf.py_function(described, carried, [spec.dtype for spec in specs])
        for tensor, spec in zip(made, specs, strict=True):
            tensor.set_shape(spec.shape)
        return tf.nest.pack_sequence_as(outputs, made)

    wrapper: Callable[..., Any] = call
    return wrapper


def _plain(leaf: Any) -> Any:
    # Variables of Keras are not variables of TensorFlow, but become tensors by this method.
    is_variable = isinstance(leaf, tf.Variable) or hasattr(leaf, "__tf_tensor__")
    return tf.convert_to_tensor(leaf) if is_variable else leaf


#: The dtypes that carry integers into ``tf.py_function``, by their bytes: it has no gradient for inputs of integers.
_CARRIERS = {2: tf.float16, 4: tf.float32, 8: tf.float64}


def _carried(x: Any) -> Any:
    if not (x.dtype.is_integer or x.dtype.is_bool):
        return x
    x = tf.cast(x, tf.int16) if x.dtype.size == 1 else x
    return tf.bitcast(x, _CARRIERS[x.dtype.size])


def _restored(x: Any, dtype: Any) -> Any:
    if x.dtype == dtype:
        return x
    return tf.cast(tf.bitcast(x, tf.int16), dtype) if dtype.size == 1 else tf.bitcast(x, dtype)


@functools.cache
def _anchor() -> Any:
    """Return a variable, which every tape watches when it is read."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0.0, name="tensor_bridge")


def _node(inputs: Sequence[Any], values: Callable[[], Sequence[Any]], graph: Callable[[], Graph]) -> list[Any]:
    """Return the values as tensors of TensorFlow, of which a tape knows how they depend on the inputs.

    ``values`` computes them in PyTorch, ``graph`` with what is needed to differentiate them.
    """
    tensors: list[Any] = _core.to_tensorflow([value.detach() for value in values()], copy=True)
    if not inputs or not tensors:
        return tensors
    used: set[int] = {0} if len(tensors) == 1 else set()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator, unused-ignore]
    def gradient(*gradients: Any) -> list[Any]:
        if not tf.executing_eagerly():
            text = "this gradient runs in PyTorch, one at a time: pass experimental_use_pfor=False to tape.jacobian"
            raise of_kind("argument", text)
        inner, outer = graph()
        given = [i for i, y in enumerate(outer) if i in used and y.requires_grad]
        if len(tensors) > 1:
            used.clear()
        # Of rows that were read, TensorFlow makes slices.
        known = [tf.convert_to_tensor(gradients[i]) for i in given]
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

        with torch.inference_mode(False):
            found = _node([*inputs, *known], first, again)
        return filled([None] * len(inputs), at, found)

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def node(*_: Any) -> tuple[list[Any], Any]:
        return tensors, gradient

    made: list[Any] = node(*inputs)
    return [_marked(tensor, i, used) for i, tensor in enumerate(made)] if len(made) > 1 else made


def _marked(tensor: Any, number: int, used: set[int]) -> Any:
    """Return a result that notes when a tape takes its gradient: for one that is not used, the node gets zeros."""

    def gradient(given: Any) -> Any:
        used.add(number)
        return given

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def mark(tensor: Any) -> tuple[Any, Any]:
        return tensor, gradient

    return mark(tensor)


def _backward(inner: list[Any], targets: list[Any], gradients: list[Any]) -> list[Any]:
    """Return the gradients of the inputs, or ``None``. Those of parameters are added to ``.grad``."""
    torch.autograd.backward(targets, gradients, retain_graph=True)
    found = [None if x is None else x.grad for x in inner]
    for x in inner:
        if x is not None:
            x.grad = None
    # PyTorch writes to ``.grad`` later, and may have made it of memory that it was handed or that another has.
    spans = [span(gradient) for gradient in gradients]
    for leaf in _leaves(targets):
        if leaf.grad is not None:
            if overlaps(leaf.grad, spans):
                leaf.grad = leaf.grad.clone()
            spans.append(span(leaf.grad))
    return found


def _leaves(targets: Sequence[Any]) -> Iterator[Any]:
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
