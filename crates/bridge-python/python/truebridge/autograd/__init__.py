"""Gradients across frameworks: a function of one framework in a model of another.

``torch_function(f)`` runs a function of TensorFlow or JAX on tensors of PyTorch, and ``loss.backward()`` goes through
it. ``tf_function(f)`` runs a function of PyTorch or JAX on tensors of TensorFlow, and ``tf.GradientTape`` goes through
it. ``jax_function(f)`` runs a function of PyTorch or TensorFlow on arrays of JAX, and ``jax.grad`` goes through it. The
keyword ``of=`` names the framework of ``f``. Arguments and parameters are passed in place where both frameworks allow
it, in stream order. Results and gradients are copied: each framework writes to memory or shares it in ways that the
other does not expect.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal

from ..errors import of_kind
from ._leaves import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["jax_function", "tf_function", "torch_function"]

_LABELS = {"torch": "PyTorch", "tensorflow": "TensorFlow", "jax": "JAX"}

#: The framework of the functions of a package.
_HOMES = {"torch": "torch", "tensorflow": "tensorflow", "jax": "jax", "jaxlib": "jax", "flax": "jax"}

#: By the framework whose tensors are differentiated and that of the function: the module that makes one of the other.
_PAIRS = {
    ("torch", "tensorflow"): "_tensorflow_in_torch",
    ("torch", "jax"): "_jax_in_torch",
    ("tensorflow", "torch"): "_torch_in_tensorflow",
    ("tensorflow", "jax"): "_jax_in_tensorflow",
    ("jax", "torch"): "_torch_in_jax",
    ("jax", "tensorflow"): "_tensorflow_in_jax",
}


def torch_function(
    function: Callable[..., Any], *, of: Literal["tensorflow", "jax"] = "tensorflow", variables: Any = None
) -> torch.nn.Module:
    """Return a module of PyTorch that runs a function of another framework and is differentiable.

    Parameters
    ----------
    function : callable
        A function of eager tensors of TensorFlow, a ``tf.function`` or a layer of Keras; with ``of="jax"`` a function
        of arrays that ``jax.jit`` can compile. It returns a tensor or a container of tensors. ``None`` may stand for a
        tensor.
    of : str, optional
        The framework of the function.
    variables : optional
        What is trained. Of TensorFlow an iterable of variables, such as ``layer.trainable_variables`` of a layer that
        is built. They become the parameters of the module, in this order and in place: a step of PyTorch's optimizer
        writes to the variables, and to no other tensor of TensorFlow. Before you write to a parameter yourself, call
        ``module.unshare()``. Of JAX a tree of arrays, which never change: the parameters of the module are copies of
        them, and the function takes the tree of these as its first argument, as ``model.apply`` of Flax does.

    Returns
    -------
    torch.nn.Module
        Takes tensors of PyTorch, also in dicts, lists and tuples and by keyword, all on one device. Other arguments
        are passed as they are; JAX compiles the function for each of them. The results have the dtypes that
        ``function`` returns; those of integers are not differentiable. A second call of ``backward`` with
        ``create_graph=True`` differentiates the gradients.

    Raises
    ------
    BridgeError
        ``argument`` if ``function`` is not callable, if it reads a trainable variable that ``variables`` does not name
        while gradients are on, if a parameter was replaced, if a module over variables is pickled or copied, for
        another ``of``, for forward-mode derivatives, and in a backward after a write to a tensor that it needs, or
        where a checkpoint would draw other random numbers; ``not_a_tensor`` for an argument of another framework and
        for a result that is not a tensor; ``device`` for tensors of several devices; ``dtype`` for a variable that has
        no gradient, and for 64 bits without ``jax_enable_x64``; ``missing`` without the two frameworks.

    See Also
    --------
    tf_function, jax_function : the other directions.

    Examples
    --------
    >>> import torch, tensorflow as tf
    >>> import truebridge as tb
    >>> square = tb.autograd.torch_function(tf.square)
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> square(x).sum().backward()
    >>> x.grad
    tensor([2., 4.])
    """
    module: torch.nn.Module = _made("torch", of, function, variables)
    return module


def tf_function(
    function: Callable[..., Any], *, of: Literal["torch", "jax"] = "torch", outputs: Any = None
) -> Callable[..., Any]:
    """Return a function of TensorFlow that runs a function of another framework and is differentiable.

    Parameters
    ----------
    function : callable
        A function of tensors of PyTorch, or a ``torch.nn.Module``; with ``of="jax"`` a function of arrays that
        ``jax.jit`` can compile. It returns a tensor or a container of tensors. ``None`` may stand for a tensor. It must
        not write to its arguments: TensorFlow treats tensors as constants, so that is an error.
    of : str, optional
        The framework of the function.
    outputs : structure of tf.TensorSpec, optional
        What ``function`` returns: shapes, where ``None`` is a length that varies, and dtypes. A ``tf.function`` needs
        it, because it is traced before the function has run.

    Returns
    -------
    callable
        Takes tensors and variables of TensorFlow, also in dicts, lists and tuples and by keyword, all on one device.
        Other arguments are passed as they are. Each time that TensorFlow computes a gradient through the function, the
        gradients of the parameters of PyTorch that ``function`` uses are added to their ``.grad``, as in PyTorch.

    Raises
    ------
    BridgeError
        ``argument`` if ``function`` is not callable or writes to an argument, inside a ``tf.function`` without
        ``outputs``, for a result that ``outputs`` does not describe, for another ``of``, and for ``tape.jacobian`` with
        pfor; ``not_a_tensor`` for an argument of another framework and for a result that is not a tensor; ``device``
        for tensors of several devices; ``dtype`` for 64 bits without ``jax_enable_x64``; ``missing`` without the two
        frameworks.

    See Also
    --------
    torch_function, jax_function : the other directions.

    Examples
    --------
    >>> import torch, tensorflow as tf
    >>> import truebridge as tb
    >>> square = tb.autograd.tf_function(torch.square)
    >>> x = tf.Variable([1.0, 2.0])
    >>> with tf.GradientTape() as tape:
    ...     y = tf.reduce_sum(square(x))
    >>> tape.gradient(y, x).numpy()
    array([2., 4.], dtype=float32)
    """
    wrapped: Callable[..., Any] = _made("tensorflow", of, function, outputs)
    return wrapped


def jax_function(function: Callable[..., Any], *, of: Literal["torch", "tensorflow"] = "torch") -> Callable[..., Any]:
    """Return a function of JAX that runs a function of another framework and is differentiable.

    Parameters
    ----------
    function : callable
        A function of tensors of PyTorch, or a ``torch.nn.Module``; with ``of="tensorflow"`` a function of eager tensors
        of TensorFlow. It returns a tensor or a container of tensors. ``None`` may stand for a tensor. What it trains is
        an argument: JAX has gradients only of arguments.
    of : str, optional
        The framework of the function.

    Returns
    -------
    callable
        Takes arrays of JAX in trees and by keyword. Other arguments are passed as they are. ``jax.grad`` and
        ``jax.vjp`` go through it, to any order. It runs outside of compiled functions: compile with ``jax.jit`` what is
        before it, and what is after it.

    Raises
    ------
    BridgeError
        ``argument`` if ``function`` is not callable, writes to an argument, or uses parameters or variables that would
        get no gradient; inside of ``jit``, ``vmap``, ``pmap`` and ``scan``; for another ``of``; ``not_a_tensor`` for an
        argument of another framework and for a result that is not a tensor; ``dtype`` for a result of 64 bits without
        ``jax_enable_x64``; ``missing`` without the two frameworks.

    See Also
    --------
    torch_function, tf_function : the other directions.

    Examples
    --------
    >>> import jax, torch
    >>> import truebridge as tb
    >>> total = tb.autograd.jax_function(lambda x: torch.square(x).sum())
    >>> jax.grad(total)(jax.numpy.array([1.0, 2.0]))
    Array([2., 4.], dtype=float32)
    """
    wrapped: Callable[..., Any] = _made("jax", of, function)
    return wrapped


def _made(target: str, of: str, function: Any, *options: Any) -> Any:
    """Return the function of ``target`` that runs one of the framework ``of``."""
    if not callable(function):
        raise of_kind("argument", f"{shown(function)} is not callable: pass a function, a layer or a module")
    if (target, of) not in _PAIRS:
        known = " or ".join(repr(one) for into, one in _PAIRS if into == target)
        raise of_kind(
            "argument", f"of={of!r:.50} is not a framework whose functions run in {_LABELS[target]}: pass of={known}"
        )
    home = _home(function)
    if home not in (None, of):
        advice = "call it directly" if home == target else f"pass of={home!r}"
        raise of_kind("argument", f"{shown(function)} is of {_LABELS[home]}, not of {_LABELS[of]}: {advice}")
    try:
        module = importlib.import_module(f".{_PAIRS[target, of]}", __package__)
    except ImportError as error:
        text = f"gradients need {_LABELS[target]} and {_LABELS[of]}: {str(error):.200}"
        raise of_kind("missing", text) from error
    return module.wrapped(function, *options)


def _home(function: Any) -> str | None:
    """Return the framework that a function or its class comes from, where that is one of them."""
    classes = (function, *type(function).__mro__)
    packages = (str(getattr(one, "__module__", None)).partition(".")[0] for one in classes)
    return next((_HOMES[package] for package in packages if package in _HOMES), None)
