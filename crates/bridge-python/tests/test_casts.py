"""``tb.copy`` and ``tb.copier`` with ``dtype=``, on the host: ``Tensor.to`` and ml_dtypes judge the values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")
ml_dtypes: Any = pytest.importorskip("ml_dtypes")

from casting import CASTS, DTYPES, cast, numbers, pair, same, view  # noqa: E402


@pytest.mark.parametrize(("source", "to"), CASTS)
def test_every_number_is_cast_as_pytorch_casts_it(source: str, to: str) -> None:
    values = numbers(source, np.random.default_rng(1))
    target = torch.zeros(values.shape, dtype=DTYPES[to])
    assert tb.copy(values, out=target, dtype=to) is target
    same(target, values.to(DTYPES[to]))


@pytest.mark.parametrize("to", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_float32_is_cast_as_ml_dtypes_cast_it(to: str) -> None:
    values = numbers("float32", np.random.default_rng(2))
    with np.errstate(all="ignore"):
        expected = values.numpy().astype(np.float16 if to == "float16" else getattr(ml_dtypes, to))
    target = torch.zeros(values.shape, dtype=DTYPES[to])
    tb.copy(values, out=target, dtype=to)
    integers = np.int16 if expected.itemsize == 2 else np.uint8
    same(target, torch.from_numpy(expected.view(integers)).view(DTYPES[to]))


def test_a_float64_becomes_a_float32_first_as_in_pytorch() -> None:
    """NumPy and ml_dtypes round once."""
    value = 1 + 2.0**-11 + 2.0**-40
    target = np.zeros(1, np.float16)
    tb.copy(np.array([value]), out=target, dtype="float16")
    assert target[0] == torch.tensor([value], dtype=torch.float64).to(torch.float16).item() == 1
    assert np.float16(value) > 1


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_any_views_are_cast(seed: int, to: str) -> None:
    random = np.random.default_rng([seed, list(DTYPES).index(to)])
    pairs = [pair(random, to, "cpu") for _ in range(12)]
    for source, target in pairs:
        tb.copy(source, out=target, dtype=to)
        same(target, cast(source, target))
    targets = [torch.zeros_like(target) for _, target in pairs]
    tb.copy([source for source, _ in pairs], out=targets, dtype=to)
    for (source, _), target in zip(pairs, targets, strict=True):
        same(target, cast(source, target))


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


@pytest.mark.parametrize("make", [tb.copy, tb.copier])
@pytest.mark.parametrize("dtype", ["bfloat", "int32", "complex64", "float8_e8m0fnu", "", torch.bfloat16, 3])
def test_other_names_are_refused(make: Any, dtype: Any) -> None:
    target = zeros(torch.bfloat16)
    with pytest.raises(tb.BridgeValueError, match="pass one of|is a str") as error:
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


def test_arrays_of_ml_dtypes_are_sources_and_targets() -> None:
    source = np.linspace(-3, 3, 100, dtype=np.float32)
    target = np.zeros(100, ml_dtypes.bfloat16)
    tb.copy(source, out=target, dtype="bfloat16")
    assert np.array_equal(target.view(np.int16), source.astype(ml_dtypes.bfloat16).view(np.int16))
    back = torch.zeros(100, dtype=torch.float64)
    tb.copy(target, out=back, dtype="float64")
    assert np.array_equal(back.numpy(), target.astype(np.float64))


def test_empty_tensors_and_single_numbers_are_cast() -> None:
    one = view(np.random.default_rng(1), [], "float32", "cpu")
    target = torch.zeros((), dtype=torch.float64)
    tb.copy(one, out=target, dtype="float64")
    same(target, one.double())
    tb.copy(torch.zeros(0, 3), out=torch.zeros(0, 3, dtype=torch.float16), dtype="float16")
