"""Calls of functions that take tensors by a protocol, with all tensors in one stream."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from .. import _core

_Result = TypeVar("_Result")


@contextmanager
def _tvm_ffi(library: Any, device: int, stream: int) -> Iterator[None]:
    """Run functions of tvm-ffi in a stream: by itself it takes only the first tensor's stream."""
    with library.use_raw_stream(library.device(f"cuda:{device}"), stream):
        yield


#: Libraries whose functions run in a stream that is set from outside: the module, and what sets it.
_SETTERS = {"tvm_ffi": _tvm_ffi}


def call(function: Callable[..., _Result], *args: Any, stream: Any = None, read_only: bool = False) -> _Result:
    """Call a function of a library that knows tensors only by a protocol, with all its tensors in one stream.

    Parameters
    ----------
    function : callable
        It takes objects with ``__dlpack__`` or an array interface, and puts its work into the stream: a function of
        tvm-ffi, whose stream is set for the call, or one that is told the stream.
    args : object
        Tensors of any frameworks, and containers of them, are lent for the call, as by ``lend``. Everything else is
        passed as it is.
    stream : stream or int, optional
        As for ``lend``. Without it the stream that is current in the framework of the first tensor on a device.
    read_only : bool, optional
        As for ``lend``.

    Returns
    -------
    object
        What the function returns.

    Raises
    ------
    BridgeError
        As for ``lend``.

    Notes
    -----
    The frameworks of the tensors wait in their current streams for the stream, so the function may write to them.

    See Also
    --------
    lend : lends one tensor.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> import truebridge as tb
    >>> def add(a, b, out):  # takes any tensors, by their protocol
    ...     np.add(np.from_dlpack(a), np.from_dlpack(b), out=np.from_dlpack(out))
    >>> total = torch.empty(2)
    >>> tb.call(add, torch.ones(2), np.ones(2, np.float32), total)
    >>> total
    tensor([2., 2.])
    """
    loaned, loans, place = _core.lend_together(args, stream, read_only)
    with ExitStack() as stack:
        for loan in loans:
            stack.enter_context(loan)
        for name, setter in _SETTERS.items():
            if place is not None and name in sys.modules:
                stack.enter_context(setter(sys.modules[name], *place))
        return function(*loaned)
