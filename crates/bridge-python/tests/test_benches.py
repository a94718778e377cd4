"""The benches: each measures what its tables say, checks what it copied, and judges by its bars."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from benches import (
    baseline,
    files,
    host_copies,
    lists,
    moves,
    pages,
    pieces,
    store,
    training,
    transfers,
    updates,
    ways,
)
from truebridge_conformance import _conformance

torch: Any = pytest.importorskip("torch")

pytest.importorskip("truebridge_conformance", reason="the suite's package is in the bundle")

pytest.importorskip("safetensors")

pytest.importorskip("torch")

pytest.importorskip("tensorflow")


# The bench has a floor, and for every pair a row with live views and one with threads.


def test_a_row_beside_views_and_one_with_threads(tmp_path: Path) -> None:
    few = ["--rounds", "1", "--batch", "2", "--max-size", "1024", "--views", "50", "--threads", "3"]
    assert transfers.main(["--device", "cpu", "--only", "torch:numpy", "--report", str(tmp_path), *few]) == 0
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert all(row["floor"] > 0 and row["over_floor"] > 0 for row in report["rows"])
    rows = report["growth"]
    assert [(row["path"], row["crowd"]) for row in rows] == [
        ("torch→numpy", "50 live views"),
        ("torch→numpy→torch", "50 live views"),
        ("torch→numpy", "3 threads"),
    ]
    assert all(row["ratio"] > 0 and row["alone"] > 0 for row in rows)
    assert "50 live views" in (tmp_path / "bench.md").read_text(encoding="utf-8")


def measured(**ratios: float) -> list[dict[str, Any]]:
    sizes = (1 << 10, 1 << 20, 1 << 26)
    return [
        {"path": path, "streams": "one", "size": size, "ratio": ratio, "over_floor": 1.5}
        for path, ratio in ratios.items()
        for size in sizes
    ]


def test_what_got_worse_is_found_and_nothing_else() -> None:
    before = measured(a=0.2, b=0.4, gone=0.1)
    found = list(baseline.worse(before, measured(a=0.25, b=0.6, new=9.0), 0.35))
    assert [(one.path, one.what, one.before, one.now) for one in found] == [("b", "ours / native", 0.4, 0.6)]
    assert "| b | one | ours / native | 0.400 | 0.600 |" in baseline.markdown(found, "old.json", 0.35)
    # One size that is slower is noise, two of three are not.
    noisy = measured(a=0.2)
    noisy[0]["ratio"] = 5.0
    assert list(baseline.worse(before, noisy, 0.35)) == []
    noisy[1]["ratio"] = 5.0
    assert [one.now for one in baseline.worse(before, noisy, 0.35)] == [5.0]
    # A kept run may lack a figure.
    old = [{name: value for name, value in row.items() if name != "over_floor"} for row in before]
    assert list(baseline.worse(old, before, 0.35)) == []
    with pytest.raises(baseline.Unfit, match="no path in common"):
        list(baseline.worse(before, measured(other=1.0), 0.35))


def test_a_run_is_checked_against_itself_and_a_faster_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--rounds", "1", "--batch", "2", "--max-size", "1024", "--views", "50", "--threads", "2"]
    call = ["--device", "cpu", "--only", "torch:numpy", "--report", str(tmp_path / "now"), *few]
    transfers.main(call)
    kept = json.loads((tmp_path / "now/bench.json").read_text(encoding="utf-8"))
    file = tmp_path / "kept.json"

    def checked(**changed: Any) -> int:
        file.write_text(json.dumps({**kept, **changed}), encoding="utf-8")
        return transfers.main([*call, "--check", str(file), "--tolerance", "1000"])

    assert checked() == 0
    faster = [{**row, "ratio": row["ratio"] / 1e9} for row in kept["rows"]]
    assert checked(rows=faster) == 1
    assert json.loads((tmp_path / "now/bench.json").read_text(encoding="utf-8"))["worse"][0]["path"] == "torch→numpy"
    assert "1 of the ratios got worse by more than" in capsys.readouterr().out
    assert checked(host={**kept["host"], "gpus": ["NVIDIA H200"]}) == 2
    assert "another kind of host (NVIDIA H200)" in capsys.readouterr().err
    (tmp_path / "now/bench.json").unlink()
    assert checked(rows=measured(other=1.0)) == 2
    assert "no path in common" in capsys.readouterr().err and (tmp_path / "now/bench.json").is_file()
    unfit = [{"path": "a", "streams": "b", "size": 1, "ratio": "fast"}]
    host = {"gpus": [], "cpu": "x"}
    for content in ("", [], {}, {"rows": [{}], "host": host}, {"rows": unfit, "host": host}):
        file.write_text(json.dumps(content) if content != "" else "", encoding="utf-8")
        assert transfers.main([*call, "--check", str(file)]) == 2
        assert f"{file} is not a bench.json" in capsys.readouterr().err


def arrays() -> tuple[np.ndarray, dict[str, object]]:
    """Return memory that 64 divides, and the tensor of each framework over it."""
    memory = np.frombuffer(torch.arange(16, dtype=torch.float32).numpy(), np.float32).reshape(4, 4)
    tensor = torch.from_numpy(memory)
    return memory, {"torch": tensor, "numpy": memory, "jax": tb.to_jax(tensor, copy=False)}


@pytest.mark.parametrize(
    ("source", "target"), [("torch", "numpy"), ("numpy", "torch"), ("jax", "torch"), ("torch", "jax")]
)
def test_the_floor_makes_the_consumers_own_object(source: str, target: str) -> None:
    memory, tensors = arrays()
    made = _conformance.Floor(source, target, (memory.ctypes.data, (4, 4), -1), [], []).convert(tensors[source])
    assert type(made) is type(tensors[target])
    assert made.shape == (4, 4)
    memory[2, 3] = 77
    assert made[2, 3] == 77


def test_unknown_frameworks_have_no_floor() -> None:
    with pytest.raises(ValueError, match="no floor from mxnet"):
        _conformance.Floor("mxnet", "torch", (0, (0, 0), -1), [], [])


# The bench of copies on the host compares what all three copied, and names a slower copy.


def test_a_row_for_both_kinds_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "NOISE", float("inf"))
    few = ["--rounds", "1", "--only", "512² .t()", "--report", str(tmp_path)]
    assert host_copies.main(few) == 0
    rows = json.loads((tmp_path / "bench_host_copies.json").read_text(encoding="utf-8"))["rows"]
    assert {row["memory"] for row in rows} == {"into", "fresh"} and 1 in {row["threads"] for row in rows}
    assert all(row["ours"] > 0 and row["of_numpy"] > 0 and row["of_torch"] > 0 for row in rows)
    monkeypatch.setattr(host_copies, "NOISE", 0.0)
    assert host_copies.main(few) == 1
    assert "MISSED" in (tmp_path / "bench_host_copies.md").read_text(encoding="utf-8")


def test_a_wrong_copy_is_no_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(src: Any, *, out: Any) -> Any:
        return out

    monkeypatch.setattr(tb, "copy", nothing)
    case = host_copies.CASES[-2]
    with pytest.raises(RuntimeError, match="other elements"):
        host_copies.contenders(case)


# The bench of moves judges all moves by PyTorch's, and large ones by the pinned copy of the same round as well.


def move(mib: float, part: float, direction: str = "down", times: float = 0.5) -> Any:
    return moves.Row(direction, f"{mib:g} MiB", mib, 1e6 / part, 2e6, 1e6, 1e6, 4e6, part, times, 1.0)


@pytest.mark.parametrize(
    ("rows", "passed"),
    [
        ([move(0.0625, 0.1), move(64, 0.5, times=1.04)], [True, True, False, True]),
        ([move(256, 0.9), move(1024, 0.95, "up")], [True] * 6),
        ([move(256, 0.89), move(1024, 1.0)], [False] + [True] * 5),
    ],
)
def test_moves_are_judged(rows: list[Any], passed: list[bool]) -> None:
    verdicts = moves.judge(rows)
    assert [verdict.passed for verdict in verdicts] == passed
    table = moves.markdown(moves.host.describe("torch"), rows, verdicts)
    assert table.count("MISSED") == passed.count(False)
    # 256 MiB in 1.11 ms.
    assert ("| 241.6 |" in table) == ((256, 0.9) in [(row.mib, row.part) for row in rows])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_moves_on_a_gpu(tmp_path: Path) -> None:
    moves.main(["--sizes=0.0625,4", "--rounds=3", "--report", str(tmp_path)])
    report = json.loads((tmp_path / "bench_moves.json").read_text())
    assert [(row["direction"], row["mib"]) for row in report["rows"]] == [
        ("down", 0.0625),
        ("down", 4),
        ("up", 0.0625),
        ("up", 4),
    ]
    assert all(
        min(row[way] for way in ("ours", "fresh", "pinned_ours", "pinned", "pageable")) > 1000 for row in report["rows"]
    )


# The bench of many pieces compares what it copies, and names a bar that is missed.


FEW = ["--device", "cpu", "--count", "50", "--nbytes", "300", "--width", "16", "--rounds", "1"]


def test_a_row_for_each_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PART", 0.0)
    monkeypatch.setattr(pieces, "CALL", float("inf"))
    monkeypatch.setattr(pieces, "PREPARED", float("inf"))
    assert pieces.main([*FEW, "--report", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "bench_pieces.json").read_text(encoding="utf-8"))["rows"]
    counts = {"equal": 50, "of another process": 50, "weights": 291, "shards": 320}
    assert {row["pieces"]: row["count"] for row in rows} == counts
    ways = {"plain", "ours", "prepared", "unchecked", "one by one", "foreach"}
    assert {row["way"] for row in rows if row["pieces"] == "equal"} == ways | {"select"}
    assert {row["way"] for row in rows if row["pieces"] != "equal"} == ways
    assert all(row["seconds"] > 0 and row["call"] > 0 and row["part"] > 0 for row in rows)
    monkeypatch.setattr(pieces, "CALL", 0.0)
    assert pieces.main([*FEW, "--report", str(tmp_path)]) == 1
    assert "MISSED" in (tmp_path / "bench_pieces.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_row_for_each_method_between_memories(direction: str) -> None:
    rows = pieces.between(direction, "cpu", 20, 1)
    assert {row.way for row in rows} == {"plain", "ours", "prepared", "loop"}
    assert all(row.count == 20 and 20 * pieces.SHORTEST <= row.nbytes <= 20 * pieces.LONGEST for row in rows)
    assert all(row.seconds > 0 and row.call > 0 and row.part > 0 for row in rows)


def test_a_piece_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tb.copy

    def all_but_one(src: Any, *, out: Any) -> Any:
        return copy(src[:-1], out=out[:-1])

    monkeypatch.setattr(tb, "copy", all_but_one)
    with pytest.raises(RuntimeError, match="other elements"):
        pieces.measure("equal", lists.equal("cpu", "cpu", 5, 100), 1)
    with pytest.raises(RuntimeError, match="other elements"):
        pieces.between("up", "cpu", 5, 1)


def test_shards_are_the_parts_of_whole_tensors() -> None:
    copied = lists.shards("cpu", "cpu", 16)
    tb.copy(copied.sources, out=copied.targets)
    assert pieces.same(copied.sources, copied.targets)
    # Each element is in one piece: the targets are as long as the sources, and no two share memory.
    assert sum(tensor.numel() for tensor in copied.sources) == sum(tensor.numel() for tensor in copied.targets)
    shapes = [(16, 16), (4, 16), (4, 16), *[(56, 16)] * 16, (16, 16), *[(16, 56)] * 8, (8, 16), (16,), (16,)]
    assert 2 * sum(torch.Size(shape).numel() for shape in shapes) == sum(tensor.numel() for tensor in copied.sources)


# The bench of files judges large files by reading and one pinned copy in the same round.


def load(mib: float, part: float) -> Any:
    return files.Row(mib, 1e9 / part, 2e9, 1e9, 8e8, part)


@pytest.mark.parametrize(
    ("rows", "passed"),
    [([load(1024, 0.5)], []), ([load(256, 0.1), load(4096, 0.9)], [True]), ([load(4096, 0.89)], [False])],
)
def test_large_files_are_judged(rows: list[Any], passed: list[bool]) -> None:
    verdicts = files.judge(rows)
    assert [verdict.passed for verdict in verdicts] == passed
    table = files.markdown(files.host.describe("torch"), rows, verdicts)
    assert table.count("MISSED") == passed.count(False)
    # 4 GiB: by the parts in a second, by safetensors in two.
    assert ("| 2.1 | 4.3 | 5.4 |" in table) == any(row.mib == 4096 for row in rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_files_on_a_gpu(tmp_path: Path) -> None:
    files.main(["--sizes=1,128", "--rounds=2", f"--folder={tmp_path}", "--report", str(tmp_path)])
    report = json.loads((tmp_path / "bench_files.json").read_text())
    assert [row["mib"] for row in report["rows"]] == [1, 128]
    assert all(min(row["ours"], row["safetensors"], row["parts"]) > row["read"] / 10 > 1000 for row in report["rows"])
    assert not list(tmp_path.glob("**/*.safetensors"))


# The bench of fresh pages measures each setting in a separate process, and judges what huge pages save.


def test_a_row_for_each_setting_and_size(tmp_path: Path) -> None:
    few = ["--rounds", "1", "--sizes", "0.25,8", "--report", str(tmp_path)]
    assert pages.main(few) == 0
    data = json.loads((tmp_path / "bench_pages.json").read_text(encoding="utf-8"))
    assert [(row["setting"], row["mib"]) for row in data["rows"]] == [(s, m) for s in pages.SETTINGS for m in (0.25, 8)]
    assert all(row[way]["wall"] > 0 for row in data["rows"] for way in ("ours", "torch"))
    assert "madvise" in data["host"]["transparent_hugepage"]


@pytest.mark.parametrize(("faults", "cpu", "passed"), [(40, 1.0, True), (4000, 1.0, False), (40, 2.9, False)])
def test_the_bars_are_parts_of_what_small_pages_take(faults: int, cpu: float, passed: bool) -> None:
    small = pages.Cost(16384, 3.0, 3.0)
    rows = [
        pages.Row("as set", 64, pages.Cost(faults, cpu, 1.0), small),
        pages.Row("never", 64, small, small),
        pages.Row("as set", 1, small, small),
    ]
    assert all(verdict.passed for verdict in pages.verdicts(rows)) == passed


# The bench of the store runs on the host, and its report has every way.


def test_every_method_is_measured_and_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store.main(["--device", "cpu", "--sizes", "2", "--rounds", "1", "--report", str(tmp_path)])
    rows = json.loads((tmp_path / "bench_store.json").read_text(encoding="utf-8"))["rows"]
    assert {(row["what"], row["mib"]) for row in rows} == {(way, 2) for way in ("hand over", "put", "store", "file")}
    assert all(row["right"] and row["milliseconds"] > 0 for row in rows)
    assert "2 MiB attached" in capsys.readouterr().out


# The bench of updates runs on the host, and every way brings the weights that the trainer has.


def test_every_method_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert updates.main(["--device", "cpu", "--rounds", "3", "--report", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "bench_updates.json").read_text(encoding="utf-8"))["rows"]
    assert [row["what"] for row in rows] == ["published", "in place", "plain"]
    assert all(row["right"] for row in rows)
    assert "MISSED" not in capsys.readouterr().out


# The benches of the four paths and of training run on the host, check what they measure, and judge on devices.


TENSORFLOW1 = bool(os.environ.get("TRUEBRIDGE_TENSORFLOW1"))


def run_bench(bench: str, folder: Path, *options: str) -> tuple[Any, str]:
    """Run a bench, and return its report."""
    command = [sys.executable, "-m", "benches", f"--{bench.removeprefix('bench_')}", "--report", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    table = (folder / f"{bench}.md").read_text()
    assert table in done.stdout
    return json.loads((folder / f"{bench}.json").read_text()), table


def test_the_paths_are_measured_side_by_side(tmp_path: Path) -> None:
    report, table = run_bench("bench_ways", tmp_path, "--sizes=0.25", "--rounds=1", f"--folder={tmp_path}")
    rows = {(row["source"], row["target"], row["way"]): row for row in report["rows"]}
    for pair in (("torch", "tensorflow"), ("tensorflow", "torch")):
        for way in ("in place", "file", "process"):
            row = rows.pop((*pair, way))
            # Nothing of this takes less than 100 ns.
            assert min(row["ours"], row["theirs"]) > 100 and row["by"]
            assert f"| {row['ours'] / 1000:,.1f} | {row['theirs'] / 1000:,.1f} |" in table
    # TensorFlow 1.15 has no methods to compare here. Another process is one of Python 3.7.
    assert {key[:2] for key in rows} == ({("torch", "tensorflow1")} if TENSORFLOW1 else set())
    assert all(row["theirs"] is None for row in rows.values())
    assert not list(tmp_path.glob("**/*.npy"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_paths_are_measured_on_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    report, _ = run_bench("bench_ways", tmp_path, "--device=cuda:0", "--sizes=1", "--rounds=1", f"--folder={tmp_path}")
    rows = {(row["source"], row["target"], row["way"]): row for row in report["rows"]}
    for pair in (("torch", "tensorflow"), ("tensorflow", "torch"), ("cupy", "tensorflow"), ("cupy", "torch")):
        for way in ("in place", "host", "file", "process"):
            row = rows[(*pair, way)]
            assert min(row["ours"], row["theirs"]) > 100 and row["device"] == "cuda:0"


def test_wrong_elements_are_no_measurement() -> None:
    setting = ways.Setting.__new__(ways.Setting)
    setting.numpy, setting.array, setting.target = np, np.arange(4.0), "torch"
    setting._check("host", np.arange(4.0))
    with pytest.raises(RuntimeError, match="the way host to torch returned wrong elements"):
        setting._check("host", np.arange(4.0) + 1)


@pytest.mark.parametrize("layer", training.LAYERS)
def test_a_training_step_is_measured_beside_its_halves(layer: str, tmp_path: Path) -> None:
    _, framework, module = training.LAYERS[layer]
    pytest.importorskip(module)
    few = ["--widths=32", "--batch=64", "--rounds=1", "--report", str(tmp_path)]
    assert training.main([f"--layer={layer}", *few]) == 0
    report = json.loads((tmp_path / "bench_training.json").read_text())
    table = (tmp_path / "bench_training.md").read_text()
    (row,) = report["rows"]
    assert row["framework"] == framework and f"| {framework}, µs |" in table
    # No step of either framework takes less than ten microseconds.
    assert min(row["whole"], row["torch"], row["layer"]) > 10_000
    assert 0 < row["difference"] < 1e-5 and f"{row['difference']:.1e}" in table
    assert [verdict["what"] for verdict in report["verdicts"]] == ["difference of gradients, at most"]


def step(width: int, part: float, difference: float = 1e-7, device: str = "cuda:0") -> Any:
    return training.Row("JAX", device, 64, width, 1e6 * part, 5e5, 5e5, part, difference)


@pytest.mark.parametrize(
    ("rows", "passed"),
    [
        ([step(64, 1.5), step(4096, 1.05)], [True, True]),
        ([step(64, 1.0), step(4096, 1.06)], [True, False]),
        ([step(64, 1.0, difference=1.1e-5), step(4096, 1.0)], [False, True]),
        ([step(64, 3.0, device="cpu")], [True]),
        ([step(64, 1.0, device="cpu"), step(65, 1.0, difference=float("nan"), device="cpu")], [False]),
    ],
)
def test_the_widest_step_and_every_gradient_are_judged(rows: list[Any], passed: list[bool]) -> None:
    assert [verdict.passed for verdict in training.judge(rows)] == passed
