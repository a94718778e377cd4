"""PaddlePaddle."""

from __future__ import annotations

import math
from typing import Any

from .table import SMALL, Example, Framework, Side


def _of_host(paddle: Any, array: Any) -> Any:
    return paddle.to_tensor(array, place=paddle.CPUPlace())


def _side(paddle: Any, index: int | None) -> Side:
    return Side(
        of_host=lambda array: _of_host(paddle, array),
        to_host=lambda x: x.numpy(),
        capsule=lambda x: x.__dlpack__(),
        of_dlpack=paddle.from_dlpack,
        transposed=lambda x: x.T.clone().contiguous(),
        wait=lambda: None,
    )


def _small(paddle: Any, kind: str, index: int) -> Any:
    return paddle.zeros([SMALL], "float32")


FRAMEWORK = Framework(
    label="PaddlePaddle",
    alias="paddle",
    tensor="paddle.Tensor",
    kind=("paddle", "Tensor"),
    install="`pip install paddlepaddle`",
    example=Example("import paddle", "paddle.ones([3])", "paddle.Size([3])", "cpu"),
    build=lambda paddle: "CPU",
    devices=lambda paddle: 0,
    small=_small,
    side=_side,
    on_gpus=False,
    nbytes=lambda x: math.prod(x.shape) * int(x.element_size()),
    on_gpu=lambda x: bool(x.place.is_gpu_place()),
)
