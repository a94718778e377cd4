"""``bench``: the figures are of what the table says, and a way that is wrong or missing is not measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import truebridge as tb
from truebridge import __main__
from truebridge._frameworks.numpy import aligned
from truebridge._frameworks.table import ALL, Side
from truebridge.diagnostics import bench, doctor, measure

np: Any = pytest.importorskip("numpy")
torch: Any = pytest.importorskip("torch")

ROW = {"source": "torch", "target": "numpy", "device": "cpu"}
MEASURED = {
    "versions": {"torch": "2.11", "numpy": "2.4"},
    "broken": {"cupy": "ImportError: libcuda"},
    "handoffs": [{**ROW, "ours": 1234.5, "native": None, "host": 2e6}],
    "copies": [{**ROW, "ours": 1e6, "native": 2e6}],
}
DRIVER = {"version": "13.0", "devices": [{"name": "H200"}]}


def printing(monkeypatch: pytest.MonkeyPatch, measured: str, code: int | None = 0) -> list[list[str]]:
    """Put what the processes print in their place. Return the arguments that they were started with."""
    started: list[list[str]] = []

    def run(probes: list[list[str]], *rest: Any) -> list[tuple[int | None, str, str]]:
        started.extend(probes)
        return [(0, json.dumps(DRIVER), "") if probe[0] == "driver" else (code, measured, "boom") for probe in probes]

    monkeypatch.setattr(doctor, "_run", run)
    return started


def test_every_pair_on_the_host_is_measured() -> None:
    code = """
        import sys, truebridge as tb
        from truebridge.diagnostics import doctor
        # Copies of 1 MiB: those of 64 MiB take most of a minute.
        kinds = "from truebridge.diagnostics.measure import KINDS; "
        kinds += "KINDS['copies'] = KINDS['copies']._replace(shape=(512, 512)); "
        doctor._PROGRAM = doctor._PROGRAM.replace("probe.main", kinds + "probe.main")
        assert kinds in doctor._PROGRAM
        print(tb.bench(seconds=0.5, timeout=400).as_json())
        assert not set(tb._core.FRAMEWORKS) & set(sys.modules), "imported in the caller's process"
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    here = [name for name in ("torch", "numpy", "tensorflow", "jax", "paddle") if name in found["frameworks"]]
    assert {"torch", "numpy"} <= set(here)
    pairs = {(one, other, "cpu") for one in here for other in here if one != other}
    for table in ("handoffs", "copies"):
        rows = found[table]
        assert {(row["source"], row["target"], row["device"]) for row in rows} == pairs
        # Not every import takes tensors of PaddlePaddle, which cannot be imported after TensorFlow.
        found[table] = rows = [row for row in rows if "paddle" not in (row["source"], row["target"])]
        assert all(row["ours"] > 0 and row["native"] > 0 for row in rows), rows
    assert all(row["host"] > 0 for row in found["handoffs"])
    # A copy takes longer than a hand-off, by far.
    assert min(row["ours"] for row in found["copies"]) > 10 * min(row["ours"] for row in found["handoffs"])
    assert bench._TRAFFIC == 2 * np.dtype(np.float32).itemsize * np.prod(measure.KINDS["copies"].shape)
    assert found["version"] == tb.__version__ and found["cores"] > 0 and found["date"].endswith("Z")


def sides() -> tuple[Side, Side]:
    return ALL["torch"].side(torch, None), ALL["numpy"].side(np, None)


def test_the_methods_return_the_elements() -> None:
    pair = measure.Pair("torch", "numpy", "cpu", sides())
    values = measure._values((8, 4))
    tensor = pair.sides[0].of_host(aligned(values))
    for kind in measure.KINDS.values():
        for method, (call, side) in kind.methods(pair).items():
            result = side.to_host(call(tensor))
            right = values.T if kind.copies else values
            assert result.tobytes() == right.tobytes(), method
            shares = np.shares_memory(result, tensor.numpy())
            assert shares != kind.copies, method


def test_every_element_of_the_values_differs() -> None:
    assert len(set(measure._values((64, 32)).view(np.int32).ravel().tolist())) == 64 * 32


def test_a_method_with_other_elements_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = measure.Pair("torch", "numpy", "cpu", sides())

    def wrong(pair: Any) -> dict[str, Any]:
        return {"ours": (lambda x: np.ones(x.shape, np.float32), pair.sides[1])}

    kind = measure.Kind((4, 4), False, wrong)
    with pytest.raises(RuntimeError, match="the elements differ"):
        measure._rows(kind, [pair], 0.01, lambda share: None)


def test_a_method_that_fails_has_no_figure() -> None:
    pair = measure.Pair("torch", "numpy", "cpu", sides())

    def failing(pair: Any) -> dict[str, Any]:
        return {"ours": (lambda x: x.numpy(), pair.sides[1]), "native": (lambda x: x.absent(), pair.sides[1])}

    (row,) = measure._rows(measure.Kind((4, 4), False, failing), [pair], 0.01, lambda share: None)
    assert row["ours"] > 0
    assert row["native"] is None


def test_a_figure_is_the_median_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    # One call to find the size of a batch three times, two rounds that do not count, then five.
    taken = iter([1e9, 1e9, 1e9, 7.0, 7.0, 1.0, 9.0, 3.0, 8.0, 2.0])
    asked, told = [], []

    def batch(call: Any, tensor: Any, calls: int, before: Any, after: Any) -> float:
        asked.append(calls)
        return next(taken)

    monkeypatch.setattr(measure, "batch", batch)
    pair = measure.Pair("torch", "numpy", "cpu", sides())
    contender = measure.Contender({}, "ours", lambda x: x, None, pair)
    assert measure._medians(measure.KINDS["handoffs"], [contender], 1e-9, told.append) == [3.0]
    assert asked == [1] * 10
    assert told == pytest.approx([0, *(0.3 + 0.7 * turn / 7 for turn in range(7))])


def test_a_batch_counts_what_follows_and_not_what_precedes() -> None:
    calls = []
    nap = 0.02
    nanoseconds = measure.batch(calls.append, 7, 4, lambda: time.sleep(10 * nap), lambda: time.sleep(nap))
    assert calls == [7] * 4
    assert nap * 1e9 / 4 <= nanoseconds


def test_the_tables_name_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    started = printing(monkeypatch, json.dumps(MEASURED))
    result = tb.bench(seconds=3)
    assert started == [["driver"], ["bench", "3"]]
    text = str(result)
    assert "CUDA 13.0: H200" in text and "torch 2.11, numpy 2.4" in text
    assert "cupy cannot be imported: ImportError: libcuda" in text
    cells = [line.split() for line in text.splitlines()]
    assert ["torch", "→", "numpy", "cpu", "1,234", "-", "2,000,000", "-"] in cells
    # 64 MiB, read and written, in one and in two milliseconds.
    assert ["torch", "→", "numpy", "cpu", "134.2", "67.1", "2.00", "██"] in cells
    assert text.count("A shorter bar is better") == 2
    written = json.loads(result.as_json())
    for kind in ("handoffs", "copies"):
        for row, measured in zip(written[kind], MEASURED[kind], strict=True):
            assert row == {**row, **measured} and row.keys() - measured.keys() == {"ratio", "winner"}
            ours, native = measured["ours"], measured["native"]
            assert row["ratio"] == (ours / native if ours and native else None)
            figures = {name: figure for name, figure in measured.items() if name in ("ours", "native", "host")}
            assert row["winner"] is None or figures[row["winner"]] == min(filter(None, figures.values()))
    assert {"ours", "native", "host", "ratio"} <= written["units"].keys()


@pytest.mark.parametrize(
    ("ours", "native", "host", "judged"),
    [
        (500.0, 1000.0, 900.0, ["0.50", "██"]),
        (10.0, 1000.0, None, ["0.01", "█"]),
        (1500.0, 1000.0, 900.0, ["1.50", "█" * 6]),
        (9000.0, 1000.0, None, ["9.00", "█" * 12, "…"]),
        (None, None, None, ["-"]),
    ],
)
def test_the_chart_shows_the_time_beside_that_of_the_native_function(
    ours: Any, native: Any, host: Any, judged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {**ROW, "ours": ours, "native": native, "host": host}
    printing(monkeypatch, json.dumps({**MEASURED, "handoffs": [row]}))
    result = tb.bench()
    lines = str(result).splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("pair"))
    assert lines[head].endswith("████ DLPack")
    assert lines[head + 2].split()[7:] == judged
    # Numbers stand below each other, on the right.
    ends = [match.end() for match in re.finditer(r"truebridge|DLPack|NumPy", lines[head])][:3]
    assert [match.end() for match in re.finditer(r"[\d,-]+", lines[head + 2])][:3] == ends


def test_the_tables_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = {"source": "tensorflow", "target": "numpy", "device": "cuda:0"}
    measured = {
        "handoffs": [{**pair, "ours": 123456.0, "native": 1234.0, "host": 123456.0}],
        "copies": [{**pair, "ours": 9e9, "native": 1e6}],
    }
    printing(monkeypatch, json.dumps({**MEASURED, **measured}))
    assert max(map(len, str(tb.bench()).splitlines()[4:])) <= 80


def test_fewer_than_two_frameworks_are_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    printing(monkeypatch, json.dumps({"versions": {"numpy": "2.4"}, "broken": {}, "handoffs": [], "copies": []}))
    assert "No pair is in place here" in str(tb.bench())


def test_frameworks_that_are_broken_or_missing_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise ImportError('half installed')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    names = ("numpy", "tensorflow", "no_such_framework")
    monkeypatch.setattr(measure, "ALL", {name: ALL["numpy"] for name in names})
    told: list[float] = []
    found = measure.bench("0.01", told.append)
    assert told == [0, 0.125, 0.25, 0.625]
    assert found["broken"] == {"tensorflow": "ImportError: half installed"}
    assert list(found["versions"]) == ["numpy"]
    assert found["handoffs"] == found["copies"] == []


@pytest.mark.parametrize(
    ("code", "words"), [(-11, "is killed by SIGSEGV: boom"), (None, "has not ended after 123 s: raise --timeout, or")]
)
def test_a_process_that_crashes_or_hangs_is_an_error(
    code: int | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    printing(monkeypatch, "", code)
    with pytest.raises(tb.BridgeRuntimeError, match=f"{words}.* run `python -m truebridge doctor`") as caught:
        tb.bench(seconds=3)
    assert caught.value.kind == "framework"


@pytest.mark.parametrize("keyword", ["seconds", "timeout"])
@pytest.mark.parametrize("time", [0, -1, float("nan"), float("inf"), "long", None, True])
def test_a_time_that_is_none_is_refused(keyword: str, time: Any) -> None:
    with pytest.raises(tb.BridgeValueError, match=f"{keyword} must be a positive number of seconds"):
        tb.bench(**{keyword: time})


def test_a_program_without_a_python_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(tb.BridgeImportError, match="python -m truebridge bench"):
        tb.bench()


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command(as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    started = printing(monkeypatch, json.dumps(MEASURED))
    assert __main__.main(["bench", "--seconds", "2", *["--json"] * as_json]) == 0
    printed = capsys.readouterr().out
    assert started[1] == ["bench", "2.0"]
    if as_json:
        assert json.loads(printed) == json.loads(tb.bench(seconds=2).as_json()) | {"date": json.loads(printed)["date"]}
    else:
        assert "ns a call" in printed


@pytest.mark.parametrize(
    "arguments", [["--seconds", "0"], ["--seconds", "soon"], ["--rounds", "3"], ["--timeout", "-1"]]
)
def test_bad_arguments_end_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = __main__.main(["bench", *arguments])
    except SystemExit as error:
        status = error.code  # type: ignore[assignment]
    assert status == 2
    assert capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_each_gpu_is_measured() -> None:
    found = tb.bench(seconds=2)
    assert len(found.gpus) == torch.cuda.device_count()
    on_gpu = {(row.source, row.target): row for row in found.handoffs if row.device == "cuda:0"}
    assert "numpy" not in {name for pair in on_gpu for name in pair}
    names = [name for name in ("torch", "cupy", "tensorflow") if name in found.frameworks]
    assert set(on_gpu) >= {(one, other) for one in names[:2] for other in names[:2] if one != other}
    for row in on_gpu.values():
        assert row.ours and row.host and row.ours < row.host, row
    for copied in found.copies:
        assert copied.ours, copied
