"""Hand batches of a PyTorch data loader, NHWC and uint8, to TensorFlow as NCHW and float32.

TensorFlow takes compact tensors only, so a permutation is one copy. It is made first, while an element has one byte:
truebridge reorders, and on the way moves the batch to the GPU if there is one; ``tf.cast`` then makes floats. The
other order, in place and then ``tf.transpose(tf.cast(x))``, permutes four times as many bytes::

    pip install . torch tensorflow && python examples/loader_to_tensorflow.py
"""

import argparse
import os
from typing import Any

os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import torch
from torch.utils.data import DataLoader, TensorDataset

import truebridge as tb

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NCHW = (0, 3, 1, 2)


def batches(loader: Any) -> Any:
    """Yield batches of TensorFlow, float32 between 0 and 1, of shape (n, channels, height, width)."""
    import tensorflow as tf

    for images, labels in loader:
        x = tb.to_tensorflow(images, permute=NCHW, device=DEVICE)  # still uint8: one copy
        yield tf.cast(x, tf.float32) / 255, tb.to_tensorflow(labels, device=DEVICE)


def main() -> None:
    """Load every batch, and compare it with what PyTorch makes of the same images."""
    parser = argparse.ArgumentParser(description="Hand batches of a PyTorch data loader to TensorFlow.")
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--size", type=int, default=64, help="rows and columns of an image")
    options = parser.parse_args()
    images = torch.randint(0, 256, (options.images, options.size, options.size, 3), dtype=torch.uint8)
    labels = torch.arange(options.images)
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, pin_memory=DEVICE == "cuda")

    first, _ = next(iter(loader))
    plan = tb.plan(first, "tensorflow", permute=NCHW, device=DEVICE)
    print(f"a batch: {tuple(first.shape)} {first.dtype}; to TensorFlow on {DEVICE}: {plan}")
    assert plan.nbytes == first.nbytes, "one copy, of one byte for each element"

    seen = 0
    for x, numbers in batches(loader):
        expected = images[seen : seen + len(x)].permute(NCHW) / 255
        assert x.dtype == "float32" and x.shape == expected.shape
        torch.testing.assert_close(tb.to_torch(x, device="cpu", read_only=True), expected)
        assert tb.to_torch(numbers, device="cpu", read_only=True).equal(labels[seen : seen + len(x)])
        seen += len(x)
    assert seen == options.images
    print(f"{seen} images arrived as {x.dtype.name} of shape {tuple(x.shape)} on {x.device}")


if __name__ == "__main__":
    main()
