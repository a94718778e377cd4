"""TensorFlow 1.15, whose libraries need no Python of that time."""

from __future__ import annotations

from .. import _core
from .table import Folder

FRAMEWORK = Folder(
    label="TensorFlow 1.15",
    tensor="Tensor",
    folder="the folder tensorflow_core of the unpacked wheel of 1.15, or its parent",
    load=lambda: _core.tensorflow1_open(None),
)
