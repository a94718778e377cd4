"""Files in hostile places: what is not a file keeps its place, and a save that fails leaves the file that was there."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb

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


def child(program: str, *arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START + textwrap.dedent(program), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_leaves_the_file_that_was_there(suffix: str, tmp_path: Path) -> None:
    """A limit on the length of files stands for the disk: each write beyond it fails."""
    path = tmp_path / f"x{suffix}"
    tb.save(path, wrapped(path, np.ones(3)))
    done = child(
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


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone becomes another user")
def test_a_folder_of_another_user(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / f"x{suffix}"
    path.parent.mkdir()
    tb.save(path, wrapped(path, np.ones(3)))
    done = child(
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
        process = child(
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
        # What was under way stays beside it, hidden: a file of this package, of safetensors, or of both.
        assert all(name == path.name or name.startswith(".") for name in os.listdir(tmp_path))
