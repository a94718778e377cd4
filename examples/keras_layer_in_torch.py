"""Train a PyTorch model that has a layer of Keras in its middle: one backward pass, one optimizer.

The parameters of the layer are the variables of TensorFlow, in place::

    pip install . torch tensorflow && python examples/keras_layer_in_torch.py
"""

import argparse
import os
from typing import Any

os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import torch
from torch import nn

import truebridge as tb

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def mixed(width: int) -> tuple[nn.Sequential, Any]:
    """Return a model with a Keras layer in it, and the layer."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    # TensorFlow rounds the factors of a product on a GPU to 11 bits, PyTorch does not.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    with tf.device("GPU:0" if DEVICE == "cuda" else "CPU:0"):
        layer = keras.layers.Dense(width, activation="tanh")
        layer.build((None, width))
    middle = tb.autograd.torch_function(layer, variables=layer.trainable_variables)
    return nn.Sequential(nn.Linear(4, width, device=DEVICE), middle, nn.Linear(width, 1, device=DEVICE)), layer


def pure(model: nn.Sequential, width: int) -> nn.Sequential:
    """Return the same model in pure PyTorch, with copies of the parameters."""
    twin = nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)).to(DEVICE)
    with torch.no_grad():
        for mine, other in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(other.T if mine is twin[1].weight else other)  # Keras has (inputs, outputs)
    return twin


def main() -> None:
    """Compare the gradients with those of pure PyTorch, then train."""
    parser = argparse.ArgumentParser(description="Train a PyTorch model through a layer of Keras.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    torch.manual_seed(0)
    model, layer = mixed(options.width)
    x = torch.rand(256, 4, device=DEVICE)
    y = x.prod(1, keepdim=True)
    twin = pure(model, options.width)
    for each in (model, twin):
        nn.functional.mse_loss(each(x), y).backward()
    difference = 0.0
    for mine, other in zip(twin.parameters(), model.parameters(), strict=True):
        theirs = other.grad.T if mine is twin[1].weight else other.grad
        difference = max(difference, ((theirs - mine.grad).norm() / mine.grad.norm()).item())
    print(f"gradients differ from those of pure PyTorch by {difference:.1e} of their length")
    assert difference < 1e-5

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        losses.append(nn.functional.mse_loss(model(x), y))
        losses[-1].backward()
        optimizer.step()  # writes the variables of the layer as well
    kernel = tb.to_torch(layer.trainable_variables[0].value, read_only=True)
    assert kernel.data_ptr() == model[1].variables[0].data_ptr() and losses[-1] < losses[0] / 4
    print(f"loss {losses[0]:.4f} before, {losses[-1]:.4f} after {options.steps} steps on {DEVICE}; kernel in place")


if __name__ == "__main__":
    main()
