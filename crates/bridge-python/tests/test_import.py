"""The import of the package: short, without a framework, and with everything in it that it names."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import truebridge as tb


def run(code: str) -> str:
    """Run a program in a new process, and return what it prints."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_takes_neither_frameworks_nor_what_is_needed_later() -> None:
    code = """
        import sys, truebridge
        late = {"torch", "cupy", "numpy", "tensorflow", "safetensors", "argparse", "subprocess", "dataclasses", "json"}
        print(sorted(late & set(sys.modules)))
    """
    assert run(code) == "[]\n"


def test_the_import_takes_less_than_30_ms() -> None:
    code = """
        import time
        start = time.process_time()
        import truebridge
        print(time.process_time() - start)
    """
    # Processor time, of the best of a few: other processes on the machine do not count.
    assert min(float(run(code)) for _ in range(5)) < 0.030


@pytest.mark.parametrize("name", ["doctor", "processes", "pairs", "open", "trace", "Ticket", "convert_tf_to_pytorch"])
def test_a_name_that_is_imported_later_is_one_object(name: str) -> None:
    code = f"""
        import truebridge as tb
        assert {name!r} in dir(tb)
        first = getattr(tb, {name!r})
        from truebridge import {name} as second
        assert first is second is getattr(tb, {name!r})
    """
    run(code)


def test_everything_that_is_named_is_there() -> None:
    assert all(getattr(tb, name) is not None for name in tb.__all__)
    assert set(tb.__all__) <= set(dir(tb))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tb.nonsense  # type: ignore[attr-defined]


def test_the_modules_import_one_another_without_a_circle() -> None:
    """Also where they do at their first use, and for types. Modules import nothing of the package itself."""
    folder = Path(tb.__file__).parent

    def imported(file: Path) -> set[str]:
        named = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        own = [node for node in named if node.level == 1]
        return {name for node in own for name in ([node.module] if node.module else [a.name for a in node.names])}

    imports = {file.stem: imported(file) for file in folder.glob("*.py") if file.stem not in ("__init__", "__main__")}
    assert len(imports) > 20
    list(graphlib.TopologicalSorter(imports).static_order())
