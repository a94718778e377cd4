"""``trace``: what is recorded of each conversion, who records it, and what is written."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from conftest import kind_of
from programs import Warm
from truebridge import _core, processes
from truebridge.diagnostics.trace import Event, Trace
from truebridge_conformance.others import Other

torch: Any = pytest.importorskip("torch")


def only(trace: Trace) -> Event:
    (event,) = trace.events
    return event


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process with changes to its environment."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def test_a_tensor_in_place() -> None:
    before = time.monotonic_ns()
    with tb.trace() as trace:
        tb.to_numpy(torch.zeros(2, 3))
    after = time.monotonic_ns()
    event = only(trace)
    assert event[1:14] == (
        "convert",
        "torch",
        "numpy",
        "in place",
        None,
        None,
        None,
        "cpu",
        "float32",
        (2, 3),
        24,
        None,
        event.start,
    )
    assert before <= event.start <= event.start + event.duration <= after
    assert event.duration > 0
    assert (event.tensors, event.pid, event.thread) == (1, os.getpid(), threading.get_native_id())
    assert (event.method, event.why) == ("in place", "")


@pytest.mark.parametrize(
    ("x", "target", "keywords", "reason"),
    [
        (lambda: torch.zeros(4), "numpy", {"copy": True}, "asked for"),
        (lambda: np.zeros((4, 4), np.float32).T, "numpy", {"order": "C"}, "another order than the requested one"),
        (lambda: np.zeros(4, np.float32)[::-1], "torch", {}, "negative strides"),
        (lambda: torch.zeros(4, dtype=torch.complex64).conj(), "numpy", {}, "a pending conjugation"),
    ],
)
def test_a_copy_says_why_and_by_whom(x: Any, target: Any, keywords: Any, reason: str) -> None:
    tensor = x()
    plan = tb.plan(tensor, target, **keywords)
    with tb.trace() as trace:
        tb.convert(tensor, target, **keywords)
    event = only(trace)
    assert (event.path, event.copied_by, event.reason) == ("copy", plan.copied_by, plan.reason)
    assert (event.reason, event.nbytes) == (reason, plan.nbytes)
    assert (event.method, event.why) == (f"copy by {plan.copied_by}", reason)


def test_a_copy_into_a_tensor_that_exists() -> None:
    out = np.zeros((2, 3), np.float32)
    with tb.trace() as trace:
        tb.copy(torch.ones(3), out=out)
        assert kind_of(lambda: tb.copy(torch.ones(3), out=np.zeros(3))) == "dtype"
    copied, refused = trace.events
    assert copied[1:7] == ("copy", "torch", "numpy", "copy", "host", "a tensor that exists")
    assert copied.shape == (3,)
    assert (refused.path, refused.error, refused.target) == ("failed", "dtype", "numpy")


def test_errors_are_recorded_with_their_kind() -> None:
    cases: list[tuple[Any, Any]] = [
        ("torch", lambda: tb.to_numpy(torch.zeros(2, requires_grad=True))),
        ("numpy", lambda: tb.to_torch(np.zeros(2, "M8[s]"))),
        ("numpy", lambda: tb.to_torch(np.zeros(4, np.float32)[::-1], copy=False)),
        (None, lambda: tb.to_torch(np.zeros(4), order="Z")),  # type: ignore[arg-type]
        (None, lambda: tb.open("nonsense", "torch")),
    ]
    with tb.trace() as trace:
        kinds = [kind_of(call) for _, call in cases]
    assert [event.error for event in trace.events] == kinds
    assert [event.source for event in trace.events] == [source for source, _ in cases]
    assert {event.path for event in trace.events} == {"failed"}
    assert (trace.events[2].dtype, trace.events[2].shape) == ("float32", (4,))
    assert trace.events[3].shape is None


def test_a_tree_is_one_call_with_an_event_for_each_tensor() -> None:
    tree = {"a": torch.zeros(2), "b": [np.zeros(4)[::-1], torch.zeros(3)], "c": "text"}
    with tb.trace() as trace:
        tb.to_torch(tree)
    assert [(event.source, event.path, event.shape) for event in trace.events] == [
        ("torch", "in place", (2,)),
        ("numpy", "copy", (4,)),
        ("torch", "in place", (3,)),
    ]
    assert len({(event.call, event.start, event.duration) for event in trace.events}) == 1
    assert {event.tensors for event in trace.events} == {3}
    (piece,) = [event for event in trace.chrome()["traceEvents"] if event["ph"] == "X"]
    assert piece["name"] == "numpy+torch → torch (3 tensors)"
    assert piece["args"]["path"] == f"{trace.events[1].method}: negative strides, in place"


def test_a_tree_that_fails_is_recorded_by_the_tensor_that_failed() -> None:
    tree = [torch.zeros(2), torch.zeros(5, requires_grad=True), torch.zeros(3)]
    with tb.trace() as trace:
        assert kind_of(lambda: tb.to_numpy(tree)) == "requires_grad"
        assert kind_of(lambda: tb.to_torch([np.zeros(2), np.zeros(7)[::-1]], copy=False)) == "copy_needed"
    first, second = trace.events
    assert (first.source, first.error, first.tensors) == ("torch", "requires_grad", 3)
    assert (second.source, second.error, second.shape, second.tensors) == ("numpy", "copy_needed", (7,), 2)


def test_a_capsule_is_consumed_once() -> None:
    with tb.trace() as trace:
        assert tb.to_numpy(torch.arange(3).__dlpack__()).tolist() == [0, 1, 2]
    assert (only(trace).path, only(trace).shape) == ("in place", (3,))


def test_nothing_is_recorded_outside() -> None:
    trace = tb.trace()
    tb.to_numpy(torch.zeros(1))
    with trace:
        tb.to_numpy(torch.zeros(2))
        assert repr(trace) == str(trace)
        assert len(trace.events) == 1
    tb.to_numpy(torch.zeros(3))
    assert [event.shape for event in trace.events] == [(2,)]
    with trace:
        pass
    assert trace.events == (), "a trace that is entered again begins anew"


def test_traces_are_nested_and_overlap() -> None:
    with tb.trace() as outer:
        tb.to_numpy(torch.zeros(1))
        with tb.trace() as inner:
            tb.to_numpy(torch.zeros(2))
        tb.to_numpy(torch.zeros(3))
    assert [event.shape for event in inner.events] == [(2,)]
    assert [event.shape for event in outer.events] == [(1,), (2,), (3,)]
    first, second = tb.trace(), tb.trace()
    first.__enter__()
    tb.to_numpy(torch.zeros(1))
    second.__enter__()
    tb.to_numpy(torch.zeros(2))
    first.close()
    tb.to_numpy(torch.zeros(3))
    second.close()
    assert [event.shape for event in first.events] == [(1,), (2,)]
    assert [event.shape for event in second.events] == [(2,), (3,)]


def test_the_oldest_events_are_dropped_and_counted() -> None:
    with tb.trace(limit=10) as wide, tb.trace(limit=2) as narrow:
        for length in range(5):
            tb.to_numpy(torch.zeros(length))
    assert [event.shape for event in narrow.events] == [(3,), (4,)]
    assert (narrow.dropped, wide.dropped, len(wide.events)) == (3, 0, 5)
    assert "3 older events were dropped" in str(narrow)
    assert narrow.chrome()["otherData"]["dropped"] == 3
    with tb.trace(limit=1) as one:
        for length in range(5):
            tb.to_numpy(torch.zeros(length))
        assert (one.dropped, only(one).shape) == (4, (4,))


@pytest.mark.parametrize("limit", [0, -1, 1.5, "many", True, 1 << 40])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    assert kind_of(lambda: tb.trace(limit=limit)) == "argument"


def test_an_open_trace_is_not_entered_again() -> None:
    with tb.trace() as trace:
        assert kind_of(trace.__enter__) == "argument"
        tb.to_numpy(torch.zeros(2))
    assert len(trace.events) == 1


def test_threads_are_told_apart() -> None:
    rounds, ready = 50, threading.Barrier(4)

    def work() -> None:
        ready.wait()
        for _ in range(rounds):
            tb.to_numpy(torch.zeros(2))

    with tb.trace() as trace:
        threads = [threading.Thread(target=work, name=f"worker {index}") for index in range(3)]
        for thread in threads:
            thread.start()
        ready.wait()
        tb.to_numpy(torch.zeros(2))
        for thread in threads:
            thread.join()
    counts: dict[int, int] = {}
    for event in trace.events:
        counts[event.thread] = counts.get(event.thread, 0) + 1
    ids = {thread.native_id or 0: rounds for thread in threads}
    assert counts == {**ids, threading.get_native_id(): 1}
    assert len({event.call for event in trace.events}) == 3 * rounds + 1


def test_tasks_of_asyncio_are_recorded() -> None:
    async def convert(length: int) -> None:
        await asyncio.sleep(0)
        tb.to_numpy(torch.zeros(length))

    async def main() -> Trace:
        with tb.trace() as trace:
            await asyncio.gather(*(convert(length) for length in range(3)))
        return trace

    assert [event.shape for event in asyncio.run(main()).events] == [(0,), (1,), (2,)]


def test_processes_through_tickets(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    _core.ipc_close()
    processes.configure(folder=tmp_path)
    other = Other()
    try:
        with tb.trace() as trace:
            ticket = tb.share([torch.zeros(2, 3), np.zeros(4)])
        assert [event[1:6] for event in trace.events] == [
            ("share", "torch", "ipc", "copy", "host"),
            ("share", "numpy", "ipc", "copy", "host"),
        ]
        assert [event.nbytes for event in trace.events] == [24, 32]
        other("trace = tb.trace().__enter__()")
        assert other(f"len(tb.open({ticket.text!r}, 'numpy'))") == "2"
        seen = other("[(e.operation, e.source, e.target, e.path, e.nbytes) for e in trace.events]")
        assert seen == repr([("open", "ipc", "numpy", "in place", 24), ("open", "ipc", "numpy", "in place", 32)])
        assert other("trace.events[0].pid") == repr(other.process.pid)
        tb.revoke(ticket)
        assert other(f"tb.open({ticket.text!r}, 'numpy')") == "'gone'"
        assert other("trace.events[-1][2:8]") == repr((None, "numpy", "failed", None, None, "gone"))
        other("trace.close()")
    finally:
        other.kill()
        _core.ipc_close()


def test_files_are_recorded(tmp_path: Path) -> None:
    with tb.trace() as trace:
        tb.save(tmp_path / "x.npy", torch.zeros(2, 3))
        tb.load(tmp_path / "x.npy", "torch")
    assert [(event.source, event.target, event.shape) for event in trace.events] == [
        ("torch", "numpy", (2, 3)),
        ("numpy", "torch", (2, 3)),
    ]


def test_edges_of_graphs(beside_tensorflow: Warm) -> None:
    pytest.importorskip("tensorflow")
    code = """
        import torch, tensorflow as tf, truebridge as tb
        with tb.trace() as trace, tf.Graph().as_default(), tf.compat.v1.Session() as session:
            handle = tb.tensorflow.placeholder()
            x = tb.tensorflow.external_input(tf.float32, [None], handle)
            y = tb.tensorflow.external_output(2 * x)
            fetched = session.run(y, {handle: tb.tensorflow.feed(torch.ones(3))})
            assert tb.tensorflow.take(fetched, "torch").tolist() == [2, 2, 2]
        print([(e.operation, e.source, e.target, e.shape) for e in trace.events])
        with tb.trace() as trace:
            tb.to_torch(tf.zeros([2]))
        print([(e.source, e.target, e.error) for e in trace.events])
    """
    done = beside_tensorflow.run(code, frozen=True)
    assert done.stdout.splitlines() == [
        "[('feed', 'torch', 'tensorflow', (3,)), ('take', 'tensorflow', 'torch', (3,))]",
        "[('tensorflow', 'torch', None)]",
    ], done.stderr


def test_a_fork_records_its_own() -> None:
    code = """
        import os, numpy, truebridge as tb
        with tb.trace() as trace:
            tb.to_numpy(numpy.zeros(1))
            child = os.fork()
            tb.to_numpy(numpy.zeros(2))
            if child == 0:
                os._exit(0 if [event.shape for event in trace.events] == [(2,)] else 1)
            assert os.waitpid(child, 0)[1] == 0
        assert [event.shape for event in trace.events] == [(1,), (2,)]
    """
    run(code)


def test_the_table() -> None:
    with tb.trace() as trace:
        assert str(trace) == "No transfers were recorded."
        for _ in range(3):
            tb.to_numpy(torch.zeros(1024))
        tb.to_torch(np.zeros(1 << 18)[::-1])
        kind_of(lambda: tb.to_numpy(torch.zeros(1, requires_grad=True)))
    heading, rule, *lines = str(trace).splitlines()
    assert set(rule) == {"-", " "}
    assert re.split(r"  +", heading) == ["from", "to", "path", "reason", "tensors", "bytes", "median"]
    cells = [re.split(r"  +", line.strip()) for line in lines]
    assert cells[0][:-1] == ["numpy", "torch", trace.events[3].method, "negative strides", "1", "2.0 MiB"]
    assert cells[1][:-1] == ["torch", "numpy", "in place", "3", "12.0 KiB"]
    assert cells[2][:-1] == ["torch", "numpy", "failed", "requires_grad", "1", "0 B"]
    assert all(re.fullmatch(r"[\d.]+ (ns|µs|ms|s)", row[-1]) for row in cells)
    assert len({len(line) for line in [heading, *lines]}) == 1
    rows = trace.rows()
    assert [row.tensors for row in rows] == [1, 3, 1]
    assert rows[1].median == sorted(event.duration for event in trace.events[:3])[1]


def chrome(text: str) -> list[dict[str, Any]]:
    """Check the fields that Perfetto needs, and return the slices."""
    content = json.loads(text)
    slices = [event for event in content["traceEvents"] if event["ph"] == "X"]
    for event in slices:
        assert set(event) == {"ph", "name", "cat", "ts", "dur", "pid", "tid", "args"}
        assert event["ts"] > 0 and event["dur"] > 0
        assert type(event["pid"]) is int and type(event["tid"]) is int
    names = [event for event in content["traceEvents"] if event["ph"] == "M"]
    assert {event["tid"] for event in names} <= {event["tid"] for event in slices}
    assert len(slices) + len(names) == len(content["traceEvents"])
    return slices


def test_the_file_for_perfetto(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("older")
    with tb.trace() as trace:
        tb.to_numpy(torch.zeros(2, 3))
        tb.to_torch(np.zeros(4)[::-1])
    trace.save(path)
    first, second = chrome(path.read_text())
    assert (first["name"], first["cat"]) == ("torch → numpy", "convert")
    assert first["args"] == {
        "path": "in place",
        "nbytes": 24,
        "tensors": 1,
        "device": "cpu",
        "dtype": "float32",
        "shape": [2, 3],
    }
    assert second["args"]["path"] == f"{trace.events[1].method}: negative strides"
    assert first["ts"] + first["dur"] <= second["ts"]
    assert first["ts"] == trace.events[0].start / 1000
    assert os.listdir(tmp_path) == ["trace.json"]
    with pytest.raises(OSError):
        trace.save(tmp_path / "no folder" / "trace.json")


PROGRAM = "import numpy, truebridge as tb; tb.to_numpy(numpy.zeros(3))"


def test_the_environment_variable_writes_a_file(tmp_path: Path) -> None:
    done = run(PROGRAM, TRUEBRIDGE_TRACE=str(tmp_path / "all.json"))
    assert (done.stdout, done.stderr) == ("", "")
    (piece,) = chrome((tmp_path / "all.json").read_text())
    assert piece["name"] == "numpy → numpy"
    run(PROGRAM, TRUEBRIDGE_TRACE=str(tmp_path / "%p.json"))
    (numbered,) = tmp_path.glob("[0-9]*.json")
    (piece,) = chrome(numbered.read_text())
    assert numbered.stem == str(piece["pid"])


def test_the_environment_variable_prints_a_table() -> None:
    done = run(PROGRAM, TRUEBRIDGE_TRACE="1")
    assert done.stdout == ""
    assert re.search(r"^numpy +numpy +in place +1 +24 B", done.stderr, re.MULTILINE)
    for off in ("", "0"):
        assert run(PROGRAM, TRUEBRIDGE_TRACE=off).stderr == ""
    assert run("import truebridge", TRUEBRIDGE_TRACE="1").stderr == "", "there is nothing to say"


@pytest.mark.parametrize("path", ["/nowhere/trace.json", "/", "/dev/full"])
def test_a_file_that_cannot_be_written_is_said(path: str) -> None:
    done = run(PROGRAM, TRUEBRIDGE_TRACE=path)
    assert re.fullmatch(r"truebridge: TRUEBRIDGE_TRACE cannot be written: .+\n", done.stderr)


#: A profiler: NVTX loads it, and it prints the ranges.
PROFILER = r"""
#include <stdio.h>
#include <nvtx3/nvToolsExt.h>
static int push(const char *name) { printf("push %s\n", name); fflush(stdout); return 0; }
static int pop(void) { printf("pop\n"); fflush(stdout); return 0; }
int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
    const NvtxExportTableCallbacks *callbacks = get(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table = NULL;
    unsigned int size = 0;
    if (callbacks == NULL || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) return 0;
    *table[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)pop;
    return 1;
}
"""


def test_ranges_of_nvtx(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    headers = [found for place in sys.path for found in Path(place).glob("nvidia/*/include/nvtx3/nvToolsExt.h")]
    libraries = [found for place in sys.path for found in Path(place).glob("nvidia/*/lib/libnvtx3interop.so.1")]
    if compiler is None or not headers or not libraries:
        pytest.skip("there is no C compiler, or no package of NVTX")
    source, profiler = tmp_path / "profiler.c", tmp_path / "profiler.so"
    source.write_text(PROFILER)
    include = str(headers[0].parents[1])
    subprocess.run([compiler, "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(profiler)], check=True)
    code = """
        import numpy, truebridge as tb
        tb.to_numpy(numpy.zeros(1))
        with tb.trace():
            tb.to_numpy(numpy.zeros(1))
            try:
                tb.to_numpy(3)
            except tb.BridgeError:
                pass
        tb.to_numpy(numpy.zeros(1))
    """
    done = run(code, NVTX_INJECTION64_PATH=str(profiler))
    assert done.stdout.splitlines() == ["push truebridge.convert", "pop"] * 2
    assert run(code).stdout == ""


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of docs/trace.md runs, one after the other."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "trace.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert blocks
    space: dict[str, Any] = {}
    for block in blocks:
        exec(block, space)
    chrome((tmp_path / "transfers.json").read_text())
