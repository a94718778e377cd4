"""A model of PyTorch, computed by candle: a tensor of PyTorch goes in, and one of PyTorch comes out.

The extension module ``perceptron`` is examples/candle.
"""

from __future__ import annotations

import perceptron  # type: ignore[import-not-found]
import torch

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
model = perceptron.Perceptron([(layer.weight.detach(), layer.bias.detach()) for layer in net if len(layer._parameters)])

batch = torch.rand(32, 64)
result = model(batch)
difference = (result - net(batch).detach()).abs().max().item()
came_in, went_out = model.plans(batch)
print(f"a {type(result).__module__}.{type(result).__name__} of shape {tuple(result.shape)}")
print(f"in: {came_in}; out: {went_out}")
print(f"largest difference to PyTorch's own result: {difference:.1e}")
if difference > 1e-5:
    raise SystemExit("candle and PyTorch differ")
