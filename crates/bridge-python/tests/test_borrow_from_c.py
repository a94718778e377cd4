"""Borrows through the table of C functions, as a C extension makes them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from capsules import Producer
from truebridge import _core

torch: Any = pytest.importorskip("torch")

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
    x: Any = type("Foreign", (), {"__dlpack__": lambda self, **_: producer.capsule()})()
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
