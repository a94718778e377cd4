"""The example over candle: a model in Rust that every framework calls with its own tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

perceptron: Any = pytest.importorskip("perceptron", reason="cargo xtask bundle --candle builds it")

torch: Any = pytest.importorskip("torch")

RANDOM = np.random.default_rng(0)
LAYERS = [
    (RANDOM.standard_normal((5, 3), np.float32), RANDOM.standard_normal(5, np.float32)),
    (RANDOM.standard_normal((2, 5), np.float32), RANDOM.standard_normal(2, np.float32)),
]
BATCH = RANDOM.standard_normal((4, 3), np.float32)


def expected(batch: np.ndarray) -> np.ndarray:
    """What NumPy computes, in float64."""
    (weight, bias), (last, offset) = LAYERS
    hidden: np.ndarray = np.maximum(batch.astype(np.float64) @ weight.T + bias, 0)
    return hidden @ last.T + offset


def _tensorflow(array: Any) -> Any:
    tensorflow = pytest.importorskip("tensorflow")
    with tensorflow.device("CPU:0"):
        return tensorflow.constant(array)


def _jax(array: Any) -> Any:
    jax = pytest.importorskip("jax")
    return jax.device_put(array, jax.devices("cpu")[0])


FRAMEWORKS: dict[str, Callable[[Any], Any]] = {
    "torch": torch.from_numpy,
    "numpy": lambda array: array,
    "tensorflow": _tensorflow,
    "jax": _jax,
}


@pytest.fixture(scope="module")
def model() -> Any:
    return perceptron.Perceptron([tuple(map(torch.from_numpy, LAYERS[0])), LAYERS[1]])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_batch_comes_back_in_its_framework(model: Any, name: str) -> None:
    x = FRAMEWORKS[name](BATCH)
    y = model(x)
    assert type(y) is type(x) and tuple(y.shape) == (4, 2)
    np.testing.assert_allclose(np.asarray(y), expected(BATCH), rtol=1e-5, atol=1e-6)
    assert np.array_equal(np.asarray(x), BATCH), "the argument is left as it was"


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_the_batch_is_copied_and_the_result_is_not(model: Any, name: str) -> None:
    came_in, went_out = model.plans(FRAMEWORKS[name](BATCH))
    assert came_in == "copy of 48 bytes because of memory that it does not own"
    assert went_out == "zero copy"


def test_strides_are_followed_by_candle(model: Any) -> None:
    np.testing.assert_allclose(model(BATCH[::-2]), expected(BATCH[::-2]), rtol=1e-5, atol=1e-6)
    turned = torch.from_numpy(np.ascontiguousarray(BATCH.T)).t()
    np.testing.assert_allclose(model(turned), expected(BATCH), rtol=1e-5, atol=1e-6)


def test_results_outlive_the_model_and_are_apart() -> None:
    model = perceptron.Perceptron(LAYERS)
    first, second = model(BATCH), model(BATCH + 1)
    del model
    second[:] = 0
    np.testing.assert_allclose(first, expected(BATCH), rtol=1e-5, atol=1e-6)


def test_weights_are_copied() -> None:
    weight, bias = torch.eye(3), torch.zeros(3)
    model = perceptron.Perceptron([(weight, bias)])
    weight.zero_()
    assert np.array_equal(model(BATCH), BATCH)


def test_threads_share_a_model(model: Any) -> None:
    results: list[Any] = []

    def call() -> None:
        results.extend(model(BATCH) for _ in range(50))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 200
    for result in results:
        np.testing.assert_allclose(result, expected(BATCH), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (3, TypeError, r"int is not a tensor: pass numpy\.asarray"),
        (torch.zeros(3), ValueError, r"pass a batch of shape \(batch, 3\), not \[3\]"),
        (torch.zeros(4, 2), ValueError, r"pass a batch of shape \(batch, 3\), not \[4, 2\]"),
        (torch.zeros(4, 3, dtype=torch.float64), TypeError, "pass float32, not candle's f64"),
        (torch.zeros(4, 3, dtype=torch.complex64), TypeError, "candle has no dtype complex64"),
        (torch.zeros(4, 3, requires_grad=True), BufferError, "detach"),
    ],
)
def test_nonsense_is_refused_by_candle(model: Any, x: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        model(x)


@pytest.mark.parametrize(
    "layers",
    [
        [(LAYERS[0][0], LAYERS[1][1])],
        [(LAYERS[0][1], LAYERS[0][1])],
        [LAYERS[0], LAYERS[0]],
    ],
)
def test_layers_that_do_not_fit_are_refused(layers: Any) -> None:
    with pytest.raises(ValueError, match=r"pass a weight \(outputs, inputs\) and a bias \(outputs,\)"):
        perceptron.Perceptron(layers)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_batch_on_a_device_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="copy it to the host"):
        model(torch.zeros(4, 3, device="cuda"))
