"""Tensors of a GPU that PyTorch saves elsewhere: no backward computes from later writes."""

from __future__ import annotations

import os
from typing import Any

import pytest

import truebridge as tb

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

torch: Any = pytest.importorskip("torch")
jax: Any = pytest.importorskip("jax")
tf: Any = pytest.importorskip("tensorflow")
if not torch.cuda.is_available() or all(device.platform != "gpu" for device in jax.devices()):
    pytest.skip("no CUDA device that JAX has", allow_module_level=True)
if not tf.config.list_physical_devices("GPU"):
    pytest.skip("TensorFlow has no GPU", allow_module_level=True)

graph = torch.autograd.graph
MODES = {
    "save_on_cpu": graph.save_on_cpu,
    "save_on_cpu, pinned": lambda: graph.save_on_cpu(pin_memory=True),
    "clone": lambda: graph.saved_tensors_hooks(torch.clone, lambda x: x),
    "allow_mutation": graph.allow_mutation_on_saved_tensors,
}


def gradient(function: Any, mode: Any, writes: bool) -> list[float]:
    x = torch.tensor([1.0, 2.0], device="cuda", requires_grad=True)
    with mode():
        inner = x * 1
        y = function(inner)
        if writes:
            inner.detach().zero_()
        y.sum().backward()
    values: list[float] = x.grad.tolist()
    return values


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_jax_computes_from_what_pytorch_has_saved(mode: str, writes: bool) -> None:
    square = tb.autograd.torch_function(lambda x: x * x, of="jax")
    assert gradient(square, MODES[mode], writes) == gradient(torch.square, MODES[mode], writes) == [2, 4]


@pytest.mark.parametrize("mode", MODES)
def test_tensorflow_refuses_a_write_to_the_memory_of_its_tape(mode: str) -> None:
    square = tb.autograd.torch_function(tf.square)
    assert gradient(square, MODES[mode], False) == [2, 4]
    with pytest.raises(tb.BridgeError, match="wrote to an argument"):
        gradient(square, MODES[mode], True)
