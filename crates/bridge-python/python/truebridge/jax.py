"""Tensors of other frameworks inside functions that JAX has compiled.

Arguments and results do not need this module: ``truebridge.to_jax(x)`` returns an array in place, and a result is
converted like any array. But a compiled function also uses tensors that are neither: weights that PyTorch updates, a
buffer that is refilled, memory where a result has to go. JAX would copy such a tensor once, when it traces the
function. A tensor that is fed is read or filled by every call::

    weights = tb.jax.feed(torch_weights)
    scores = tb.jax.feed(torch_scores)


    @jax.jit
    def score(x):
        y = x @ tb.jax.external_input(weights)
        return y, tb.jax.external_output(y, scores)
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from . import _core
from ._core import JAXFeed as Feed
from .errors import of_kind

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Feed", "external_input", "external_output", "feed"]


def feed(x: Any) -> Feed:
    """Return the handle by which compiled functions read or fill a tensor.

    Parameters
    ----------
    x : tensor
        A tensor of any framework, of any strides.

    Returns
    -------
    Feed
        What ``external_input`` and ``external_output`` take. Keep it: a call that uses a ``Feed`` that was destroyed
        fails.

    Raises
    ------
    BridgeError
        As for ``convert`` with ``copy=False``: a copy would not change with the tensor.

    Notes
    -----
    The handle keeps the memory, and the stream that is current in the framework of ``x`` now. Each call reads and fills
    the tensor in order with that stream: make it wait for work on ``x`` in other streams.

    Examples
    --------
    >>> import torch
    >>> import truebridge as tb
    >>> tb.jax.feed(torch.ones(2, 3))
    <Feed: float32 [2, 3] on cpu>
    """
    return _core.jax_feed(x)


def external_input(feed: Feed) -> Any:
    """Return a fed tensor in a function that JAX compiles, as it is when the function runs.

    Parameters
    ----------
    feed : Feed
        What ``feed`` returned.

    Returns
    -------
    jax.Array
        A copy in memory of JAX's, made by every call.

    Raises
    ------
    BridgeTypeError
        If ``feed`` is not what ``feed`` returned.
    BridgeDTypeError
        For elements of 64 bits without ``jax_enable_x64``.
    ValueError, jax.errors.JaxRuntimeError
        What the call of the function raises, or the wait for its result: the ``Feed`` was destroyed, the function runs
        on another device than the tensor's, or the copy failed. The text starts with a status of XLA's, such as
        ``NOT_FOUND``, and ``truebridge``.

    Notes
    -----
    JAX calls functions asynchronously. Before you write to the tensor again, wait for a result of the call
    (``jax.block_until_ready``). A function must not both read and fill a tensor: XLA orders the two as it likes.

    Gradients end here: differentiate with respect to the result, as in ``jax.grad(loss)(external_input(feed))``.
    Under ``vmap`` the tensor is the same for all.

    Examples
    --------
    >>> import jax, torch
    >>> import truebridge as tb
    >>> weights = torch.ones(3)
    >>> handle = tb.jax.feed(weights)
    >>> total = jax.jit(lambda: tb.jax.external_input(handle).sum())
    >>> float(total())
    3.0
    >>> _ = weights.mul_(2)
    >>> float(total())
    6.0
    """
    return _call("truebridge_input", _checked(feed).handle, _described(feed))()


def external_output(y: Any, feed: Feed) -> Any:
    """Copy an array into a fed tensor whenever the function that JAX compiles runs.

    Parameters
    ----------
    y : array
        Of the dtype and the shape of the tensor.
    feed : Feed
        What ``feed`` returned.

    Returns
    -------
    jax.Array
        Empty. It is ready when the tensor is filled: return it from the function, and wait for it or for another result
        before you read the tensor.

    Raises
    ------
    BridgeTypeError
        If ``feed`` is not what ``feed`` returned.
    BridgeDTypeError
        If the dtypes differ.
    BridgeLayoutError
        If the shapes differ.
    BridgeBufferError
        If the tensor is read-only; the kind is ``"read_only"``.
    BridgeValueError
        Under ``vmap``, which would fill the tensor many times.
    ValueError, jax.errors.JaxRuntimeError
        As for ``external_input``.

    Notes
    -----
    The tensor is filled even if the result is not used. It takes part in no gradient, and PyTorch counts the write, by
    which autograd notices that a tensor that it has saved has changed.

    Examples
    --------
    >>> import jax, torch
    >>> import truebridge as tb
    >>> out = torch.zeros(3)
    >>> handle = tb.jax.feed(out)
    >>> double = jax.jit(lambda x: tb.jax.external_output(2 * x, handle))
    >>> _ = double(jax.numpy.ones(3)).block_until_ready()
    >>> out
    tensor([2., 2., 2.])
    """
    import jax

    _checked(feed)
    y, wanted = jax.numpy.asarray(y), _described(feed)
    if y.dtype != wanted.dtype:
        raise of_kind(
            "dtype", f"the array is {y.dtype} and the tensor {feed.dtype}: cast one, y.astype({feed.dtype!r})"
        )
    if y.shape != wanted.shape:
        raise of_kind("layout", f"the array has shape {y.shape} and the tensor {feed.shape}: reshape one first")
    if feed.read_only:
        raise of_kind("read_only", "the tensor is read-only: feed a writable one")
    return _filling(feed.handle)(jax.lax.stop_gradient(y))


def _checked(feed: object) -> Feed:
    if not isinstance(feed, Feed):
        advice = "pass what truebridge.jax.feed returned, which the function holds or takes as a static argument"
        raise of_kind("not_a_tensor", f"an object of type {type(feed).__name__} is not a handle: {advice}")
    return feed


def _described(feed: Feed) -> Any:
    import jax

    dtype = jax.numpy.dtype(feed.dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise of_kind("dtype", f"JAX has {feed.dtype} only with jax_enable_x64: enable it, or feed another dtype")
    return jax.ShapeDtypeStruct(feed.shape, dtype)


@functools.cache
def _register() -> None:
    import jax

    for name, platform, handler in _core.jax_targets():
        jax.ffi.register_ffi_target(name, handler, platform=platform)


def _call(name: str, handle: int, result: Any, **options: Any) -> Callable[..., Any]:
    """Return the function that calls one of ours."""
    import jax
    import numpy as np

    _register()
    return functools.partial(jax.ffi.ffi_call(name, result, **options), handle=np.int64(handle))


def _filling(handle: int) -> Any:
    """Return the function that fills the tensor of a handle."""
    import jax

    def fill(y: Any) -> Any:
        empty = jax.ShapeDtypeStruct((0,), jax.numpy.uint8)
        return _call("truebridge_output", handle, empty, has_side_effect=True)(y)

    def refuse(*_: Any) -> Any:
        advice = "call it on the result of vmap, with a tensor of the whole batch"
        raise of_kind("argument", f"external_output under vmap would fill one tensor many times: {advice}")

    filling = jax.custom_batching.custom_vmap(fill)
    filling.def_vmap(refuse)
    return filling
