"""TensorFlow 2."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

from .table import SMALL, Example, Framework, Side

_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


def _build(tensorflow: Any) -> str:
    if not tensorflow.test.is_built_with_cuda():
        return "ROCm" if tensorflow.test.is_built_with_rocm() else "CPU"
    return f"CUDA {tensorflow.sysconfig.get_build_info().get('cuda_version', '')}".rstrip()


def _small(tensorflow: Any, kind: str, index: int) -> Any:
    with tensorflow.device(f"{'GPU' if kind == 'cuda' else 'CPU'}:{index}"):
        return tensorflow.zeros([SMALL], tensorflow.float32)


def _settings(tensorflow: Any) -> dict[str, Any]:
    config = tensorflow.config
    forced = os.environ.get(_GROWTH) == "true"

    def bounded(gpu: Any) -> bool:
        return config.experimental.get_memory_growth(gpu) or config.get_logical_device_configuration(gpu) is not None

    return {"takes_all_memory": not forced and not all(map(bounded, config.get_visible_devices("GPU")))}


def _side(tensorflow: Any, index: int | None) -> Side:
    place, dlpack = "CPU:0" if index is None else f"GPU:{index}", tensorflow.experimental.dlpack

    def of_host(array: Any) -> Any:
        with tensorflow.device(place):
            return tensorflow.convert_to_tensor(array)

    return Side(
        of_host=of_host,
        to_host=lambda x: x.numpy(),
        capsule=dlpack.to_dlpack,
        of_dlpack=dlpack.from_dlpack,
        transposed=tensorflow.transpose,
        wait=lambda: None,
        capsules_only=True,
    )


FRAMEWORK = Framework(
    label="TensorFlow 2",
    alias="tf",
    tensor="tensorflow.Tensor",
    kind=("tensorflow.python.framework.ops", "EagerTensor"),
    install="`pip install 'tensorflow[and-cuda]'`",
    example=Example("import tensorflow as tf", "tf.ones(3)", "TensorShape([3])"),
    build=_build,
    devices=lambda tensorflow: len(tensorflow.config.list_physical_devices("GPU")),
    small=_small,
    side=_side,
    settings=_settings,
    sparing={_GROWTH: "true"},
    spare="tf.config.experimental.set_memory_growth(gpu, True)",
    # It opens its libraries, and stubs of CUDA's with them, for the whole process, unless a caller prevents it.
    hides_cuda=lambda: sys.modules.get("tensorflow.python.pywrap_dlopen_global_flags") is not None,
    tested="docs/tensorflow.md",
    nbytes=lambda x: math.prod(x.shape) * int(x.dtype.size),
    on_gpu=lambda x: "GPU" in x.device,
)
