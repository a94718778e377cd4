"""The scoreboard: its programs, what it makes of what they do, and its page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import truebridge_conformance
from truebridge_conformance.scoreboard import command, frameworks, page, properties, verdicts
from truebridge_conformance.scoreboard.frameworks import GPU, HOST, Framework
from truebridge_conformance.scoreboard.programs import OURS, OWN, Cell, Program
from truebridge_conformance.scoreboard.properties import Property
from truebridge_conformance.scoreboard.report import Report
from truebridge_conformance.scoreboard.run import Run, environment
from truebridge_conformance.scoreboard.sentences import EXPECTATION, Sentence
from truebridge_conformance.scoreboard.verdicts import Outcome, Ran

ROOT = Path(__file__).parents[3]
SCRIPT = Path(truebridge_conformance.__file__).parents[1] / "scoreboard.py"

EVERY = command.cells(frameworks.FRAMEWORKS, [HOST, GPU], properties.PROPERTIES)
#: The programs of all cells that have one.
PROGRAMS = [(cell, program) for cell in EVERY if (program := cell.program(10)) is not None]
CONTROLS = [
    cell
    for row in frameworks.FRAMEWORKS
    for on in row.on
    for one in properties.PROPERTIES
    if not one.shown and on in one.on and (cell := Cell(row, row, on, OWN, one)).has_meaning
]


def made(name: str, take: str = "{t}", **more: Any) -> Framework:
    """Return a framework whose tensors are lists, and that takes them in this way."""
    lines: dict[str, Any] = {
        "on": (HOST,),
        "imports": ("import os, time",),
        "made": "[1.0, 2.0]",
        "full": "[$v] * 256",
        "typed": "[1] * 4",
        "list": "list($t)",
        "array": "$t",
        "exports": {"dlpack": "$t"},
        "takes": {"dlpack": take.replace("{t}", "$t")},
        "ours": "list($t)",
    }
    return Framework(name=name, label=name, modules=("sys",), distributions=(), **{**lines, **more})


def asked(
    template: str = "  x = $made\n! y = $take\n? got = $list_y\n? print('right' if got == x else f'wrong: {got}')",
    **more: Any,
) -> Property:
    return Property(name="asked", doc="a property", template=template, sentence=Sentence("It arrives."), **more)


def outcome(tmp_path: Path, take: str, property_: Property | None = None, **more: Any) -> Outcome:
    """Return the verdict of a pair whose target takes tensors in this way."""
    cell = Cell(made("a", **more), made("b", take, **more), HOST, OWN, property_ or asked())
    (judged,) = Run(tmp_path, repeat=3, jobs=1).judge([cell])
    return judged.outcome


@pytest.mark.parametrize(
    ("take", "verdict", "text"),
    [
        ("{t}", "right", ""),
        ("{t} + [3.0]", "wrong", "[1.0, 2.0, 3.0]"),
        ("int({t})", "refused", "TypeError: int() argument must be"),
        ("os.abort()", "wrong", "the process is aborted by SIGABRT"),
        ("os.kill(os.getpid(), 11)", "wrong", "the process is aborted by SIGSEGV"),
        ("None", "wrong", "the result cannot be used: TypeError: 'NoneType' object is not iterable"),
        ("sorted({t}, no=1)", "not offered", "TypeError: "),
        ("[].from_dlpack({t})", "not offered", "AttributeError: 'list' object has no attribute 'from_dlpack'"),
        ("os._exit(3)", "could not run", "the process exited with 3"),
    ],
)
def test_a_program_has_its_verdict(take: str, verdict: str, text: str, tmp_path: Path) -> None:
    found = outcome(tmp_path, take)
    assert (found.verdict, found.text[: len(text)]) == (verdict, text), found


def test_a_line_of_the_producer_says_nothing_of_the_pair(tmp_path: Path) -> None:
    found = outcome(tmp_path, "{t}", made="[1.0, undefined]")
    assert found == Outcome("could not run", "NameError: name 'undefined' is not defined")
    assert outcome(tmp_path, "{t}", made="os.abort()").verdict == "could not run"
    assert outcome(tmp_path, "{t}", imports=("import no_such_module",)).verdict == "could not run"


def test_a_program_that_does_not_end_is_wrong(tmp_path: Path) -> None:
    cell = Cell(made("a"), made("b", "time.sleep(600)"), HOST, OWN, asked())
    (judged,) = Run(tmp_path, seconds=0.5, start=2, jobs=1).judge([cell])
    assert (judged.before, judged.outcome) == (Outcome("wrong", "no end within 0.5 s"),) * 2


def test_an_abort_after_the_last_word_is_wrong(tmp_path: Path) -> None:
    template = "  x = $made\n! y = $take\n? print('right')\n  os.abort()"
    found = outcome(tmp_path, "{t}", asked(template))
    assert (found.verdict, "after it had said: right" in found.text) == ("wrong", True), found


def test_an_abort_costs_its_own_verdict_alone(tmp_path: Path) -> None:
    source, target = made("a"), made("b")
    rows = [asked(f"  x = $made\n! {line}\n? print('right')") for line in ("y = 1", "os.abort()", "y = 2")]
    cells = [
        Cell(source, target, HOST, OWN, Property(name=str(n), doc="", template=row.template, sentence=row.sentence))
        for n, row in enumerate(rows)
    ]
    judged = Run(tmp_path, jobs=1).judge(cells)
    assert [one.outcome.verdict for one in judged] == ["right", "wrong", "right"]


def test_an_error_of_the_device_ends_its_process(tmp_path: Path) -> None:
    # What runs next must not see a device that is broken.
    rows = ["! exec('raise RuntimeError(\"CUDA error: misaligned address\")')", "  pass"]
    made_ = [asked(f"  import sys, os\n{line}\n  print('right: ' + str(os.getpid()))") for line in ["  pass", *rows]]
    cells = [
        Cell(
            made("a"), made("b"), HOST, OWN, Property(name=str(n), doc="", template=row.template, sentence=row.sentence)
        )
        for n, row in enumerate(made_)
    ]
    first, broken, last = Run(tmp_path, jobs=1).judge(cells)
    assert broken.outcome.verdict == "refused"
    assert broken.before is not None
    assert (first.outcome.verdict, last.outcome.verdict) == ("right", "right")
    assert first.outcome.text != last.outcome.text


def test_what_is_refused_may_be_right(tmp_path: Path) -> None:
    raises = "exec('raise BufferError(1)')"
    assert outcome(tmp_path, raises).verdict == "refused"
    assert outcome(tmp_path, raises, asked(refusal=("BufferError",))) == Outcome("right", "refused: BufferError: 1")
    assert outcome(tmp_path, raises, asked(refusal=("ValueError",))).verdict == "refused"
    own = "exec('class BridgeBufferError(BufferError): ...\\nraise BridgeBufferError(1)')"
    assert outcome(tmp_path, own, asked(refusal=("BufferError",))).verdict == "right"


def race(tmp_path: Path, take: str, copied: str) -> Outcome:
    """Return the verdict of ``order`` where a thread stands for the device: it writes 0.3 s later."""
    row = made(
        "a",
        take,
        imports=("import time, threading", "import numpy as np"),
        full="np.full(256, $v)",
        write="late = threading.Timer(0.3, x.fill, [$v]); late.start()",
        wait="if 'late' in dir(): late.join()",
        copied=copied,
        on=(GPU,),
    )
    cell = Cell(row, row, GPU, OWN, properties.BY_NAME["order"])
    (judged,) = Run(tmp_path, repeat=4, jobs=1).judge([cell])
    return judged.outcome


def test_the_host_that_waits_is_told_from_one_that_does_not(tmp_path: Path) -> None:
    assert race(tmp_path, "(late.join(), {t})[1]", "z = y").verdict == "waits"
    assert race(tmp_path, "{t}", "late.join(); z = y") == Outcome("right")
    stale = race(tmp_path, "{t}", "z = y.copy()")
    assert (stale.verdict, stale.text[1:]) == ("wrong", " of 4 reads are stale")


def test_a_wrong_verdict_is_that_of_a_process_of_its_own(tmp_path: Path) -> None:
    # It is wrong only in the process of the batch, in which other programs have run.
    template = "  import sys\n  x = $made\n! y = $take\n? print('wrong' if 'runpy' in sys.modules else 'right')"
    cell = Cell(made("a"), made("b"), HOST, OWN, asked(template))
    (judged,) = Run(tmp_path, jobs=1).judge([cell])
    assert (judged.outcome, judged.before) == (Outcome("right"), Outcome("wrong"))


def test_no_program_starts_after_the_deadline(tmp_path: Path) -> None:
    cell = Cell(made("a"), made("b"), HOST, OWN, asked())
    (judged,) = Run(tmp_path, jobs=1, deadline=time.monotonic()).judge([cell])
    assert judged.outcome == Outcome("not run")
    assert not list(tmp_path.rglob("*.out"))


def test_lines_are_told_apart_by_the_last_traceback() -> None:
    program = Program("x\ny\nz\n", takes=frozenset({2}), checks=frozenset({3}))

    def verdict(err: str, status: int = 1) -> str:
        return verdicts.judge(program, "/p.py", Ran("", err, status)).verdict

    start = "Traceback (most recent call last):\n"
    assert verdict(f'{start}  File "/p.py", line 2, in <module>\n  File "/lib.py", line 3, in f\nE: no\n') == "refused"
    assert verdict(f'{start}  File "/p.py", line 3, in <module>\nE: no\n') == "wrong"
    assert verdict(f'{start}  File "/p.py", line 1, in <module>\nE: no\n') == "could not run"
    fatal = (
        'Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "/lib.py", line 1 in f\n'
    )
    assert verdict(f'{fatal}  File "/p.py", line 2 in <module>\n', -6) == "wrong"
    assert verdict(f'{fatal}  File "/p.py", line 1 in <module>\n', -6) == "could not run"
    hangs = 'Timeout (0:00:01)!\nThread 0x1 (most recent call first):\n  File "/p.py", line '
    assert verdict(f"{hangs}2 in <module>\n", -6) == "wrong"
    assert verdict(f"{hangs}1 in <module>\n", -6) == "could not run"


def test_every_program_is_python() -> None:
    for cell, program in [*PROGRAMS, *((cell, cell.program(10)) for cell in CONTROLS)]:
        assert program is not None, cell.key
        compile(program.text, str(cell.key), "exec")
        lines = program.text.splitlines()
        assert "$" not in program.text, program.text
        assert max(map(len, lines)) <= 150, max(lines, key=len)
        assert max(program.takes | program.checks, default=1) <= len(lines)


def test_a_program_is_short() -> None:
    # Without imports, and the kernels and matrices that keep a stream busy.
    for cell, program in PROGRAMS:
        before = {line for row in (cell.source, cell.target) for line in row.before}
        rest = [line for line in program.text.splitlines() if "import" not in line and line not in before]
        assert len(rest) <= 15, program.text


def test_only_the_rows_of_this_package_need_it() -> None:
    for cell, program in PROGRAMS:
        assert ("truebridge" in program.text) == (cell.by == OURS), program.text


def test_every_pair_and_property_is_asked() -> None:
    names = {row.name for row in frameworks.FRAMEWORKS}
    assert {(cell.source.name, cell.target.name) for cell in EVERY} >= {
        (one, other)
        for one in names - {"numpy", "numba", "onnxruntime", "cupy"}
        for other in names - {"cupy", "numba"}
        if one != other
    }
    assert {cell.asked.name for cell in EVERY} == {row.name for row in properties.PROPERTIES if row.shown}
    # Where a target has no function for a tensor, that is a verdict.
    (cell,) = (c for c in EVERY if c.key == ("tensorflow", "numba", GPU, OWN, "values"))
    assert cell.program(1) is None


def test_a_sentence_has_its_page_or_is_an_expectation() -> None:
    for cell in EVERY:
        sentence = cell.sentence
        assert sentence.link.startswith("https://") or sentence.text.startswith(EXPECTATION), sentence


def test_the_programs_of_others_do_not_find_this_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "truebridge").mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:/elsewhere")
    own, ours = (environment(Cell(made("a"), made("b"), HOST, by, asked())) for by in (OWN, OURS))
    assert own["PYTHONPATH"] == "/elsewhere"
    assert str(tmp_path) in ours["PYTHONPATH"].split(":")
    assert own["CUDA_VISIBLE_DEVICES"] == ""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the scoreboard over two pairs, and return the folder of its reports."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("scoreboard")
    options = ["--device", "cpu", "--pairs", "numpy:torch,torch:numpy", "--jobs", "2", "--report", str(folder)]
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "verdicts are *wrong*" in done.stdout
    return folder


def test_pairs_of_the_host_are_judged(report: Path) -> None:
    found = json.loads((report / "scoreboard.json").read_text())
    rows = {(row["source"], row["by"], row["property"]): row for row in found["rows"]}
    assert found["controls"] == []
    assert rows["numpy", "own", "values"]["verdict"] == "right"
    for by, verdict in (("own", "wrong"), ("truebridge", "right")):
        for key in (("numpy", by, "negative"), ("torch", by, "deferred"), ("numpy", by, "read-only")):
            assert rows[key]["verdict"] == verdict, rows[key]
    negative = rows["numpy", "own", "negative"]
    assert "SIGABRT" in negative["text"]
    # What the report shows is what anyone can run, without this package.
    done = subprocess.run([sys.executable, "-c", negative["program"]], capture_output=True, check=False)
    assert done.returncode < 0
    assert {row["verdict"] for row in found["rows"]} <= {"right", "refused", "wrong"}


def test_the_page_says_what_is_wrong(report: Path) -> None:
    text = (report / "scoreboard.md").read_text()
    read = Report.read(report / "scoreboard.json")
    assert text == page.whole(read)
    assert "They prove errors, and never their absence" in text
    assert "| NumPy → PyTorch | ✓ |" in text
    # Who is wrong where comes before the machine and the matrices.
    first = text.partition("## ")[0]
    assert re.search(r"\| \*\*negative\*\* \| 1 of \d+: NumPy → PyTorch \| 0 of \d+ \|", first)
    assert "x = torch.tensor([1 + 2j, 3 + 4j], device=&quot;cpu&quot;).conj().imag" in text
    assert EXPECTATION in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pairs", "numpy:nothing"], "numpy:nothing is not a pair of"),
        (["--properties", "beauty"], "there is no property 'beauty'"),
        (["--pairs", "numpy:torch", "--properties", "order", "--device", "cpu"], "leave nothing to judge"),
    ],
)
def test_bad_options_say_what_there_is(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(options) == 2
    assert words in capsys.readouterr().err


def test_a_stale_page_is_found(tmp_path: Path) -> None:
    tables = ROOT / "xtask/site/tables.py"
    if not tables.exists():
        pytest.skip("not a checkout")
    program = f"""
import sys; sys.path.insert(0, {str(tables.parent)!r})
import tables
from pathlib import Path
tables.DOCS = Path({str(tmp_path)!r})
page = tables.DOCS / "scoreboard.md"
text = Path({str(ROOT / "docs/scoreboard.md")!r}).read_text()
page.write_text(text)
print(tables.filled(page) == page.read_text())
page.write_text(text.replace("✓", "✗", 1))
print(tables.filled(page) == page.read_text())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "False"], done.stderr
