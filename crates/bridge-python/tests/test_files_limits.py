"""What loading a file may take: nothing is decoded twice or without a bound, and a file may be larger than memory."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")


TREE = "truebridge.tree.json"
#: More than the memory and the swap of any machine that runs the tests.
GIANT = 4 << 40


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def archive(*members: tuple[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as written:
        for name, data in members:
            written.writestr(name, data)
    return file.getvalue()


def directory(data: bytes, change: Callable[[int, bytearray], None]) -> bytes:
    """Change each entry of the directory of an archive: `change` gets its number and its bytes."""
    changed, at, number = bytearray(data), data.index(b"PK\1\2"), 0
    while changed[at : at + 4] == b"PK\1\2":
        length = 46 + sum(struct.unpack_from("<HHH", changed, at + 28))
        entry = changed[at : at + length]
        change(number, entry)
        changed[at : at + length] = entry
        at, number = at + length, number + 1
    return bytes(changed)


def one_place() -> bytes:
    """Sixty entries for one member."""
    body = archive(("00.npy", npy(np.zeros(1 << 16))))
    at, end = body.index(b"PK\1\2"), body.index(b"PK\5\6")
    entry, tail = body[at:end], bytearray(body[end:])
    entries = entry * 60
    struct.pack_into("<HHI", tail, 8, 60, 60, len(entries))
    return body[:at] + entries + bytes(tail)


def quoted() -> bytes:
    """Two members, of which the first, not compressed, holds the second."""
    inner = archive(("b.npy", npy(np.ones(3))), how=zipfile.ZIP_STORED)
    inner = inner[: inner.index(b"PK\1\2")]
    whole = archive(("a.npy", npy(np.zeros(len(inner), np.uint8)) + inner), ("b.npy", inner), how=zipfile.ZIP_STORED)
    start = whole.index(inner)
    return directory(whole, lambda number, entry: struct.pack_into("<I", entry, 42, start) if number else None)


def into_the_directory() -> bytes:
    """A member that reaches over the directory after it."""
    data = archive(("a.npy", npy(np.ones(3))), how=zipfile.ZIP_STORED)
    return directory(data, lambda _, entry: struct.pack_into("<II", entry, 20, len(data) - 40, len(data) - 40))


def twice() -> bytes:
    data = archive(("a.npy", npy(np.ones(3))), ("b.npy", npy(np.zeros(3))))
    return data.replace(b"b.npy", b"a.npy")


DAMAGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "one place": (one_place, "one name"),
    "quoted": (quoted, "overlaps another"),
    "the directory": (into_the_directory, "overlaps another"),
    "one name": (twice, "one name"),
    "tree of another method": (lambda: archive((TREE, b"{}"), how=zipfile.ZIP_LZMA), "another method"),
    "a long tree": (lambda: archive((TREE, bytes(17 << 20))), "description of the tree has 17825792 bytes"),
    "tensors that the tree leaves out": (
        lambda: archive((TREE, b'{"tree": "[\\"x\\",0]", "names": ["a"]}'), ("a.npy", npy(1)), ("b.npy", npy(2))),
        "does not fit",
    ),
}


TREES = [
    "3",
    "null",
    '["p",3]',
    '["x",true]',
    '["l",[["x",0],["x",0]]]',
    '["d",[[[],["x",0]]]]',
    "[" * 9999,
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree[:20])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_tree_without_each_of_its_tensors_once_is_refused(tree: str, suffix: str, tmp_path: Path) -> None:
    path, text = tmp_path / f"x{suffix}", json.dumps({"tree": tree, "names": ["a"]})
    if suffix == ".npz":
        path.write_bytes(archive((TREE, text.encode()), ("a.npy", npy(np.ones(2)))))
    else:
        known = pytest.importorskip("safetensors.numpy")
        known.save_file({"a": np.ones(2)}, path, {"truebridge.tree": text})
    with pytest.raises(tb.BridgeValueError, match="does not fit") as caught:
        tb.load(path, "numpy")
    assert caught.value.kind == "file"


@pytest.mark.parametrize("case", DAMAGED)
def test_members_are_decoded_once_and_bounded(case: str, tmp_path: Path) -> None:
    make, words = DAMAGED[case]
    (tmp_path / "x.npz").write_bytes(make())
    with pytest.raises(tb.BridgeValueError, match=words) as caught:
        tb.load(tmp_path / "x.npz", "numpy")
    assert caught.value.kind == "file"


def test_a_member_at_the_place_of_another_is_refused(tmp_path: Path) -> None:
    """Under other names, in the way of archives that decode one member many times."""
    names = [f"{number:02}.npy" for number in range(60)]
    data = archive(*((name, npy(np.zeros(1 << 10))) for name in names))
    first = directory(data, lambda _, entry: struct.pack_into("<I", entry, 42, 0))
    (tmp_path / "x.npz").write_bytes(first)
    with pytest.raises(tb.BridgeValueError, match="overlaps another"):
        tb.load(tmp_path / "x.npz", "numpy")


def child(program: str, *arguments: Any) -> None:
    """Run a program in a process whose limits do not outlive it."""
    text = "import resource\nimport sys\n\nimport numpy as np\n\nimport truebridge as tb\n"
    text += textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", text, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_bomb_in_the_tree_takes_no_memory(tmp_path: Path) -> None:
    """256 MiB in 256 KB: the child may use 128 MiB more than it has in use."""
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as written, written.open(TREE, "w") as member:
        for _ in range(4):
            member.write(bytes(64 << 20))
    assert path.stat().st_size < 1 << 20
    child(
        """
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), -1))
        for limit in (None, 4):
            try:
                tb.load(sys.argv[1], "numpy", max_nbytes=limit)
            except tb.BridgeValueError as error:
                assert error.kind == "file", error
                assert "description of the tree has 268435456 bytes" in str(error), error
            else:
                raise AssertionError
        """,
        path,
    )


def giant(path: Path) -> None:
    """Write a file of 4 TiB, of which almost nothing is on the disk."""
    header: bytes
    if path.suffix == ".npy":
        described = str({"descr": "|u1", "fortran_order": False, "shape": (GIANT,)}).encode()
        header = b"\x93NUMPY\1\0" + struct.pack("<H", 118) + described.ljust(117) + b"\n"
    else:
        text = json.dumps({"x": {"dtype": "U8", "shape": [GIANT], "data_offsets": [0, GIANT]}}).encode().ljust(120)
        header = struct.pack("<Q", 120) + text
    with open(path, "wb") as file:
        file.write(header)
        try:
            file.truncate(len(header) + GIANT)
        except OSError:
            pytest.skip("this file system holds no file of 4 TiB")
        file.seek(len(header) + GIANT - 1)
        file.write(b"\7")


@pytest.mark.parametrize("target", ["numpy", "torch"])
@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_a_file_larger_than_memory_is_mapped(suffix: str, target: Any, tmp_path: Path) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    path = tmp_path / f"x{suffix}"
    giant(path)
    loaded = tb.load(path, target)
    x = loaded if suffix == ".npy" else loaded["x"]
    assert x.shape == (GIANT,) and (int(x[0]), int(x[-1])) == (0, 7)
    x[0] = 3
    again = tb.load(path, target)
    assert int((again if suffix == ".npy" else again["x"])[0]) == 0, "a write has reached the file"
    with pytest.raises(tb.BridgeValueError, match=f"{GIANT} bytes, and 4 are allowed"):
        tb.load(path, target, max_nbytes=4)


def test_what_a_process_may_not_map_is_an_error_of_the_package(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    giant(path)
    child(
        """
        resource.setrlimit(resource.RLIMIT_AS, (1 << 40, -1))
        try:
            tb.load(sys.argv[1], "numpy")
        except tb.BridgeMemoryError as error:
            assert error.kind == "out_of_memory" and "ulimit" in str(error), error
        else:
            raise AssertionError
        """,
        path,
    )


def test_what_must_be_copied_and_is_larger_than_memory_is_refused(tmp_path: Path) -> None:
    """An array whose data are not aligned, in a file without data: nothing is allocated."""
    path = tmp_path / "x.npy"
    text = str({"descr": "<f8", "fortran_order": False, "shape": (GIANT >> 3,)}).encode()
    header = b"\x93NUMPY\1\0" + struct.pack("<H", 119) + text.ljust(118) + b"\n"
    with open(path, "wb") as file:
        file.write(header)
        try:
            file.truncate(len(header) + GIANT)
        except OSError:
            pytest.skip("this file system holds no file of 4 TiB")
    with pytest.raises(tb.BridgeValueError, match="decompressed or copied") as caught:
        tb.load(path, "numpy")
    assert caught.value.kind == "file"
    # A small one is copied.
    path.write_bytes(
        header.replace(str(GIANT >> 3).encode(), b"2".rjust(len(str(GIANT >> 3)))) + struct.pack("2d", 1, 2)
    )
    assert tb.load(path, "torch").tolist() == [1, 2]


def test_memory_that_runs_out_is_an_error_of_the_package(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.zeros(1 << 28, np.uint8))
    child(
        """
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), -1))
        try:
            tb.load(sys.argv[1], "numpy")
        except tb.BridgeMemoryError as error:
            assert error.kind == "out_of_memory" and sys.argv[1] in str(error), error
        else:
            raise AssertionError
        """,
        path,
    )


def test_a_description_that_is_too_long_is_not_saved(tmp_path: Path) -> None:
    """What is saved can be loaded."""
    tree = {"x": np.zeros(1), "text": "x" * (17 << 20)}
    for suffix in (".npz", ".safetensors"):
        if suffix == ".safetensors":
            pytest.importorskip("safetensors")
        with pytest.raises(tb.BridgeValueError, match="save it in parts") as caught:
            tb.save(tmp_path / f"x{suffix}", tree)
        assert caught.value.kind == "argument" and os.listdir(tmp_path) == []


@pytest.mark.parametrize("levels", [22, 60, 99])
@pytest.mark.parametrize("pair", [lambda x: [x, x], lambda x: (x, x), lambda x: {"a": x, "b": x}])
def test_a_tree_that_holds_itself_many_times_is_refused_at_once(levels: int, pair: Any, tmp_path: Path) -> None:
    """It is not written out first: that would take memory and time without end."""
    tree: Any = np.ones(1)
    for _ in range(levels):
        tree = pair(tree)
    with pytest.raises(tb.BridgeValueError, match="more than 1048576 bytes to describe: share it in parts"):
        tb.share(tree)
    for suffix in ["npz", "safetensors"]:
        with pytest.raises(tb.BridgeValueError, match="more than 16777216 bytes: save it in parts"):
            tb.save(tmp_path / f"x.{suffix}", tree)
    assert not list(tmp_path.iterdir())


def test_a_tree_that_holds_itself_a_few_times_is_saved(tmp_path: Path) -> None:
    tree: Any = np.ones(1)
    for _ in range(6):
        tree = [tree, tree]
    tb.save(tmp_path / "x.npz", tree)
    loaded = tb.load(tmp_path / "x.npz", "numpy")
    for _ in range(6):
        loaded = loaded[1]
    assert loaded == 1
    ticket = tb.share(tree)
    assert len(tb.open(ticket, "numpy")) == 2
    tb.revoke(ticket)


# Files in hostile places: what is not a file keeps its place, and a save that fails leaves the file that was there.


SUFFIXES = [".npy", ".npz", ".safetensors"]
START = "import os, resource, sys\nimport numpy as np\nimport truebridge as tb\npath = sys.argv[1]\n"


@pytest.fixture(params=SUFFIXES)
def suffix(request: pytest.FixtureRequest) -> str:
    if request.param == ".safetensors":
        pytest.importorskip("safetensors")
    return str(request.param)


def whole(path: Path) -> set[float]:
    """The elements of a file, each once."""
    loaded = tb.load(path, "numpy")
    return set((loaded if path.suffix == ".npy" else loaded["x"]).tolist())


def wrapped(path: Path, array: Any) -> Any:
    return array if path.suffix == ".npy" else {"x": array}


PLACES: dict[str, Callable[[Path], object]] = {
    "directory": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "link to a pipe": lambda path: (os.mkfifo(path.parent / "pipe"), path.symlink_to("pipe")),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_a_file_keeps_its_place(place: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    PLACES[place](path)
    before = [(name, (tmp_path / name).lstat().st_ino) for name in sorted(os.listdir(tmp_path))]
    for call in (lambda: tb.save(path, wrapped(path, np.ones(3))), lambda: tb.load(path, "numpy")):
        with pytest.raises(tb.BridgeValueError, match="is not a regular file") as caught:
            call()
        assert caught.value.kind == "file"
    assert [(name, (tmp_path / name).lstat().st_ino) for name in sorted(os.listdir(tmp_path))] == before


def test_links_in_a_circle_and_into_nowhere(suffix: str, tmp_path: Path) -> None:
    circle, nowhere = tmp_path / f"x{suffix}", tmp_path / f"y{suffix}"
    circle.symlink_to(circle.name)
    nowhere.symlink_to(f"nowhere/y{suffix}")
    for path, number in ((circle, errno.ELOOP), (nowhere, errno.ENOENT)):
        for call in (lambda path: tb.save(path, wrapped(path, np.ones(3))), lambda path: tb.load(path, "numpy")):
            with pytest.raises(OSError) as caught:
                call(path)
            assert caught.value.errno == number and path.is_symlink()


def test_an_error_of_the_system_names_the_path_of_the_caller(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "missing" / f"x{suffix}"
    with pytest.raises(FileNotFoundError) as caught:
        tb.save(path, wrapped(path, np.ones(3)))
    assert caught.value.filename == str(path) and ".part" not in str(caught.value)


def test_a_link_to_a_file_that_is_not_there_yet(suffix: str, tmp_path: Path) -> None:
    link = tmp_path / f"link{suffix}"
    link.symlink_to(f"x{suffix}")
    tb.save(link, wrapped(link, np.ones(3)))
    assert link.is_symlink() and whole(tmp_path / f"x{suffix}") == {1}


def test_the_longest_name_of_a_file(suffix: str, tmp_path: Path) -> None:
    for letter in "xü":
        path = tmp_path / (letter * ((255 - len(suffix)) // len(letter.encode())) + suffix)
        tb.save(path, wrapped(path, np.ones(3)))
        assert whole(path) == {1}


def limited(program: str, *arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START + textwrap.dedent(program), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_leaves_the_file_that_was_there(suffix: str, tmp_path: Path) -> None:
    """A limit on the length of files stands for the disk: each write beyond it fails."""
    path = tmp_path / f"x{suffix}"
    tb.save(path, wrapped(path, np.ones(3)))
    done = limited(
        """
        import errno
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, -1))
        array = np.zeros(1 << 15)
        try:
            tb.save(path, array if path.endswith(".npy") else {"x": array})
        except OSError as error:
            assert error.errno == errno.EFBIG, error
        else:
            raise AssertionError
        """,
        path,
    )
    assert (done.communicate(timeout=120)[1], done.returncode) == ("", 0)
    assert whole(path) == {1} and os.listdir(tmp_path) == [path.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / f"x{suffix}"
    path.parent.mkdir()
    tb.save(path, wrapped(path, np.ones(3)))
    done = limited(
        """
        array = np.zeros(3)
        calls = [
            lambda: tb.save(path, array if path.endswith(".npy") else {"x": array}),
            lambda: tb.load(path, "numpy"),
        ]
        # What is imported later may lie where the other user may not read.
        for call in calls:
            call()
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        for call in calls:
            try:
                call()
            except PermissionError:
                pass
            else:
                raise AssertionError
        """,
        path,
    )
    assert (done.communicate(timeout=120)[1], done.returncode) == ("", 0)
    assert whole(path) == {0} and os.listdir(path.parent) == [path.name]


def test_saves_to_one_path_at_once(suffix: str, tmp_path: Path) -> None:
    """The last one stays, and a load in between is of one of them."""
    path, wrong = tmp_path / f"x{suffix}", []
    tb.save(path, wrapped(path, np.zeros(1 << 12)))

    def save(number: int) -> None:
        for _ in range(10):
            tb.save(path, wrapped(path, np.full(1 << 12, number)))

    def load() -> None:
        for _ in range(40):
            if len(seen := whole(path)) != 1:
                wrong.append(seen)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    threads += [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(whole(path)) == 1 and os.listdir(tmp_path) == [path.name]


def test_a_save_that_is_killed_leaves_a_whole_file(suffix: str, tmp_path: Path) -> None:
    path, chance = tmp_path / f"x{suffix}", random.Random(suffix)
    for _ in range(3):
        process = limited(
            """
            number = 0
            while True:
                array = np.full(1 << 18, float(number % 100))
                tb.save(path, array if path.endswith(".npy") else {"x": array})
                if not number:
                    print("saved", flush=True)
                number += 1
            """,
            path,
        )
        assert process.stdout and process.stdout.readline() == "saved\n"
        time.sleep(chance.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert len(whole(path)) == 1
        # An unfinished write stays next to it, hidden: a file of this package, of safetensors, or of both.
        assert all(name == path.name or name.startswith(".") for name in os.listdir(tmp_path))
