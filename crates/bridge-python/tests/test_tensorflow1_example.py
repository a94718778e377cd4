"""The examples of a model of TensorFlow 1.x do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphs import FOLDER

torch: Any = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[3] / "examples"
if not EXAMPLES.is_dir():
    pytest.skip("the examples are in the repository alone", allow_module_level=True)

#: The environment of Python 3.7, which ``cargo xtask setup`` makes beside that of this Python.
PYTHON37 = Path(sys.prefix).with_name("venv37") / "bin/python"
#: Where the package for it is, with its library.
PACKAGE = next((path for path in map(Path, sys.path) if (path / "truebridge_tf1").is_dir()), Path())

#: What the examples print.
WORDS = {
    "trained": r"trained by TensorFlow (?P<trainer>\S+): loss (?P<before>\S+) before, (?P<after>\S+) after",
    "frozen": r"frozen: (?P<size>\d+) bytes",
    "served": r"served by TensorFlow (?P<server>\S+): (?P<frames>\d+) frames of PyTorch on (?P<device>[^\s,]+)",
    "results": r"results on (?P<results>\S+)",
    "read": r"read where PyTorch has them: (?P<read>\w+)",
    "right": r"largest difference to PyTorch's own result: (?P<difference>\S+)",
}


def printed(command: list[str], **settings: str) -> dict[str, str]:
    """What an example has said, by the names above."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env={**os.environ, **settings}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts: dict[str, str] = {"text": done.stdout}
    for name, words in WORDS.items():
        found = re.search(words, done.stdout)
        assert found, f"nothing is said of {name}: {done.stdout}"
        facts |= found.groupdict()
    return facts


def check(facts: dict[str, str], device: str) -> None:
    assert facts["server"].startswith("1.15.")
    assert 1e-3 < float(facts["before"]) < 1
    assert float(facts["after"]) < float(facts["before"]) / 1000
    # Gains and offsets are constants of the graph, four bytes each.
    assert 2 * 4 * 240 * 320 < int(facts["size"]) < 2 * 4 * 240 * 320 + 4096
    assert (facts["frames"], facts["read"]) == ("8", "True")
    assert facts["device"] == facts["results"] == device
    assert float(facts["difference"]) < 1e-6


#: What ``cargo xtask setup`` has fetched.
FETCHED = EXAMPLES.parent / "target/tensorflow1/tensorflow_core"


@pytest.mark.parametrize("named_by", ["environment", "argument", "setup"])
def test_a_frozen_model_serves_on_the_host(named_by: str) -> None:
    if named_by == "setup" and not FETCHED.is_dir():
        pytest.skip("cargo xtask setup has not fetched TensorFlow 1.15 into target/")
    argument, variable = {"environment": ([], FOLDER), "argument": ([FOLDER], "/nowhere"), "setup": ([], "")}[named_by]
    command = [sys.executable, str(EXAMPLES / "frozen_model.py"), "--device=cpu", *argument]
    facts = printed(command, PYTHONPATH=os.pathsep.join(sys.path), TRUEBRIDGE_TENSORFLOW1=variable)
    check(facts, "cpu")
    assert facts["trainer"].startswith("2.")
    assert "results where TensorFlow has them: True" in facts["text"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_frozen_model_serves_on_a_device() -> None:
    command = [sys.executable, str(EXAMPLES / "frozen_model.py"), "--device=cuda"]
    facts = printed(command, PYTHONPATH=os.pathsep.join(sys.path))
    check(facts, "cuda:0")
    assert "results where TensorFlow has them: True" in facts["text"]


@pytest.mark.skipif(not PYTHON37.exists(), reason=f"there is no {PYTHON37} (cargo xtask setup makes it)")
@pytest.mark.skipif(PACKAGE == Path(), reason="there is no package truebridge_tf1")
def test_a_program_of_python_3_7_serves_it() -> None:
    """It finds nothing of this Python's."""
    facts = printed([str(PYTHON37), str(EXAMPLES / "python37.py")], PYTHONPATH=str(PACKAGE))
    check(facts, "cpu")
    assert facts["trainer"].startswith("1.15.")
