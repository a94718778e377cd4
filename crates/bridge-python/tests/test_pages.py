"""The blocks of the pages that show how to do a thing: they run, and print what the comments next to them say."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import truebridge as tb
from truebridge import _core, processes
from truebridge_conformance.others import python37

torch: Any = pytest.importorskip("torch")

DOCS = Path(__file__).parents[3] / "docs"
PAGES = [
    "../README.md",
    "../crates/bridge-python/README.md",
    "index.md",
    "streams.md",
    "debug.md",
    "jax.md",
    *sorted(f"howto/{page.name}" for page in (DOCS / "howto").glob("*.md")),
]

#: A block, and what the comment before it says that it needs.
BLOCK = re.compile(r"(?:<!-- ([^\n]*) -->\n)?```python\n(.*?)```", re.S)
#: A call of ``print`` on a separate line, with what it prints.
PRINT = re.compile(r"^ *print\(.*?\)(?: +# (.*))?$", re.M)

#: The folder that the package must come from, where the tests are of an installed one.
INSTALLED = os.environ.get("TRUEBRIDGE_INSTALLED")
TENSORFLOW1 = os.environ.get("TRUEBRIDGE_TENSORFLOW1")


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder of the test, with its own tickets."""
    # A process that a page starts finds the package by a path that does not depend on the folder.
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(os.path.abspath(entry) for entry in path if entry))
    monkeypatch.chdir(tmp_path)
    sockets = tmp_path_factory.mktemp("ipc")
    sockets.chmod(0o700)
    monkeypatch.setenv("TRUEBRIDGE_IPC", str(sockets))
    _core.ipc_close()
    processes.configure(folder=sockets)
    yield tmp_path
    _core.ipc_close()


def test_the_package_is_the_installed_one() -> None:
    if INSTALLED is None:
        pytest.skip("the tests are not of an installed package")
    assert Path(tb.__file__).is_relative_to(INSTALLED)


@pytest.mark.parametrize("page", sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")))
def test_the_blocks_of_the_page_compile(page: str) -> None:
    # Those too that need a GPU, or that no test runs.
    for _, block in BLOCK.findall((DOCS / page).read_text()):
        compile(block, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        # TensorFlow shows stubs of CUDA's libraries to what is imported after it.
        assert not re.search(r"import tensorflow\b.*\bimport (torch|cupy)\b", block, re.S), "import TensorFlow last"


@pytest.mark.parametrize("picture", sorted(str(picture.relative_to(DOCS)) for picture in DOCS.rglob("*.svg")))
def test_the_picture_is_well_formed(picture: str) -> None:
    # A browser shows nothing of one that is not.
    assert ElementTree.parse(DOCS / picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_a_picture_that_differs_from_its_report_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS.parent / "xtask/site"))
    tables = importlib.import_module("tables")
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    shutil.copytree(DOCS / "images", tmp_path / "images")
    assert tables.main(["--check"]) == 0
    drawn = tmp_path / "images/cost/copies.svg"
    drawn.write_text(drawn.read_text().replace(">97 %<", ">99 %<", 1))
    assert tables.main(["--check"]) == 1


@pytest.mark.parametrize("page", sorted(page.name for page in (DOCS / "howto").glob("[!i]*.md")))
def test_a_question_is_answered_one_click_from_the_front_page(page: str) -> None:
    assert f"](howto/{page})" in (DOCS / "index.md").read_text()
    answer, *rest = re.split(r"^## ", (DOCS / "howto" / page).read_text(), flags=re.M)
    # The first block is the answer, and the other sections are there for every question.
    assert re.search(r"```python\n(?:.*\n)*?.*\btb\.\w", answer)
    heads = {section.partition("\n")[0] for section in rest}
    assert {"What it costs", "When plain DLPack is enough", "From C++"} <= heads
    assert "tb.copy(" in "".join([answer, *rest])
    assert re.search(r"^\| .*ratio.*\|$", "".join(rest), re.M) or page == "other-libraries.md"


@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs(page: str, folder: Path) -> None:
    blocks = BLOCK.findall((DOCS / page).read_text())
    if page == "howto/index.md":
        assert not blocks
        return
    assert blocks
    left_out = [reason for marks, _ in blocks if (reason := missing(marks))]
    if len(left_out) == len(blocks):
        pytest.skip(left_out[0])
    if any("1.15" in marks for marks, _ in blocks):
        old_model(folder)
    if "tensorflow" in page or "tensorflow" in blocks[0][1]:
        pytest.importorskip("tensorflow")
    space: dict[str, Any] = {}
    for marks, block in blocks:
        if missing(marks):
            continue
        printed = in_another_process(marks, block, space["text"]) if "another process" in marks else here(block, space)
        expected = PRINT.findall(block)
        assert len(printed) == len(expected), printed
        for line, said in zip(printed, expected, strict=True):
            parts = [re.escape(part) for part in said.split("…")] if said else [".*"]
            assert re.fullmatch(".*".join(parts), line), (line, said)
    if "ticket" in space:
        tb.revoke(space["ticket"])


def missing(marks: str) -> str | None:
    """Return what a block needs and this machine lacks."""
    if "gpu" in marks and not torch.cuda.is_available():
        return "needs CUDA"
    if "gpu" in marks and not has("cupy"):
        return "needs CuPy"
    if "1.15" in marks and not TENSORFLOW1:
        return "TRUEBRIDGE_TENSORFLOW1 names no folder of TensorFlow 1.15"
    if "1.15" in marks and torch.cuda.is_available():
        from graphs import has_gpu

        if not has_gpu():
            return "TensorFlow 1.15 sees no GPU"
    if "Python 3.7" in marks and python37() is None:
        return "there is no Python 3.7 with TensorFlow 1.15"
    return None


def has(module: str) -> bool:
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def here(block: str, space: dict[str, Any]) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, "page", "exec"), space)
    return printed.getvalue().splitlines()


def in_another_process(marks: str, block: str, text: str) -> list[str]:
    python = python37() if "Python 3.7" in marks else sys.executable
    assert python is not None
    command = [python, "-c", f"text = {text!r}\n{block}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def old_model(folder: Path) -> None:
    """Put the files that a page about TensorFlow 1.15 opens next to the program."""
    from graphs import line

    (folder / "model.pb").write_bytes(line())
    (folder / "tensorflow1").symlink_to(Path(str(TENSORFLOW1)).resolve())
