"""A function for each pair of frameworks, under the name that people look for.

``convert_tf_to_pytorch(x)`` is ``to_torch(x)``, and so on: the name says where the tensor comes from, to those who read
the program. A tensor of another framework than the named one is converted all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from . import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol, TypeVar, overload

    import cupy
    import tensorflow as tf
    import torch
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from ._core import Device, Keywords, Order

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
    #: Its class of tensors, and the function that returns one.
    tensor: str
    function: Callable[..., Any]
    #: For the example: an import, a tensor of three ones, and its shape as Python shows it.
    imported: str
    ones: str
    shape: str
    #: The device that the example names as a target, where ``ones`` of another framework may be elsewhere.
    device: str = ""


#: The frameworks by the names that they have in the names of the functions.
_FRAMEWORKS = {
    "pytorch": _Framework(
        "PyTorch", "torch.Tensor", _core.to_torch, "import torch", "torch.ones(3)", "torch.Size([3])"
    ),
    "tf": _Framework(
        "TensorFlow",
        "tensorflow.Tensor",
        _core.to_tensorflow,
        "import tensorflow as tf",
        "tf.ones(3)",
        "TensorShape([3])",
    ),
    "cupy": _Framework("CuPy", "cupy.ndarray", _core.to_cupy, "import cupy", "cupy.ones(3)", "(3,)", "cuda"),
    "numpy": _Framework("NumPy", "numpy.ndarray", _core.to_numpy, "import numpy as np", "np.ones(3)", "(3,)", "cpu"),
}

_DOC = """Convert a tensor of {source.name} to one of {target.name}.

Parameters
----------
x : {source.tensor} or container
    Of any shape and strides.{place} A dict, a list, a tuple or a dataclass is converted with all tensors in it.
{keywords}
Returns
-------
{target.tensor} or container
    In place, or a copy where ``plan`` says so.

Raises
------
BridgeError
    As for ``{function}``.

See Also
--------
{function} : the same, for a tensor of any framework.

Examples
--------
>>> {source.imported}
>>> import tensor_bridge as tb
>>> y = tb.{name}({source.ones}{device})
>>> y.shape
{target.shape}
"""


def _named(name: str) -> Any:
    """Return the function of this name, ``convert_SOURCE_to_TARGET``."""
    source, target = (_FRAMEWORKS[part] for part in name.removeprefix("convert_").split("_to_"))
    function = target.function

    def convert(
        x: Any,
        *,
        copy: bool | None = None,
        device: Device | None = None,
        order: Order | None = None,
        permute: Sequence[int] | None = None,
        layout: Literal["compact"] | None = None,
        detach: bool = False,
        via: Literal["host"] | None = None,
    ) -> Any:
        return function(
            x, copy=copy, device=device, order=order, permute=permute, layout=layout, detach=detach, via=via
        )

    convert.__name__ = convert.__qualname__ = name
    convert.__annotations__ = {**convert.__annotations__, "x": source.tensor, "return": target.tensor}
    convert.__doc__ = _DOC.format(
        name=name,
        source=source,
        target=target,
        function=function.__name__,
        keywords=_core.KEYWORDS,
        place=f' One that is elsewhere is moved with ``device="{target.device}"``.' if target.device else "",
        device=f', device="{target.device}"' if target.device else "",
    )
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
