"""A borrow says what the framework says of its tensor, and keeps nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from truebridge_conformance._conformance import borrowed

torch: Any = pytest.importorskip("torch")


def said(array: np.ndarray[Any, Any], **more: object) -> dict[str, object]:
    """Return what a borrow of memory that NumPy sees as ``array`` says."""
    return {
        "data": array.ctypes.data,
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "strides": [stride // array.itemsize for stride in array.strides],
        "device": "cpu",
        "read_only": False,
        "stream": None,
        **more,
    }


TENSORS: dict[str, Callable[[], Any]] = {
    "scalar": lambda: torch.tensor(1.5),
    "vector": lambda: torch.arange(5),
    "transposed": lambda: torch.ones(2, 3, dtype=torch.float16).T,
    "slice": lambda: torch.arange(24.0).reshape(4, 6)[1:, ::2],
    "five dimensions": lambda: torch.ones(1, 2, 3, 2, 1, dtype=torch.uint8),
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_torch(name: str) -> None:
    tensor = TENSORS[name]()
    assert borrowed(tensor) == said(tensor.numpy())


def test_a_tensor_without_elements_is_borrowed() -> None:
    assert borrowed(torch.ones(0, 3))["shape"] == [0, 3]
    assert borrowed(np.ones((3, 0)))["shape"] == [3, 0]


def test_a_tensor_that_requires_grad_is_borrowed_as_in_extensions_of_torch() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert borrowed(parameter) == said(parameter.detach().numpy())


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_dtypes_that_numpy_lacks(name: str) -> None:
    tensor = torch.ones(3).to(getattr(torch, name))
    assert borrowed(tensor)["dtype"] == name


@pytest.mark.parametrize("writable", [True, False])
def test_numpy(writable: bool) -> None:
    array = np.arange(12, dtype=np.int16).reshape(3, 4)[::-1, 1:]
    array.flags.writeable = writable
    assert borrowed(array) == said(array, read_only=not writable)


def test_tensorflow() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    with tensorflow.device("CPU:0"):
        tensors = tensorflow.constant([[1.0, 2.0], [3.0, 4.0]]), tensorflow.constant(3, tensorflow.int32)
        variable = tensorflow.Variable([1.0, 2.0])
    for tensor in tensors:
        assert borrowed(tensor) == said(np.asarray(memoryview(tensor)), read_only=True)
    assert borrowed(variable)["shape"] == [2]


def test_nothing_is_kept() -> None:
    tensors = [torch.ones(3), np.ones(3)]
    before = [sys.getrefcount(tensor) for tensor in tensors]
    for _ in range(10):
        assert [borrowed(tensor)["shape"] for tensor in tensors] == [[3], [3]]
    assert [sys.getrefcount(tensor) for tensor in tensors] == before


def fake() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "number": (lambda: 3, "NotATensor: int is not a tensor"),
    "class": (lambda: torch.Tensor, "NotATensor"),
    "conjugated": (lambda: torch.ones(3, dtype=torch.complex64).conj(), "CopyNeeded: .*resolve_conj"),
    "negated": (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "CopyNeeded: .*resolve_neg"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "NotATensor: .*to_dense"),
    "meta": (lambda: torch.ones(3, device="meta"), "NotATensor: .*meta"),
    "fake": (fake, "NotATensor: .*plain tensor"),
    "masked": (lambda: np.ma.masked_array([1.0], [0]), "NotATensor: .*filled"),
    "strings": (lambda: np.array(["a"]), "Dtype: .*counterpart"),
    "odd strides": (lambda: np.zeros(3, [("a", "u1"), ("b", "f4")])["b"], "CopyNeeded: .*whole number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_plain_memory_is_refused(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(RuntimeError, match=f"^{text}"):
        borrowed(make())


def cuda() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return pytest.importorskip("cupy")


def test_on_a_device_the_stream_is_the_current_one() -> None:
    cupy = cuda()
    tensor, array = torch.ones(2, 3, device="cuda"), cupy.ones((2, 3), order="F")
    stream, other = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    with torch.cuda.stream(stream), other:
        of_torch, of_cupy = borrowed(tensor), borrowed(array)
    assert (of_torch["data"], of_torch["stream"]) == (tensor.data_ptr(), stream.cuda_stream)
    assert (of_cupy["data"], of_cupy["stream"]) == (array.data.ptr, other.ptr)
    assert of_torch["device"] == of_cupy["device"] == "cuda:0"
    assert (of_torch["strides"], of_cupy["strides"]) == ([3, 1], [1, 2])
    # The legacy default stream, by its handle.
    assert borrowed(tensor)["stream"] == borrowed(array)["stream"] == 1


def test_on_a_device_tensorflow_names_its_own_stream() -> None:
    cuda()
    tensorflow = pytest.importorskip("tensorflow")
    if not tensorflow.config.list_physical_devices("GPU"):
        pytest.skip("no GPU for TensorFlow")
    with tensorflow.device("GPU:0"):
        said = borrowed(tensorflow.ones([2, 3]) + 1)
    assert said["device"] == "cuda:0" and said["stream"] not in (None, 0, 1)
