"""Functions of PyTorch as nodes of TensorFlow's tapes and graphs. Imports both frameworks.

Arguments are converted in place. Results and gradients are copied: PyTorch adds to gradients and writes to parameters
in place, and lets them share memory with what it returns; TensorFlow takes its tensors as constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf
import torch

from ._autograd_nodes import Recorded, anchor, copied, crossed, ends, node, operation
from .autograd import filled, results_at, tensors_at
from .errors import of_kind

if TYPE_CHECKING:
    from collections.abc import Callable


def wrapped(function: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
    """Return the function of TensorFlow that runs this one of PyTorch."""
    specs = [] if outputs is None else tf.nest.flatten(outputs)
    if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
        raise of_kind("argument", "outputs is a tf.TensorSpec, or a container of them: one for each result")

    # There is nothing in it for AutoGraph, which would warn of modules of PyTorch.
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator, unused-ignore]
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = [_plain(leaf) for leaf in tf.nest.flatten((args, kwargs))]
        at = tensors_at(leaves, tf.Tensor, torch.Tensor, "TensorFlow", "truebridge.to_tensorflow")
        inputs = [leaves[i] for i in at]

        def run(inputs: list[Any]) -> tuple[Any, list[Any], list[Any]]:
            """Return the results, their leaves, and the inputs, as PyTorch has them."""
            with torch.inference_mode(False), torch.enable_grad():
                views = crossed(inputs)
                _check_devices(views)
                positional, named = tf.nest.pack_sequence_as((args, kwargs), filled(leaves, at, views))
                results = function(*positional, **named)
            if any(view._version for view in views):
                text = "the function wrote to an argument, which TensorFlow takes as constant: write to a .clone()"
                raise of_kind("argument", text)
            flat = tf.nest.flatten(results)
            results_at(flat, torch.Tensor, "PyTorch")
            return results, flat, views

        if tf.executing_eagerly():
            results, flat, views = run(inputs)
            own = {id(view) for view in views}
            if any(id(leaf) not in own for leaf in ends([y for y in flat if y is not None])):
                # For the parameters a tape records the node, whether or not it watches an argument.
                inputs, views = [*inputs, anchor().value()], [*views, None]
            return tf.nest.pack_sequence_as(results, node(inputs, flat, lambda: Recorded(views, flat)))
        if not tf.compat.v1.get_default_graph().building_function:
            raise of_kind("argument", "this runs eagerly and in a tf.function: call it outside of graphs of version 1")
        if outputs is None:
            text = "a tf.function is traced before PyTorch runs: pass outputs=tf.TensorSpec(…) to tf_function"
            raise of_kind("argument", text)

        def step(*given: Any) -> tuple[list[Any], Callable[[], Recorded]]:
            results, flat, views = run(list(given[:-1]))
            tensors = copied(flat)
            _check_described(outputs, specs, results, tensors)
            record = Recorded([*views, None], flat)
            return tensors, lambda: record

        made = operation([*inputs, anchor().value()], specs, step)
        return tf.nest.pack_sequence_as(outputs, made)

    wrapper: Callable[..., Any] = call
    return wrapper


def _plain(leaf: Any) -> Any:
    # Variables of Keras are not variables of TensorFlow, but become tensors by this method.
    is_variable = isinstance(leaf, tf.Variable) or hasattr(leaf, "__tf_tensor__")
    return tf.convert_to_tensor(leaf) if is_variable else leaf


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
