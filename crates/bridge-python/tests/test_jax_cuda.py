"""JAX on a CUDA device with PyTorch: what waits for what, also in JAX's own copies, and what is kept how long."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

import truebridge as tb
from truebridge.autograd import jax_function, torch_function  # noqa: E402

np: Any = pytest.importorskip("numpy")

torch: Any = pytest.importorskip("torch")

jax: Any = pytest.importorskip("jax")


# JAX would take most of the memory, which the other tests need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if not torch.cuda.is_available() or all(device.platform != "gpu" for device in jax.devices()):
    pytest.skip("no CUDA device that JAX has", allow_module_level=True)

from devices import Late, late, settled  # noqa: E402

jnp = jax.numpy
GPU = jax.local_devices(backend="cuda")[0]
N = 1 << 20
ROUNDS = 10

#: Cycles of a GPU: some tens of milliseconds, in which everything that does not wait is too early.
LONG = 100_000_000


@jax.jit
def long(x: Any) -> Any:
    """Compute for some tens of milliseconds."""
    for _ in range(30):
        x = x @ x * 1e-4
    return x


@pytest.fixture(scope="module")
def operand() -> Any:
    x = jax.device_put(jnp.ones((4096, 4096)), GPU)
    return long(x).block_until_ready()


def overwrite(side: Any) -> None:
    """Write to memory that PyTorch reuses."""
    with torch.cuda.stream(side):
        torch.full((N,), -1.0, device="cuda")


#: Operations of JAX that read an array, each in a different stream of JAX.
READS: dict[str, Callable[[Any], Any]] = {
    "computed": lambda x: np.asarray(x + 0),
    "to NumPy": np.asarray,
    "copied on the device": lambda x: np.asarray(jax.device_put(x, GPU, may_alias=False)),
    "copied to the host": lambda x: np.asarray(jax.device_put(x, jax.local_devices(backend="cpu")[0])),
}


@pytest.mark.parametrize("read", READS)
def test_jax_reads_after_the_stream_that_writes(read: str) -> None:
    side = torch.cuda.Stream()
    for i in range(ROUNDS):
        with torch.cuda.stream(side):
            array = tb.to_jax(late(i), copy=False)
        assert (READS[read](array) == i).all()
        del array
        gc.collect()


@pytest.mark.parametrize("read", [name for name in READS if name != "to NumPy"])
def test_memory_of_pytorch_is_kept_until_jax_has_read_it(read: str, operand: Any) -> None:
    lazy = {
        "computed": lambda x: x + long(operand)[0, 0] * 0,
        "copied on the device": lambda x: jax.device_put(x, GPU, may_alias=False),
        "copied to the host": lambda x: jax.device_put(x, jax.local_devices(backend="cpu")[0]),
    }
    side = torch.cuda.Stream()
    for i in range(ROUNDS):
        with torch.cuda.stream(side):
            array = tb.to_jax(torch.full((N,), float(i), device="cuda"), copy=False)
        long(operand)
        result = lazy[read](array)
        del array
        overwrite(side)
        assert (np.asarray(result) == i).all()


def test_a_conversion_from_jax_does_not_wait_for_it(operand: Any) -> None:
    tb.to_torch(operand)
    result = long(operand)
    view = tb.to_torch(result)
    assert not result.is_ready(), "the host has waited"
    assert view.data_ptr() == result.unsafe_buffer_pointer()


def test_a_conversion_to_jax_does_not_wait_for_pytorch() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tb.to_jax(torch.zeros(N, device="cuda"))
        tensor = late(3.0)
        array = tb.to_jax(tensor)
        assert not side.query(), "the host has waited"
    assert (np.asarray(array) == 3).all()


def test_a_stream_is_recorded_for_a_view_of_jax() -> None:
    tb.record_stream(tb.to_jax(torch.arange(8.0, device="cuda")), torch.cuda.Stream())
    with pytest.raises(tb.BridgeValueError, match="its own framework"):
        tb.record_stream(jnp.arange(8.0, device=GPU), torch.cuda.Stream())


@pytest.mark.parametrize(("platforms", "found"), [("cpu", False), ("cuda,cpu", True), ("", True)])
def test_jax_has_the_devices_that_its_platforms_allow(platforms: str, found: bool) -> None:
    code = "import truebridge as tb; print('cuda' in tb.profile('jax')['devices'])"
    environment = dict(os.environ, JAX_PLATFORMS=platforms)
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout.split() == [str(found)], ran.stderr


def test_threads_convert_one_array() -> None:
    """jaxlib counts the references to an array without a lock: it would abort the process when the array is freed."""
    code = """
        import threading, time
        import jax, torch
        import truebridge as tb

        array = jax.numpy.arange(256.0)

        def convert():
            for _ in range(4000):
                tb.to_torch(array, read_only=True)

        threads = [threading.Thread(target=convert) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        while (stats := tb.stats())["pending"]:
            time.sleep(0.001)
        print(stats["leased"] - stats["released"], stats["leaked"])
        del array
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    ran = subprocess.run(run, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["0", "0"]


def test_an_array_of_jax_is_on_the_device_of_its_memory() -> None:
    for device, platform in [("cpu", "cpu"), ("cuda", "gpu")] * 2:
        tensor = torch.arange(64.0, device=device)
        array = tb.to_jax(tensor)
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
        assert [found.platform for found in array.devices()] == [platform]


def test_memory_of_jax_is_reused_after_the_work_of_others() -> None:
    """How JAX's allocator reuses memory is not known, so the package keeps it until the device is done with it."""
    array = jnp.arange(64.0, device=GPU)
    tb.to_torch(array)
    is_busy = False
    # Once more where the host was so slow that the stream had ended when it looked.
    while not is_busy:
        assert settled()["pending"] == 0
        view = tb.to_torch(array)
        torch.cuda._sleep(LONG)
        del view
        waiting = tb.stats()["pending"]
        is_busy = not torch.cuda.current_stream().query()
    assert waiting == 1
    assert settled()["pending"] == 0


def test_a_view_is_not_donated() -> None:
    tensor = torch.ones(N, device="cuda")
    array = tb.to_jax(tensor, copy=False)
    with pytest.raises(Exception, match="Donation requested"):
        jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(array).block_until_ready()
    assert (tensor == 1).all()


# What compiled functions of JAX read and fill of PyTorch, and gradients through both.

#: What a call raises: the first where it runs at once, the second where it runs later.
FAILED = (ValueError, jax.errors.JaxRuntimeError)


@pytest.fixture(autouse=True)
def on_the_gpu() -> Any:
    with jax.default_device(GPU), jax.default_matmul_precision("highest"):
        yield


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


def test_a_feed_of_the_host_is_refused_on_the_device() -> None:
    on_host = tb.jax.feed(torch.ones(3))
    with pytest.raises(FAILED, match="truebridge: the tensor is on cpu"):
        jax.block_until_ready(jax.jit(lambda: tb.jax.external_input(on_host))())


# --- Gradients


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
