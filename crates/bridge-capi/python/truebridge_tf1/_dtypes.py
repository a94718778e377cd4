"""Element types: DLPack's numbers, NumPy's dtypes, and the names of both."""

from typing import Any, Tuple

import numpy as np

from ._library import Dtype
from .errors import of_kind

#: Name, and DLPack's code and bits (``dlpack.h``).
NAMES = {
    "bool": (6, 8),
    "int8": (0, 8),
    "int16": (0, 16),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "uint16": (1, 16),
    "uint32": (1, 32),
    "uint64": (1, 64),
    "float16": (2, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "bfloat16": (4, 16),
    "complex64": (5, 64),
    "complex128": (5, 128),
}
_BY_NUMBERS = {numbers: name for name, numbers in NAMES.items()}


def from_numpy(dtype: np.dtype) -> Dtype:
    """Return DLPack's numbers of a NumPy dtype."""
    numbers = NAMES.get(dtype.name)
    if numbers is None or not dtype.isnative:
        text = "dtype {} has no counterpart: cast the array to a number type in native byte order first"
        raise of_kind("dtype", text.format(dtype.str if dtype.names is None else dtype))
    return Dtype(numbers[0], numbers[1], 1)


def name(numbers: Tuple[int, int]) -> str:
    """Return the name of the dtype with this code and number of bits."""
    return _BY_NUMBERS.get(numbers, f"dlpack{numbers}")


def to_numpy(name: str) -> Any:
    """Return the NumPy dtype of this name. TensorFlow defines that of bfloat16."""
    if name == "bfloat16":
        import tensorflow as tf

        return np.dtype(tf.bfloat16.as_numpy_dtype)
    if name not in NAMES:
        raise of_kind("dtype", f"numpy has no dtype {name}: take the tensor with another framework")
    return np.dtype(name)
