"""The bench of files judges large files by reading and one pinned copy in the same round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("truebridge_conformance", reason="the suite's package is in the bundle")
bench: Any = pytest.importorskip("benches.files")


def row(mib: float, part: float) -> Any:
    return bench.Row(mib, 1e9 / part, 2e9, 1e9, 8e8, part)


@pytest.mark.parametrize(
    ("rows", "passed"),
    [([row(1024, 0.5)], []), ([row(256, 0.1), row(4096, 0.9)], [True]), ([row(4096, 0.89)], [False])],
)
def test_large_files_are_judged(rows: list[Any], passed: list[bool]) -> None:
    verdicts = bench.judge(rows)
    assert [verdict.passed for verdict in verdicts] == passed
    table = bench.markdown(bench.host.describe("torch"), rows, verdicts)
    assert table.count("MISSED") == passed.count(False)
    # 4 GiB: by the parts in a second, by safetensors in two.
    assert ("| 2.1 | 4.3 | 5.4 |" in table) == any(row.mib == 4096 for row in rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_it_measures(tmp_path: Path) -> None:
    bench.main(["--sizes=1,128", "--rounds=2", f"--folder={tmp_path}", "--report", str(tmp_path)])
    report = json.loads((tmp_path / "bench_files.json").read_text())
    assert [row["mib"] for row in report["rows"]] == [1, 128]
    assert all(min(row["ours"], row["safetensors"], row["parts"]) > row["read"] / 10 > 1000 for row in report["rows"])
    assert not list(tmp_path.glob("**/*.safetensors"))
