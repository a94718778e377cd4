"""A function for each pair of frameworks, under the name that people look for.

``convert_tf_to_pytorch(x)`` is ``to_torch(x)``, and so on: the name shows readers of the program where the tensor comes
from. A tensor of another framework than the named one is converted as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from . import _core
from ._frameworks import ALL

if TYPE_CHECKING:
    from collections.abc import Sequence
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


#: By the names in the names of the functions: the name that ``convert`` takes, and the row.
_BY_ALIAS = {row.alias: (name, row) for name, row in ALL.items()}

_DOC = """Convert a tensor of {source.label} to one of {target.label}.

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
>>> {source.example.imported}
>>> import truebridge as tb
>>> y = tb.{name}({source.example.ones}{device})
>>> y.shape
{target.example.shape}
"""


def _named(name: str) -> Any:
    """Return the function of this name, ``convert_SOURCE_to_TARGET``."""
    (_, source), (to, target) = (_BY_ALIAS[part] for part in name.removeprefix("convert_").split("_to_"))
    function = getattr(_core, f"to_{to}")
    on = target.example.device

    def convert(
        x: Any,
        *,
        copy: bool | None = None,
        device: Device | None = None,
        order: Order | None = None,
        permute: Sequence[int] | None = None,
        detach: bool = False,
        via: Literal["host"] | None = None,
    ) -> Any:
        return function(x, copy=copy, device=device, order=order, permute=permute, detach=detach, via=via)

    convert.__name__ = convert.__qualname__ = name
    convert.__annotations__ = {**convert.__annotations__, "x": source.tensor, "return": target.tensor}
    convert.__doc__ = _DOC.format(
        name=name,
        source=source,
        target=target,
        function=function.__name__,
        keywords=_core.KEYWORDS,
        place=f' One that is elsewhere is moved with ``device="{on}"``.' if on else "",
        device=f', device="{on}"' if on else "",
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
