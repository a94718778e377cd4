"""The formats of files: NumPy's and that of safetensors. Headers are checked before anything else is read."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import mmap
import os
import re
import stat
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from ..diagnostics.progress import Meter
from ..errors import BridgeError, BridgeWarning, of_kind
from ..processes.trees import SAVED, is_own

Arrays = dict[str, Any]
#: Arrays by name, and the description of their tree, if there is one.
Read = tuple[Any, Any]

#: Bytes of a header of NumPy that are read at most. NumPy refuses longer ones as well.
_HEADER = 16 << 10

#: Data of ``.npz`` begin at multiples of this number of bytes: every framework then takes them in place.
_ALIGNMENT = 64

#: The member of a ``.npz``, and the key in the metadata of safetensors, that describes a tree.
_MEMBER, _KEY = "truebridge.tree.json", "truebridge.tree"

#: Version 3.0 differs from 2.0 only in the names of fields, which no dtype of numbers has.
_VERSIONS = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
    (3, 0): npy.read_array_header_2_0,
}

#: The most bytes of the name of a member: its length has 16 bits.
_NAME = (1 << 16) - 1

#: How far deflate can shrink: what claims more is malformed.
_DEFLATE = 1032

#: Pages that are written to take memory, and the others none. Without this flag, which Python 3.10 does not name, the
#: kernel refuses to map more than it could hold.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

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

#: The dtypes of safetensors whose elements are less than a byte, with their bits. They are loaded as bytes.
_NARROW = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class _Found(NamedTuple):
    """An array that a file holds, as its header says."""

    dtype: Any
    shape: tuple[int, ...]
    order: Any
    #: Where the data begin and end: in the file, or in what a compressed member holds.
    start: int
    end: int
    #: The member, if it is compressed.
    packed: zipfile.ZipInfo | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def is_copied(self) -> bool:
        """Whether the array takes memory besides the mapping."""
        return self.packed is not None or self.start % self.dtype.alignment != 0


def write_npy(path: str, arrays: Arrays, description: str | None, meter: Meter) -> None:
    """Write the one tensor of ``arrays``."""
    if description is None or json.loads(description)["tree"] is not None:
        raise of_kind("argument", "a .npy file holds one tensor: save a tree as .npz or .safetensors")
    (array,) = _numbers(arrays).values()
    with open(path, "wb") as file:
        npy.write_array(_counted(file, meter), array, allow_pickle=False)


@contextlib.contextmanager
def _archive(path: str) -> Iterator[zipfile.ZipFile]:
    """Open a new archive, which is left as it is after an error: to close it with half a member is another error."""
    with open(path, "wb") as file:
        archive = zipfile.ZipFile(file, "w")
        try:
            yield archive
            archive.close()
        except BaseException:
            archive.fp = None
            raise


def write_npz(path: str, arrays: Arrays, description: str | None, meter: Meter) -> None:
    """Write each tensor as a member that is not compressed, with its data at a multiple of 64 bytes."""
    with _archive(path) as archive:
        for name, array in _numbers(arrays).items():
            member = zipfile.ZipInfo(f"{name}.npy")
            if len(member.filename.encode()) > _NAME:
                raise of_kind("argument", f"{name:.80}… is too long for a name in .npz: choose a shorter key")
            # What comes before the data: the fixed part, the name, and the two fields below.
            start = archive.start_dir + 30 + len(member.filename.encode()) + 20 + 4
            # zipfile writes a field of 20 bytes for lengths of 8 bytes; this field, whose number no program has, pads.
            member.extra = struct.pack("<HH", 0xDA7A, -start % _ALIGNMENT) + bytes(-start % _ALIGNMENT)
            with archive.open(member, "w", force_zip64=True) as file:
                npy.write_array(_counted(file, meter), array, allow_pickle=False)
        if description is not None:
            archive.writestr(_MEMBER, description)


def write_safetensors(path: str, arrays: Arrays, description: str | None, meter: Meter) -> None:
    """Write the tensors by the package safetensors, in one call: it is a single step."""
    known = _safetensors()
    for name, array in _named(arrays).items():
        if array.dtype.name not in _DTYPES.values():
            elsewhere = ", or save it as .npz" if array.dtype.isbuiltin == 1 else ""
            raise of_kind("dtype", f"{name}: safetensors has no {array.dtype}: convert it first{elsewhere}")
    compact = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    metadata = None if description is None else {_KEY: description}
    try:
        known.numpy.save_file(compact, path, metadata)
    except known.SafetensorError as error:
        # A full disk, for example, which it reports in its own words.
        if (number := re.search(r"os error (\d+)", str(error))) is None:
            raise of_kind("argument", f"safetensors refuses this ({error!s:.300}): save it as .npz") from error
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    _in_order(path, list(arrays))
    meter.step(sum(array.nbytes for array in compact.values()))


def _in_order(path: str, names: list[str]) -> None:
    """Write the names in the header of safetensors, which its package has sorted, in this order."""
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        sorted_header = json.loads(file.read(length))
        header = {name: sorted_header[name] for name in ("__metadata__", *names) if name in sorted_header}
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        # The same text in another order: what is left of the header is its padding.
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


def _counted(file: Any, meter: Meter) -> Any:
    """Return what writes to the file and counts the bytes.

    To a file itself NumPy writes in a way that does not say why a write fails.
    """

    def write(data: Any) -> None:
        file.write(data)
        meter.step(len(data))

    return SimpleNamespace(write=write)


def read_npy(path: str, limit: int | None, meter: Meter) -> Read:
    """Return the array of a file, in a mapping of it."""
    with _mapped(path) as (memory, _), _faults(path):
        dtype, shape, order, start = _header(memory[:_HEADER])
        found = {"array": _Found(dtype, shape, order, start, len(memory))}
        return _arrays(memory, found, limit, meter)["array"], None


def read_npz(path: str, limit: int | None, meter: Meter) -> Read:
    """Return the arrays of the members of a file: in a mapping of it, or from what is compressed."""
    with _mapped(path) as (memory, file), _faults(path), zipfile.ZipFile(file) as archive:
        members = _members(archive, memory)
        described = members.pop(_MEMBER, None)
        found = {name.removesuffix(".npy"): _member(archive, memory, member) for name, member in members.items()}
        arrays = _arrays(memory, found, limit, meter, archive)
        return arrays, None if described is None else _description(described.file_size, archive.read, described)


def read_safetensors(path: str, limit: int | None, meter: Meter) -> Read:
    """Return the tensors of a file in a mapping of it. The package safetensors checks the header first."""
    known = _safetensors()
    with _mapped(path) as (memory, file), _faults(path, known.SafetensorError):
        # The file that is mapped, whatever stands at the path by now.
        with known.safe_open(f"/proc/self/fd/{file.fileno()}", framework="np") as checked:
            metadata = checked.metadata() or {}
        start = 8 + int.from_bytes(memory[:8], "little")
        header = json.loads(memory[8:start])
        header.pop("__metadata__", None)
        found = {
            name: _Found(*_elements(name, one), "C", *(start + at for at in one["data_offsets"]))
            for name, one in header.items()
        }
        arrays = _arrays(memory, found, limit, meter)
        narrow = [f"{name} ({one['dtype']})" for name, one in header.items() if one["dtype"] in _NARROW]
        if narrow:
            what = f"{path}: elements of less than a byte are loaded as their bytes, uint8: {', '.join(narrow)}"
            # The caller of load().
            warnings.warn(f"{what:.500}", BridgeWarning, stacklevel=3)
        return arrays, _description(len(metadata[_KEY]), metadata.get, _KEY) if _KEY in metadata else None


#: The functions that write and read a format, by its suffix.
FORMATS: dict[str, tuple[Callable[[str, Arrays, Any, Meter], None], Callable[[str, int | None, Meter], Read]]] = {
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
            advice = "save it as .safetensors" if array.dtype.name in _DTYPES.values() else "convert it first"
            raise of_kind("dtype", f"{name}: NumPy's files have no {array.dtype}: {advice}")
    return arrays


def _description(length: int, read: Callable[[Any], Any], source: Any) -> Any:
    """Return the description of a tree, which has ``length`` bytes and is read from ``source``."""
    if length > SAVED:
        raise of_kind("file", f"the description of the tree has {length} bytes, and {SAVED} are allowed")
    return json.loads(read(source))


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        text = "files of safetensors are checked and written by its package: pip install safetensors"
        raise of_kind("missing", text) from error
    return safetensors


def _elements(name: str, one: dict[str, Any]) -> tuple[Any, tuple[int, ...]]:
    """Return the dtype and the shape of a tensor; of one with elements of less than a byte, those of its bytes."""
    shape = tuple(one["shape"])
    bits = _NARROW.get(one["dtype"])
    if bits is None:
        return _dtype(name, one["dtype"]), shape
    *rows, last = shape or (1,)
    # Where a row is not a whole number of bytes, the bytes are in no rows.
    whole = last * bits % 8 == 0
    return np.dtype(np.uint8), (*rows, last * bits // 8) if whole else (math.prod(shape) * bits // 8,)


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
    # Opening what is not a file, such as a pipe, must not wait.
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode):
        os.close(number)
        raise of_kind("file", f"{path} is not a regular file: pass the path of one")
    with open(number, "rb") as file:
        if not status.st_size:
            raise of_kind("file", f"{path}: the file is empty")
        try:
            memory = mmap.mmap(number, 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            text = f"{path}: this process may not map {status.st_size} bytes: raise its limits (ulimit -v, -d)"
            raise of_kind("out_of_memory", text) from error
        yield memory, file


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
    except MemoryError as error:
        text = f"{path}: out of memory for what must be decompressed or copied: {error!s:.300}"
        raise of_kind("out_of_memory", text) from error
    except RecursionError as error:
        if is_own(error):
            raise
        raise of_kind("file", f"{path}: the file is malformed: {error!s:.300}") from error
    except malformed as error:
        # zipfile seeks to where a malformed file says, and replaces the errors of the system. What has no number is not
        # the system's: a signal handler may raise TimeoutError.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        if isinstance(error.__context__, OSError) and error.__context__.errno is None:
            raise error.__context__ from None
        raise of_kind(
            "file", f"{path}: the file is truncated, malformed or of another format: {error!s:.300}"
        ) from error


def _header(start: bytes) -> tuple[Any, tuple[int, ...], str, int]:
    """Return the dtype, the shape and the order of an array, and where its data begin, of the start of a file."""
    file = io.BytesIO(start)
    version = npy.read_magic(file)
    if version not in _VERSIONS:
        raise of_kind(
            "file", f"version {version[0]}.{version[1]} of NumPy's format is not known: save it as version 1.0"
        )
    try:
        shape, fortran, dtype = _VERSIONS[version](file)
    except (OSError, RecursionError):
        raise
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


def _bounded(nbytes: int, limit: int | None, what: str = "") -> None:
    if limit is not None and nbytes > limit:
        advice = "load the file on a larger machine" if what else "raise max_nbytes"
        raise of_kind("file", f"{what}the tensors have {nbytes} bytes, and {limit} are allowed: {advice}")


def _machine() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _arrays(
    memory: mmap.mmap, found: dict[str, _Found], limit: int | None, meter: Meter, archive: zipfile.ZipFile | None = None
) -> Arrays:
    """Return the arrays of a file, once the sizes of all of them have been checked."""
    for name, one in found.items():
        there = one.end - one.start if one.packed else max(0, min(one.end, len(memory)) - one.start)
        if one.nbytes != there or one.start < 0:
            text = f"{name!r:.80}: a tensor {one.shape} of {one.dtype} takes {one.nbytes} bytes, and {there} are there"
            raise of_kind("file", text)
    _bounded(sum(one.nbytes for one in found.values()), limit)
    _bounded(sum(one.nbytes for one in found.values() if one.is_copied), _machine(), "decompressed or copied, ")
    meter.expect(sum(one.nbytes * (2 if one.packed else 1) for one in found.values()))
    return {name: _unpacked(archive, one, meter) if one.packed else _array(memory, one) for name, one in found.items()}


def _array(memory: mmap.mmap, one: _Found) -> Any:
    """Return an array in a mapping: in place, or a copy if it is not aligned."""
    if not one.nbytes:
        return np.empty(one.shape, one.dtype)
    array = np.frombuffer(memory, one.dtype, math.prod(one.shape), one.start).reshape(one.shape, order=one.order)
    return array.copy(order=one.order) if one.is_copied else array


def _members(archive: zipfile.ZipFile, memory: mmap.mmap) -> dict[str, zipfile.ZipInfo]:
    """Return the members by name. None lies over another, so that no byte is decoded twice."""
    members = {member.filename: member for member in archive.infolist()}
    if len(members) != len(archive.infolist()):
        raise of_kind("file", "two members have one name: write the file again")
    end = 0
    for member in sorted(members.values(), key=lambda member: member.header_offset):
        begin, start = member.header_offset, _data(memory, member)
        if begin < end or start + member.compress_size > archive.start_dir:
            raise of_kind("file", f"{member.filename!r:.80} overlaps another member")
        end = start + member.compress_size
        _sized(member)
    return members


def _sized(member: zipfile.ZipInfo) -> None:
    """Refuse a member that claims more than it can hold."""
    name, packed = f"{member.filename!r:.80}", member.compress_size
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise of_kind("file", f"{name} is compressed by another method than those of NumPy")
    if member.compress_type == zipfile.ZIP_STORED and packed != member.file_size:
        raise of_kind("file", f"{name} is not compressed, and has two sizes")
    if member.file_size > _DEFLATE * packed + _HEADER:
        raise of_kind("file", f"{name} claims {member.file_size} bytes, more than {packed} can hold")


def _data(memory: mmap.mmap, member: zipfile.ZipInfo) -> int:
    """Return where the data of a member begin."""
    if not 0 <= member.header_offset <= len(memory) - 30:
        raise of_kind("file", f"{member.filename!r:.80} begins outside of the file")
    name, extra = struct.unpack_from("<HH", memory, member.header_offset + 26)
    return member.header_offset + 30 + int(name) + int(extra)


def _member(archive: zipfile.ZipFile, memory: mmap.mmap, member: zipfile.ZipInfo) -> _Found:
    """Return the array that is a member."""
    if not member.filename.endswith(".npy"):
        text = f"{member.filename!r:.80} is not an array: NumPy's are called *.npy"
        is_of_torch = member.filename.endswith("/data.pkl")
        raise of_kind("file", f"{text}; torch.load reads a file of torch.save" if is_of_torch else text)
    with archive.open(member) as file:
        dtype, shape, order, start = _header(file.read(_HEADER))
    if member.compress_type != zipfile.ZIP_STORED:
        return _Found(dtype, shape, order, start, member.file_size, member)
    at = _data(memory, member)
    return _Found(dtype, shape, order, at + start, at + member.file_size)


def _unpacked(archive: Any, one: _Found, meter: Meter) -> Any:
    """Return the array of a compressed member."""
    array = np.empty(math.prod(one.shape), one.dtype)
    left = memoryview(array.view(np.uint8)) if array.size else memoryview(b"")
    with archive.open(one.packed) as file:
        file.read(one.start)
        while left:
            count = file.readinto(left[: 1 << 20])
            if not count:
                raise of_kind("file", "a member is truncated")
            left = left[count:]
            meter.step(count)
        # The end, where the checksum is compared.
        file.read(1)
    return array.reshape(one.shape, order=one.order)
