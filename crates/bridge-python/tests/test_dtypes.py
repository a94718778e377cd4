"""What a conversion returns has the dtype that the source itself states, whatever its protocol names."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from capsules import Wrapper
from casting import CASTS, DTYPES, numbers, same  # noqa: E402

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


class Spoken(Wrapper):
    """A tensor known only by DLPack, which states its dtype."""

    def __init__(self, tensor: Any) -> None:
        super().__init__(tensor)
        self.dtype = tensor.dtype


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
                    # NumPy and PyTorch raise a BufferError themselves, as the array API says.
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


def test_bytes_stay_bytes() -> None:
    """An object whose ``dtype`` says nothing of use is taken by its protocol."""

    class Odd(Spoken):
        def __init__(self, tensor: Any, dtype: Any) -> None:
            self.tensor, self.dtype = tensor, dtype

    class Raises(Wrapper):
        @property
        def dtype(self) -> Any:
            raise RuntimeError("not now")

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


# ``tb.copy`` and ``tb.copier`` with ``dtype=``, on the host. The property ``elements`` of the suite casts any views.


@pytest.mark.parametrize(("source", "to"), CASTS)
def test_every_number_is_cast_as_pytorch_casts_it(source: str, to: str) -> None:
    values = numbers(source, np.random.default_rng(1))
    target = torch.zeros(values.shape, dtype=DTYPES[to])
    assert tb.copy(values, out=target, dtype=to) is target
    same(target, values.to(DTYPES[to]))


def test_a_float64_becomes_a_float32_first_as_in_pytorch() -> None:
    """NumPy and ml_dtypes round once."""
    value = 1 + 2.0**-11 + 2.0**-40
    target = np.zeros(1, np.float16)
    tb.copy(np.array([value]), out=target, dtype="float16")
    assert target[0] == torch.tensor([value], dtype=torch.float64).to(torch.float16).item() == 1
    assert np.float16(value) > 1


def test_elements_at_any_address_are_cast() -> None:
    for shift in range(8):
        source = np.frombuffer(bytearray(8 * 1000 + shift), np.uint8)[shift:].view(np.float64)
        target = np.frombuffer(bytearray(4 * 1000 + 3), np.uint8)[3:].view(np.float32)
        source[:] = np.linspace(-5, 5, 1000)
        tb.copy(source, out=target, dtype="float32")
        assert np.array_equal(target, source.astype(np.float32))
        tb.copy(target[::-1], out=source, dtype="float64")
        assert np.array_equal(source, target[::-1].astype(np.float64))


def test_nothing_beside_the_target_is_written() -> None:
    whole = torch.full((7, 100), 3.0, dtype=torch.bfloat16)
    tb.copy(torch.ones(7, 50), out=whole[:, 20:70], dtype="bfloat16")
    expected = torch.full_like(whole, 3)
    expected[:, 20:70] = 1
    assert torch.equal(whole, expected)


def test_a_large_cast_is_shared_by_threads() -> None:
    source = torch.randn(3000, 1001)
    target = torch.zeros(3000, 1001, dtype=torch.float8_e4m3fn)
    tb.copy(source, out=target, dtype="float8_e4m3fn")
    same(target, source.to(torch.float8_e4m3fn))
    turned = torch.zeros(1001, 3000, dtype=torch.bfloat16)
    tb.copy(source.t(), out=turned, dtype="bfloat16")
    same(turned, source.t().to(torch.bfloat16))


def test_what_has_one_dtype_is_copied_as_it_is() -> None:
    trained = torch.nn.BatchNorm1d(5)
    trained(torch.randn(8, 5))
    served = torch.nn.BatchNorm1d(5).to(torch.bfloat16)
    state = served.state_dict()
    assert state["num_batches_tracked"].dtype == torch.int64
    tb.copy(trained.state_dict(), out=state, dtype="bfloat16")
    for name, tensor in trained.state_dict().items():
        expected = tensor.to(state[name].dtype)
        assert torch.equal(state[name], expected), name
    assert state["num_batches_tracked"] == 1
    # Of another floating dtype, too.
    half, quarter = torch.randn(3).half(), torch.zeros(3, dtype=torch.float16)
    tb.copy([half, torch.ones(2)], out=[quarter, torch.zeros(2, dtype=torch.bfloat16)], dtype="bfloat16")
    assert torch.equal(half, quarter)


def test_a_weight_that_is_held_twice_is_cast_once_and_views_as_two_dtypes_are_refused() -> None:
    source, target = torch.randn(4), torch.zeros(4, dtype=torch.float16)
    tb.copy([source, source], out=[target, target], dtype="float16")
    same(target, source.half())
    both = torch.randn(4).half()
    wide = torch.zeros(4)
    with pytest.raises(tb.BridgeError, match=r"tree\[1\] and tree\[0\]: the two targets share memory"):
        tb.copy([both, both.view(torch.bfloat16)], out=[wide, wide], dtype="float32")


def test_a_copier_casts_again() -> None:
    sources = {"a": torch.randn(50), "b": [np.arange(5.0), torch.arange(3)]}
    targets = {
        "a": torch.zeros(50, dtype=torch.bfloat16),
        "b": [torch.zeros(5, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64)],
    }
    update = tb.copier(sources, out=targets, dtype="bfloat16")
    for _ in range(3):
        sources["a"] += 1
        sources["b"][0] *= 1.01
        sources["b"][1] += 1
        assert update() is targets
        same(targets["a"], sources["a"].to(torch.bfloat16))
        same(targets["b"][0], torch.from_numpy(sources["b"][0]).to(torch.bfloat16))
        assert torch.equal(targets["b"][1], sources["b"][1])
    one = torch.zeros(50, dtype=torch.float64)
    tb.copier(sources["a"], out=one, dtype="float64", check=False)()
    assert torch.equal(one, sources["a"].double())
    sources["a"].data = sources["a"].double()
    with pytest.raises(tb.BridgeError) as error:
        update()
    assert error.value.kind == "layout"


def test_a_trace_shows_a_cast() -> None:
    source, target = torch.randn(4), torch.zeros(4, dtype=torch.float16)
    with tb.trace() as traced:
        tb.copy(source, out=target, dtype="float16")
    same(target, source.half())
    assert len(traced.events) == 1


ONES = torch.ones(3)


def zeros(dtype: Any) -> Any:
    return torch.zeros(3, dtype=dtype)


@pytest.mark.parametrize("module", ["torch", "tensorflow", "jax.numpy", "ml_dtypes"])
def test_dtypes_of_every_framework_are_names(module: str) -> None:
    bfloat16 = pytest.importorskip(module).bfloat16
    for dtype in (bfloat16, np.dtype("bfloat16") if module == "ml_dtypes" else bfloat16):
        assert tb.copy(ONES, out=zeros(torch.bfloat16), dtype=dtype).tolist() == [1, 1, 1]
    assert tb.copy(ONES, out=np.zeros(3, np.float16), dtype=np.float16).tolist() == [1, 1, 1]


@pytest.mark.parametrize("make", [tb.copy, tb.copier])
@pytest.mark.parametrize("dtype", ["bfloat", "int32", "complex64", "float8_e8m0fnu", "", torch.int32, float, 3])
def test_other_names_are_refused(make: Any, dtype: Any) -> None:
    target = zeros(torch.bfloat16)
    with pytest.raises(tb.BridgeValueError, match='^cannot cast to dtype .*: pass one of "float16"') as error:
        make(ONES, out=target, dtype=dtype)
    assert error.value.kind == "argument" and not target.any()
    with pytest.raises(tb.BridgeValueError):
        make(ONES, out=zeros(torch.float32), dtype=dtype)


@pytest.mark.parametrize("make", [tb.copy, tb.copier])
@pytest.mark.parametrize(
    ("source", "target", "dtype", "text"),
    [
        (ONES, torch.float16, None, "pass the target's dtype as dtype="),
        (ONES, torch.float16, "bfloat16", "pass a target of dtype bfloat16, or of float32"),
        (ONES, torch.int32, "bfloat16", "pass a target of dtype bfloat16, or of float32"),
        (ONES.int(), torch.bfloat16, "bfloat16", "cast the source first"),
        (ONES.bool(), torch.float32, "float32", "cast the source first"),
        (ONES.to(torch.complex64), torch.float32, "float32", "cast the source first"),
        (ONES.int(), torch.bfloat16, None, "cast the source first"),
    ],
)
def test_other_pairs_are_refused_before_anything_is_written(
    make: Any, source: Any, target: Any, dtype: str | None, text: str
) -> None:
    first = zeros(torch.float32)
    with pytest.raises(tb.BridgeError, match=r"^tree\['b'\]\[0\]: .*" + text) as error:
        make({"a": ONES, "b": [source]}, out={"a": first, "b": [zeros(target)]}, dtype=dtype)
    assert error.value.kind == "dtype" and not first.any()
    with pytest.raises(tb.BridgeError, match=text):
        make(source, out=zeros(target), dtype=dtype)


def test_views_that_overlap_are_refused_whatever_their_itemsizes() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    halves, floats = memory.view(torch.float16), memory.view(torch.float32)
    for source, target in [(floats[:4], halves[4:8]), (halves[8:12], floats[3:7])]:
        with pytest.raises(tb.BridgeError, match="share memory") as error:
            tb.copy(source, out=target, dtype=str(target.dtype).removeprefix("torch."))
        assert error.value.kind == "layout"
    halves[8:12] = torch.arange(4).half()
    tb.copy(halves[8:12], out=floats[0:4], dtype="float32")
    assert floats[:4].tolist() == [0, 1, 2, 3]
