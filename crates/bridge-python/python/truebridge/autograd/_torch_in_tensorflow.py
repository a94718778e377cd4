"""Functions of PyTorch as nodes of TensorFlow's tapes and graphs. Imports both frameworks.

Arguments are converted in place. Results and gradients are copied: PyTorch adds to gradients and writes to parameters
in place, and lets them share memory with what it returns; TensorFlow takes its tensors as constant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import of_kind
from ._in_tensorflow import Call, Made, function_of
from ._of_torch import Recorded, check_arguments, converted, ends

if TYPE_CHECKING:
    from collections.abc import Callable


def wrapped(function: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
    """Return the function of TensorFlow that runs this one of PyTorch."""
    return function_of(lambda call, inputs: _run(function, call, inputs), torch.Tensor, "PyTorch", outputs)


def _run(function: Callable[..., Any], call: Call, inputs: list[Any]) -> Made:
    with torch.inference_mode(False), torch.enable_grad():
        views = converted(inputs)
        _check_devices(views)
        positional, named = call.packed(views)
        results = function(*positional, **named)
    check_arguments(views, "TensorFlow")
    flat = call.flat(results)
    own = {id(view) for view in views}
    trained = any(id(leaf) not in own for leaf in ends([y for y in flat if y is not None]))
    return Made(results, flat, Recorded(views, flat), trained)


def _check_devices(tensors: list[Any]) -> None:
    # TensorFlow keeps integers on the host; where the function needs them is for the function to say.
    devices = sorted({str(tensor.device) for tensor in tensors if tensor.requires_grad})
    if len(devices) > 1:
        raise of_kind("device", f"tensors are on {' and '.join(devices)}: move them to one device first")
