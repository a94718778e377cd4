"""Tensors lent to consumers that are known only by a protocol, on the host."""

from __future__ import annotations

import ctypes
import gc
import shutil
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capsules
import truebridge as tb
from capsules import Producer
from truebridge import _core

torch: Any = pytest.importorskip("torch")


CPU = (1, 0)


class Frozen:
    """A NumPy array that may not be written to."""

    def __new__(cls) -> np.ndarray:  # type: ignore[misc]
        array = np.arange(4, dtype=np.float32)
        array.flags.writeable = False
        return array


def test_every_protocol_of_the_host_shares_the_memory() -> None:
    t = torch.arange(6, dtype=torch.float32).reshape(2, 3).T
    loan = tb.lend(t)
    assert (loan.shape, loan.dtype_name, loan.stream, loan.__dlpack_device__()) == ((3, 2), "float32", None, CPU)
    interface = loan.__array_interface__
    assert interface["data"] == (t.data_ptr(), False)
    assert (interface["shape"], interface["strides"], interface["version"]) == ((3, 2), (4, 12), 3)
    assert not hasattr(loan, "__cuda_array_interface__")
    for view in (np.from_dlpack(loan), np.asarray(loan), torch.from_dlpack(loan), tb.to_torch(loan)):
        view[0, 0] += 1
    assert t[0, 0].item() == 4
    assert tb.lend(t.contiguous()).__array_interface__["strides"] is None


@pytest.mark.parametrize(
    ("version", "name"),
    [(None, "dltensor"), ((0, 8), "dltensor"), ((1, 0), "dltensor_versioned"), ((2, 1), "dltensor_versioned")],
)
def test_consumers_get_the_version_that_they_ask_for(version: Any, name: str) -> None:
    capsule = tb.lend(torch.zeros(3)).__dlpack__(max_version=version, stream=None, copy=None, dl_device=None)
    assert f'"{name}"' in repr(capsule)


def test_a_consumer_may_ask_for_a_copy_or_a_device() -> None:
    t = torch.arange(6).reshape(2, 3)
    loan = tb.lend(t, permute=(1, 0))
    copied = np.from_dlpack(loan, copy=True)
    copied[0, 0] = 9
    assert t[0, 0].item() == 0
    assert copied.tolist()[1:] == [[1, 4], [2, 5]]
    assert np.from_dlpack(loan, device="cpu", copy=False).ctypes.data == t.data_ptr()
    with pytest.raises(BufferError, match="copy=None to allow a move"):
        loan.__dlpack__(dl_device=(2, 0), copy=False)
    consumed = tb.lend(capsules.Producer().capsule())
    assert np.from_dlpack(consumed).size > 0
    with pytest.raises(BufferError, match="cannot be copied or moved"):
        consumed.__dlpack__(copy=True)


def flags(capsule: Any) -> int:
    """Return the flags of a versioned capsule."""
    read = ctypes.pythonapi.PyCapsule_GetPointer
    read.restype, read.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return capsules.Versioned.from_address(read(capsule, b"dltensor_versioned")).flags


def test_flags_say_what_is_read_only_and_what_is_the_consumers_alone() -> None:
    read_only, copied = 1, 2
    loan = tb.lend(Frozen())
    assert flags(loan.__dlpack__(max_version=(1, 0))) == read_only
    assert flags(loan.__dlpack__(max_version=(1, 0), copy=True)) == copied
    shared = tb.lend(np.ones((2, 3)), order="F")
    assert flags(shared.__dlpack__(max_version=(1, 0))) == 0, "the loan and its consumers share this copy"


def test_read_only_memory_is_marked_and_unversioned_capsules_need_a_promise() -> None:
    array = Frozen()
    loan = tb.lend(array)
    assert loan.__array_interface__["data"][1] is True
    assert not np.from_dlpack(loan).flags.writeable
    with pytest.raises(BufferError, match="read_only=True"):
        loan.__dlpack__()
    promised = tb.lend(array, read_only=True)
    assert '"dltensor"' in repr(promised.__dlpack__())
    assert promised.__array_interface__["data"][1] is True
    assert tb.lend(np.arange(3), read_only=True).__array_interface__["data"][1] is True


def test_what_the_framework_never_changes_goes_to_every_consumer() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    loan = tb.lend(tensorflow.constant([1.0, 2.0]))
    assert '"dltensor"' in repr(loan.__dlpack__())
    assert not np.from_dlpack(loan).flags.writeable
    assert tb.to_torch(loan, copy=False).tolist() == [1, 2]
    assert not tb.to_numpy(loan).flags.writeable
    with pytest.raises(BufferError, match="read_only=True"):
        tb.to_torch(tb.lend(Frozen()))


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64", "bool", "float16", "uint8"])
def test_dtypes(dtype: str) -> None:
    t = torch.ones(3, dtype=getattr(torch, dtype))
    loan = tb.lend(t)
    assert loan.dtype_name == dtype
    assert torch.equal(torch.from_dlpack(loan), t)
    assert hasattr(loan, "__array_interface__") is (dtype != "bfloat16")
    if dtype != "bfloat16":
        assert np.asarray(loan).dtype == np.dtype(dtype)


def test_the_memory_lives_as_long_as_the_loan_and_every_view() -> None:
    t = np.ones(4)
    alive = weakref.ref(t)
    loan = tb.lend(t)
    view = np.from_dlpack(loan)
    del t
    loan.__dlpack__()  # a consumer that drops its view at once
    gc.collect()
    assert alive() is not None
    del loan
    gc.collect()
    assert alive() is not None
    assert view.sum() == 4
    del view
    gc.collect()
    assert alive() is None


def test_a_block_closes_the_loan() -> None:
    t = np.ones(4)
    with tb.lend(t) as loan:
        assert np.from_dlpack(loan).ctypes.data == t.ctypes.data
    alive = weakref.ref(t)
    del t
    gc.collect()
    assert alive() is None, "the closed loan keeps nothing"
    assert repr(loan) == "<Loan: closed>"
    for use in (loan.__dlpack__, lambda: loan.shape, lambda: loan.dtype_name, lambda: loan.__array_interface__):
        with pytest.raises(BufferError, match="closed"):
            use()
    with pytest.raises(tb.BridgeValueError, match="closed"):
        tb.record_stream(loan, 7)
    with pytest.raises(ZeroDivisionError), tb.lend(np.ones(1)) as loan:
        raise ZeroDivisionError
    assert repr(loan) == "<Loan: closed>"


def test_a_view_by_an_array_interface_keeps_the_memory_after_the_block() -> None:
    array, called = np.full(4, 7.0), np.full(4, 7.0)
    alive = [weakref.ref(array), weakref.ref(called)]
    with tb.lend(array) as loan:
        views = [np.asarray(loan), tb.call(np.asarray, called)]
    assert repr(loan) == "<Loan: closed>"
    with pytest.raises(BufferError, match="closed"):
        _ = loan.__array_interface__
    del array, called, loan
    gc.collect()
    assert all(owner() is not None for owner in alive) and [view.tolist() for view in views] == [[7] * 4] * 2
    del views
    gc.collect()
    assert [owner() for owner in alive] == [None, None]


def test_containers_are_lent_with_all_tensors_in_them() -> None:
    loaned = tb.lend({"a": torch.ones(2), "b": [np.ones(3), "text"]})
    assert isinstance(loaned["a"], tb.Loan)
    assert isinstance(loaned["b"][0], tb.Loan)
    assert loaned["b"][1] == "text"


def test_errors_say_what_to_do() -> None:
    for x, kind in [(3, "not_a_tensor"), (torch.ones(2, requires_grad=True), "requires_grad")]:
        with pytest.raises(tb.BridgeError) as caught:
            tb.lend(x)
        assert caught.value.kind == kind
    assert isinstance(tb.lend(torch.ones(2, requires_grad=True), detach=True), tb.Loan)
    with pytest.raises(tb.BridgeValueError, match="is not a CUDA stream"):
        tb.lend(torch.ones(2), stream="main")
    with pytest.raises(TypeError):
        tb.Loan()
    assert isinstance(tb.lend(torch.ones(2), stream=5), tb.Loan), "on the host there is nothing to order"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_a_tensor_of_a_device_is_an_error_and_is_released() -> None:
    for stream in (None, 7):
        producer = capsules.Producer()
        producer.tensor.device_type, producer.shape[0] = capsules.CUDA, 0
        with pytest.raises(tb.BridgeImportError):
            tb.lend(producer.capsule(), stream=stream)
        assert producer.deleted == 1


def test_a_loan_is_a_tensor_for_every_conversion() -> None:
    t = torch.arange(6.0).reshape(2, 3)
    loan = tb.lend(t)
    assert tb.plan(loan, "numpy").zero_copy
    assert tb.to_numpy({"x": loan})["x"].ctypes.data == t.data_ptr()
    assert tb.copy(np.ones((2, 3), np.float32), out=t) is t
    assert tb.to_numpy(tb.lend(loan)).sum() == 6
    tb.record_stream(loan, 7)  # on the host there is nothing to record


def test_debug_looks_at_what_is_lent() -> None:
    with tb.debug():
        t = torch.ones(1000)
        view = np.from_dlpack(tb.lend(t))
        del t
        assert view.sum() == 1000
        del view


def test_threads_share_a_loan() -> None:
    loan = tb.lend(np.arange(1000))
    threads = [threading.Thread(target=lambda: [np.from_dlpack(loan) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.from_dlpack(loan).sum() == 499500


def add(a: Any, b: Any, out: Any, scale: float = 1.0) -> int:
    np.multiply(np.from_dlpack(a) + np.from_dlpack(b[0]), scale, out=np.from_dlpack(out))
    return 7


def test_a_call_lends_all_tensors_and_closes_the_loans() -> None:
    seen: list[Any] = []

    def function(*args: Any) -> int:
        seen.extend(args)
        return add(*args)

    total = torch.empty(2)
    assert tb.call(function, torch.ones(2), [np.ones(2, np.float32)], total, 0.5) == 7
    assert total.tolist() == [1, 1]
    assert [repr(seen[i]) for i in (0, 2)] == ["<Loan: closed>"] * 2
    assert seen[3] == 0.5
    assert tb.call(max, 3, 5) == 5
    assert tb.call(lambda: 1) == 1
    with pytest.raises(BufferError, match="read_only=True"):
        tb.call(lambda a: a.__dlpack__(), Frozen())
    assert tb.call(lambda a: a.__dlpack__(), Frozen(), read_only=True) is not None


def test_a_trace_shows_what_is_lent() -> None:
    with tb.trace() as trace:
        tb.lend(torch.ones(3))
    (event,) = trace.events
    assert event[1:5] == ("lend", "torch", "dlpack", "in place")


def test_pyarrow_takes_a_loan() -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="PyArrow is not installed")
    t = torch.arange(5)
    tensor = pyarrow.Tensor.from_numpy(np.asarray(tb.lend(t)))
    t[0] = 9
    assert tensor.to_numpy()[0] == 9


def test_tvm_ffi_takes_tensors_of_two_frameworks() -> None:
    tvm_ffi = pytest.importorskip("tvm_ffi", reason="tvm-ffi is not installed")
    function = tvm_ffi.convert(lambda a, b: float(np.from_dlpack(a).sum() + np.from_dlpack(b).sum()))
    assert tb.call(function, torch.ones(3), np.ones(2, np.float32)) == 5
    t = np.ones(2)
    tensor = tvm_ffi.from_dlpack(tb.lend(t))
    alive = weakref.ref(t)
    t[0] = 8
    del t
    gc.collect()
    assert alive() is not None
    assert tb.to_numpy(tensor)[0] == 8
    del tensor
    gc.collect()
    assert alive() is None


def test_jax_takes_a_loan() -> None:
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    t = torch.arange(1 << 10, dtype=torch.float32)
    assert float(jnp.asarray(tb.lend(t)).sum()) == 523776
    assert float(jnp.from_dlpack(tb.lend(t)).sum()) == 523776


def test_numba_takes_a_loan() -> None:
    numba = pytest.importorskip("numba", reason="Numba is not installed")
    t = torch.ones(4)

    @numba.njit
    def double(a: Any) -> None:
        for i in range(a.size):
            a[i] *= 2

    double(np.asarray(tb.lend(t)))
    assert t.tolist() == [2, 2, 2, 2]


# Borrows through the table of C functions, as a C extension makes them.


NDIM = 64


class Borrowed(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("stream", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("read_only", ctypes.c_uint16),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.c_int64 * NDIM),
        ("strides", ctypes.c_int64 * NDIM),
    )


class Api(ctypes.Structure):
    _fields_ = (
        ("abi", ctypes.c_uint32),
        ("borrow", ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Borrowed))),
        ("end", ctypes.PYFUNCTYPE(None, ctypes.POINTER(Borrowed))),
    )


@pytest.fixture
def api() -> Api:
    find = ctypes.pythonapi.PyCapsule_Import
    find.restype, find.argtypes = ctypes.POINTER(Api), (ctypes.c_char_p, ctypes.c_int)
    found: Api = find(b"truebridge._core.borrow", 0).contents
    assert found.abi == 1
    return found


def said(api: Api, tensor: object) -> tuple[Any, ...]:
    """What a borrow says: address, shape, strides, dtype, device, read-only, stream."""
    out = Borrowed()
    assert api.borrow(tensor, ctypes.byref(out)) == 0
    api.end(ctypes.byref(out))
    assert out.kept is None
    dims = (tuple(out.shape[: out.ndim]), tuple(out.strides[: out.ndim]))
    where = (out.device_type, out.device_id)
    return (out.data, *dims, (out.dtype_code, out.dtype_bits), where, out.read_only, out.stream)


def test_tensors_of_each_framework(api: Api) -> None:
    tensor = torch.ones(4, 6, dtype=torch.complex64, requires_grad=True)[1:, ::2]
    assert said(api, tensor) == (tensor.data_ptr(), (3, 3), (6, 2), (5, 64), (1, 0), 0, 0)
    array = np.arange(3, dtype=np.int16)[::-1]
    array.flags.writeable = False
    assert said(api, array) == (array.ctypes.data, (3,), (-1,), (0, 16), (1, 0), 1, 0)
    tensorflow = pytest.importorskip("tensorflow")
    with tensorflow.device("CPU"):
        eager = tensorflow.constant([True, False])
    assert said(api, eager)[1:] == ((2,), (1,), (6, 8), (1, 0), 1, 0)
    # A variable is exported, so `end` has something to drop.
    variable, out = tensorflow.Variable([1.0, 2.0]), Borrowed()
    assert api.borrow(variable, ctypes.byref(out)) == 0 and out.kept
    del variable
    assert list((ctypes.c_float * 2).from_address(out.data)) == [1, 2]
    api.end(ctypes.byref(out))


@pytest.mark.parametrize("legacy", [False, True])
def test_a_producer_known_by_a_protocol(api: Api, legacy: bool) -> None:
    producer = Producer(legacy=legacy)
    if not legacy:
        producer.managed.flags = 1
    x: Any = type("ProtocolObject", (), {"__dlpack__": lambda self, **_: producer.capsule()})()
    out = Borrowed()
    assert api.borrow(x, ctypes.byref(out)) == 0
    assert (out.data, out.ndim, out.shape[0], out.read_only, out.stream) == (producer.address, 1, 8, not legacy, 0)
    assert producer.deleted == 0
    api.end(ctypes.byref(out))
    assert producer.deleted == 1 and out.kept is None


@pytest.mark.parametrize("ndim", [0, 1, 64])
def test_any_number_of_dimensions(api: Api, ndim: int) -> None:
    array = np.ones((1,) * ndim)
    assert said(api, array)[1] == array.shape


def test_what_is_refused_raises(api: Api) -> None:
    out = Borrowed()
    refused = [(3, "int is not a tensor"), (torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj")]
    if hasattr(torch, "int4"):
        refused.append((torch.ones(2, dtype=torch.uint8).view(torch.int4), "torch.int4 has no counterpart"))
    for bad, text in refused:
        with pytest.raises(tb.BridgeError, match=text):
            api.borrow(bad, ctypes.byref(out))
    assert not out.kept and not out.data


def test_the_header_declares_what_the_table_holds(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    include = Path(_core.__file__).parent / "include"
    names = [name for name, *_ in Borrowed._fields_]
    offsets = ", ".join(f"offsetof(tb_borrowed, {name})" for name in names)
    source = f"""
        #include <stddef.h>
        #include <stdio.h>
        #include "truebridge_borrow.h"
        int main(void) {{
            size_t said[] = {{TB_BORROW_ABI, sizeof(tb_borrowed), offsetof(tb_borrow_api, end), {offsets}}};
            for (size_t i = 0; i < sizeof said / sizeof *said; i++) printf("%zu ", said[i]);
            puts(TB_BORROW_CAPSULE);
            return 0;
        }}"""
    (tmp_path / "said.c").write_text(source)
    program = tmp_path / "said"
    for language in ("c", "c++"):
        command = [compiler, "-x", language, "-Wall", "-Werror", "-I", str(include), str(tmp_path / "said.c")]
        if subprocess.run([*command, "-fsyntax-only"], check=False).returncode != 0:
            assert language == "c++" and shutil.which("c++") is None
    subprocess.run([compiler, "-I", str(include), str(tmp_path / "said.c"), "-o", str(program)], check=True)
    text = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split()
    known = [1, ctypes.sizeof(Borrowed), Api.end.offset, *(getattr(Borrowed, name).offset for name in names)]
    assert [int(number) for number in text[:-1]] == known
    assert text[-1] == "truebridge._core.borrow"


def test_nothing_is_kept(api: Api) -> None:
    said(api, torch.ones(2))  # looks PyTorch up: errors of that are dropped later, and their frames with them
    tensor = torch.ones(2)
    before = sys.getrefcount(tensor)
    for _ in range(10):
        said(api, tensor)
    assert sys.getrefcount(tensor) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_stream_is_the_current_one_of_the_tensors_framework(api: Api) -> None:
    cupy = pytest.importorskip("cupy")
    tensor, array = torch.ones(2, device="cuda"), cupy.ones(2)
    legacy, of_torch, of_cupy = 1, torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    assert [said(api, each)[-1] for each in (tensor, array)] == [legacy, legacy]
    with torch.cuda.stream(of_torch), of_cupy:
        assert [said(api, each)[-1] for each in (tensor, array)] == [of_torch.cuda_stream, of_cupy.ptr]
    assert said(api, array)[:5] == (array.data.ptr, (2,), (1,), (2, 64), (2, 0))
