"""``progress=``: a terminal shows how far a long call is, in one line, and nothing else shows anything by default."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from truebridge import files
from truebridge.diagnostics import doctor, progress, report

ONES: Any = np.ones(1 << 16, np.float32)
NBYTES = ONES.nbytes
#: Compressed members are read in pieces of this size.
TREE = {"a": np.arange(1 << 19, dtype=np.float32), "b": [np.zeros(3, np.int8), np.ones((2, 0))]}
TOTAL = (1 << 21) + 3

#: Runs where files are written and loaded in small steps, each of which takes a while.
SLOW = """
import sys, time
import numpy as np
import truebridge as tb
from truebridge import files
from truebridge.diagnostics import progress
files._STEP = 1 << 16
progress.PATIENCE = {patience}
step = progress.Meter.step
def slow(meter, amount):
    time.sleep(0.15)
    step(meter, amount)
progress.Meter.step = slow
arrays = {{name: np.zeros(1 << 14, np.float32) for name in "abcd"}}
{call}
print("the end", file=sys.stderr)
"""

#: Runs ``bench``, whose process measures nothing.
BENCH = """
import truebridge as tb
from truebridge.diagnostics import doctor, progress
progress.PATIENCE = 0
doctor._PROGRAM = '''
import sys, time
for share in range(6 if "bench" in sys.argv else 0):
    print(f"{share / 5:.3f}", flush=True)
    time.sleep(0.3)
print('{"versions": {}, "broken": {}, "handoffs": [], "copies": []}', end="")
'''
tb.bench(seconds=3)
"""


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Screen(io.StringIO):
    """A standard error that may be a terminal."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    return clock


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_STEP", 1 << 18)


def on_a_terminal(code: str, columns: int = 80) -> str:
    """Return what a program writes to a terminal that is its standard error."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=side, stdin=subprocess.DEVNULL, env=env)
    os.close(side)
    read = []
    while True:
        try:
            data = os.read(main, 1 << 12)
        except OSError:  # The other side is closed.
            break
        if not data:
            break
        read.append(data)
    os.close(main)
    assert process.wait(timeout=120) == 0, b"".join(read).decode()
    return b"".join(read).decode()


def test_a_terminal_shows_one_line_that_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = on_a_terminal(SLOW.format(patience=0.2, call="tb.save('x.npz', arrays)"))
    line, *rest = shown.split("\r\n")
    assert rest == ["the end", ""]
    steps = [step.rstrip() for step in line.split("\r")]
    assert steps[0] == "" and len(steps) >= 4
    form = re.compile(r"save x\.npz: (\d+)% of 256\.0 KiB(, \d+ s left|, \d+\.\d s)?")
    found = [match for step in steps[1:] if (match := form.fullmatch(step))]
    assert len(found) == len(steps) - 1, steps
    shares = [int(match[1]) for match in found]
    assert shares == sorted(shares) and shares[-1] == 100 and len(set(shares)) > 2
    assert any("s left" in match[0] for match in found) and found[-1][2] and "left" not in found[-1][2]
    assert "load" not in shown


@pytest.mark.parametrize(
    ("patience", "call"),
    [(0, "tb.save('x.npz', arrays, progress=False)"), (600, "tb.save('x.npz', arrays)")],
    ids=["False", "a short call"],
)
def test_a_terminal_shows_nothing(patience: float, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert on_a_terminal(SLOW.format(patience=patience, call=call)) == "the end\r\n"


def test_a_line_is_not_longer_than_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = on_a_terminal(SLOW.format(patience=0.2, call="tb.save('a-long-name.npz', arrays)"), columns=20)
    line, *rest = shown.split("\r\n")
    assert rest == ["the end", ""]
    assert [step for step in line.split("\r") if step] == ["save a-long-name.np"] * line.count("\r")


def test_what_is_not_a_terminal_is_left_alone(
    clock: Clock, small_steps: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    for screen in (Screen(False), None):
        monkeypatch.setattr(sys, "stderr", screen)
        tb.save(tmp_path / "x.npz", TREE)
        tb.load(tmp_path / "x.npz", "numpy")
        assert screen is None or screen.getvalue() == ""
    closed = Screen(True)
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    for choice in (None, True):
        tb.save(tmp_path / "x.npz", TREE, progress=choice)
    # Else the same call shows something.
    monkeypatch.setattr(sys, "stderr", screen := Screen(True))
    tb.save(tmp_path / "x.npz", TREE)
    assert "save x.npz: 100% of 2.0 MiB" in screen.getvalue()


def test_true_shows_a_line_in_a_notebook(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen(False))
    tb.save(tmp_path / "x.npy", ONES, progress=True)
    # The header comes first.
    lines = ["", "save x.npy: 0% of 256.0 KiB", "save x.npy: 100% of 256.0 KiB, 0.0 s\n"]
    assert screen.getvalue().split("\r") == lines


def test_a_line_is_written_ten_times_a_second_and_says_how_long(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen(True))
    with progress.metered(None, "load \x1b[2J.npy", report.size) as meter:
        meter.expect(100 << 20)
        for _ in range(100):
            clock.now += 0.05
            meter.step(1 << 20)
    first, *steps = screen.getvalue().removesuffix("\n").split("\r")
    assert first == "" and "\n" not in "".join(steps)
    # A second passes before the first line, and the last one is written at the end.
    assert len(steps) == 41
    assert steps[0] == "load ?[2J.npy: 21% of 100.0 MiB, 4 s left"
    assert steps[-1].rstrip() == "load ?[2J.npy: 100% of 100.0 MiB, 5.0 s"
    assert len({len(step) for step in steps}) <= 2, "what was longer is overwritten"


def test_an_error_does_not_share_the_line(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen(True))
    with pytest.raises(KeyboardInterrupt), progress.metered(True, "bench", "{:g} s".format) as meter:
        meter.expect(10)
        meter.step(5)
        raise KeyboardInterrupt
    assert screen.getvalue() == "\rbench: 50% of 10 s\n"


@pytest.fixture
def told() -> tuple[list[tuple[float, float]], Callable[[float, float], None]]:
    told: list[tuple[float, float]] = []
    return told, lambda done, total: told.append((done, total))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_function_sees_every_step(suffix: str, told: Any, small_steps: None, tmp_path: Path) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    steps, tell = told
    tb.save(tmp_path / f"x{suffix}", TREE, progress=tell)
    assert [total for _, total in steps] == [TOTAL] * len(steps)
    assert steps[-1][0] == TOTAL and steps == sorted(steps)
    # NumPy writes each array after its header, and the package safetensors all in one call.
    assert len(steps) == 1 if suffix == ".safetensors" else len(steps) >= 4
    steps.clear()
    loaded = tb.load(tmp_path / f"x{suffix}", "numpy", progress=tell)
    assert steps == [(1 << 21, TOTAL), (TOTAL, TOTAL)]
    assert loaded["a"].tolist() == TREE["a"].tolist()


def test_one_tensor_is_one_step_of_a_load(told: Any, tmp_path: Path) -> None:
    steps, tell = told
    tb.save(tmp_path / "x.npy", ONES, progress=tell)
    assert steps[-1] == (NBYTES, NBYTES)
    steps.clear()
    tb.load(tmp_path / "x.npy", "torch", progress=tell)
    assert steps == [(NBYTES, NBYTES)]


def test_what_is_compressed_counts_twice(told: Any, tmp_path: Path) -> None:
    steps, tell = told
    np.savez_compressed(tmp_path / "x.npz", a=TREE["a"])
    tb.load(tmp_path / "x.npz", "numpy", progress=tell)
    # Two pieces of a MiB, and the conversion.
    assert steps[-1] == (1 << 22, 1 << 22) and (1 << 20, 1 << 22) in steps
    assert steps == sorted(steps)


def test_a_load_in_steps_is_the_same(small_steps: None, tmp_path: Path) -> None:
    many = {f"{number}": np.full(1 << 16, number, np.float32) for number in range(9)}
    tb.save(tmp_path / "x.npz", many)
    with tb.trace() as trace:
        loaded = tb.load(tmp_path / "x.npz", "numpy")
    assert list(loaded) == list(many) and all((loaded[name] == many[name]).all() for name in many)
    assert len({event.call for event in trace.events}) == 9
    with pytest.raises(tb.BridgeError, match=r"^tree\['0'\]: "):
        tb.load(tmp_path / "x.npz", "numpy", device="cuda")


def test_an_exception_of_the_function_ends_the_call(tmp_path: Path) -> None:
    def stop(done: float, total: float) -> None:
        raise RuntimeError("enough")

    (tmp_path / "x.npz").write_text("before")
    with pytest.raises(RuntimeError, match="enough"):
        tb.save(tmp_path / "x.npz", TREE, progress=stop)
    assert os.listdir(tmp_path) == ["x.npz"] and (tmp_path / "x.npz").read_text() == "before"


@pytest.mark.parametrize("progress", [3, "yes", 0.5])
def test_another_progress_is_refused(progress: Any, tmp_path: Path) -> None:
    tb.save(tmp_path / "x.npy", ONES)
    for call in (
        lambda: tb.save(tmp_path / "y.npy", ONES, progress=progress),
        lambda: tb.load(tmp_path / "x.npy", "numpy", progress=progress),
        lambda: tb.bench(progress=progress),
        lambda: tb.to_torch(ONES, progress=progress),
        lambda: tb.convert({"a": ONES}, "torch", progress=progress),
        lambda: tb.copy(ONES, out=ONES.copy(), progress=progress),
    ):
        with pytest.raises(tb.BridgeValueError, match="progress is .*: pass True, False, or a function"):
            call()
    assert os.listdir(tmp_path) == ["x.npy"]


def test_what_stays_on_the_host_is_not_counted(told: Any) -> None:
    steps, tell = told
    assert tb.to_torch(ONES, progress=tell).sum() == 1 << 16
    assert tb.convert({"a": ONES}, "torch", copy=True, device="cpu", progress=tell)["a"].sum() == 1 << 16
    assert tb.copy(ONES, out=np.zeros_like(ONES), progress=tell).all()
    assert tb.convert_numpy_to_pytorch(ONES, progress=tell).sum() == 1 << 16
    assert steps == []


def test_an_interrupt_at_the_end_of_the_line_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def interrupted(_: Any, ago: float) -> Iterator[progress.Meter]:
        yield progress.Meter(None)
        raise KeyboardInterrupt

    monkeypatch.setattr(progress, "of_moves", interrupted)
    for call in (lambda: tb.to_torch(ONES, progress=True), lambda: tb.copy(ONES, out=ONES, progress=True)):
        with pytest.raises(KeyboardInterrupt):
            call()
    # It is not even asked.
    assert tb.to_torch(ONES, progress=False).sum() == 1 << 16


def test_bench_hears_how_far_its_process_is(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, tell = told
    printed = iter(["", "a stray line\n0.0", "0.000\n", "0.250\n0.500\n0.7", '0.500\n1.000\n{"versions": 1}'])

    def run(probes: Any, timeout: float, environment: Any, hear: Any) -> Any:
        if hear is None:
            return [(0, "{}", "")]
        for text in printed:
            hear(text)
        return [(0, '1.000\n{"versions": {}, "broken": {}, "handoffs": [], "copies": []}', "")]

    monkeypatch.setattr(doctor, "_run", run)
    tb.bench(seconds=4, progress=tell)
    assert steps == [(0, 4), (0, 4), (0, 4), (2, 4), (4, 4), (4, 4)]


def test_the_process_of_bench_is_heard_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It goes on once it was heard.
    program = "import os, time\nfor share in ('0.100', '0.200'):\n print(share, flush=True)\n"
    program += f" while not os.path.exists({str(tmp_path)!r} + '/' + share): time.sleep(0.01)\n"
    monkeypatch.setattr(doctor, "_PROGRAM", f"{program}print('{{\"a\": 1}}', end='')")

    def hear(printed: str) -> None:
        for share in printed.split():
            (tmp_path / share).touch()

    assert doctor.ask({"x": []}, 60, hear=hear) == {"x": {"a": 1}}
    assert sorted(os.listdir(tmp_path)) == ["0.100", "0.200"]


def test_a_process_that_is_heard_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROGRAM", "import time; time.sleep(600)")
    heard: list[str] = []
    assert doctor.ask({"x": []}, 0.5, hear=heard.append)["x"]["ended"][0] == "hang"
    assert heard and set(heard) == {""}


def test_bench_shows_itself_on_a_terminal() -> None:
    shown = on_a_terminal(BENCH)
    first, *steps = shown.split("\r\n")[0].split("\r")
    assert first == "" and shown.count("\n") == 1
    shares = [int(found[1]) for step in steps if (found := re.match(r"bench: (\d+)%, \d+\.\d s *$", step))]
    assert shares == sorted(shares) and len(shares) == len(steps) and len(set(shares)) > 1
    assert shares[-1] == 100 and steps[-1].rstrip().endswith(" s")


def test_threads_have_lines_of_their_own(tmp_path: Path, told: Any) -> None:
    def save(number: int) -> None:
        tb.save(tmp_path / f"{number}.npy", ONES, progress=lambda done, total: totals[number].append((done, total)))

    totals: list[list[tuple[float, float]]] = [[], []]
    threads = [threading.Thread(target=save, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [steps[-1] for steps in totals] == [(NBYTES, NBYTES)] * 2
