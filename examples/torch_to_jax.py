"""Prepare images with PyTorch and classify them with a function that JAX has compiled, without a host wait between.

From a checkout::

    pip install . torch jax && python examples/torch_to_jax.py
"""

import argparse
import time
from typing import Any

import jax
import torch

import truebridge as tb

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, CLASSES = 32, 10


def prepared(images: torch.Tensor) -> torch.Tensor:
    """Return images of bytes as PyTorch prepares them: cropped at random, between -1 and 1, flattened."""
    top, left = torch.randint(0, images.shape[1] - SIZE, (2,)).tolist()
    cropped = images[:, top : top + SIZE, left : left + SIZE].float()
    return (cropped / 127.5 - 1).flatten(1)


@jax.jit
def classified(params: Any, x: Any) -> Any:
    """Return the class of each image."""
    for kernel in params:
        x = jax.nn.relu(x @ kernel)
    return x.argmax(1)


def main() -> None:
    """Classify batches, and compare with pure PyTorch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    widths = [SIZE * SIZE * 3, 512, CLASSES]
    shapes = zip(jax.random.split(jax.random.key(0)), widths, widths[1:], strict=False)
    params = [jax.random.normal(key, shape) * 0.1 for key, *shape in shapes]
    batches = [torch.randint(0, 256, (64, 40, 40, 3), dtype=torch.uint8, device=DEVICE) for _ in range(options.batches)]
    classified(params, tb.to_jax(prepared(batches[0]))).block_until_ready()  # compiles

    begin = time.perf_counter()
    inputs = [prepared(batch) for batch in batches]
    # In place and in stream order: JAX starts when PyTorch has finished, and the host waits for neither.
    results = [classified(params, tb.to_jax(x)) for x in inputs]
    issued = time.perf_counter() - begin
    jax.block_until_ready(results)
    print(f"issued in {issued * 1e3:.1f} ms, computed after {(time.perf_counter() - begin) * 1e3:.1f} ms")

    assert tb.plan(inputs[0], "jax").zero_copy
    weights = tb.to_torch(params, copy=True)
    for x, result in zip(inputs, results, strict=True):
        scores = (x.double() @ weights[0].double()).relu() @ weights[1].double()
        found = scores.gather(1, tb.to_torch(result, read_only=True).long()[:, None])[:, 0]
        # The best score, or one that JAX's precision does not tell from it.
        assert torch.allclose(found.relu(), scores.relu().amax(1), rtol=1e-2, atol=0.5)
    print(f"{sum(map(len, inputs))} images of PyTorch classified by JAX on {DEVICE}, in place")


if __name__ == "__main__":
    main()
