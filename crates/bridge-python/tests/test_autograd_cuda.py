"""Gradients across frameworks on a CUDA device: in place, and in the order of the streams, there and back."""

from __future__ import annotations

import os
from typing import Any

import pytest

import truebridge as tb
from truebridge.autograd import tf_function, torch_function  # noqa: E402

torch: Any = pytest.importorskip("torch")
tf: Any = pytest.importorskip("tensorflow")
jax: Any = pytest.importorskip("jax")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not tf.config.list_physical_devices("GPU"):
    pytest.skip("TensorFlow has no GPU", allow_module_level=True)

from devices import Late, late  # noqa: E402

COUNT = 1 << 20
#: About 50 ms.
CYCLES = 100_000_000


def late_in_tensorflow(value: float) -> Any:
    """Return a tensor of TensorFlow after work of about 24 ms on an H200."""
    with tf.device("GPU:0"):
        x = tf.fill([COUNT], tf.constant(1e6, "float64"))
        for _ in range(10):
            result = tf.math.igamma(x, x)
        return tf.fill([COUNT], tf.constant(value, "float32")) + tf.cast(result * 0, "float32")


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """Kernels are loaded and memory is reserved the first time, which waits for the device."""
    x = torch.ones(COUNT, device="cuda", requires_grad=True)
    Late.apply(torch_function(tf.square)(x)).sum().backward()
    with tf.device("GPU:0"):
        variable = tf.Variable(late_in_tensorflow(1))
        with tf.GradientTape() as tape:
            y = tf_function(torch.square)(variable)
        tape.gradient(y, variable)
    torch.cuda.synchronize()


@pytest.mark.parametrize("side", [False, True])
def test_tensorflow_waits_for_the_inputs_and_for_the_gradients(side: bool) -> None:
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            x = late(2.0).requires_grad_()
            y = Late.apply(torch_function(tf.square)(x))
            y.sum().backward()
            assert x.grad.is_cuda and (x.grad == 12).all() and (y == 4).all()


def test_pytorch_waits_for_the_inputs_and_for_the_gradients() -> None:
    square = tf_function(torch.square)
    for _ in range(5):
        x = late_in_tensorflow(2.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = square(x)
        sent = late_in_tensorflow(3.0)
        found = tape.gradient(y, x, output_gradients=sent)
        assert found.device.endswith("GPU:0") and (found.numpy() == 12).all() and (y.numpy() == 4).all()


def test_arguments_convert_in_place_and_results_are_memory_of_their_own() -> None:
    seen: list[int] = []

    def function(x: Any) -> Any:
        y = x * 2
        seen.extend(tb.to_torch(t).data_ptr() for t in (x, y))
        return y

    x = torch.ones(COUNT, device="cuda", requires_grad=True)
    y = torch_function(function)(x)
    assert x.data_ptr() == seen[0]
    assert y.is_cuda and y.data_ptr() not in seen


def test_an_optimizer_changes_no_other_tensor_of_tensorflow() -> None:
    with tf.device("GPU:0"):
        online = tf.Variable(late_in_tensorflow(1.0))
        module = torch_function(lambda x: x * online, variables=[online])
        optimizer = torch.optim.SGD(module.parameters(), 0.5)
        for step in range(3):
            before = 1 - 0.5 * step
            target = tf.Variable(online)
            snapshots = [tf.identity(online), online.read_value(), target.assign(online)]
            module(torch.ones(COUNT, device="cuda")).sum().backward()
            torch.cuda._sleep(CYCLES)
            optimizer.step()  # Written late: what TensorFlow reads next has to wait for it.
            optimizer.zero_grad()
            assert (online.numpy() == before - 0.5).all()
            assert all((x.numpy() == before).all() for x in [*snapshots, target])
    assert all(p.is_cuda for p in module.parameters())


def test_an_optimizer_trains_the_variables_in_order() -> None:
    with tf.device("GPU:0"):
        variable = tf.Variable(tf.zeros([COUNT]))
    module = torch_function(lambda x: x * variable, variables=[variable])
    (parameter,) = module.parameters()
    for step in range(1, 6):
        with torch.no_grad():
            torch.cuda._sleep(CYCLES)
            parameter.add_(1)  # Written late: TensorFlow has to wait for it before it reads the variable.
        y = module(torch.ones(COUNT, device="cuda"))
        assert (y == step).all()


def test_a_state_that_is_loaded_is_there_for_tensorflow() -> None:
    with tf.device("GPU:0"):
        variable = tf.Variable(tf.zeros([COUNT]))
    module = torch_function(lambda x: x * variable, variables=[variable])
    for value in range(1, 6):
        module.load_state_dict({"variables.0": late(float(value))})
        assert (variable.numpy() == value).all()


def test_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(tb.BridgeError) as error:
        torch_function(tf.add)(torch.ones(2, device="cuda"), torch.ones(2))
    assert error.value.kind == "device"
    with tf.device("CPU:0"):
        host = tf.ones(2)
    with tf.device("GPU:0"):
        device = tf.ones(2) + 1
    with pytest.raises(tb.BridgeError) as error:
        tf_function(torch.add)(device, host)
    assert error.value.kind == "device"


def test_tensors_of_the_host_stay_there() -> None:
    x = torch.ones(4, requires_grad=True)
    y = torch_function(lambda x: x * 3)(x)
    y.sum().backward()
    assert not y.is_cuda and not x.grad.is_cuda and x.grad.tolist() == [3] * 4


def test_inside_a_tf_function() -> None:
    double = tf_function(lambda x: x * 2, outputs=tf.TensorSpec([None], tf.float32))

    @tf.function  # type: ignore[untyped-decorator, unused-ignore]
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = double(x * 5)
        return y, tape.gradient(y, x)

    for _ in range(3):
        y, slope = step(tb.to_tensorflow(late(2.0)))
        assert (y.numpy() == 20).all() and (slope.numpy() == 10).all()


# Tensors of a GPU that PyTorch saves elsewhere: no backward computes from later writes.


os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax_has_a_gpu = pytest.mark.skipif(
    all(device.platform != "gpu" for device in jax.devices()), reason="no CUDA device that JAX has"
)

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


@jax_has_a_gpu
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_jax_computes_from_what_pytorch_has_saved(mode: str, writes: bool) -> None:
    square = tb.autograd.torch_function(lambda x: x * x, of="jax")
    assert gradient(square, MODES[mode], writes) == gradient(torch.square, MODES[mode], writes) == [2, 4]


@jax_has_a_gpu
@pytest.mark.parametrize("mode", MODES)
def test_tensorflow_refuses_a_write_to_the_memory_of_its_tape(mode: str) -> None:
    square = tb.autograd.torch_function(tf.square)
    assert gradient(square, MODES[mode], False) == [2, 4]
    with pytest.raises(tb.BridgeError, match="wrote to an argument"):
        gradient(square, MODES[mode], True)
