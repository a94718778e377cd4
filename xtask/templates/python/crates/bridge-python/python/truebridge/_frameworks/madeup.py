"""MadeUp."""

from __future__ import annotations

from typing import Any

from . import SMALL, Example, Framework, Side


def _of_host(madeup: Any, array: Any) -> Any:
    raise NotImplementedError(
        "write _of_host in truebridge/_frameworks/madeup.py: it returns a tensor with the elements of an array"
    )


def _side(madeup: Any, index: int | None) -> Side:
    import numpy

    return Side(
        of_host=lambda array: _of_host(madeup, array),
        to_host=numpy.asarray,
        capsule=lambda x: x.__dlpack__(),
        of_dlpack=madeup.from_dlpack,
        transposed=lambda x: x.T,
        wait=lambda: None,
        takes_capsules=False,
    )


def _small(madeup: Any, kind: str, index: int) -> Any:
    import numpy

    return _of_host(madeup, numpy.zeros(SMALL, numpy.float32))


FRAMEWORK = Framework(
    label="MadeUp",
    alias="madeup",
    tensor="madeup.Tensor",
    kind=("madeup", "Tensor"),
    install="`pip install MADEUP`",
    example=Example("import madeup", "madeup.ones(3)", "(3,)", "cpu"),
    build=lambda madeup: "CPU",
    devices=lambda madeup: 0,
    small=_small,
    side=_side,
    # % if host
    on_gpus=False,
    # % end
)
