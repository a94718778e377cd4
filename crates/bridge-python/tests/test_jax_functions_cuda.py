"""JAX on a CUDA device: what its compiled functions read and fill of PyTorch, and gradients through both."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest

import truebridge as tb

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

np: Any = pytest.importorskip("numpy")
torch: Any = pytest.importorskip("torch")
jax: Any = pytest.importorskip("jax")
if not torch.cuda.is_available() or all(device.platform != "gpu" for device in jax.devices()):
    pytest.skip("no CUDA device that JAX has", allow_module_level=True)
from truebridge.autograd import jax_function, torch_function  # noqa: E402

jnp = jax.numpy
GPU = jax.local_devices(backend="cuda")[0]
N = 1 << 20
ROUNDS = 10
#: Cycles of a GPU: some tens of milliseconds.
LONG = 100_000_000
#: What a call raises: the first where it runs at once, the second where it runs later.
FAILED = (ValueError, jax.errors.JaxRuntimeError)


@pytest.fixture(autouse=True)
def on_the_gpu() -> Any:
    with jax.default_device(GPU), jax.default_matmul_precision("highest"):
        yield


@jax.jit
def long(x: Any) -> Any:
    """Compute for some tens of milliseconds."""
    for _ in range(30):
        x = x @ x * 1e-4
    return x


@pytest.fixture(scope="module")
def operand() -> Any:
    return long(jax.device_put(jnp.ones((4096, 4096)), GPU)).block_until_ready()


# --- Compiled functions


def test_a_call_reads_after_the_stream_of_the_feed() -> None:
    side = torch.cuda.Stream()
    tensor = torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        fed = tb.jax.feed(tensor)
    function = jax.jit(lambda x: tb.jax.external_input(fed) * x)
    function(1.0).block_until_ready()
    for i in range(1, ROUNDS):
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG)
            tensor.fill_(i)
        assert (np.asarray(function(2.0)) == 2 * i).all()


def test_the_stream_of_the_feed_writes_after_a_read(operand: Any) -> None:
    tensor = torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    fed = tb.jax.feed(tensor)
    function = jax.jit(lambda x: x[0, 0] * 0 + tb.jax.external_input(fed))
    function(operand).block_until_ready()
    for i in range(1, ROUNDS):
        tensor.fill_(i)
        result = function(operand)
        # The call was handed to XLA: what is written after its result is ready is not read by it.
        result.block_until_ready()
        tensor.fill_(-1)
        assert (np.asarray(result) == i).all()


def test_a_tensor_is_filled_after_what_the_function_computes(operand: Any) -> None:
    side = torch.cuda.Stream()
    whole = torch.full((N, 2), -1.0, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        fed = tb.jax.feed(whole[:, 0])
    function = jax.jit(lambda x, value: tb.jax.external_output(jnp.full(N, value) + long(x)[0, 0] * 0, fed))
    for i in range(ROUNDS):
        function(operand, float(i)).block_until_ready()
        with torch.cuda.stream(side):
            copy = whole.clone()
        side.synchronize()
        assert (copy[:, 0] == i).all() and (copy[:, 1] == -1).all()


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "float16", "bfloat16", "float32", "complex64"])
def test_layouts_and_dtypes(dtype: str) -> None:
    source = torch.arange(24, device="cuda").reshape(2, 3, 4).to(getattr(torch, dtype))
    for view in (source, source.permute(2, 0, 1), source[:, ::2, 1:], source[0, 0, 0], source[:0]):
        read = view.mT if view.ndim > 1 else view
        target = torch.zeros_like(read, memory_format=torch.contiguous_format)
        fed, filled = tb.jax.feed(read), tb.jax.feed(target)
        jax.block_until_ready(jax.jit(lambda f=fed, o=filled: tb.jax.external_output(tb.jax.external_input(f), o))())
        torch.cuda.synchronize()
        assert torch.equal(target, read)


def test_control_flow_reads_and_fills() -> None:
    source, out = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    fed, filled = tb.jax.feed(source), tb.jax.feed(out)

    def step(carry: Any, _: Any) -> tuple[Any, Any]:
        return carry + 1, tb.jax.external_output(carry * tb.jax.external_input(fed), filled)

    run = jax.jit(lambda: jax.lax.scan(step, 1.0, None, 5))
    for _ in range(4):
        out.zero_()
        jax.block_until_ready(run())
        assert out.tolist() == [5, 5, 5]
    branch = jax.jit(lambda p: jax.lax.cond(p, lambda: tb.jax.external_output(jnp.zeros(3), filled).size, lambda: 0))
    jax.block_until_ready(branch(False))
    assert out.tolist() == [5, 5, 5]
    jax.block_until_ready(branch(True))
    assert out.tolist() == [0, 0, 0]


def test_what_does_not_fit_a_run_fails_and_the_next_works() -> None:
    on_host = tb.jax.feed(torch.ones(3))
    with pytest.raises(FAILED, match="truebridge: the tensor is on cpu"):
        jax.block_until_ready(jax.jit(lambda: tb.jax.external_input(on_host))())
    fed = tb.jax.feed(torch.ones(3, device="cuda"))
    held = [fed]
    function = jax.jit(lambda: tb.jax.external_input(held[0]))
    jax.block_until_ready(function())
    del fed, held[:]
    gc.collect()
    with pytest.raises(FAILED, match="truebridge: no tensor is fed"):
        jax.block_until_ready(function())
    other = tb.jax.feed(torch.full((3,), 7.0, device="cuda"))
    assert jax.jit(lambda: tb.jax.external_input(other))().tolist() == [7, 7, 7]


# --- Gradients


def late(value: float) -> Any:
    """Return a tensor that is zero until the device has been busy for a while."""
    tensor = torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    return tensor.fill_(value)


class Late(torch.autograd.Function):  # type: ignore[misc]
    """Passes on what it gets, and a gradient that is written late."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return late(3.0)


def test_jax_in_pytorch_waits_in_both_passes() -> None:
    square = torch_function(jnp.square, of="jax")
    x = torch.ones(N, device="cuda", requires_grad=True)
    Late.apply(square(x)).sum().backward()
    side = torch.cuda.Stream()
    for i in range(1, ROUNDS):
        with torch.cuda.stream(side):
            x = late(i).requires_grad_()
            y = square(x)
            (gradient,) = torch.autograd.grad(Late.apply(y).sum(), x)
            assert (y == i * i).all() and (gradient == 6 * i).all()


def test_pytorch_in_jax_waits_in_both_passes(operand: Any) -> None:
    square = jax_function(lambda x: x * x)
    for i in range(1, ROUNDS):
        x = jnp.full(N, float(i)) + long(operand)[0, 0] * 0
        y, back = jax.vjp(square, x)
        (gradient,) = back(jnp.full(N, 3.0) + long(operand)[0, 0] * 0)
        assert (np.asarray(y) == i * i).all() and (np.asarray(gradient) == 6 * i).all()


def dense(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["kernel"] + params["bias"])


def test_a_model_with_a_layer_of_jax_is_trained_as_in_pytorch_alone() -> None:
    kernel = jax.random.normal(jax.random.key(0), (64, 64)) / 8
    middle = torch_function(dense, of="jax", variables={"kernel": kernel, "bias": jnp.zeros(64)})
    torch.manual_seed(0)
    first, last = torch.nn.Linear(8, 64).cuda(), torch.nn.Linear(64, 1).cuda()
    model = torch.nn.Sequential(first, middle, last).cuda()
    bias, kernel = (parameter.detach().clone().requires_grad_() for parameter in middle.variables)
    own = [parameter.detach().clone().requires_grad_() for parameter in (*first.parameters(), *last.parameters())]
    x = torch.rand(256, 8, device="cuda")
    y = x.prod(1, keepdim=True)

    def alone(x: Any) -> Any:
        x = torch.tanh(torch.nn.functional.linear(x, own[0], own[1]) @ kernel + bias)
        return torch.nn.functional.linear(x, own[2], own[3])

    twins = [own[0], own[1], bias, kernel, own[2], own[3]]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(twins, 0.1)]
    for _ in range(20):
        for optimizer, module in zip(optimizers, (model, alone), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(module(x), y).backward()
            optimizer.step()
    for mine, twin in zip(model.parameters(), twins, strict=True):
        torch.testing.assert_close(mine, twin, rtol=1e-4, atol=1e-6)


def test_second_derivatives() -> None:
    x = torch.linspace(-1, 1, 100, device="cuda", requires_grad=True)
    (first,) = torch.autograd.grad(torch_function(jnp.sin, of="jax")(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, torch.cos(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(second, -torch.sin(x.detach()), rtol=1e-5, atol=1e-6)
    cube = jax_function(lambda x: x**3)
    z = jnp.array([1.0, 2.0])
    assert jax.grad(lambda z: jax.grad(lambda z: cube(z).sum())(z).sum())(z).tolist() == [6, 12]
