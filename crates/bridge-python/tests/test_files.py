"""Tensors in files: what is saved is what is loaded, by this package and by others, and hostile files are refused."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import random
import re
import stat
import struct
import sys
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from truebridge.files import formats

torch: Any = pytest.importorskip("torch")

try:
    import safetensors.numpy
    import safetensors.torch
except ImportError:
    safetensors = None
needs_safetensors = pytest.mark.skipif(safetensors is None, reason="safetensors is not installed")
SUFFIXES = [".npz", pytest.param(".safetensors", marks=needs_safetensors)]
GOLDEN = next((top / "fixtures/files" for top in Path(__file__).parents if (top / "fixtures/files").is_dir()), Path())


def tensors() -> dict[str, Any]:
    return {
        "matrix": torch.arange(6.0).reshape(2, 3),
        "strided": torch.arange(12.0).reshape(3, 4).T,
        "odd": np.arange(5, dtype=np.int8),
        "double": np.arange(3.0),
        "half": torch.ones(3, dtype=torch.float16),
        "complex": torch.ones(2, dtype=torch.complex64),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }


def same(left: Any, right: Any) -> bool:
    left, right = tb.to_numpy(left), tb.to_numpy(right)
    return left.dtype == right.dtype and left.shape == right.shape and left.tolist() == right.tolist()


@pytest.mark.parametrize("target", ["torch", "numpy", "tensorflow"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_saved_is_loaded(suffix: str, target: Any, tmp_path: Path) -> None:
    if target == "tensorflow":
        pytest.importorskip("tensorflow")
    saved, path = tensors(), tmp_path / f"x{suffix}"
    tb.save(path, saved)
    loaded = tb.load(path, target)
    assert loaded.keys() == saved.keys()
    for name, tensor in loaded.items():
        assert same(tensor, saved[name]), name
        assert type(tensor) is type(tb.convert(saved[name], target))


def test_a_tensor_by_itself(tmp_path: Path) -> None:
    for suffix in (".npy", ".npz", *[".safetensors"] * (safetensors is not None)):
        tb.save(tmp_path / f"x{suffix}", torch.arange(6.0).reshape(2, 3).T)
        loaded = tb.load(tmp_path / f"x{suffix}", "torch")
        assert loaded.tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_trees_keep_their_shape(suffix: str, tmp_path: Path) -> None:
    one = torch.ones(2)
    tree = {"layers": [one, {"w": np.zeros(3)}], "pair": (one, None), "n": 3, 7: 1.5, "layers.0": torch.zeros(1)}
    tb.save(tmp_path / f"x{suffix}", tree)
    loaded = tb.load(tmp_path / f"x{suffix}", "numpy")
    assert list(loaded) == list(tree)
    assert loaded["layers"][0].tolist() == [1, 1] and loaded["layers"][1]["w"].tolist() == [0, 0, 0]
    assert loaded["pair"][0].tolist() == [1, 1] and loaded["pair"][1] is None
    assert (loaded["n"], loaded[7], loaded["layers.0"].tolist()) == (3, 1.5, [0])


EMPTY: list[Any] = [{}, [], (), None, 3, 1.5, "text", {"n": 1}, [{}, ((), {"a": [None]})]]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("tree", EMPTY, ids=repr)
def test_trees_without_a_tensor_are_loaded_as_well(tree: Any, suffix: str, tmp_path: Path) -> None:
    tb.save(tmp_path / f"x{suffix}", tree)
    assert tb.load(tmp_path / f"x{suffix}", "torch") == tree
    with pytest.raises(tb.BridgeValueError):
        tb.load(tmp_path / f"x{suffix}", "torch", device="gpu")


KEYS = [
    "",
    ".",
    "a/b",
    "../c",
    "a\\b",
    "a.npy",
    "tensor",
    "tensor#1",
    "\n",
    "ü",
    "0",
    "truebridge.tree.json",
    "k" * 9999,
]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_keys_are_kept(suffix: str, tmp_path: Path) -> None:
    plain: dict[Any, Any] = {key: np.full(3, number) for number, key in enumerate(KEYS)}
    for saved in (plain, {**plain, 0: np.zeros(1), None: np.ones(1), True: {"": np.ones(2)}}):
        tb.save(tmp_path / f"x{suffix}", saved)
        loaded = tb.load(tmp_path / f"x{suffix}", "numpy")
        assert loaded.keys() == saved.keys()
        assert all(same(loaded[key], saved[key]) for key in plain)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_order_of_keys_is_kept(suffix: str, tmp_path: Path) -> None:
    """A program may pair what it has loaded with the parameters of a model, in their order."""
    path, generator = tmp_path / f"x{suffix}", random.Random(7)
    dtypes = [np.int8, np.float64, np.float32, np.bool_]
    for _ in range(20):
        keys = generator.sample([*KEYS, '"\\/\x01\x1f\x7f', "\u2028", "\U0001f600", "z", "weight", "bias"], 6)
        saved = {key: np.full(2, number, generator.choice(dtypes)) for number, key in enumerate(keys)}
        tb.save(path, saved)
        loaded = tb.load(path, "numpy")
        assert [(key, value.tolist()) for key, value in loaded.items()] == [(k, v.tolist()) for k, v in saved.items()]
        if suffix == ".safetensors":
            opened = safetensors.numpy.load_file(path)
            assert opened.keys() == saved.keys() and all(same(opened[key], saved[key]) for key in saved)


def test_numpy_opens_what_this_package_saves(tmp_path: Path) -> None:
    saved = tensors()
    tb.save(tmp_path / "x.npz", saved)
    with np.load(tmp_path / "x.npz", allow_pickle=False) as opened:
        assert sorted(opened) == sorted(saved)
        assert all(same(opened[name], saved[name]) for name in saved)
    assert zipfile.ZipFile(tmp_path / "x.npz").testzip() is None
    tb.save(tmp_path / "x.npy", saved["matrix"])
    assert same(np.load(tmp_path / "x.npy"), saved["matrix"])


@needs_safetensors
def test_safetensors_opens_what_this_package_saves(tmp_path: Path) -> None:
    saved = {
        **tensors(),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "float8": torch.ones(3).to(torch.float8_e5m2),
    }
    tb.save(tmp_path / "x.safetensors", saved)
    opened = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert sorted(opened) == sorted(saved)
    assert all(same(opened[name], saved[name]) for name in saved)


def test_files_of_numpy() -> None:
    matrix = [[0, 1, 2], [3, 4, 5]]
    for name in ("matrix", "fortran"):
        assert tb.load(GOLDEN / f"{name}.npy", "torch").tolist() == matrix
    for name in ("arrays", "compressed"):
        loaded = tb.load(GOLDEN / f"{name}.npz", "torch")
        assert loaded["matrix"].tolist() == matrix and loaded["odd"].tolist() == [0, 1, 2, 3, 4]
        assert loaded["scalar"].item() == 2.5 and loaded["empty"].shape == (0, 3)


@needs_safetensors
def test_files_of_safetensors() -> None:
    pytest.importorskip("ml_dtypes")
    loaded = tb.load(GOLDEN / "tensors.safetensors", "torch")
    assert loaded["matrix"].tolist() == [[0, 1, 2], [3, 4, 5]] and loaded["scalar"].item() == 2.5
    assert loaded["bfloat16"].dtype == torch.bfloat16 and loaded["bfloat16"].tolist() == [1] * 4
    assert loaded["float8"].dtype == torch.float8_e4m3fn and loaded["float8"].float().tolist() == [1] * 4
    assert loaded["bool"].tolist() == [True, False]


@pytest.mark.parametrize("target", ["torch", "numpy"])
@pytest.mark.parametrize("suffix", [".npy", *SUFFIXES])
def test_a_big_file_is_mapped_and_not_read(suffix: str, target: Any, tmp_path: Path) -> None:
    path, nbytes = tmp_path / f"x{suffix}", 64 << 20
    tb.save(path, np.ones(nbytes, np.int8) if suffix == ".npy" else {"x": np.ones(nbytes, np.int8)})
    tb.load(path, target)
    tracemalloc.start()
    loaded = tb.load(path, target, copy=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    view = tb.to_numpy(loaded if suffix == ".npy" else loaded["x"])
    assert any(str(path) in line and within(line, view.ctypes.data) for line in open("/proc/self/maps"))
    view[:] = 2
    assert tb.to_numpy(loaded if suffix == ".npy" else loaded["x"])[-1] == 2
    again = tb.load(path, "numpy")
    assert (again if suffix == ".npy" else again["x"])[-1] == 1, "a write has reached the file"


def within(line: str, address: int) -> bool:
    first, last = (int(part, 16) for part in line.split()[0].split("-"))
    return first <= address < last


def test_every_framework_takes_a_saved_npz_in_place(tmp_path: Path) -> None:
    tb.save(tmp_path / "x.npz", {name: np.ones(7, np.int8) for name in ("a", "long name", "ü")})
    for array in tb.load(tmp_path / "x.npz", "numpy").values():
        assert array.ctypes.data % 64 == 0


@pytest.mark.parametrize("suffix", [".npy", *SUFFIXES])
def test_saving_over_a_file_that_is_in_use(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    wrapped: Callable[[Any], Any] = (lambda x: x) if suffix == ".npy" else (lambda x: {"x": x})
    tb.save(path, wrapped(np.ones(1 << 16)))
    path.chmod(0o640)
    loaded = tb.load(path, "numpy")
    tb.save(path, wrapped(np.zeros(4)))
    assert (loaded if suffix == ".npy" else loaded["x"]).sum() == 1 << 16
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    link = tmp_path / f"link{suffix}"
    link.symlink_to(path)
    tb.save(link, wrapped(np.ones(5)))
    assert link.is_symlink()
    loaded = tb.load(path, "torch")
    assert (loaded if suffix == ".npy" else loaded["x"]).tolist() == [1] * 5


def bf16() -> Any:
    return torch.ones(2, dtype=torch.bfloat16)


@dataclasses.dataclass
class Layer:
    weight: Any


UNSAVED: dict[str, tuple[str, Callable[[], Any], str, str]] = {
    "suffix": ("x.pt", bf16, "argument", ".npy, .npz, .safetensors"),
    "no suffix": ("x", bf16, "argument", "has no suffix"),
    "tree in npy": ("x.npy", lambda: {"a": np.zeros(3)}, "argument", "save a tree as .npz"),
    "list in npy": ("x.npy", lambda: [np.zeros(3)], "argument", "save a tree as .npz"),
    "bfloat16": ("x.npz", bf16, "dtype", "safetensors"),
    "object": ("x.npz", object, "not_a_tensor", "object is not a tensor"),
    "object in a tree": (
        "x.npz",
        lambda: {"a": np.zeros(3), "b": object()},
        "not_a_tensor",
        "b: object is not a tensor",
    ),
    "requires grad": ("x.npz", lambda: [torch.ones(2, requires_grad=True)], "requires_grad", "0: .*detach"),
    "byte order": ("x.npz", lambda: {"a": np.zeros(3, ">f4")}, "dtype", "newbyteorder"),
    "NUL": ("x.npz", lambda: {"a\0": np.zeros(3)}, "argument", "another key"),
    "surrogate": ("x.npz", lambda: {"\ud800": np.zeros(3)}, "argument", "another key"),
    "dataclass": ("x.npz", lambda: {"a": Layer(np.zeros(3))}, "not_a_tensor", "a: Layer is not a tensor: save a dict"),
    "dataclass without a tensor": ("x.npz", lambda: Layer(3), "not_a_tensor", "Layer is not a tensor"),
    "set": ("x.npz", lambda: [np.zeros(3), {1}], "not_a_tensor", "1: set is not a tensor"),
    "long key": ("x.npz", lambda: {"k" * 65532: np.zeros(3)}, "argument", "too long for a name in .npz"),
    "long int": ("x.npz", lambda: [np.zeros(3), 10**4300], "argument", "cannot be written as JSON"),
    "long int as a key": ("x.npz", lambda: {10**4300: np.zeros(3)}, "argument", "cannot be written as JSON"),
    "text of surrogates": ("x.npz", lambda: [np.zeros(3), "\ud83d\ude00"], "argument", "cannot be written as JSON"),
    "narrow": ("x.npz", lambda: {"a": torch.zeros(3, dtype=torch.uint8).view(torch.uint7)}, "dtype", "a: .*view"),
    "metadata": ("x.npz", lambda: {"__metadata__": np.zeros(3)}, "argument", "another key"),
}


@pytest.mark.parametrize("case", UNSAVED)
def test_what_cannot_be_saved_is_refused_and_leaves_no_file(case: str, tmp_path: Path) -> None:
    name, make, kind, words = UNSAVED[case]
    (tmp_path / name).write_text("before")
    with pytest.raises(tb.BridgeError, match=words) as caught:
        tb.save(tmp_path / name, make())
    assert caught.value.kind == kind
    assert os.listdir(tmp_path) == [name] and (tmp_path / name).read_text() == "before"


@needs_safetensors
def test_safetensors_has_no_complex128(tmp_path: Path) -> None:
    with pytest.raises(tb.BridgeDTypeError, match=r"a: safetensors has no complex128.*\.npz"):
        tb.save(tmp_path / "x.safetensors", {"a": np.zeros(3, complex)})


def npy(descr: str = "<f4", shape: str = "(2,)", order: str = "False", data: bytes = b"\0" * 8) -> bytes:
    header = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + data


def version_3(file: bytes) -> bytes:
    """Return the file in the version that NumPy writes for names of fields beyond latin-1."""
    length = int.from_bytes(file[8:10], "little")
    return b"\x93NUMPY\3\0" + struct.pack("<I", length) + file[10:]


def npz(members: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def safe(header: Any, data: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BOMB = npz({"a.npy": npy(shape=f"({1 << 24},)", data=bytes(4 << 24))}, zipfile.ZIP_DEFLATED)

HOSTILE: dict[str, tuple[str, bytes, str, str]] = {
    "empty": (".npy", b"", "file", "empty"),
    "magic": (".npy", b"PICKLE" + npy(), "file", "malformed"),
    "short": (".npy", npy(data=b"\0" * 7), "file", "takes 8 bytes, and 7 are there"),
    "long": (".npy", npy(data=b"\0" * 9), "file", "takes 8 bytes, and 9 are there"),
    "huge": (".npy", npy(shape="(1000000000000,)"), "file", "takes 4000000000000 bytes"),
    "huger": (".npy", npy(shape="(9999999999999999999, 99999999999999999)"), "file", "are there"),
    "negative": (".npy", npy(shape="(-2,)"), "file", "negative"),
    "negative twice": (".npy", npy(shape="(-1, -2)"), "file", "negative"),
    "no numbers": (".npy", npy(shape="('a',)"), "file", "malformed"),
    "code": (".npy", npy(shape="__import__('os').abort()"), "file", "malformed"),
    "nesting": (".npy", npy(shape="(" * 500 + ")" * 500), "file", "malformed"),
    "objects": (".npy", npy("|O"), "file", "pickled"),
    "byte order": (".npy", npy(">f4"), "dtype", "newbyteorder"),
    "strings": (".npy", npy("<U2"), "dtype", "counterpart"),
    "dates": (".npy", npy("<M8[D]"), "dtype", "counterpart"),
    "voids": (".npy", npy("|V4"), "dtype", "counterpart"),
    "version": (".npy", b"\x93NUMPY\x09\0" + npy()[8:], "file", "version|malformed"),
    "header": (".npy", b"\x93NUMPY\2\0" + struct.pack("<I", 1 << 31) + npy()[10:], "file", "malformed"),
    "no zip": (".npz", b"PK" + bytes(100), "file", "malformed"),
    "no array": (".npz", npz({"a.txt": b"text"}), "file", "not an array"),
    "objects in zip": (".npz", npz({"a.npy": npy("|O")}), "file", "pickled"),
    "byte order in zip": (".npz", npz({"a.npy": npy(">i8")}), "dtype", "newbyteorder"),
    "short in zip": (".npz", npz({"a.npy": npy(data=b"")}), "file", "takes 8 bytes, and 0 are there"),
    "huge in zip": (
        ".npz",
        npz({"a.npy": npy(shape="(1000000000000,)")}, zipfile.ZIP_DEFLATED),
        "file",
        "takes 4000000000000 bytes",
    ),
    "another method": (".npz", npz({"a.npy": npy()}, zipfile.ZIP_BZIP2), "file", "another method"),
    "tree": (".npz", npz({"truebridge.tree.json": b'{"tree": "[]", "names": ["b"]}'}), "file", "does not fit"),
    "no tree": (".npz", npz({"truebridge.tree.json": b"[" * 100000}), "file", "malformed|does not fit"),
    "no header": (".safetensors", b"\0" * 7, "file", "malformed"),
    "header too long": (".safetensors", safe({"a": F32}, length=1 << 62), "file", "malformed"),
    "no JSON": (".safetensors", safe(b"{" * 16), "file", "malformed"),
    "data missing": (".safetensors", safe({"a": F32}, b""), "file", "malformed"),
    "offsets": (".safetensors", safe({"a": {**F32, "data_offsets": [8, 0]}}), "file", "malformed"),
    "overlap": (".safetensors", safe({"a": F32, "b": F32}), "file", "malformed"),
    "shape": (".safetensors", safe({"a": {**F32, "shape": [1 << 62, 4]}}), "file", "malformed"),
    "dtype": (".safetensors", safe({"a": {**F32, "dtype": "X9"}}), "file", "malformed"),
    "half bytes": (".safetensors", safe({"a": {"dtype": "F4", "shape": [17], "data_offsets": [0, 8]}}), "file", "malf"),
    "records": (".npy", version_3(npy("<f4").replace(b"'<f4'", b"[('\xc3\xa9', '<f4')]")), "dtype", "counterpart"),
    "tree of unsupported objects": (
        ".safetensors",
        safe({"__metadata__": {"truebridge.tree": '{"tree": 3, "names": ["a"]}'}, "a": F32}),
        "file",
        "does not fit",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_before_memory_is_taken(case: str, tmp_path: Path) -> None:
    suffix, data, kind, words = HOSTILE[case]
    if suffix == ".safetensors" and safetensors is None:
        pytest.skip("safetensors is not installed")
    path = tmp_path / f"x{suffix}"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(tb.BridgeError, match=words) as caught:
        tb.load(path, "numpy")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.kind == kind
    assert str(path) in str(caught.value)
    assert peak < 8 << 20


@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_numbers_in_version_3_are_loaded(target: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(version_3(npy(data=np.arange(2, dtype=np.float32).tobytes())))
    assert np.load(path).tolist() == tb.load(path, target).tolist() == [0, 1]


#: Tensors of safetensors with elements of less than a byte: dtype, shape, and the shape of the bytes.
NARROW = {
    "rows of bytes": ("F4", [2, 4], [2, 2]),
    "rows of half bytes": ("F4", [2, 3], [3]),
    "six bits": ("F6_E2M3", [2, 4], [2, 3]),
    "the other six bits": ("F6_E3M2", [4, 2], [6]),
    "none": ("F4", [0, 4], [0, 2]),
}


@needs_safetensors
@pytest.mark.parametrize("case", NARROW)
@pytest.mark.parametrize("target", ["numpy", "torch", "jax"])
def test_elements_of_less_than_a_byte_are_loaded_as_bytes(case: str, target: Any, tmp_path: Path) -> None:
    pytest.importorskip(target)
    dtype, shape, bytes_shape = NARROW[case]
    nbytes = math.prod(bytes_shape)
    data = np.arange(2, dtype=np.float32).tobytes() + bytes(range(10, 10 + nbytes))
    narrow = {"dtype": dtype, "shape": shape, "data_offsets": [8, 8 + nbytes]}
    path = tmp_path / "x.safetensors"
    path.write_bytes(safe({"a": F32, "narrow": narrow}, data))
    with pytest.warns(tb.BridgeWarning, match=rf"uint8: narrow \({dtype}\)") as caught:
        loaded = tb.load(path, target)
    assert [warning.filename for warning in caught] == [__file__]
    assert loaded["a"].tolist() == [0, 1]
    narrow_bytes = np.asarray(loaded["narrow"])
    assert (narrow_bytes.dtype, list(narrow_bytes.shape)) == (np.uint8, bytes_shape)
    assert narrow_bytes.tobytes() == bytes(range(10, 10 + nbytes))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(tb.BridgeWarning):
            tb.load(path, target)


def test_golden_files_that_are_refused() -> None:
    for name, kind in (("byte_order", "dtype"), ("pickled", "file"), ("records", "dtype")):
        with pytest.raises(tb.BridgeError) as caught:
            tb.load(GOLDEN / f"{name}.npy", "numpy")
        assert caught.value.kind == kind


def test_what_is_compressed_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(BOMB)
    assert len(BOMB) < 1 << 20
    for limit in (0, (4 << 24) - 1):
        with pytest.raises(tb.BridgeValueError, match=f"have {4 << 24} bytes, and {limit} are allowed"):
            tb.load(path, "numpy", max_nbytes=limit)
    assert tb.load(path, "numpy", max_nbytes=4 << 24)["a"].shape == (1 << 24,)
    monkeypatch.setattr(formats, "_machine", lambda: 1 << 20)
    with pytest.raises(tb.BridgeValueError, match="decompressed"):
        tb.load(path, "numpy")


def test_an_encrypted_member_is_refused(tmp_path: Path) -> None:
    data = bytearray(npz({"a.npy": npy()}))
    for start in (data.index(b"PK\3\4") + 6, data.index(b"PK\1\2") + 8):
        data[start] |= 1
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(tb.BridgeValueError, match="encrypted") as caught:
        tb.load(tmp_path / "x.npz", "numpy")
    assert caught.value.kind == "file"


def test_more_than_deflate_can_hold_is_refused(tmp_path: Path) -> None:
    data = bytearray(npz({"a.npy": npy()}, zipfile.ZIP_DEFLATED))
    struct.pack_into("<I", data, data.index(b"PK\1\2") + 24, 1 << 30)
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(tb.BridgeValueError, match="more than .* can hold"):
        tb.load(tmp_path / "x.npz", "numpy")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npy")
    (tmp_path / "y.npy").mkdir()
    for name in "xy":
        with pytest.raises(tb.BridgeValueError, match="is not a regular file"):
            tb.load(tmp_path / f"{name}.npy", "numpy")
    with pytest.raises(FileNotFoundError):
        tb.load(tmp_path / "z.npy", "numpy")
    with pytest.raises(FileNotFoundError):
        tb.save(tmp_path / "nowhere/x.npy", np.zeros(3))


@pytest.mark.parametrize("limit", [-1, 1.5, "1", True])
def test_arguments_are_checked(limit: Any, tmp_path: Path) -> None:
    tb.save(tmp_path / "x.npy", np.zeros(3))
    for call in (
        lambda: tb.load(tmp_path / "x.npy", "numpy", max_nbytes=limit),
        lambda: tb.load(tmp_path / "x.npy", "caffe"),  # type: ignore[arg-type]
        lambda: tb.load(tmp_path / "x.npy", "numpy", device="gpu"),
        lambda: tb.load(3, "numpy"),  # type: ignore[arg-type]
        lambda: tb.load("x\0.npy", "numpy"),
        lambda: tb.save(None, np.zeros(3)),  # type: ignore[arg-type]
    ):
        with pytest.raises(tb.BridgeValueError) as caught:
            call()
        assert caught.value.kind == "argument"


@pytest.mark.parametrize("package", ["safetensors", "numpy"])
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "safetensors.numpy", raising=False)
    if package == "numpy":
        monkeypatch.delitem(sys.modules, "truebridge.files.formats")
    path = tmp_path / "x.safetensors"
    path.write_bytes(safe({"a": F32}))
    for call in (lambda: tb.load(path, "torch"), lambda: tb.save(path, torch.ones(2))):
        with pytest.raises(tb.BridgeImportError, match=f"pip install {package}"):
            call()


@pytest.mark.parametrize("name", ["matrix.npy", "arrays.npz", "compressed.npz", "tensors.safetensors"])
def test_damaged_files_are_refused_or_loaded(name: str, tmp_path: Path) -> None:
    """Cut off and change bytes: whatever is loaded, nothing but an error of this package is raised."""
    if name.endswith("safetensors") and safetensors is None:
        pytest.skip("safetensors is not installed")
    whole, path, chance = (GOLDEN / name).read_bytes(), tmp_path / name, random.Random(14)
    refused = 0
    for turn in range(1500):
        damaged = bytearray(whole[: chance.randrange(len(whole))] if turn % 3 == 0 else whole)
        for _ in range(chance.randrange(3) if damaged else 0):
            damaged[chance.randrange(len(damaged))] = chance.choice([0, 1, 255, chance.randrange(256)])
        path.write_bytes(damaged)
        try:
            tb.load(path, "numpy")
        except tb.BridgeError as error:
            assert error.kind in ("file", "dtype", "layout")
            refused += 1
    assert refused > 500


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_tensors_of_a_gpu(suffix: str, tmp_path: Path) -> None:
    saved = {"x": torch.arange(6.0, device="cuda").reshape(2, 3).T, "y": [torch.ones(3, device="cuda"), np.zeros(2)]}
    tb.save(tmp_path / f"x{suffix}", saved)
    loaded = tb.load(tmp_path / f"x{suffix}", "torch", device="cuda")
    assert loaded["x"].is_cuda and loaded["x"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert loaded["y"][0].tolist() == [1, 1, 1] and loaded["y"][1].is_cuda
    pytest.importorskip("cupy")
    assert tb.load(tmp_path / f"x{suffix}", "cupy", device="cuda")["y"][0].sum() == 3


def test_the_page_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "files.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "files.md", "exec"), {})


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_a_program_near_its_recursion_limit_learns_nothing_about_the_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"good{suffix}"
    tb.save(path, np.ones(3) if suffix == ".npy" else {"a": [np.ones(3)]})

    def deep(left: int) -> Any:
        return deep(left - 1) if left else tb.load(path, "numpy")

    failed = 0
    for depth in range(sys.getrecursionlimit()):
        try:
            deep(depth)
        except RecursionError:
            failed += 1
    assert 0 < failed < sys.getrecursionlimit()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
def test_what_a_signal_handler_raises_passes(
    kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise kind("mine")

    paths = [tmp_path / name for name in ("x.npy", "x.npz")]
    for path in paths:
        tb.save(path, np.ones(3))
    for name in ("write_array", "read_magic"):
        with monkeypatch.context() as patch:
            patch.setattr(formats.npy, name, interrupted)
            for path in paths:
                with pytest.raises(kind, match="^mine$"):
                    tb.save(path, np.ones(3)) if name == "write_array" else tb.load(path, "numpy")
    assert sorted(tmp_path.iterdir()) == paths
    with monkeypatch.context() as patch:
        patch.setattr(zipfile, "_EndRecData", interrupted)
        with pytest.raises(kind, match="^mine$"):
            tb.load(tmp_path / "x.npz", "numpy")
