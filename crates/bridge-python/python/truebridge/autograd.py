"""Gradients across frameworks: a function of TensorFlow 2 in a model of PyTorch, and the other way round.

``torch_function(f)`` runs a function of TensorFlow on tensors of PyTorch, and ``loss.backward()`` goes through it.
``tf_function(f)`` runs a function or module of PyTorch on tensors of TensorFlow, and ``tf.GradientTape`` goes through
it. Arguments and parameters are passed in place where both frameworks allow it, in stream order. Results and gradients
are copied: each framework writes to memory or shares it in ways that the other does not expect.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import of_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

__all__ = ["tf_function", "torch_function"]


def torch_function(function: Callable[..., Any], *, variables: Iterable[Any] = ()) -> torch.nn.Module:
    """Return a module of PyTorch that runs a function of TensorFlow and is differentiable.

    Parameters
    ----------
    function : callable
        A function of eager tensors of TensorFlow, a ``tf.function`` or a layer of Keras. It returns a tensor or a
        container of tensors. ``None`` may stand for a tensor.
    variables : iterable of tf.Variable or Keras variables, optional
        The variables that are trained, such as ``layer.trainable_variables`` of a layer that is built. They become
        the parameters of the module, in this order and in place: a step of PyTorch's optimizer writes to the variables,
        and to no other tensor of TensorFlow. Before you write to a parameter yourself, call ``module.unshare()``.

    Returns
    -------
    torch.nn.Module
        Takes tensors of PyTorch, also in dicts, lists and tuples and by keyword, all on one device. Other arguments
        are passed as they are. The results have the dtypes that ``function`` returns; those of integers are not
        differentiable. A second call of ``backward`` with ``create_graph=True`` differentiates the gradients.

    Raises
    ------
    BridgeError
        ``argument`` if ``function`` is not callable, if it reads a trainable variable that ``variables`` does not name
        while gradients are on, if a parameter was replaced, if the module is pickled or copied, and for forward-mode
        derivatives; ``not_a_tensor`` for an argument of another framework and for a result that is not a tensor;
        ``device`` for tensors of several devices; ``dtype`` for a variable that has no gradient; ``missing`` without
        PyTorch or TensorFlow.

    See Also
    --------
    tf_function : the other direction.

    Examples
    --------
    >>> import tensorflow as tf, torch
    >>> import truebridge as tb
    >>> square = tb.autograd.torch_function(tf.square)
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> square(x).sum().backward()
    >>> x.grad
    tensor([2., 4.])
    """
    _check(function)
    module: torch.nn.Module = _framework("_autograd_torch").TensorFlowFunction(function, variables)
    return module


def tf_function(function: Callable[..., Any], *, outputs: Any = None) -> Callable[..., Any]:
    """Return a function of TensorFlow that runs a function or module of PyTorch and is differentiable.

    Parameters
    ----------
    function : callable
        A function of tensors of PyTorch, or a ``torch.nn.Module``. It returns a tensor or a container of tensors.
        ``None`` may stand for a tensor. It must not write to its arguments: TensorFlow treats tensors as constants, so
        that is an error.
    outputs : structure of tf.TensorSpec, optional
        What ``function`` returns: shapes, where ``None`` is a length that varies, and dtypes. A ``tf.function`` needs
        it, because it is traced before PyTorch has run.

    Returns
    -------
    callable
        Takes tensors and variables of TensorFlow, also in dicts, lists and tuples and by keyword, all on one device.
        Other arguments are passed as they are. Each time that TensorFlow computes a gradient through the function, the
        gradients of the parameters that ``function`` uses are added to their ``.grad``, as in PyTorch.

    Raises
    ------
    BridgeError
        ``argument`` if ``function`` is not callable or writes to an argument, inside a ``tf.function`` without
        ``outputs``, for a result that ``outputs`` does not describe, and for ``tape.jacobian`` with pfor;
        ``not_a_tensor`` for an argument of another framework and for a result that is not a tensor; ``device`` for
        tensors of several devices; ``missing`` without PyTorch or TensorFlow.

    See Also
    --------
    torch_function : the other direction.

    Examples
    --------
    >>> import tensorflow as tf, torch
    >>> import truebridge as tb
    >>> square = tb.autograd.tf_function(torch.square)
    >>> x = tf.Variable([1.0, 2.0])
    >>> with tf.GradientTape() as tape:
    ...     y = tf.reduce_sum(square(x))
    >>> tape.gradient(y, x).numpy()
    array([2., 4.], dtype=float32)
    """
    _check(function)
    wrapped: Callable[..., Any] = _framework("_autograd_tensorflow").wrapped(function, outputs)
    return wrapped


def _check(function: Any) -> None:
    if not callable(function):
        raise of_kind("argument", f"{_shown(function)} is not callable: pass a function, a layer or a module")


def _framework(module: str) -> Any:
    try:
        return importlib.import_module(f".{module}", __package__)
    except ImportError as error:
        raise of_kind("missing", f"gradients need PyTorch and TensorFlow: {str(error):.200}") from error


def tensors_at(leaves: list[Any], own: Any, others: Any, name: str, call: str) -> list[int]:
    """Return the indices of the tensors among the leaves of the arguments.

    ``own`` are the types of the framework that ``name`` names. Tensors of ``others``, and of frameworks that neither
    names, are an error: their gradients would be lost.
    """
    for leaf in leaves:
        foreign = isinstance(leaf, others) or hasattr(leaf, "__dlpack__") or hasattr(leaf, "__cuda_array_interface__")
        if foreign and not isinstance(leaf, own):
            raise of_kind("not_a_tensor", f"{_shown(leaf)} is not a tensor of {name}: call {call}(x) first")
    return [i for i, leaf in enumerate(leaves) if isinstance(leaf, own)]


def results_at(leaves: list[Any], own: Any, name: str) -> list[int]:
    """Return the indices of the tensors among the leaves of the results."""
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, own):
            raise of_kind(
                "not_a_tensor", f"the function returned {_shown(leaf)}: return tensors of {name}, or containers of them"
            )
    return [i for i, leaf in enumerate(leaves) if leaf is not None]


def filled(leaves: list[Any], at: list[int], tensors: Any) -> list[Any]:
    """Return the leaves with these tensors at these indices."""
    made = list(leaves)
    for i, tensor in zip(at, tensors, strict=True):
        made[i] = tensor
    return made


def _shown(x: Any) -> str:
    return f"an object of type {type(x).__module__}.{type(x).__qualname__}"
