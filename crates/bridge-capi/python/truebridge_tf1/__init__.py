"""Tensors of other frameworks inside the graphs of TensorFlow 1.15, in place.

A graph is built once and run many times, and the ``feed_dict`` of a session copies through the host. So a run is fed a
handle here and returns one, a tensor of two ``int32`` in host memory. The tensor itself stays where it is::

    import truebridge_tf1 as tb

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
from typing import Any, Optional

import numpy as np

from . import _sources
from ._calls import argument, no_handle, ready, stats
from ._edges import external_input, external_output, handle_of, placeholder
from ._graph import Operations
from ._library import Owned, library
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
    """A tensor that is fed: the two numbers of its handle. ``feed`` returns it.

    Runs can read the tensor any number of times as long as this object lives. A run that has read it keeps the memory
    as long as it needs it.
    """

    _kept: Optional[Owned] = None

    def __array_finalize__(self, other: Any) -> None:
        """Keep the tensor in views and copies, too."""
        self._kept = getattr(other, "_kept", None)

    def __reduce__(self) -> Any:
        """Refuse: a handle is valid only in this process."""
        raise TypeError("a Feed is valid in its process only: call feed in the other process")


def feed(x: Any, *, copy: Optional[bool] = None) -> Feed:
    """Return the handle of a tensor, to be fed to runs, which use the tensor in place.

    Parameters
    ----------
    x : array, capsule or tensor
        A NumPy array, a DLPack capsule (which is consumed), or an object with ``__dlpack__`` or
        ``__cuda_array_interface__``, such as a tensor of PyTorch or CuPy. TensorFlow's stream waits, on the device, for
        pending work on it. A bare capsule does not name the stream of that work: order it before the legacy default
        stream.
    copy : bool, optional
        ``None`` copies where TensorFlow cannot take the tensor: it takes compact tensors at addresses that 64 divides.
        ``True`` copies always, ``False`` never.

    Returns
    -------
    Feed
        What to feed. A run that reads a handle whose ``Feed`` was dropped fails with an error.

    Raises
    ------
    BridgeTypeError
        If ``x`` is not a tensor.
    BridgeDTypeError
        If TensorFlow has no such dtype.
    BridgeBufferError
        If a copy is needed and ``copy=False``, or the tensor requires grad.
    BridgeValueError
        If ``copy`` is something else.

    Examples
    --------
    >>> import numpy as np
    >>> import truebridge_tf1 as tb
    >>> fed = tb.feed(np.ones(3, np.float32))
    >>> fed.shape, fed.dtype
    ((2,), dtype('int32'))
    """
    operations = ready()
    try:
        number = _COPY[copy]
    except (KeyError, TypeError):
        raise argument(f"copy is {copy!r:.80}: it must be True, False or None") from None
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
    with _sources.exported(x) as tensor:
        library().feed(operations.runtime, tensor, copy, kept.out)
    return kept


def take(fetched: Any) -> Taken:
    """Return the tensor of a handle that a run returned, for any framework to use.

    Nothing else has its memory, unless it is the tensor of eager execution itself: see ``external_output``.

    Parameters
    ----------
    fetched : array of two int32
        What a run returned for ``external_output``. Each can be taken once.

    Returns
    -------
    Taken
        The tensor.

    Raises
    ------
    BridgeValueError
        If ``fetched`` is not a handle.
    BridgeBufferError
        If it was taken before, or its session is closed; the kind is ``"consumed"``.

    Notes
    -----
    One that is never taken keeps its memory until its session is dropped: then it is reclaimed, and the next call of
    this package warns. ``stats()["unclaimed"]`` counts them. The results of eager execution and of a ``tf.function``
    belong to no session, and wait as long as the process lives.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import truebridge_tf1 as tb
    >>> y = tb.external_output(tf.ones(3))
    >>> with tf.compat.v1.Session() as session:
    ...     taken = tb.take(session.run(y))
    >>> taken
    <Taken: float32 [3] on cpu>
    """
    operations = ready()
    try:
        numbers = np.asarray(fetched)
    except (TypeError, ValueError, NotImplementedError):
        numbers = np.empty(0)
    if numbers.shape != (2,) or numbers.dtype != np.int32:
        raise no_handle(fetched, "pass the value that a run returned for external_output")
    external = Owned("external_drop")
    library().take(operations.runtime, (ctypes.c_int32 * 2)(*numbers.tolist()), external.out)
    return Taken(external)
