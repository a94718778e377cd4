"""Tensors of other frameworks inside the graphs of TensorFlow 1.15, in place.

A graph is built once and run many times, and the ``feed_dict`` of a session copies through the host. So a run is fed a
handle here and returns one, a tensor of two ``int32`` in host memory. The tensor itself stays where it is::

    import tensor_bridge_tf1 as tb

    with tf.Graph().as_default(), tf.Session() as session:
        handle = tb.placeholder()
        x = tb.external_input(tf.float32, [None, 4], handle)
        y = tb.external_output(2 * x + 1)
        fetched = session.run(y, {handle: tb.feed(torch_tensor)})
        result = torch.utils.dlpack.from_dlpack(tb.take(fetched))

A saved graph is used as it is: the external input replaces its placeholder::

    x = tb.external_input(tf.float32, [None, 4])
    (y,) = tf.import_graph_def(graph_def, input_map={"x:0": x}, return_elements=["y:0"])
    fetched = session.run(tb.external_output(y), {tb.handle_of(x): tb.feed(torch_tensor)})

With ``tf.enable_eager_execution()`` both operations are executed immediately::

    x = tb.external_input(tf.float32, [None, 4], tb.feed(torch_tensor))
    result = torch.utils.dlpack.from_dlpack(tb.take(tb.external_output(2 * x + 1)))
"""

import ctypes
import warnings
from typing import Any, Dict, Optional

import numpy as np

from . import _sources
from ._graph import INPUT, OUTPUT, Operations
from ._library import COUNTS, Counts, Info, Owned, library
from ._taken import Taken
from ._tickets import Shared, open, revoke, share
from .errors import (
    BridgeBufferError,
    BridgeConnectionError,
    BridgeDTypeError,
    BridgeError,
    BridgeImportError,
    BridgeLayoutError,
    BridgeMemoryError,
    BridgePermissionError,
    BridgeRuntimeError,
    BridgeTypeError,
    BridgeValueError,
    of_kind,
)

__all__ = [
    "BridgeBufferError",
    "BridgeConnectionError",
    "BridgeDTypeError",
    "BridgeError",
    "BridgeImportError",
    "BridgeLayoutError",
    "BridgeMemoryError",
    "BridgePermissionError",
    "BridgeRuntimeError",
    "BridgeTypeError",
    "BridgeValueError",
    "Feed",
    "Shared",
    "Taken",
    "external_input",
    "external_output",
    "feed",
    "handle_of",
    "open",
    "placeholder",
    "revoke",
    "share",
    "stats",
    "take",
]

__version__ = "0.1.0"

#: Values of ``copy``, with the library's numbers (``tb_copy``).
_COPY = {None: 0, True: 1, False: 2}


class Feed(np.ndarray):
    """A tensor that is fed: the two numbers of its handle.

    Runs can read the tensor any number of times as long as this object lives. A run that has read it keeps the memory
    as long as it needs it.
    """

    _kept: Optional[Owned] = None

    def __array_finalize__(self, other: Any) -> None:
        """Keep the tensor in views and copies, too."""
        self._kept = getattr(other, "_kept", None)

    def __reduce__(self) -> Any:
        """Refuse: a handle is valid in this process alone."""
        raise TypeError("a Feed cannot leave the process: feed the tensor there")


def feed(x: Any, *, copy: Optional[bool] = None) -> Feed:
    """Return the handle of ``x``, to be fed to runs, which use ``x`` in place.

    ``x`` is a NumPy array, a DLPack capsule (which is consumed), or an object with ``__dlpack__`` or
    ``__cuda_array_interface__``, such as a tensor of PyTorch or CuPy. TensorFlow's stream waits, on the device, for
    pending work on it. A bare capsule does not name the stream of that work: order it before the legacy default stream.

    TensorFlow takes compact tensors at addresses that 64 divides. This package copies others, where they are, or else
    the framework of ``x`` does. ``copy=True`` always copies, and ``copy=False`` refuses tensors that need a copy. A run
    that reads a handle whose ``Feed`` was dropped fails with an error.
    """
    operations = _ready()
    try:
        number = _COPY[copy]
    except (KeyError, TypeError):
        raise _argument(f"copy is {copy!r:.80}: it must be True, False or None") from None
    x = _sources.resolved(x, copy)
    try:
        kept = _feed(operations, x, number)
    except BridgeBufferError as error:
        x = None if error.kind != "copy_needed" or copy is False else _sources.copied(x)
        if x is None:
            raise
        kept = _feed(operations, x, _COPY[None])
    numbers = (ctypes.c_int32 * 2)()
    library().external_handle(kept, numbers)
    fed: Feed = np.array(numbers, dtype=np.int32).view(Feed)
    fed._kept = kept
    return fed


def _feed(operations: Operations, x: Any, copy: int) -> Owned:
    kept = Owned("external_drop")
    with _sources.lent(x) as tensor:
        library().feed(operations.runtime, tensor, copy, kept.out)
    return kept


def placeholder(name: str = "handle") -> Any:
    """Return a new placeholder of the graph, to which a handle is fed."""
    tf = _ready().tf
    return tf.compat.v1.placeholder(tf.int32, [2], name)


def external_input(dtype: Any, shape: Any, handle: Any = None, *, name: str = "external_input") -> Any:
    """Return a tensor over another framework's memory, with this dtype and shape.

    ``handle`` is a ``placeholder``. Without it, the graph gets one of its own, which ``handle_of`` returns. In eager
    execution it is the result of ``feed``, and this returns an eager tensor, which keeps the memory. In a
    ``tf.function`` it is an argument: call the function with ``tf.convert_to_tensor(fed)``. Gradients with respect to
    the result are taken as of any tensor.

    ``shape`` may have lengths of ``None``. Every run checks the tensor that is fed against dtype and shape. In a graph
    the operation runs on the device where it is built (``tf.device``), and the tensor that is fed must be there.

    A saved graph takes it, too: ``tf.import_graph_def(graph_def, input_map={"x:0": external_input(...)})``.
    """
    operations = _ready()
    tf = operations.tf
    try:
        dtype = tf.as_dtype(dtype)
    except (TypeError, ValueError) as error:
        raise of_kind("dtype", f"{_shown(dtype)} is not a dtype of TensorFlow") from error
    try:
        shape = tf.TensorShape(shape)
    except (TypeError, ValueError) as error:
        raise _argument(f"{_shown(shape)} is not a shape: {str(error):.200}") from error
    if tf.executing_eagerly():
        made = operations.execute(
            INPUT, name, _place(operations, handle), _eager_handle(tf, handle), T=dtype.as_datatype_enum
        )
        with tf.device(made.device):
            return tf.ensure_shape(made, shape, name=name + "_shape")
    if tf.compat.v1.get_default_graph().building_function:
        if handle is None or isinstance(handle, np.ndarray):
            raise _argument(
                "inside a tf.function pass the handle: let it be an argument, and call the function with "
                "tf.convert_to_tensor(fed), where fed is the result of feed and lives until the call is over"
            )
    elif handle is None:
        handle = placeholder()
    elif isinstance(handle, np.ndarray):
        raise _argument("a graph takes the result of feed in each run: session.run(y, {handle_of(x): feed(tensor)})")
    if getattr(handle, "dtype", None) != tf.int32:
        raise _no_handle(handle, "pass a tensor of two int32, to which the result of feed is fed")
    made = operations.add(INPUT, name, handle=handle, T=dtype, place=-1)
    return tf.ensure_shape(made, shape, name=name + "_shape")


def handle_of(x: Any) -> Any:
    """Return the tensor of the graph that holds the handle of ``x``, which ``external_input`` returned.

    Feed it to a run: ``session.run(y, {handle_of(x): feed(tensor)})``.
    """
    # Read from the graph: TensorFlow takes a tensor with an attribute ``handle`` for a variable.
    operation: Any = getattr(x, "op", None)
    if getattr(operation, "type", None) == "EnsureShape":
        operation = operation.inputs[0].op
    if getattr(operation, "type", None) != INPUT:
        raise _argument(f"{_shown(x)} is not an external_input of a graph, and has no handle")
    return operation.inputs[0]


def external_output(y: Any, *, name: str = "external_output") -> Any:
    """Return a handle to ``take``, once, the value of ``y`` in a run, or in eager execution its value now."""
    operations = _ready()
    tf = operations.tf
    if getattr(getattr(y, "dtype", None), "_is_ref_dtype", False):
        raise _argument(
            "a reference variable changes after it is read: make it a resource variable (use_resource=True)"
        )
    try:
        y = tf.convert_to_tensor(y)
    except (TypeError, ValueError) as error:
        text = f"{_shown(y)} is not a tensor, and TensorFlow cannot convert it: {str(error):.200}"
        raise of_kind("not_a_tensor", text) from error
    if tf.executing_eagerly():
        return operations.execute(OUTPUT, name, y.device, y, T=y.dtype.as_datatype_enum, outlived=1)
    # A tf.function may be dropped as soon as it was called.
    outlived = int(tf.compat.v1.get_default_graph().building_function)
    return operations.add(OUTPUT, name, x=y, outlived=outlived)


def take(fetched: Any) -> Taken:
    """Return the tensor behind a handle that a run returned, in place, for any framework to use.

    Each can be taken once. One that is never taken keeps its memory until its session is dropped: then it is reclaimed,
    and the next call of this package warns. ``stats()["untaken"]`` counts them. The results of eager execution and of a
    ``tf.function`` belong to no session, and wait as long as the process lives.
    """
    operations = _ready()
    try:
        numbers = np.asarray(fetched)
    except (TypeError, ValueError, NotImplementedError):
        numbers = np.empty(0)
    if numbers.shape != (2,) or numbers.dtype != np.int32:
        raise _no_handle(fetched, "pass the value that a run returned for external_output")
    external = Owned("external_drop")
    library().take(operations.runtime, (ctypes.c_int32 * 2)(*numbers.tolist()), external.out)
    return Taken(external)


def stats() -> Dict[str, int]:
    """Return how many views this process has made (``leased``) and returned (``released``).

    Of the returned ones, ``retired`` wait for the device, and the memory of ``leaked`` is never reused because the
    driver could not tell when it may be. ``untaken`` results wait for ``take``; ``reclaimed`` ones were dropped with
    their session.
    """
    _warn_of_reclaimed()
    return _counts()


def _counts() -> Dict[str, int]:
    counts = Counts()
    library().stats(ctypes.byref(counts))
    return {name: getattr(counts, name) for name in COUNTS}


_reclaimed = 0


def _warn_of_reclaimed() -> None:
    """Warn, once, of each result that was dropped with its session before it was taken."""
    global _reclaimed
    reclaimed = _counts()["reclaimed"]
    lost, _reclaimed = reclaimed - _reclaimed, reclaimed
    if lost > 0:
        text = (
            "{} results of external_output were never taken, and were dropped with their session: "
            "call take on each, or do not fetch it"
        )
        warnings.warn(text.format(lost), ResourceWarning, stacklevel=4)


def _ready() -> Operations:
    _warn_of_reclaimed()
    return Operations.get()


def _eager_handle(tf: Any, handle: Any) -> Any:
    if handle is None:
        raise _argument("in eager execution pass the result of feed: external_input(dtype, shape, feed(tensor))")
    try:
        numbers = tf.convert_to_tensor(handle)
    except (TypeError, ValueError) as error:
        raise _no_handle(handle, "pass the result of feed") from error
    if numbers.dtype != tf.int32:
        raise _no_handle(handle, "pass the result of feed")
    return numbers


def _place(operations: Operations, handle: Any) -> Optional[str]:
    """Return TensorFlow's name of the device of a tensor that is fed; ``None`` lets TensorFlow choose."""
    kept = getattr(handle, "_kept", None)
    if kept is None:
        return None
    info = Info()
    library().external_info(kept, ctypes.byref(info))
    return operations.gpu(info.device.index) if info.device.kind == _sources.CUDA else "/device:CPU:0"


def _no_handle(object: Any, advice: str) -> BridgeError:
    return _argument(f"{_shown(object)} is not a handle: {advice}")


def _shown(object: Any) -> str:
    """Describe an object in an error, whatever its size."""
    return f"an object of type {type(object).__name__}"


def _argument(text: str) -> BridgeError:
    return of_kind("argument", text)
