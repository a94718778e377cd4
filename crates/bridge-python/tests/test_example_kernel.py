"""The extension module of examples/kernel: a kernel in Rust that every framework calls with its own tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

scaled: Any = pytest.importorskip("scaled", reason="the bundle has it")
torch: Any = pytest.importorskip("torch")

VALUES = np.arange(-3, 9, dtype=np.float32)


def _tensorflow(array: Any) -> Any:
    tensorflow = pytest.importorskip("tensorflow")
    with tensorflow.device("CPU:0"):
        return tensorflow.constant(array)


ON_THE_HOST: dict[str, Callable[[Any], Any]] = {
    "torch": torch.from_numpy,
    "numpy": lambda array: array,
    "tensorflow": _tensorflow,
}


@pytest.mark.parametrize("name", ON_THE_HOST)
def test_a_vector_is_scaled_in_its_framework(name: str) -> None:
    x = ON_THE_HOST[name](VALUES)
    result = scaled.scale(x, 2.5)
    assert type(result) is type(x)
    assert np.array_equal(np.asarray(result), VALUES * 2.5)
    assert np.array_equal(np.asarray(x), VALUES), "the argument is left as it was"


def test_strides_are_followed() -> None:
    assert np.array_equal(scaled.scale(VALUES[::-2], 2), VALUES[::-2] * 2)
    assert scaled.scale(torch.from_numpy(VALUES)[::3], 2).tolist() == (VALUES[::3] * 2).tolist()
    assert scaled.scale(torch.zeros(0), 2).shape == (0,)


@pytest.mark.parametrize(
    ("argument", "error", "text"),
    [
        (3, TypeError, r"int is not a tensor: pass numpy\.asarray"),
        (torch.zeros(2, 2), ValueError, "pass a vector, not the shape"),
        (torch.zeros(2, dtype=torch.float64), TypeError, "pass float32, not float64"),
        (torch.zeros(2).to_sparse(), TypeError, "to_dense"),
    ],
)
def test_nonsense_is_refused(argument: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        scaled.scale(argument, 1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["torch", "cupy", "tensorflow"])
def test_a_kernel_runs_after_the_work_in_the_frameworks_stream(name: str) -> None:
    """The vector is written late: a kernel in another stream would read what was there before."""
    count = 1 << 22
    if name == "tensorflow":
        tensorflow: Any = pytest.importorskip("tensorflow")
        with tensorflow.device("GPU:0"):
            slow = tensorflow.fill([2048, 2048], 1.0)
            for _ in range(8):
                slow = tensorflow.linalg.matmul(slow, slow) / 2048.0
            result = scaled.scale(tensorflow.fill([count], 1.0) * slow[0, 0], 3.0)
            assert np.array_equal(result.numpy(), np.full(count, 3.0, np.float32))
        return
    cupy: Any = pytest.importorskip("cupy")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), cupy.cuda.ExternalStream(side.cuda_stream):
        x = torch.zeros(count, device="cuda") if name == "torch" else cupy.zeros(count, dtype=cupy.float32)
        torch.cuda._sleep(20_000_000)
        x += 1
        result = scaled.scale(x[::2], 3.0)
        assert type(result) is type(x)
        side.synchronize()
        assert float(result.min()) == float(result.max()) == 3.0 and result.shape == (count // 2,)
