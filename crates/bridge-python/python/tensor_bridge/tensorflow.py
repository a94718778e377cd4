"""Tensors of other frameworks inside TensorFlow's graphs: ``tf.function`` and graphs of version 1.

Eager tensors need none of this: ``tensor_bridge.to_tensorflow(x)`` gives one, which a ``tf.function`` takes as it is. A
graph, though, is built once and run many times, and the ``feed_dict`` of a session copies through the host. So what is
fed and fetched here is a handle, a tensor of two ``int32`` in host memory, and the tensor itself stays where it is::

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        handle = tb.tensorflow.placeholder()
        x = tb.tensorflow.external_input(tf.float32, [None, 4], handle)
        y = tb.tensorflow.external_output(2 * x + 1)
        fetched = session.run(y, {handle: tb.tensorflow.feed(torch_tensor)})
        result = tb.tensorflow.take(fetched, "torch")
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core
from .errors import BridgeError, BridgeTypeError, BridgeValueError

if TYPE_CHECKING:
    from ._core import Target

__all__ = ["Feed", "external_input", "external_output", "feed", "handle_of", "placeholder", "take"]

_INPUT, _OUTPUT = "TensorBridgeInput", "TensorBridgeOutput"


class Feed(np.ndarray):
    """A tensor that is fed: the two numbers of its handle.

    Runs can read the tensor as long as this object lives, any number of times. They keep the memory themselves for as
    long as they need it.
    """

    _kept: _core.Feed | None = None

    def __array_finalize__(self, other: object) -> None:
        """Views and copies keep the tensor as well."""
        self._kept = getattr(other, "_kept", None)

    def __reduce__(self) -> str:
        """Refuse: a handle means something in this process alone."""
        raise TypeError("what is fed cannot leave the process: feed the tensor there")


def placeholder(name: str = "handle") -> Any:
    """The place in a graph of version 1 where a handle is fed."""
    import tensorflow as tf

    return tf.compat.v1.placeholder(tf.int32, [2], name)


def external_input(dtype: Any, shape: Any, handle: Any = None, *, name: str = "external_input") -> Any:
    """A tensor of the graph that is another framework's memory, with this dtype and shape.

    ``handle`` is a tensor that holds what ``feed`` gave: an argument of the ``tf.function``, or a ``placeholder``.
    Without it, a graph of version 1 gets a placeholder of its own, which ``handle_of`` returns. ``shape`` may have
    lengths of ``None``. What is fed is checked against dtype and shape in every run. Gradients with respect to the
    result are taken as of any tensor.

    The operation runs on the device where it is built (``tf.device``), and what is fed has to be there.
    """
    import tensorflow as tf

    if tf.executing_eagerly():
        raise _misplaced("tensor_bridge.to_tensorflow(x) gives an eager tensor")
    if handle is None:
        if tf.compat.v1.get_default_graph().building_function:
            raise _misplaced("inside a tf.function pass the handle: external_input(dtype, shape, handle)")
        handle = placeholder()
    if getattr(handle, "dtype", None) != tf.int32:
        raise _argument(f"{_shown(handle)} is no handle: pass a tensor of two int32, which stands for what feed gives")
    try:
        dtype = tf.as_dtype(dtype)
    except (TypeError, ValueError) as error:
        raise _error(BridgeTypeError, "dtype", f"{_shown(dtype)} is no dtype of TensorFlow") from error
    try:
        shape = tf.TensorShape(shape)
    except (TypeError, ValueError) as error:
        raise _argument(f"{_shown(shape)} is no shape: {str(error):.200}") from error
    made = _apply(_INPUT, name, handle=handle, T=dtype, place=-1)
    return tf.ensure_shape(made, shape, name=f"{name}_shape")


def handle_of(x: Any) -> Any:
    """Return the tensor of the graph that holds the handle of ``x``, which ``external_input`` returned.

    A run is fed there: ``session.run(y, {handle_of(x): feed(tensor)})``.
    """
    # Read from the graph: TensorFlow takes a tensor with an attribute ``handle`` for a variable.
    operation: Any = getattr(x, "op", None)
    if getattr(operation, "type", None) == "EnsureShape":
        operation = operation.inputs[0].op
    if getattr(operation, "type", None) != _INPUT:
        raise _argument(f"{_shown(x)} is no external_input of a graph, and has no handle")
    return operation.inputs[0]


def external_output(y: Any, *, name: str = "external_output") -> Any:
    """A handle by which the value that ``y`` has in a run can be taken, once, with ``take``.

    What a session has given goes with it when nobody has taken it. What a ``tf.function`` has given waits in any case,
    also when the call fails further on, and so does what was built inside ``tf.cond`` and the like.
    """
    import tensorflow as tf

    if tf.executing_eagerly():
        raise _misplaced("an eager tensor is converted as it is, with tensor_bridge.convert")
    if not isinstance(y, tf.Tensor | tf.Variable):
        text = f"{_shown(y)} is no tensor of a graph: call tf.convert_to_tensor first"
        raise _error(BridgeTypeError, "not_a_tensor", text)
    if y.dtype._is_ref_dtype:
        raise _argument(
            "a reference variable changes after it is read: make it a resource variable (use_resource=True)"
        )
    # A tf.function may be gone as soon as it was called.
    outlived = int(tf.compat.v1.get_default_graph().building_function)
    return _apply(_OUTPUT, name, x=y, outlived=outlived)


def feed(x: Any, *, copy: bool | None = None) -> Feed:
    """Feed ``x``, a tensor of any framework, in place: what a run is given for a handle.

    TensorFlow's stream waits, on the device, for the work on ``x`` that is under way now. ``copy`` and the errors are
    those of ``tensor_bridge.convert``. A run that reads a handle whose ``Feed`` is gone fails and says so.
    """
    _warn_of_reclaimed()
    kept = _core.tensorflow_feed(x, copy)
    handle: Feed = np.array(kept.handle, dtype=np.int32).view(Feed)
    handle._kept = kept
    return handle


def take(fetched: Any, target: Target) -> Any:
    """The tensor behind a handle that a run has given, as one of ``target``, in place.

    Each can be taken once. One that is never taken keeps its memory: ``tensor_bridge.stats()["untaken"]`` counts them.
    Those of a session go when it is closed; they are counted as ``reclaimed``, and the next call here warns of them
    (``ResourceWarning``).
    """
    _warn_of_reclaimed()
    try:
        numbers = np.asarray(fetched)
    except (TypeError, ValueError, NotImplementedError):
        numbers = np.empty(0)
    if numbers.shape != (2,) or numbers.dtype != np.int32:
        raise _argument(f"{_shown(fetched)} is no handle: pass what a run gave for external_output")
    return _core.tensorflow_take([int(number) for number in numbers], target)


_warned = 0


def _warn_of_reclaimed() -> None:
    global _warned
    reclaimed = _core.stats()["reclaimed"]
    if reclaimed > _warned:
        text = f"{reclaimed - _warned} results of external_output were never taken, and have gone with their sessions"
        _warned = reclaimed
        warnings.warn(text, ResourceWarning, stacklevel=3)


def _apply(operation: str, name: str, **arguments: Any) -> Any:
    from tensorflow.python.framework import op_def_library

    _core.tensorflow_operations()
    return op_def_library.apply_op(operation, name=name, **arguments)


def _misplaced(advice: str) -> BridgeError:
    return _argument(f"this is for graphs: {advice}")


def _shown(object: Any) -> str:
    """What an error says of an object, which may be as large as it likes."""
    return f"an object of type {type(object).__name__}"


def _argument(text: str) -> BridgeError:
    return _error(BridgeValueError, "argument", text)


def _error(kind_of_error: type[BridgeError], kind: str, text: str) -> BridgeError:
    error = kind_of_error(text)
    error.kind = kind
    return error
