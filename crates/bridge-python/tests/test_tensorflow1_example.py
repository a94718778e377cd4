"""The examples of a model of TensorFlow 1.x do what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import truebridge as tb
from graphs import FOLDER, HOST

torch: Any = pytest.importorskip("torch")

pytest.importorskip("truebridge_conformance", reason="the suite's package is in the bundle")

bench: Any = pytest.importorskip("benches.sessions")


EXAMPLES = Path(__file__).parents[3] / "examples"
if not EXAMPLES.is_dir():
    pytest.skip("the examples are only in the repository", allow_module_level=True)

#: The environment of Python 3.7, which ``cargo xtask setup`` makes next to that of this Python.
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


def test_a_frozen_model_serves_on_the_host() -> None:
    command = [sys.executable, str(EXAMPLES / "frozen_model.py"), "--device=cpu"]
    facts = printed(command, PYTHONPATH=os.pathsep.join(sys.path), TRUEBRIDGE_TENSORFLOW1=FOLDER)
    check(facts, "cpu")
    assert facts["trainer"].startswith("2.")
    assert "results where TensorFlow has them: True" in facts["text"]


@pytest.mark.parametrize(
    ("arguments", "variable", "folder"),
    [(["/named"], "/other", "/named"), ([], "/other", None), ([], "", "/")],
)
def test_an_argument_the_variable_or_the_setup_names_tensorflow(
    arguments: list[str], variable: str, folder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session looks at the variable where the example names no folder."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import frozen_model

    served: list[str | None] = []
    monkeypatch.setattr(frozen_model, "FETCHED", Path("/"))
    monkeypatch.setattr(frozen_model, "train", lambda: None)
    monkeypatch.setattr(frozen_model, "report", lambda model: None)
    monkeypatch.setattr(frozen_model, "serve", lambda model, folder, device: served.append(folder))
    monkeypatch.setattr(sys, "argv", ["frozen_model.py", "--device=cpu", *arguments])
    monkeypatch.setenv("TRUEBRIDGE_TENSORFLOW1", variable)
    frozen_model.main()
    assert served == [folder]


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


# Saved models in sessions of the real TensorFlow 1.15, on tensors of PyTorch on the host.


#: The model that ``saved_models.py`` next to it saves with 1.15.
SAVED = Path(__file__).parents[2] / "bridge-tensorflow/tests/data/saved1"
open_saved = tb.tensorflow.v1.Session.of_saved_model


def test_variables_are_restored_and_run_on_the_memory_of_torch() -> None:
    images = torch.tensor([[0.0, 1, 0], [1, 1, 2]])
    with open_saved(SAVED, config=HOST) as session:
        assert session.outputs == ["scores"]
        (scores,) = session.run({"images": images}, "torch")
    assert scores.tolist() == [[12, 23], [20, 34]]


def test_a_table_is_filled_from_the_asset() -> None:
    with open_saved(str(SAVED), "look_up", tags=["serve"], config=HOST) as session:
        (squares,) = session.run({"keys": torch.tensor([3, 7, 1])}, "torch")
    assert squares.tolist() == [9, -1, 1]


def refused(call: Callable[[], object], words: str, kind: str) -> None:
    with pytest.raises(tb.BridgeError, match=words) as caught:
        call()
    assert caught.value.kind == kind


def test_what_cannot_be_opened_says_why() -> None:
    refused(lambda: open_saved(SAVED, "train"), 'has no signature "train": it has look_up', "argument")
    refused(lambda: open_saved(SAVED, tags=["train"]), "no graph with the tags", "argument")
    refused(lambda: open_saved(SAVED.parent), "name the folder of a saved model", "argument")


def test_an_input_is_fed_as_it_was_saved() -> None:
    with open_saved(SAVED, config=HOST) as session:
        refused(lambda: session.run({}), "the input images is not fed", "argument")
        refused(lambda: session.run({"images": torch.ones(2, 4)}), r"has the shape \[\?, 3\]", "argument")
        refused(lambda: session.run({"image": torch.ones(2, 3)}), "no input image: it has images", "argument")


# The bench of sessions runs on any machine, and judges only on devices.


def test_it_measures_on_the_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benches", "--sessions", "--report", str(tmp_path)]
    settings = {"PYTHONPATH": os.pathsep.join(sys.path), "TRUEBRIDGE_TENSORFLOW1": FOLDER}
    done = subprocess.run(
        [*command, "--device=cpu", "--sizes=0.25,16", "--rounds=3"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "bench_sessions.json").read_text())
    small, large = report["rows"]
    assert (small["mib"], large["mib"], report["verdicts"]) == (0.25, 16, [])
    assert report["host"]["versions"]["tensorflow1"].startswith("1.15.")
    for row in (small, large):
        assert row["device"] == "cpu"
        # No run of a session takes less than a microsecond.
        assert min(row["bare"], row["ours"], row["host"]) > 1000
    # 64 times the work.
    assert large["bare"] > small["bare"]
    table = (tmp_path / "bench_sessions.md").read_text()
    assert table in done.stdout
    assert f"| {large['ours'] / 1000:,.1f} |" in table


def row(mib: float, *, faster: float = 30.0, overhead: float = 20e3, device: str = "cuda:0") -> Any:
    return bench.Row(device, mib, 100e3, 100e3 * faster, 100e3 - overhead, faster, overhead)


@pytest.mark.parametrize(
    ("rows", "passed"),
    [
        ([row(1, faster=2), row(64, faster=20), row(1024)], [True, True]),
        ([row(1), row(64, faster=19.9), row(1024)], [False, True]),
        ([row(1), row(64), row(1024, overhead=50_001)], [True, False]),
        ([row(1, overhead=50_001), row(16)], [False]),
        ([row(1, overhead=-1), row(16)], [True]),
        ([row(64, faster=1, overhead=1e6, device="cpu")], []),
    ],
)
def test_the_bars_are_those_of_devices(rows: list[Any], passed: list[bool]) -> None:
    assert [verdict.passed for verdict in bench.judge(rows)] == passed


@pytest.mark.parametrize("faster", [19.0, 21.0])
def test_a_missed_bar_fails(faster: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure", lambda *_: [row(64, faster=faster)])
    assert bench.main(["--report", str(tmp_path)]) == (1 if faster < 20 else 0)
    word = "MISSED" if faster < 20 else "met"
    assert f"| times faster at 64 MiB | {faster:g} | 20 | {word} |" in (tmp_path / "bench_sessions.md").read_text()
