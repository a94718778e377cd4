"""NumPy."""

from __future__ import annotations

from typing import Any

from .table import ALIGNMENT, SMALL, Example, Framework, Side


def aligned(array: Any) -> Any:
    """Return a copy of an array at an address that every framework takes in place: NumPy's own are aligned by luck."""
    import numpy

    memory = numpy.empty(array.nbytes + ALIGNMENT, numpy.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _side(numpy: Any, index: int | None) -> Side:
    return Side(
        of_host=lambda array: array,
        to_host=lambda x: x,
        capsule=lambda x: x.__dlpack__(),
        of_dlpack=numpy.from_dlpack,
        transposed=lambda x: numpy.ascontiguousarray(x.T),
        wait=lambda: None,
        takes_capsules=False,
    )


FRAMEWORK = Framework(
    label="NumPy",
    alias="numpy",
    tensor="numpy.ndarray",
    annotation="numpy.typing.NDArray[Any]",
    kind=("numpy", "ndarray"),
    install="`pip install --force-reinstall numpy`",
    example=Example("import numpy as np", "np.ones(3, np.float32)", "(3,)", "cpu"),
    build=lambda numpy: "CPU",
    devices=lambda numpy: 0,
    small=lambda numpy, kind, index: aligned(numpy.zeros(SMALL, numpy.float32)),
    side=_side,
    alignment=16,
    on_gpus=False,
    on_gpu=lambda x: False,
)
