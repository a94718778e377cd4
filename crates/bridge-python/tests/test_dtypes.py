"""What a conversion returns has the dtype that the source itself states, whatever its protocol names."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")
ml_dtypes: Any = pytest.importorskip("ml_dtypes")

TARGETS = ["numpy", "torch", "jax", "tensorflow"]
#: Numbers of dtypes in ONNX (``TensorProto.DataType``).
ONNX = [*range(1, 14), *range(16, 27)]
#: The names of ONNX that others spell in another way.
SPELLED = {"float": "float32", "double": "float64"}


def stated(x: Any) -> str:
    """Return the name of the dtype that a tensor has in its own library."""
    dtype = x.dtype
    return getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")


class Spoken:
    """A tensor known by DLPack alone, which states its dtype."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.dtype = tensor, tensor.dtype

    def __dlpack__(self, **arguments: Any) -> object:
        return self.tensor.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def of_torch() -> Iterator[Any]:
    data = torch.zeros(16, dtype=torch.uint8)
    for dtype in {known for known in vars(torch).values() if isinstance(known, torch.dtype)}:
        try:
            yield data.view(dtype)
        except RuntimeError:
            continue


def of_numpy() -> Iterator[Any]:
    extensions = (kind for kind in vars(ml_dtypes).values() if isinstance(kind, type) and issubclass(kind, np.generic))
    for kind in {*np.sctypeDict.values(), *extensions}:
        dtype = np.dtype(kind)
        # Text of some length.
        yield np.zeros(4, dtype if dtype.itemsize else f"{dtype.char}3")


def of_jax() -> Iterator[Any]:
    jax = pytest.importorskip("jax")
    for array in of_numpy():
        try:
            made = jax.numpy.zeros(4, array.dtype)
        except (TypeError, ValueError, jax.errors.JaxRuntimeError):
            continue
        yield made


def of_tensorflow() -> Iterator[Any]:
    tf = pytest.importorskip("tensorflow")
    known = {dtype for dtype in vars(tf.dtypes).values() if isinstance(dtype, tf.DType)}
    for dtype in known - {tf.resource, tf.variant}:
        try:
            yield tf.zeros([4], dtype)
        except (TypeError, ValueError, tf.errors.OpError):
            yield tf.cast(tf.zeros([4]), dtype)


SOURCES = {"torch": of_torch, "numpy": of_numpy, "jax": of_jax, "tensorflow": of_tensorflow}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_result_has_the_dtype_that_the_source_states(source: str, target: Any) -> None:
    pytest.importorskip(target)
    with warnings.catch_warnings():
        # Of dtypes that are deprecated or in beta.
        warnings.simplefilter("ignore")
        tensors = list(SOURCES[source]())
        converted = 0
        for tensor in tensors:
            name = stated(tensor)
            # TensorFlow's own DLPack aborts the process for strings.
            for x in [tensor] if name == "string" else [tensor, Spoken(tensor)]:
                try:
                    result = tb.convert(x, target)
                except tb.BridgeError as error:
                    # NumPy and PyTorch refuse with a BufferError of their own, as the array API has it.
                    assert error.kind == "dtype" or (error.kind, x is tensor) == ("refused", False), (name, x, error)
                    continue
                assert stated(result) == name, (source, target, x is tensor)
                converted += 1
    assert converted >= 10, "so many are numbers"


@pytest.fixture
def values() -> list[Any]:
    """Return a value of each dtype of ONNX Runtime that it makes values of."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    made = []
    for number in ONNX:
        try:
            made.append(onnxruntime.OrtValue.ortvalue_from_shape_and_type([4], number))
        except RuntimeError:
            # As for strings.
            continue
    return made


@pytest.mark.parametrize("target", TARGETS)
def test_a_value_of_onnx_runtime_has_its_own_dtype(values: list[Any], target: Any) -> None:
    pytest.importorskip(target)
    converted = set()
    for value in values:
        name = value.data_type().removeprefix("tensor(").removesuffix(")")
        # The public class, and the one of C.
        for x in (value, value._ortvalue):
            try:
                result = tb.convert(x, target)
            except tb.BridgeDTypeError as error:
                assert error.kind == "dtype", (name, error)
                continue
            assert stated(result) == SPELLED.get(name, name)
            converted.add(name)
    assert {"bool", "uint8", "bfloat16", "float16"} <= converted


@pytest.mark.parametrize("made", ["by onnxruntime", "of C", "by to_onnxruntime"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_mask_of_onnx_runtime_selects(made: str, target: Any) -> None:
    pytest.importorskip(target)
    onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    mask = np.array([True, False, False, True])
    value = onnxruntime.OrtValue.ortvalue_from_numpy(mask) if made != "by to_onnxruntime" else tb.to_onnxruntime(mask)
    for copy in (None, True):
        result = tb.convert(value._ortvalue if made == "of C" else value, target, copy=copy)
        assert stated(result) == "bool"
        assert np.arange(4)[np.asarray(result)].tolist() == [0, 3]
    if target == "torch":
        assert torch.arange(4)[tb.to_torch(value)].tolist() == [0, 3]


def test_bytes_stay_bytes() -> None:
    """An object whose ``dtype`` says nothing of use is taken by its protocol."""

    class Odd(Spoken):
        def __init__(self, tensor: Any, dtype: Any) -> None:
            self.tensor, self.dtype = tensor, dtype

    class Raises(Spoken):
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        @property
        def dtype(self) -> Any:
            raise RuntimeError("not now")

        @dtype.setter
        def dtype(self, value: Any) -> None: ...

    array = np.arange(3, dtype=np.uint8)
    for x in (Odd(array, None), Odd(array, "uint8"), Odd(array, 7), Odd(array, np.float64), Raises(array)):
        assert tb.to_numpy(x).dtype == np.uint8
    assert tb.to_numpy(Odd(array.astype(np.float32), bool)).dtype == np.float32, "the width differs"

    class Interrupted(Raises):
        @property
        def dtype(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tb.to_numpy(Interrupted(array))


def test_two_numbers_in_a_byte_are_converted_where_both_sides_have_them(tmp_path: Any) -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this version of PyTorch has no float4")
    packed = torch.arange(24, dtype=torch.uint8).reshape(4, 6).view(torch.float4_e2m1fn_x2)
    for x in (packed, Spoken(packed), packed[1:, ::2]):
        view = tb.to_torch(x, copy=False)
        assert (view.dtype, tuple(view.shape)) == (packed.dtype, tuple(getattr(x, "tensor", x).shape))
    assert tb.to_torch(packed).data_ptr() == packed.data_ptr()
    copies = [tb.to_torch(packed, copy=True), tb.to_torch(packed, order="F"), torch.empty_like(packed)]
    tb.copy(packed, out=copies[2])
    for copy in copies:
        assert copy.data_ptr() != packed.data_ptr()
        assert copy.view(torch.uint8).tolist() == packed.view(torch.uint8).tolist()
    for target in ("numpy", "jax", "tensorflow"):
        pytest.importorskip(target)
        with pytest.raises(tb.BridgeDTypeError, match=r"has no dtype float4_e2m1fn_x2: pass \.view\(torch\.uint8\)"):
            tb.convert(packed, target)  # type: ignore[arg-type]
    assert tb.to_numpy(packed.view(torch.uint8)).tolist() == np.arange(24).reshape(4, 6).tolist()
    with pytest.raises(tb.BridgeDTypeError, match=r"view\(torch\.uint8\)"):
        tb.save(tmp_path / "x.safetensors", {"packed": packed})
