"""Files: what is saved is what is loaded, and a damaged file is refused or loaded as its own library loads it."""

from __future__ import annotations

import functools
import io
import json
import re
import resource
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

import truebridge as tb
from hostile.subjects import Case, Subject

# What a load may allocate in addition to what is in use. The longest description of a tree takes about 400 MiB.
SPACE = 1 << 30
LIMIT = 1 << 20
NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
SIGNATURES = [b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6"]
TREE = "truebridge.tree.json"


class Wrong(Exception):
    """A load that returned something else, or took more than it may."""


def leaf(dtype: str, shape: list[int], how: str) -> Any:
    """A tensor whose bytes count up."""
    import torch

    if dtype == "bool":
        array = np.asarray(np.arange(int(np.prod(shape))).reshape(shape) % 3 == 0)
    elif dtype in NARROW:
        width = 2 if dtype == "bfloat16" else 1
        bytes_ = torch.arange(int(np.prod(shape)) * width, dtype=torch.uint8)
        return bytes_.view(getattr(torch, dtype)).reshape(shape)
    else:
        array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    if how == "transposed":
        return array.T
    return torch.from_numpy(array) if how == "torch" else array


def made(node: Any) -> Any:
    kind, *rest = node
    if kind == "leaf":
        return leaf(*rest)
    if kind == "value":
        return rest[0]
    if kind == "dict":
        return {key: made(child) for key, child in rest}
    return [made(child) for child in rest] if kind == "list" else tuple(made(child) for child in rest)


def parts(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for child in tree:
            yield from parts(child)
    elif hasattr(tree, "dtype"):
        yield tree


def facts(tensor: Any) -> Any:
    """All that a file says of a tensor."""
    array = tb.to_numpy(tensor)
    return (array.dtype.name, array.shape, array.tobytes())


def shown(tree: Any, ordered: bool) -> Any:
    """A tree for a comparison, with the types of keys and values."""
    if isinstance(tree, dict):
        items = [(type(key), key, shown(child, ordered)) for key, child in tree.items()]
        return ("dict", items if ordered else sorted(items, key=repr))
    if isinstance(tree, (list, tuple)):
        return (type(tree), [shown(child, ordered) for child in tree])
    return facts(tree) if hasattr(tree, "dtype") else (type(tree), repr(tree))


def numbers(data: bytearray, at: int, value: int) -> None:
    """Replaces one of the numbers that stand in the file as digits."""
    found = list(re.finditer(rb"\d+", data[:4096]))
    if found:
        first, last = found[at % len(found)].span()
        data[first:last] = str(value).encode()


def record(data: bytearray, at: int, value: int) -> None:
    """Changes two or four bytes of one of the records of an archive."""
    signature = SIGNATURES[at % len(SIGNATURES)]
    found = [match.start() for match in re.finditer(re.escape(signature), data)]
    if found:
        begin = found[at // 4 % len(found)] + 4 + 2 * (at // 16 % 21)
        patch = struct.pack("<I", value % (1 << 32))[: 2 if at % 3 else 4]
        if begin + len(patch) <= len(data):
            data[begin : begin + len(patch)] = patch


def cut(data: bytearray, at: int, value: int) -> None:
    """Truncates, or drops bytes from the middle."""
    begin = at % (len(data) + 1)
    del data[begin : len(data) if value % 2 else begin + value % 64]


def change(data: bytearray, at: int, value: int) -> None:
    if data:
        data[at % len(data)] = value % 256


def insert(data: bytearray, at: int, value: int) -> None:
    """Repeats some bytes of the file elsewhere."""
    begin = value % (len(data) + 1)
    data[at % (len(data) + 1) : 0] = data[begin : begin + value % 512]


def length(data: bytearray, at: int, value: int) -> None:
    data[at % 11 : at % 11 + 8] = struct.pack("<Q", value % (1 << 64))[: 8 - at % 7]


DAMAGE: dict[str, Callable[[bytearray, int, int], None]] = {
    "numbers": numbers,
    "record": record,
    "cut": cut,
    "change": change,
    "insert": insert,
    "length": length,
}


def header(shape: str, dtype: str = "<f4") -> bytes:
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text) % (1 << 16)) + text


def archive(path: Path, members: list[tuple[str, bytes]], how: int = zipfile.ZIP_DEFLATED) -> None:
    """Writes an archive, also with two members of one name."""
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", how) as file:
        warnings.simplefilter("ignore")
        for name, data in members:
            file.writestr(name, data)


def chosen(number: int, *choices: Any) -> Any:
    return choices[number % len(choices)]


#: Descriptions of trees that no program saves: the tree, and the names of its tensors.
DESCRIBED: dict[str, Callable[[int], tuple[str, Any]]] = {
    "deep": lambda number: ('["l",[' * (number % 3000) + '["x",0]' + "]]" * (number % 3000), ["a"]),
    "deep text": lambda number: ("[" * (number % (1 << 20)), ["a"]),
    "names": lambda number: ('["x",0]', chosen(number, [], {}, 3, "a", None, ["b"], ["a", "a"], [["a"]])),
    "tree": lambda number: (
        chosen(number, "3", "null", '["x",9]', '["d",[[[],3]]]', '["p",3]', '["l",3]', '["x","a"]', "[]"),
        ["a"],
    ),
}
#: Archives that no program saves: their members.
ARCHIVES: dict[str, Callable[[int], list[tuple[str, bytes]]]] = {
    "tree bomb": lambda number: [(TREE, b"[{}," * ((number % 32) << 18))],
    "bomb": lambda number: [("a.npy", header(f"({number % 64 << 18},)") + bytes(number % 64 << 20))],
    "false bomb": lambda number: [("a.npy", header(f"({number},)") + bytes(16))],
    "one place": lambda number: [
        (f"{at:04}.npy", header(f"({number % 4096},)") + bytes(number % 4096 * 4)) for at in range(40)
    ],
    "one name": lambda number: [("a.npy", header("()") + bytes(4))] * (1 + number % 3),
    "another method": lambda number: [(chosen(number, TREE, "a.npy"), header("()") + bytes(4))],
    "header": lambda number: [("a.npy", header(odd_shape(number)))],
}


def odd_shape(number: int) -> str:
    return chosen(
        number,
        f"({number},)",
        "(" * (number % 5000),
        "-" * (number % 5000) + "1",
        "9" * (number % 9000),
        "(True,)",
    )


def craft(path: Path, how: str, number: int) -> None:
    """Write a file that no program saves."""
    if how in ARCHIVES:
        methods = {
            "header": zipfile.ZIP_STORED,
            "another method": chosen(number // 2, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA),
        }
        archive(path, ARCHIVES[how](number), methods.get(how, zipfile.ZIP_DEFLATED))
        if how == "one place":
            # Every name leads to one of the first members.
            data = bytearray(path.read_bytes())
            for found in re.finditer(re.escape(b"PK\1\2"), bytes(data)):
                struct.pack_into("<I", data, found.start() + 42, number % 3)
            path.write_bytes(data)
        return
    tree, names = DESCRIBED[how](number)
    text = json.dumps({"tree": tree, "names": names})
    if path.suffix == ".npz":
        archive(path, [(TREE, text.encode()), ("a.npy", header("(2,)") + bytes(8))])
    else:
        entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
        start = json.dumps({"__metadata__": {"truebridge.tree": text}, "a": entry}).encode()
        path.write_bytes(struct.pack("<Q", len(start)) + start + bytes(8))


def load(path: Path, target: str, copy: bool | None) -> Any:
    """Loads a file with little memory, so that what takes more than it may fails."""
    tb.profile(target)  # type: ignore[arg-type]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPACE, before[1]))
    try:
        return tb.load(path, target, copy=copy, max_nbytes=LIMIT)  # type: ignore[arg-type]
    except tb.BridgeError as error:
        if error.kind == "out_of_memory":
            raise Wrong(f"takes more than {SPACE} bytes: {error}") from error
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def known(path: Path) -> Any:
    """What the library of the format loads, or ``None``."""
    try:
        if path.suffix == ".safetensors":
            import safetensors.torch

            return list(safetensors.torch.load_file(path).values())
        if path.suffix == ".npy":
            return [np.load(path, allow_pickle=False)]
        with zipfile.ZipFile(path) as opened:
            names = [name for name in opened.namelist() if name != TREE]
            return [npy.read_array(io.BytesIO(opened.read(name)), allow_pickle=False) for name in names]
    except Exception:
        # It reads checksums, which need the whole file, or knows fewer dtypes.
        return None


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="truebridge-hostile-")


def file(case: Case) -> Subject:
    """A file, loaded after it was saved and damaged."""
    path = Path(folder().name, f"x{case['suffix']}")
    pristine = not case["damage"] and case["crafted"] is None

    def act(target: str, copy: bool | None) -> Any:
        tree = made(case["tree"])
        if case["crafted"] is not None:
            craft(path, case["crafted"], case["number"])
        else:
            tb.save(path, tree)
            if case["compressed"] and case["suffix"] == ".npz":
                with zipfile.ZipFile(path) as saved:
                    members = [(member.filename, saved.read(member)) for member in saved.infolist()]
                archive(path, members)
        data = bytearray(path.read_bytes())
        for how, at, value in case["damage"]:
            DAMAGE[how](data, at, value)
        path.write_bytes(data)
        loaded = load(path, target, copy if target == "torch" else None)
        ordered = case["suffix"] == ".npz"
        if pristine:
            if shown(tree, ordered) != shown(loaded, ordered):
                raise Wrong(f"loaded {loaded!r:.200} instead of {tree!r:.200}")
        elif (expected := known(path)) is not None:
            if sorted(map(facts, expected)) != sorted(map(facts, parts(loaded))):
                raise Wrong(f"loaded {loaded!r:.200}, and others {expected!r:.200}")
        return loaded

    return Subject(act, must_convert=pristine, wrong_after=lambda: left(path))


def left(path: Path) -> str:
    """What else than the file is in its folder."""
    others = [name.name for name in path.parent.iterdir() if name.suffix not in (".npy", ".npz", ".safetensors")]
    return f"left {others}" if others else ""
