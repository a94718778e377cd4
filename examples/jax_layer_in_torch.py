"""Train a PyTorch model with a layer of JAX in it, and compare the time of a step with that of its halves.

The layer is a function of parameters and a batch, as Flax's ``model.apply`` is::

    pip install . torch jax && python examples/jax_layer_in_torch.py
"""

import statistics
import time
from typing import Any

import jax
import torch
from torch import nn

import truebridge as tb

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, STEPS = 128, 100
# JAX rounds the factors of a product on a GPU, PyTorch does not.
jax.config.update("jax_default_matmul_precision", "highest")


def layer(params: Any, x: Any) -> Any:
    """Return what a dense layer of JAX makes of a batch."""
    return jax.numpy.tanh(x @ params["kernel"] + params["bias"])


def seconds(step: Any) -> float:
    """Return the time of a step, which the host and the device have finished."""
    taken = []
    for _ in range(10):
        begin = time.perf_counter()
        jax.block_until_ready(step())
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def halves(x: torch.Tensor, y: torch.Tensor, model: nn.Sequential, params: Any) -> tuple[Any, Any]:
    """Return a step of PyTorch's layers and a step of JAX's. What would be converted is made beforehand."""
    first, middle, last = model
    between = middle(first(x)).detach().requires_grad_()
    entering, sent = tb.to_jax([first(x).detach(), torch.rand_like(between)], copy=True)
    gradients = jax.jit(lambda params, x, sent: jax.vjp(layer, params, x)[1](sent))

    def of_torch() -> None:
        given = first(x)
        nn.functional.mse_loss(last(between), y).backward()
        given.backward(given)

    return of_torch, lambda: gradients(params, entering, sent)


torch.manual_seed(0)
params = {"bias": jax.numpy.zeros(WIDTH), "kernel": jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) * WIDTH**-0.5}
middle = tb.autograd.torch_function(layer, of="jax", variables=params)
model = nn.Sequential(nn.Linear(4, WIDTH), middle, nn.Linear(WIDTH, 1)).to(DEVICE)
x = torch.rand(256, 4, device=DEVICE)
y = x.prod(1, keepdim=True)

bias, kernel = middle.variables
twin = nn.Sequential(model[0], nn.Module(), model[2])
twin[1].forward = lambda x: torch.tanh(x @ kernel + bias)  # the same in pure PyTorch
ours, own = (torch.autograd.grad(nn.functional.mse_loss(m(x), y), list(model.parameters())) for m in (model, twin))
assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(ours, own, strict=True))

optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-3), []
for _ in range(STEPS):
    optimizer.zero_grad()
    losses.append(nn.functional.mse_loss(model(x), y))
    losses[-1].backward()
    optimizer.step()  # writes to copies of the arrays in ``params``, which do not change
whole = seconds(lambda: nn.functional.mse_loss(model(x), y).backward())
parts = sum(map(seconds, halves(x, y, model, params)))
print(f"forward and backward: {whole * 1e6:.0f} µs, the halves {parts * 1e6:.0f} µs")
assert losses[-1] < losses[0] / 4
print(f"loss {losses[0]:.4f} before, {losses[-1]:.4f} after {STEPS} steps on {DEVICE}")
