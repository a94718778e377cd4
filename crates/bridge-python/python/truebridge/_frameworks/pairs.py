"""A function for each pair of frameworks, under the name that people look for.

``convert_tf_to_pytorch(x)`` is ``to_torch(x)``, and so on: the name shows readers of the program where the tensor comes
from. A tensor of another framework than the named one is converted as well.
"""

from __future__ import annotations

from itertools import permutations, starmap
from typing import TYPE_CHECKING, Any, Literal

from .. import _core
from .table import ALL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol, TypeVar, overload

    # adapters: begin imports
    import cupy
    import jax
    import numpy.typing
    import paddle
    import tensorflow
    import torch

    # adapters: end
    from typing_extensions import Unpack

    from .._core import Device, Keywords, Order
    from ..diagnostics.progress import Progress

    _Source = TypeVar("_Source", contravariant=True)
    _Result = TypeVar("_Result", covariant=True)
    _Tree = TypeVar("_Tree", dict[Any, Any], list[Any], tuple[Any, ...])

    class _Convert(Protocol[_Source, _Result]):
        @overload
        def __call__(self, x: _Tree, **keywords: Unpack[Keywords]) -> _Tree: ...
        @overload
        def __call__(self, x: _Source, **keywords: Unpack[Keywords]) -> _Result: ...

    # adapters: begin declared
    convert_pytorch_to_cupy: _Convert[torch.Tensor, cupy.ndarray]
    convert_pytorch_to_numpy: _Convert[torch.Tensor, numpy.typing.NDArray[Any]]
    convert_pytorch_to_jax: _Convert[torch.Tensor, jax.Array]
    convert_pytorch_to_paddle: _Convert[torch.Tensor, paddle.Tensor]
    convert_pytorch_to_tf: _Convert[torch.Tensor, tensorflow.Tensor]
    convert_cupy_to_pytorch: _Convert[cupy.ndarray, torch.Tensor]
    convert_cupy_to_numpy: _Convert[cupy.ndarray, numpy.typing.NDArray[Any]]
    convert_cupy_to_jax: _Convert[cupy.ndarray, jax.Array]
    convert_cupy_to_paddle: _Convert[cupy.ndarray, paddle.Tensor]
    convert_cupy_to_tf: _Convert[cupy.ndarray, tensorflow.Tensor]
    convert_numpy_to_pytorch: _Convert[numpy.typing.NDArray[Any], torch.Tensor]
    convert_numpy_to_cupy: _Convert[numpy.typing.NDArray[Any], cupy.ndarray]
    convert_numpy_to_jax: _Convert[numpy.typing.NDArray[Any], jax.Array]
    convert_numpy_to_paddle: _Convert[numpy.typing.NDArray[Any], paddle.Tensor]
    convert_numpy_to_tf: _Convert[numpy.typing.NDArray[Any], tensorflow.Tensor]
    convert_jax_to_pytorch: _Convert[jax.Array, torch.Tensor]
    convert_jax_to_cupy: _Convert[jax.Array, cupy.ndarray]
    convert_jax_to_numpy: _Convert[jax.Array, numpy.typing.NDArray[Any]]
    convert_jax_to_paddle: _Convert[jax.Array, paddle.Tensor]
    convert_jax_to_tf: _Convert[jax.Array, tensorflow.Tensor]
    convert_paddle_to_pytorch: _Convert[paddle.Tensor, torch.Tensor]
    convert_paddle_to_cupy: _Convert[paddle.Tensor, cupy.ndarray]
    convert_paddle_to_numpy: _Convert[paddle.Tensor, numpy.typing.NDArray[Any]]
    convert_paddle_to_jax: _Convert[paddle.Tensor, jax.Array]
    convert_paddle_to_tf: _Convert[paddle.Tensor, tensorflow.Tensor]
    convert_tf_to_pytorch: _Convert[tensorflow.Tensor, torch.Tensor]
    convert_tf_to_cupy: _Convert[tensorflow.Tensor, cupy.ndarray]
    convert_tf_to_numpy: _Convert[tensorflow.Tensor, numpy.typing.NDArray[Any]]
    convert_tf_to_jax: _Convert[tensorflow.Tensor, jax.Array]
    convert_tf_to_paddle: _Convert[tensorflow.Tensor, paddle.Tensor]
    # adapters: end


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


def _between(one: str, other: str) -> Any:
    """Return the function from one framework to another."""
    source, target = ALL[one], ALL[other]
    name = f"convert_{source.alias}_to_{target.alias}"
    function = getattr(_core, f"to_{other}")
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
        read_only: bool = False,
        progress: Progress = None,
    ) -> Any:
        return function(
            x,
            copy=copy,
            device=device,
            order=order,
            permute=permute,
            detach=detach,
            via=via,
            read_only=read_only,
            progress=progress,
        )

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


globals().update({made.__name__: made for made in starmap(_between, permutations(ALL, 2))})
