"""JAX on a CUDA device beside PyTorch: what waits for what, also in JAX's own copies, and what is kept how long."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import memory
import truebridge as tb

# JAX would take most of the memory, which the other tests need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

np: Any = pytest.importorskip("numpy")
torch: Any = pytest.importorskip("torch")
jax: Any = pytest.importorskip("jax")
if not torch.cuda.is_available() or all(device.platform != "gpu" for device in jax.devices()):
    pytest.skip("no CUDA device that JAX has", allow_module_level=True)

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


def late(side: Any, value: float) -> Any:
    """Return a tensor of PyTorch that a stream will have filled after a while."""
    with torch.cuda.stream(side):
        tensor = torch.zeros(N, device="cuda")
        torch.cuda._sleep(LONG)
        return tensor.fill_(value)


def overwrite(side: Any) -> None:
    """Write to memory that PyTorch reuses."""
    with torch.cuda.stream(side):
        torch.full((N,), -1.0, device="cuda")


#: Ways of JAX to read an array, which use different streams of its own.
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
            array = tb.to_jax(late(side, i), copy=False)
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


def test_pytorch_reads_after_jax_has_computed(operand: Any) -> None:
    for i in range(ROUNDS):
        array = jnp.full((N,), float(i), device=GPU) + long(operand)[0, 0] * 0
        assert (tb.to_torch(array, copy=False) == i).all()


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
        tensor = late(side, 3.0)
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
        torch.cuda.synchronize()
        assert memory.settled()["retired"] == 0
        view = tb.to_torch(array)
        torch.cuda._sleep(LONG)
        del view
        waiting = tb.stats()["retired"]
        is_busy = not torch.cuda.current_stream().query()
    assert waiting == 1
    torch.cuda.synchronize()
    assert memory.settled()["retired"] == 0


def test_memory_of_jax_is_kept_until_a_side_stream_has_read_it() -> None:
    side = torch.cuda.Stream()
    for i in range(ROUNDS):
        array = jax.device_put(jnp.full((N,), float(i)), GPU).block_until_ready()
        with torch.cuda.stream(side):
            view = tb.to_torch(array, copy=False)
            torch.cuda._sleep(LONG)
            copy = view.clone()
        del view, array
        junk = [jax.device_put(jnp.full((N,), -1.0), GPU).block_until_ready() for _ in range(4)]
        torch.cuda.synchronize()
        assert (copy == i).all()
        del junk


def test_a_view_is_not_donated() -> None:
    tensor = torch.ones(N, device="cuda")
    array = tb.to_jax(tensor, copy=False)
    with pytest.raises(Exception, match="Donation requested"):
        jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(array).block_until_ready()
    assert (tensor == 1).all()


class Described:
    """Memory of PyTorch in a stream, known by the CUDA array interface alone."""

    def __init__(self, tensor: Any, stream: Any) -> None:
        self.tensor, self.stream = tensor, stream

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {**self.tensor.__cuda_array_interface__, "version": 3, "stream": self.stream.cuda_stream}


@pytest.mark.parametrize(
    "view", [lambda x: x[1:].reshape(-1, 5), lambda x: x[:-1].reshape(5, -1).T], ids=["unaligned", "strides"]
)
@pytest.mark.parametrize("read", READS)
def test_what_jax_cannot_take_in_place_is_copied_in_order(read: str, view: Callable[[Any], Any]) -> None:
    """The producer has no kernels, and JAX no memory to be written to."""
    side = torch.cuda.Stream()
    for value in range(ROUNDS):
        with torch.cuda.stream(side):
            tensor = torch.zeros(5 * N + 1, device="cuda")
            torch.cuda._sleep(LONG)
            torch.arange(5 * N + 1, out=tensor)
            tensor += value
        described = Described(view(tensor), side)
        if not value:
            with pytest.raises(tb.BridgeError, match="cannot take the tensor in place"):
                tb.to_jax(described, copy=False)
        array = tb.to_jax(described)
        # What the copy reads is reused after it, and the copy stays what it was.
        del described
        with torch.cuda.stream(side):
            expected = view(tensor).cpu().numpy()
            tensor.fill_(-1)
        assert np.array_equal(READS[read](array), expected)
        del array
