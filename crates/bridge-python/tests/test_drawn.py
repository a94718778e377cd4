"""The corpora of the fuzzer, and a hundred cases of each kind that it judges by itself.

`cargo xtask fuzz --target KIND` draws thousands.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

FUZZ = Path(__file__).parents[1] / "fuzz"


#: What is drawn: the kind, the target, how many, and what it needs.
DRAWN = [
    ("file", "numpy", 50, "safetensors"),
    ("file", "torch", 50, "safetensors"),
    ("gradients", "torch", 100, "tensorflow"),
]


@pytest.mark.skipif(not FUZZ.is_dir(), reason="the fuzzer runs from the sources")
def test_every_kind_has_a_corpus_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case was hostile once, or looks as if it were."""
    pytest.importorskip("tensorflow")
    monkeypatch.syspath_prepend(str(FUZZ))
    import cases

    kept = cases.corpus(list(cases.KINDS))
    assert {case["kind"] for case in kept.values()} == set(cases.KINDS)
    judge(list(kept.values()))


@pytest.mark.skipif(not FUZZ.is_dir(), reason="the fuzzer runs from the sources")
@pytest.mark.parametrize(("kind", "target", "count", "needs"), DRAWN)
def test_drawn_cases(kind: str, target: str, count: int, needs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is a process of its own: it has little memory for a file."""
    pytest.importorskip(needs)
    draw_and_judge(kind, target, count, monkeypatch)


@pytest.mark.skipif(not FUZZ.is_dir(), reason="the fuzzer runs from the sources")
def test_drawn_gradients_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are on the GPU that the worker sees."""
    tf = pytest.importorskip("tensorflow")
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow has no GPU")
    draw_and_judge("gradients", "torch", 200, monkeypatch)


def draw_and_judge(kind: str, target: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FUZZ))
    import cases

    judge([cases.draw(23, number, [target], [kind]) for number in range(count)])


def judge(drawn: list[Any]) -> None:
    done = subprocess.run(
        [sys.executable, str(FUZZ / "worker.py")],
        input="".join(json.dumps(case) + "\n" for case in drawn),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    verdicts = [line[1:] for line in done.stdout.splitlines() if line.startswith("@")]
    assert len(verdicts) == len(drawn), done.stderr[-2000:]
    assert [(words, case) for words, case in zip(verdicts, drawn, strict=True) if words] == []
