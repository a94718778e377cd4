"""Preprocess images in CuPy and classify them with a Keras model. On a GPU the batch never visits the host.

Without a GPU, NumPy stands in for CuPy::

    pip install . tensorflow cupy-cuda12x && python examples/cupy_to_keras.py
"""

import argparse
import os
from typing import Any

os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import numpy as np

import truebridge as tb

try:
    # Before TensorFlow, which shows stubs of CUDA to libraries that are loaded later.
    import cupy
except ImportError:
    cupy = None
#: The array library of the preprocessing: CuPy on a GPU, NumPy elsewhere.
xp: Any = cupy if cupy and cupy.cuda.is_available() else np


def preprocessed(images: Any) -> Any:
    """Return the middle of uint8 images, shape (n, height, width, 3), as float32 of mean 0 and deviation 1."""
    height, width = images.shape[1] // 8, images.shape[2] // 8
    middle = images[:, height:-height, width:-width].astype(xp.float32)
    mean, deviation = middle.mean((1, 2), keepdims=True), middle.std((1, 2), keepdims=True)
    return (middle - mean) / (deviation + 1e-6)


def address(array: Any) -> int:
    """Return where the elements of an array are."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def main() -> None:
    """Preprocess batches, classify them, and compare with the path through the host."""
    parser = argparse.ArgumentParser(description="Preprocess images in CuPy, classify them in Keras.")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--size", type=int, default=64, help="rows and columns of an image")
    options = parser.parse_args()
    import keras

    keras.utils.set_random_seed(0)
    side = options.size - 2 * (options.size // 8)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((side, side, 3)), layers.Conv2D(8, 3), layers.GlobalMaxPooling2D(), layers.Dense(10)]
    )
    print(f"preprocessing in {xp.__name__}, model in Keras {keras.__version__}")
    for _ in range(options.batches):
        images = xp.random.randint(0, 256, (16, options.size, options.size, 3)).astype(xp.uint8)
        batch = preprocessed(images)
        plan = tb.plan(batch, "tensorflow")
        x = tb.to_tensorflow(batch)  # TensorFlow's stream waits for CuPy's; the host does not
        scores = model(x)
        in_place = address(tb.convert(x, xp.__name__)) == address(batch)
        # CuPy's memory fits TensorFlow. NumPy's may begin where 64 does not divide the address: then it is copied.
        assert in_place == plan.zero_copy and (plan.zero_copy or xp is np)
        on_host = batch if xp is np else cupy.asnumpy(batch)
        np.testing.assert_allclose(scores, model(on_host), rtol=1e-4, atol=1e-4)
        print(f"{batch.shape} {batch.dtype} -> {tuple(scores.shape)}: {plan}")
    print("scores equal those of the same batch from the host")


if __name__ == "__main__":
    main()
