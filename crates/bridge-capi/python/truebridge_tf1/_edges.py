"""The edges of graphs: operations that take tensors in, and return them."""

import ctypes
from typing import Any, Optional

import numpy as np

from . import _sources
from ._calls import argument, no_handle, ready
from ._common import operations
from ._common.operations import INPUT, OUTPUT, settled, shown, typed
from ._graph import Operations
from ._library import Info, library
from .errors import of_kind


def placeholder(name: str = "handle") -> Any:
    """Return a new placeholder of the graph, to which a handle is fed.

    Parameters
    ----------
    name : str, optional
        The name of the operation.

    Returns
    -------
    tensorflow.Tensor
        A tensor of two ``int32``.

    Raises
    ------
    BridgeImportError
        If there is no TensorFlow 1.15.

    Examples
    --------
    >>> import truebridge_tf1 as tb
    >>> tb.placeholder().shape
    TensorShape([Dimension(2)])
    """
    tf = ready().tf
    return tf.compat.v1.placeholder(tf.int32, [2], name)


def external_input(dtype: Any, shape: Any, handle: Any = None, *, name: str = "external_input") -> Any:
    """Return a tensor over another framework's memory.

    Parameters
    ----------
    dtype : tf.DType
        The dtype. Every run checks that the fed tensor has it.
    shape : sequence of int or None
        The shape, in elements; ``None`` is a length that varies. Every run checks it.
    handle : tensorflow.Tensor or Feed, optional
        A ``placeholder``. Without it, the graph gets a new one, which ``handle_of`` returns. In eager execution it
        is the result of ``feed``. In a ``tf.function`` it is an argument: call the function with
        ``tf.convert_to_tensor(fed)``.
    name : str, optional
        The name of the operation.

    Returns
    -------
    tensorflow.Tensor
        The fed tensor; an eager one keeps the memory. Gradients with respect to it are taken as of any tensor.

    Raises
    ------
    BridgeDTypeError
        If TensorFlow has no such dtype.
    BridgeValueError
        If an argument has no such value, or the handle is missing where one is needed.

    Notes
    -----
    In a graph the operation runs on the device where it is built (``tf.device``), and the tensor that is fed must be
    there. A saved graph takes it, too: ``tf.import_graph_def(graph_def, input_map={"x:0": external_input(...)})``.

    Examples
    --------
    >>> import numpy as np, tensorflow as tf
    >>> import truebridge_tf1 as tb
    >>> handle = tb.placeholder()
    >>> x = tb.external_input(tf.float32, [None], handle)
    >>> with tf.compat.v1.Session() as session:
    ...     session.run(2 * x, {handle: tb.feed(np.ones(3, np.float32))})
    array([2., 2., 2.], dtype=float32)
    """
    operations = ready()
    tf = operations.tf
    dtype, shape = typed(tf, dtype, shape)
    if tf.executing_eagerly():
        made = operations.execute(
            INPUT, name, _place(operations, handle), _eager_handle(tf, handle), T=dtype.as_datatype_enum
        )
        with tf.device(made.device):
            return tf.ensure_shape(made, shape, name=name + "_shape")
    if tf.compat.v1.get_default_graph().building_function:
        if handle is None or isinstance(handle, np.ndarray):
            raise argument(
                "inside a tf.function pass the handle: let it be an argument, and call the function with "
                "tf.convert_to_tensor(fed), where fed is the result of feed and lives until the call is over"
            )
    elif handle is None:
        handle = placeholder()
    elif isinstance(handle, np.ndarray):
        raise argument("a graph takes the result of feed in each run: session.run(y, {handle_of(x): feed(tensor)})")
    if getattr(handle, "dtype", None) != tf.int32:
        raise no_handle(handle, "pass a tensor of two int32, to which the result of feed is fed")
    made = operations.add(INPUT, name, handle=handle, T=dtype, place=-1)
    return tf.ensure_shape(made, shape, name=name + "_shape")


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
        If ``x`` is nothing that ``external_input`` returned.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import truebridge_tf1 as tb
    >>> x = tb.external_input(tf.float32, [None])
    >>> tb.handle_of(x).dtype
    tf.int32
    """
    return operations.handle_of(x)


def external_output(y: Any, *, name: str = "external_output") -> Any:
    """Return a handle by which the value of a tensor can be taken: in a run, or in eager execution its value now.

    Parameters
    ----------
    y : tensorflow.Tensor
        A tensor, or what TensorFlow converts to one.
    name : str, optional
        The name of the operation.

    Returns
    -------
    tensorflow.Tensor
        What a run returns for ``take``, which can take each value once.

    Raises
    ------
    BridgeTypeError
        If TensorFlow cannot convert ``y`` to a tensor.

    Notes
    -----
    What ``take`` returns of a run is memory that nothing else has: it does not change later, and may be written. It is
    in place where a kernel has computed ``y``, and otherwise a copy: of a variable, a constant or a fed tensor, also
    after ``tf.identity`` and the like, and of what other operations of the graph read and have not run yet. In eager
    execution it is the memory of ``y`` itself.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import truebridge_tf1 as tb
    >>> y = tb.external_output(tf.ones(3))
    >>> with tf.compat.v1.Session() as session:
    ...     tb.take(session.run(y)).numpy()
    array([1., 1., 1.], dtype=float32)
    """
    operations = ready()
    tf = operations.tf
    try:
        y = tf.convert_to_tensor(y)
    except (TypeError, ValueError) as error:
        text = f"{shown(y)} is not a tensor, and TensorFlow cannot convert it: {str(error):.200}"
        raise of_kind("not_a_tensor", text) from error
    if tf.executing_eagerly():
        return operations.execute(OUTPUT, name, y.device, y, T=y.dtype.as_datatype_enum, outlived=2)
    # A tf.function may be dropped as soon as it was called.
    outlived = int(tf.compat.v1.get_default_graph().building_function)
    return operations.add(OUTPUT, name, x=settled(tf, y), outlived=outlived)


def _eager_handle(tf: Any, handle: Any) -> Any:
    if handle is None:
        raise argument("in eager execution pass the result of feed: external_input(dtype, shape, feed(tensor))")
    try:
        numbers = tf.convert_to_tensor(handle)
    except (TypeError, ValueError) as error:
        raise no_handle(handle, "pass the result of feed") from error
    if numbers.dtype != tf.int32:
        raise no_handle(handle, "pass the result of feed")
    return numbers


def _place(operations: Operations, handle: Any) -> Optional[str]:
    """Return TensorFlow's name of the device of a tensor that is fed; ``None`` lets TensorFlow choose."""
    kept = getattr(handle, "_kept", None)
    if kept is None:
        return None
    info = Info()
    library().external_info(kept, ctypes.byref(info))
    return operations.gpu(info.device.index) if info.device.kind == _sources.CUDA else "/device:CPU:0"
