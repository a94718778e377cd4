"""A function for each pair of frameworks, under the name that people look for.

``convert_tf_to_pytorch(x)`` is ``to_torch(x)``, and so on: the name says where the tensor comes from, to those who read
the program. A tensor of another framework than the named one is converted all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from . import _core

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol, TypeVar, overload

    import cupy
    import tensorflow as tf
    import torch
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from ._core import Keywords

    _Source = TypeVar("_Source", contravariant=True)
    _Result = TypeVar("_Result", covariant=True)
    _Tree = TypeVar("_Tree", dict[Any, Any], list[Any], tuple[Any, ...])

    class _Convert(Protocol[_Source, _Result]):
        @overload
        def __call__(self, x: _Tree, **keywords: Unpack[Keywords]) -> _Tree: ...
        @overload
        def __call__(self, x: _Source, **keywords: Unpack[Keywords]) -> _Result: ...


class _Framework(NamedTuple):
    name: str
    tensor: str
    function: Callable[..., Any]
    device: str = ""


#: The frameworks by the names that they have in the names of the functions.
_FRAMEWORKS = {
    "pytorch": _Framework("PyTorch", "torch.Tensor", _core.to_torch),
    "tf": _Framework("TensorFlow", "tensorflow.Tensor", _core.to_tensorflow),
    "cupy": _Framework("CuPy", "cupy.ndarray", _core.to_cupy, "a GPU: a tensor of the host is moved with ``'cuda'``"),
    "numpy": _Framework(
        "NumPy", "numpy.ndarray", _core.to_numpy, "the host: a tensor of a GPU is moved with ``'cpu'``"
    ),
}

_DOC = """Return a tensor of {target.name} over the memory of a tensor of {source.name}.

Parameters
----------
x : {source.tensor}, or a container of them
    Of any shape and strides. A dict, a list, a tuple or a dataclass is converted with all tensors in it.
copy : bool, optional
    ``None`` copies only where {target.name} cannot take the tensor in place, ``True`` always, ``False`` never.
device : str or device, optional
    Where the result must be, such as ``"cpu"`` or ``"cuda:0"``. Without it nothing is moved.{place}
order : {{"C", "F"}}, optional
    Row-major or column-major elements without gaps.
permute : sequence of int, optional
    The dimensions of ``x`` in the order of the result.
layout : {{"compact"}}, optional
    Another name of ``order="C"``.
detach : bool, optional
    Takes a tensor that requires grad without its gradients. Without it, such a tensor is an error.

Returns
-------
{target.tensor}
    In place, or a copy where ``plan`` says so. Ready in the current stream of {target.name}.

Raises
------
BridgeError
    If ``x`` cannot cross. Its ``kind`` says why in one word.

See Also
--------
{function} : the same function, under the name of its result alone.

Examples
--------
>>> y = tensor_bridge.{name}(x)
"""


def _named(name: str) -> Any:
    """Return the function of this name, ``convert_SOURCE_to_TARGET``."""
    source, target = (_FRAMEWORKS[part] for part in name.removeprefix("convert_").split("_to_"))
    place = f" {target.name} is on {target.device}." if target.device else ""
    function = target.function

    def convert(
        x: Any,
        *,
        copy: bool | None = None,
        device: Any = None,
        order: Any = None,
        permute: Any = None,
        layout: Any = None,
        detach: bool = False,
    ) -> Any:
        return function(x, copy=copy, device=device, order=order, permute=permute, layout=layout, detach=detach)

    convert.__name__ = convert.__qualname__ = name
    convert.__annotations__ = {"x": source.tensor, "return": target.tensor}
    convert.__doc__ = _DOC.format(name=name, source=source, target=target, function=function.__name__, place=place)
    return convert


convert_pytorch_to_tf: _Convert[torch.Tensor, tf.Tensor] = _named("convert_pytorch_to_tf")
convert_pytorch_to_cupy: _Convert[torch.Tensor, cupy.ndarray] = _named("convert_pytorch_to_cupy")
convert_pytorch_to_numpy: _Convert[torch.Tensor, NDArray[Any]] = _named("convert_pytorch_to_numpy")
convert_tf_to_pytorch: _Convert[tf.Tensor, torch.Tensor] = _named("convert_tf_to_pytorch")
convert_tf_to_cupy: _Convert[tf.Tensor, cupy.ndarray] = _named("convert_tf_to_cupy")
convert_tf_to_numpy: _Convert[tf.Tensor, NDArray[Any]] = _named("convert_tf_to_numpy")
convert_cupy_to_pytorch: _Convert[cupy.ndarray, torch.Tensor] = _named("convert_cupy_to_pytorch")
convert_cupy_to_tf: _Convert[cupy.ndarray, tf.Tensor] = _named("convert_cupy_to_tf")
convert_cupy_to_numpy: _Convert[cupy.ndarray, NDArray[Any]] = _named("convert_cupy_to_numpy")
convert_numpy_to_pytorch: _Convert[NDArray[Any], torch.Tensor] = _named("convert_numpy_to_pytorch")
convert_numpy_to_tf: _Convert[NDArray[Any], tf.Tensor] = _named("convert_numpy_to_tf")
convert_numpy_to_cupy: _Convert[NDArray[Any], cupy.ndarray] = _named("convert_numpy_to_cupy")
