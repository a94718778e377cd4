"""A hundred drawn files: those that are whole come back, those that are damaged are refused or right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

FUZZ = Path(__file__).parents[1] / "fuzz"


@pytest.mark.skipif(not FUZZ.is_dir(), reason="the fuzzer runs from the sources")
@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_drawn_files(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has little memory for a load; `cargo xtask fuzz --kinds file` draws thousands."""
    monkeypatch.syspath_prepend(str(FUZZ))
    import cases

    drawn: list[Any] = [cases.draw(23, number, [target], ["file"]) for number in range(50)]
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
