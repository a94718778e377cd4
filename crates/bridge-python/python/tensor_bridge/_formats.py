"""The formats of files: NumPy's and that of safetensors. Headers are checked before anything else is read."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import mmap
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from .errors import BridgeError, of_kind

Arrays = dict[str, Any]
#: Arrays by name, and the description of their tree, if there is one.
Read = tuple[Any, Any]

#: Bytes of a header of NumPy that are read at most. NumPy refuses longer ones as well.
_HEADER = 16 << 10

#: Data of ``.npz`` begin at multiples of this number of bytes: every framework then takes them in place.
_ALIGNMENT = 64

#: The member of a ``.npz``, and the key in the metadata of safetensors, that describes a tree.
_MEMBER, _KEY = "tensor_bridge.tree.json", "tensor_bridge.tree"

_VERSIONS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}

#: How far deflate can shrink: what claims more is malformed.
_DEFLATE = 1032

#: The dtypes of safetensors, as NumPy and ml_dtypes name them.
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def write_npy(path: str, arrays: Arrays, described: Any) -> None:
    """Write the one tensor of ``arrays``."""
    if described is None or described["tree"] is not None:
        raise of_kind("argument", "a .npy file holds one tensor: save a tree as .npz or .safetensors")
    (array,) = _numbers(arrays).values()
    with open(path, "wb") as file:
        npy.write_array(file, array, allow_pickle=False)


def write_npz(path: str, arrays: Arrays, described: Any) -> None:
    """Write each tensor as a member that is not compressed, with its data at a multiple of 64 bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in _numbers(arrays).items():
            member = zipfile.ZipInfo(f"{name}.npy")
            # What comes before the data: the fixed part, the name, and the two fields below.
            start = archive.start_dir + 30 + len(member.filename.encode()) + 20 + 4
            # zipfile writes a field of 20 bytes for lengths of 8 bytes; this field, whose number no program has, pads.
            member.extra = struct.pack("<HH", 0xDA7A, -start % _ALIGNMENT) + bytes(-start % _ALIGNMENT)
            with archive.open(member, "w", force_zip64=True) as file:
                npy.write_array(file, array, allow_pickle=False)
        if described is not None:
            archive.writestr(_MEMBER, json.dumps(described))


def write_safetensors(path: str, arrays: Arrays, described: Any) -> None:
    """Write the tensors by the package safetensors."""
    known = _safetensors()
    for name, array in _named(arrays).items():
        if array.dtype.name not in _DTYPES.values():
            raise of_kind("dtype", f"{name}: safetensors has no {array.dtype}: convert it first, or save it as .npz")
    compact = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    known.numpy.save_file(compact, path, None if described is None else {_KEY: json.dumps(described)})


def read_npy(path: str, limit: int | None) -> Read:
    """Return the array of a file, in a mapping of it."""
    with _mapped(path) as (memory, _), _faults(path):
        dtype, shape, order, start = _header(memory[:_HEADER])
        _bounded(_nbytes(dtype, shape), limit)
        return _array(memory, dtype, shape, order, start, len(memory)), None


def read_npz(path: str, limit: int | None) -> Read:
    """Return the arrays of the members of a file: in a mapping of it, or from what is compressed."""
    with _mapped(path) as (memory, file), _faults(path), zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        described = [json.loads(archive.read(member)) for member in members if member.filename == _MEMBER]
        headers = {member: _member(archive, member) for member in members if member.filename != _MEMBER}
        _bounded(sum(_nbytes(dtype, shape) for dtype, shape, _, _ in headers.values()), limit)
        packed = [header for member, header in headers.items() if member.compress_type != zipfile.ZIP_STORED]
        _bounded(sum(_nbytes(dtype, shape) for dtype, shape, _, _ in packed), _machine(), "decompressed, ")
        arrays = {}
        for member, header in headers.items():
            name = member.filename.removesuffix(".npy")
            if member.compress_type == zipfile.ZIP_STORED:
                start = _data(memory, member)
                arrays[name] = _array(memory, *header[:3], start + header[3], start + member.file_size)
            else:
                arrays[name] = _unpacked(archive, member, *header)
        return arrays, described[0] if described else None


def read_safetensors(path: str, limit: int | None) -> Read:
    """Return the tensors of a file in a mapping of it. The package safetensors checks the header first."""
    known = _safetensors()
    with _mapped(path) as (memory, file), _faults(path, known.SafetensorError):
        # The file that is mapped, whatever stands at the path by now.
        with known.safe_open(f"/proc/self/fd/{file.fileno()}", framework="np") as checked:
            metadata = checked.metadata() or {}
        start = 8 + int.from_bytes(memory[:8], "little")
        header = json.loads(memory[8:start])
        header.pop("__metadata__", None)
        facts = {
            name: (_dtype(name, one["dtype"]), tuple(one["shape"]), one["data_offsets"]) for name, one in header.items()
        }
        _bounded(sum(_nbytes(dtype, shape) for dtype, shape, _ in facts.values()), limit)
        arrays = {
            name: _array(memory, dtype, shape, "C", start + first, start + last)
            for name, (dtype, shape, (first, last)) in facts.items()
        }
        return arrays, json.loads(metadata[_KEY]) if _KEY in metadata else None


#: The functions that write and read a format, by its suffix.
FORMATS: dict[str, tuple[Callable[[str, Arrays, Any], None], Callable[[str, int | None], Read]]] = {
    ".npy": (write_npy, read_npy),
    ".npz": (write_npz, read_npz),
    ".safetensors": (write_safetensors, read_safetensors),
}


def _named(arrays: Arrays) -> Arrays:
    """Refuse names that no file can hold."""
    for name in arrays:
        if "\0" in name or name == "__metadata__" or any("\ud800" <= letter <= "\udfff" for letter in name):
            raise of_kind("argument", f"{name!r:.80} cannot be the name of a tensor in a file: choose another key")
    return arrays


def _numbers(arrays: Arrays) -> Arrays:
    """Refuse dtypes that NumPy's files lose."""
    for name, array in _named(arrays).items():
        if array.dtype.isbuiltin != 1:
            raise of_kind("dtype", f"{name}: NumPy's files have no {array.dtype}: save it as .safetensors")
    return arrays


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        text = "files of safetensors are checked and written by its package: pip install safetensors"
        raise of_kind("missing", text) from error
    return safetensors


def _dtype(name: str, dtype: str) -> Any:
    if dtype not in _DTYPES:
        raise of_kind(
            "dtype", f"{name}: {dtype} has no counterpart in NumPy: load it with the program that has saved it"
        )
    try:
        return np.dtype(_DTYPES[dtype])
    except TypeError:
        pass
    try:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, _DTYPES[dtype]))
    except (ImportError, AttributeError) as error:
        raise of_kind("missing", f"{name}: {dtype} is a dtype of ml_dtypes: pip install --upgrade ml_dtypes") from error


@contextlib.contextmanager
def _mapped(path: str) -> Iterator[tuple[mmap.mmap, IO[bytes]]]:
    """Map a file, with writes that stay in this process. Its arrays keep the mapping, not the file."""
    # Opening what is no file, such as a pipe, must not wait.
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode):
        os.close(number)
        raise of_kind("file", f"{path} is no file: pass the path of one")
    with open(number, "rb") as file:
        if not status.st_size:
            raise of_kind("file", f"{path}: the file is empty")
        yield mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), file


@contextlib.contextmanager
def _faults(path: str, *also: type[Exception]) -> Iterator[None]:
    """Turn what NumPy, zipfile, json and safetensors raise over a malformed file into an error of this package."""
    malformed: tuple[type[Exception], ...] = (
        ValueError,
        TypeError,
        LookupError,
        EOFError,
        OverflowError,
        AttributeError,
    )
    malformed += (OSError, RuntimeError, zipfile.BadZipFile, struct.error, zlib.error, *also)
    try:
        yield
    except BridgeError as error:
        raise of_kind(error.kind, f"{path}: {error}") from error.__cause__
    except malformed as error:
        # zipfile seeks to where a malformed file says.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise of_kind("file", f"{path}: the file is truncated or malformed: {error!s:.300}") from error


def _header(start: bytes) -> tuple[Any, tuple[int, ...], str, int]:
    """Return the dtype, the shape and the order of an array, and where its data begin, of the start of a file."""
    file = io.BytesIO(start)
    version = npy.read_magic(file)
    if version not in _VERSIONS:
        raise of_kind("file", f"version {version[0]}.{version[1]} of NumPy's format is for records, or unknown")
    try:
        shape, fortran, dtype = _VERSIONS[version](file)
    except Exception as error:
        # NumPy passes on what Python's parser raises.
        raise of_kind("file", f"the header is malformed: {error!s:.300}") from error
    if dtype.hasobject:
        raise of_kind("file", "pickled Python objects can run any program: save the numbers that are in them")
    if not dtype.isnative:
        text = f"{dtype} has another byte order: save it as dtype.newbyteorder('=')"
        raise of_kind("dtype", text)
    if dtype.kind not in "biufc":
        raise of_kind("dtype", f"{dtype} has no counterpart in other frameworks: save numbers")
    if any(length < 0 for length in shape):
        raise of_kind("file", f"the shape {shape} is negative")
    return dtype, shape, "F" if fortran else "C", file.tell()


def _nbytes(dtype: Any, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * int(dtype.itemsize)


def _bounded(nbytes: int, limit: int | None, what: str = "") -> None:
    if limit is not None and nbytes > limit:
        raise of_kind("file", f"{what}the tensors have {nbytes} bytes, and {limit} are allowed")


def _machine() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _array(memory: mmap.mmap, dtype: Any, shape: tuple[int, ...], order: Any, start: int, end: int) -> Any:
    """Return the array between these bytes of a mapping: in place, or a copy if it is not aligned."""
    nbytes = _nbytes(dtype, shape)
    if not 0 <= start <= end <= len(memory) or nbytes != end - start:
        there = max(0, min(end, len(memory)) - start)
        raise of_kind("file", f"a tensor {shape} of {dtype} takes {nbytes} bytes, and {there} are there")
    if not nbytes:
        return np.empty(shape, dtype)
    array = np.frombuffer(memory, dtype, math.prod(shape), start).reshape(shape, order=order)
    return array if array.flags.aligned else array.copy(order=order)


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[Any, tuple[int, ...], str, int]:
    """Return the header of a member, whose size is compared with that of the member."""
    if not member.filename.endswith(".npy"):
        raise of_kind("file", f"{member.filename!r:.80} is no array: NumPy's are called *.npy")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise of_kind("file", f"{member.filename!r:.80} is compressed by another method than those of NumPy")
    if member.compress_type == zipfile.ZIP_DEFLATED and member.file_size > _DEFLATE * member.compress_size + _HEADER:
        text = f"{member.filename!r:.80} claims {member.file_size} bytes, more than {member.compress_size} can hold"
        raise of_kind("file", text)
    with archive.open(member) as file:
        header = _header(file.read(_HEADER))
    takes, there = _nbytes(*header[:2]), member.file_size - header[3]
    if takes != there:
        raise of_kind("file", f"{member.filename!r:.80} has {there} bytes, and its header says {takes}")
    return header


def _data(memory: mmap.mmap, member: zipfile.ZipInfo) -> int:
    """Return where a member that is not compressed begins. ``zipfile`` has checked its local header."""
    if member.compress_size != member.file_size:
        raise of_kind("file", f"{member.filename!r:.80} is not compressed, and has two sizes")
    name, extra = struct.unpack_from("<HH", memory, member.header_offset + 26)
    return member.header_offset + 30 + int(name) + int(extra)


def _unpacked(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, dtype: Any, shape: tuple[int, ...], order: Any, start: int
) -> Any:
    """Return the array of a compressed member."""
    array = np.empty(math.prod(shape), dtype)
    left = memoryview(array.view(np.uint8)) if array.size else memoryview(b"")
    with archive.open(member) as file:
        file.read(start)
        while left:
            count = file.readinto(left[: 1 << 20])  # type: ignore[attr-defined]
            if not count:
                raise of_kind("file", f"{member.filename!r:.80} is truncated")
            left = left[count:]
        # The end, where the checksum is compared.
        file.read(1)
    return array.reshape(shape, order=order)
