"""A case that the runner has kept is run first from then on, whatever the adapter is called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tensor_bridge_conformance
from tensor_bridge_conformance import _conformance, host

SCRIPT = Path(tensor_bridge_conformance.__file__).parents[1] / "conformance.py"

#: The index of a case that comes from a regression (``REPLAYED`` in ``conformance/src/engine.rs``).
REPLAYED = 2**32 - 1

CASE = {
    "spec": {"dtype": "float32", "shape": [2], "strides": [1], "offset": 0, "base": 2, "read_only": False},
    "seed": 7,
}


class Listed(Exception):
    """Carries the adapters that the runner knows out of it, before it runs anything."""


def known() -> list[dict[str, Any]]:
    def describe(adapters: str) -> str:
        raise Listed(adapters)

    with pytest.raises(Listed) as listed:
        _conformance.main([], [sys.executable, str(SCRIPT)], describe)
    adapters: list[dict[str, Any]] = json.loads(str(listed.value))
    return adapters


def messages(*options: str) -> list[dict[str, Any]]:
    """What a worker says."""
    worker = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, errors="replace", timeout=300
    )
    lines = [json.loads(line) for line in worker.stdout.splitlines()]
    assert lines and lines[-1] == "done", worker.stderr
    return lines


@pytest.mark.parametrize("name", [adapter["name"] for adapter in known()])
def test_a_kept_case_is_replayed(name: str, tmp_path: Path) -> None:
    about = host.describe(known())
    if name not in about["versions"]:
        pytest.skip(about["refused"].get(name, "not installed"))
    device = "cpu"
    if name == "cupy":
        if not about["gpus"]:
            pytest.skip("no CUDA device")
        device = "cuda"
    folder = tmp_path / "regressions"
    folder.mkdir()
    kept = {"from": name, "to": name, "property": "values", "case": CASE}
    (folder / f"{name}-{name}-values-1.json").write_text(json.dumps(kept), encoding="utf-8")
    said = messages(
        *("--worker", f"{name}:{name}", "--device", device, "--report", os.fspath(tmp_path)),
        *("--properties", "values", "--cases", "1", "--seed", "1"),
    )
    indices = [message["started"]["index"] for message in said if "started" in message]
    assert indices == [REPLAYED, 0]
    judged = [message["finished"] for message in said if "finished" in message]
    assert [(report["verdict"], report["cases"]) for report in judged] == [("passed", 2)]
