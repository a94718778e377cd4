"""Inputs and outputs of sessions of ONNX Runtime."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")

onnxruntime: Any = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")


def field(number: int, content: bytes | int) -> bytes:
    """Return a field of protobuf: a message, a string or a small number."""
    if isinstance(content, int):
        return bytes([number << 3, content])
    assert len(content) < 128, "one byte holds the length"
    return bytes([number << 3 | 2, len(content)]) + content


def matrix(name: bytes) -> bytes:
    """Return a ``ValueInfoProto``: a matrix of float32, of any lengths."""
    shape = field(1, field(2, b"rows")) + field(1, field(2, b"columns"))
    return field(1, name) + field(2, field(1, field(1, 1) + field(2, shape)))


@pytest.fixture
def session() -> Any:
    """Return a session of the model y = x + x."""
    node = field(1, b"x") + field(1, b"x") + field(2, b"y") + field(4, b"Add")
    graph = field(1, node) + field(2, b"doubling") + field(11, matrix(b"x")) + field(12, matrix(b"y"))
    model = field(1, 8) + field(7, graph) + field(8, field(2, 13))
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


def test_an_input_is_the_memory_of_the_tensor_and_a_result_is_taken_in_place(session: Any) -> None:
    t = np.full((2, 3), 3, np.float32)
    value = tb.to_onnxruntime(t, session)
    assert value.data_ptr() == t.ctypes.data
    alive = weakref.ref(t)
    del t
    gc.collect()
    (y,) = session.run_with_ort_values(None, {"x": value})
    assert alive() is not None
    del value
    gc.collect()
    assert alive() is None, "the value kept it"
    result = tb.to_torch(y, copy=False)
    assert result.data_ptr() == y.data_ptr()
    del y
    gc.collect()
    assert result.tolist() == [[6] * 3] * 2


def test_a_binding_reads_and_writes_tensors(session: Any) -> None:
    x, y = torch.ones(2, 3), torch.zeros(2, 3)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", tb.to_onnxruntime(x, session))
    binding.bind_ortvalue_output("y", tb.to_onnxruntime(y, session))
    session.run_with_iobinding(binding)
    assert y.tolist() == [[2] * 3] * 2


def test_a_tensor_that_is_not_compact_is_copied() -> None:
    t = torch.arange(6).reshape(2, 3).T
    value = tb.to_onnxruntime(t)
    assert value.data_ptr() != t.data_ptr()
    assert value.numpy().tolist() == t.tolist()
    with pytest.raises(tb.BridgeBufferError, match="copy=None to allow a copy"):
        tb.to_onnxruntime(t, copy=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "float16", "float64", "int8", "int64", "uint8", "uint64"])
def test_dtypes(dtype: str) -> None:
    t = torch.ones(2, 3, dtype=getattr(torch, dtype))
    value = tb.to_onnxruntime(t)
    assert value.data_ptr() == t.data_ptr()
    assert value.data_type() == {"float64": "tensor(double)"}.get(dtype, f"tensor({dtype})")
    t.zero_()
    if dtype not in ("bfloat16", "bool"):
        assert tb.to_torch(value).sum() == 0


def test_errors_say_what_to_do(session: Any) -> None:
    for x, kind in [
        (torch.ones(2, dtype=torch.complex64), "dtype"),
        (torch.ones(2, dtype=torch.float8_e5m2), "dtype"),
        ([torch.ones(2)], "argument"),
        (5, "not_a_tensor"),
    ]:
        with pytest.raises(tb.BridgeError) as caught:
            tb.to_onnxruntime(x, session)
        assert caught.value.kind == kind, x
    frozen = np.ones(3, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(BufferError, match="read_only=True"):
        tb.to_onnxruntime(frozen)
    assert tb.to_onnxruntime(frozen, read_only=True).data_ptr() == frozen.ctypes.data


@pytest.mark.parametrize("given", [None, "0", "", "94023"])
def test_the_stream_of_a_session_is_the_one_that_it_was_given(given: str | None) -> None:
    from truebridge._frameworks import onnxruntime

    class Session:
        def get_provider_options(self) -> dict[str, dict[str, str]]:
            return {"CUDAExecutionProvider": {} if given is None else {"user_compute_stream": given}}

    expected = 94023 if given == "94023" else None
    assert onnxruntime._compute_stream(Session()) == expected
