"""The edges of TensorFlow's graphs. Needs NumPy, as TensorFlow does."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..errors import BridgeError, of_kind
from . import operations
from .operations import INPUT, OUTPUT, settled, shown, typed

if TYPE_CHECKING:
    from .._core import Target

__all__ = ["Feed", "external_input", "external_output", "feed", "handle_of", "placeholder", "take"]


class Feed(np.ndarray):
    """The handle of a tensor that can be fed: two numbers. ``feed`` returns it.

    Runs can read the tensor any number of times as long as this object lives. They keep the memory for as long as they
    need it. It cannot be pickled, because a handle is valid only in its process.
    """

    _kept: _core.Feed | None = None

    def __array_finalize__(self, other: object) -> None:
        """Keep the tensor in views and copies, too."""
        self._kept = getattr(other, "_kept", None)

    def __reduce__(self) -> str:
        """Refuse: a handle is valid only in this process."""
        raise TypeError("a Feed is valid in its process only: call feed in the other process")


def placeholder(name: str = "handle") -> Any:
    """Return the tensor of a graph of version 1 where a handle is fed.

    Parameters
    ----------
    name : str, optional
        The name of the operation.

    Returns
    -------
    tensorflow.Tensor
        A placeholder of two ``int32``.

    Raises
    ------
    RuntimeError
        Outside a graph.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import truebridge as tb
    >>> with tf.Graph().as_default():
    ...     tb.tensorflow.placeholder().shape
    TensorShape([2])
    """
    import tensorflow as tf

    return tf.compat.v1.placeholder(tf.int32, [2], name)


def external_input(dtype: Any, shape: Any, handle: Any = None, *, name: str = "external_input") -> Any:
    """Return a tensor of the graph in another framework's memory.

    Parameters
    ----------
    dtype : tf.DType
        The dtype. Every run checks that the fed tensor has it.
    shape : sequence of int or None
        The shape, in elements; ``None`` is a length that varies. Every run checks it.
    handle : tensorflow.Tensor, optional
        Where the handle is fed that ``feed`` returns: an argument of the ``tf.function``, or a ``placeholder``. Without
        it a graph of version 1 gets a placeholder, which ``handle_of`` returns.
    name : str, optional
        The name of the operation.

    Returns
    -------
    tensorflow.Tensor
        The fed tensor. Gradients with respect to it are computed as for any tensor.

    Raises
    ------
    BridgeValueError
        Outside a graph, without a handle inside a ``tf.function``, and for what is not a handle or not a shape.
    BridgeDTypeError
        If TensorFlow has no such dtype.

    Notes
    -----
    The operation runs on the device where it is built (``tf.device``), and the fed tensor has to be on it.

    Examples
    --------
    >>> import torch, tensorflow as tf
    >>> import truebridge as tb
    >>> @tf.function(input_signature=[tf.TensorSpec([2], tf.int32)])
    ... def total(handle):
    ...     return tf.reduce_sum(tb.tensorflow.external_input(tf.float32, [None], handle))
    >>> float(total(tb.tensorflow.feed(torch.ones(3))))
    3.0
    """
    import tensorflow as tf

    if tf.executing_eagerly():
        raise _misplaced("truebridge.to_tensorflow(x) returns an eager tensor")
    if handle is None:
        if tf.compat.v1.get_default_graph().building_function:
            raise _misplaced("inside a tf.function pass the handle: external_input(dtype, shape, handle)")
        handle = placeholder()
    if getattr(handle, "dtype", None) != tf.int32:
        raise of_kind("argument", f"{shown(handle)} is not a handle: pass a tensor with what feed returned: two int32")
    dtype, shape = typed(tf, dtype, shape)
    made = _apply(INPUT, name, handle=handle, T=dtype, place=-1)
    return tf.ensure_shape(made, shape, name=f"{name}_shape")


def handle_of(x: Any) -> Any:
    """Return the tensor of the graph that holds the handle of an ``external_input``.

    Parameters
    ----------
    x : tensorflow.Tensor
        What ``external_input`` returned.

    Returns
    -------
    tensorflow.Tensor
        Where to feed a run what ``feed`` returns.

    Raises
    ------
    BridgeValueError
        If ``x`` was not returned by ``external_input``.

    Examples
    --------
    >>> import numpy as np, tensorflow as tf
    >>> import truebridge as tb
    >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    ...     x = tb.tensorflow.external_input(tf.float64, [None])
    ...     session.run(2 * x, {tb.tensorflow.handle_of(x): tb.tensorflow.feed(np.ones(3))})
    array([2., 2., 2.])
    """
    return operations.handle_of(x)


def external_output(y: Any, *, name: str = "external_output") -> Any:
    """Return a handle by which the value of a tensor in a run can be taken.

    Parameters
    ----------
    y : tensorflow.Tensor or tensorflow.Variable
        A tensor of the graph.
    name : str, optional
        The name of the operation.

    Returns
    -------
    tensorflow.Tensor
        What a run returns for ``take``, which can take each value once.

    Raises
    ------
    BridgeTypeError
        If ``y`` is not a tensor of a graph.
    BridgeValueError
        Outside a graph.

    Notes
    -----
    ``take`` returns memory that no other tensor has: it does not change later, and you may write to it. The result is
    in place if a kernel has computed ``y``. Otherwise it is a copy: of a variable, a constant or a fed tensor, also
    after ``tf.identity`` and the like, and of a tensor that other operations of the graph have yet to read.

    A value of a session that is not taken is dropped when the session is closed. A value of a ``tf.function`` is kept
    until it is taken, even if the call fails later, and so is a value that was built inside ``tf.cond`` and the like.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import truebridge as tb
    >>> @tf.function
    ... def ones(n):
    ...     return tb.tensorflow.external_output(tf.ones(n))
    >>> tb.tensorflow.take(ones(3), "torch")
    tensor([1., 1., 1.])
    """
    import tensorflow as tf

    if tf.executing_eagerly():
        raise _misplaced("convert an eager tensor as it is, with truebridge.convert")
    if not isinstance(y, tf.Tensor | tf.Variable):
        text = f"{shown(y)} is not a tensor of a graph: call tf.convert_to_tensor first"
        raise of_kind("not_a_tensor", text)
    y = settled(tf, tf.convert_to_tensor(y))
    # A tf.function may be destroyed right after its call.
    outlived = int(tf.compat.v1.get_default_graph().building_function)
    return _apply(OUTPUT, name, x=y, outlived=outlived)


def feed(x: Any, *, copy: bool | None = None) -> Feed:
    """Return the handle with which a run is fed a tensor, in place.

    Parameters
    ----------
    x : tensor
        A tensor of any framework. TensorFlow's stream waits, on the device, for the pending work on it.
    copy : bool, optional
        As for ``convert``.

    Returns
    -------
    Feed
        What to feed. Keep it: a run that reads the handle of a ``Feed`` that was destroyed fails.

    Raises
    ------
    BridgeError
        As for ``convert``.

    Examples
    --------
    >>> import torch
    >>> import truebridge as tb
    >>> tb.tensorflow.feed(torch.ones(3)).shape
    (2,)
    """
    _warn_of_reclaimed()
    kept = _core.tensorflow_feed(x, copy)
    handle: Feed = np.array(kept.handle, dtype=np.int32).view(Feed)
    handle._kept = kept
    return handle


def take(fetched: Any, target: Target) -> Any:
    """Take the tensor of a handle that a run has returned, in memory that no other tensor has.

    Parameters
    ----------
    fetched : tensor or array of two int32
        What a run returned for ``external_output``. Each can be taken once.
    target : Target
        The name of the framework of the result.

    Returns
    -------
    tensor
        The value.

    Raises
    ------
    BridgeValueError
        If ``fetched`` is not a handle.
    BridgeBufferError
        If it was taken before, or its session is closed; the kind is ``"consumed"``.
    BridgeError
        As for ``convert``.

    Notes
    -----
    Values that are not taken keep their memory: ``stats()["unclaimed"]`` counts them. Values of a session are dropped
    when it is closed and counted as ``reclaimed``, and the next call here warns of them (``ResourceWarning``).

    Examples
    --------
    >>> import torch, tensorflow as tf
    >>> import truebridge as tb
    >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    ...     x = tb.tensorflow.external_input(tf.float32, [None])
    ...     y = tb.tensorflow.external_output(2 * x)
    ...     fetched = session.run(y, {tb.tensorflow.handle_of(x): tb.tensorflow.feed(torch.ones(3))})
    ...     tb.tensorflow.take(fetched, "torch")
    tensor([2., 2., 2.])
    """
    _warn_of_reclaimed()
    try:
        numbers = np.asarray(fetched)
    except (TypeError, ValueError, NotImplementedError):
        numbers = np.empty(0)
    if numbers.shape != (2,) or numbers.dtype != np.int32:
        raise of_kind("argument", f"{shown(fetched)} is not a handle: pass what a run returned for external_output")
    return _core.tensorflow_take([int(number) for number in numbers], target)


_warned = 0


def _warn_of_reclaimed() -> None:
    global _warned
    reclaimed = _core.stats()["reclaimed"]
    if reclaimed > _warned:
        text = (
            f"{reclaimed - _warned} results of external_output were never taken, and were dropped with their sessions"
        )
        _warned = reclaimed
        warnings.warn(text, ResourceWarning, stacklevel=3)


def _apply(operation: str, name: str, **arguments: Any) -> Any:
    from tensorflow.python.framework import op_def_library

    _core.tensorflow_operations()
    return op_def_library.apply_op(operation, name=name, **arguments)


def _misplaced(advice: str) -> BridgeError:
    return of_kind("argument", f"this is for graphs: {advice}")
