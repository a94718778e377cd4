"""The wheel: one for every Python, with everything in it and nothing that wants more."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from test_process import library

PACKAGE = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("wheel")
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "-e", str(out), "build", "-b", str(out / "build")]
        + ["bdist_wheel", "-d", str(out), "-b", str(out / "bdist")],
        cwd=str(PACKAGE),
        env={**os.environ, "TRUEBRIDGE_TF1_LIBRARY": library()},
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=300,
    )
    (made,) = out.glob("*.whl")
    return made


def test_the_name_says_what_it_is_for(wheel: Path) -> None:
    cargo = PACKAGE.parent.parent.parent / "Cargo.toml"
    version = re.findall(r'^version = "(.+)"', cargo.read_text(), re.MULTILINE)[0]
    assert wheel.name == f"truebridge_tf1-{version}-py3-none-linux_x86_64.whl"


def test_everything_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(str(wheel)) as contents:
        names = {name for name in contents.namelist() if ".dist-info/" not in name}
        (tags,) = [name for name in contents.namelist() if name.endswith(".dist-info/WHEEL")]
        described = contents.read(tags).decode()
    sources = {f"truebridge_tf1/{path.name}" for path in (PACKAGE / "truebridge_tf1").glob("*.py")}
    assert names == sources | {"truebridge_tf1/py.typed", "truebridge_tf1/libtruebridge_tf1.so"}
    assert "Tag: py3-none-linux_x86_64" in described
    assert "Root-Is-Purelib: false" in described


def test_it_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            "--target",
            str(tmp_path),
            str(wheel),
        ],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop("TRUEBRIDGE_TF1_LIBRARY", None)
    code = "import truebridge_tf1 as tb; assert tb.stats()['leased'] == 0; print(tb.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=str(tmp_path), env=environment, stdout=subprocess.PIPE, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.decode().startswith(str(tmp_path))


def test_the_library_wants_no_python(wheel: Path) -> None:
    with zipfile.ZipFile(str(wheel)) as contents:
        binary = contents.read("truebridge_tf1/libtruebridge_tf1.so")
    assert b"libpython" not in binary
    assert b"libcudart" not in binary
