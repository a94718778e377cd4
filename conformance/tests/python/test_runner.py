"""The runner: its reports, its progress, cases that are replayed, planted faults and sanitizers."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import truebridge._core
import truebridge_conformance
from truebridge_conformance import host

pytest.importorskip("numpy")


# The page of a run, as a browser shows it: it opens from a file, in light and dark, and fits a phone.


SCRIPT = Path(truebridge_conformance.__file__).parents[1] / "conformance.py"

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

#: A case that no framework can make: its view leaves its base buffer. So a run that keeps it fails.
CASE = {
    "spec": {"dtype": "float32", "shape": [2, 3], "strides": [-5, 1], "offset": 5, "base": 7, "read_only": False},
    "seed": 7,
}

#: Elements of HTML that have no end.
VOID = ("meta", "br", "hr", "img", "input", "link")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one failure, which has a case, and its page."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "regressions").mkdir()
    kept = {"from": "numpy", "to": "numpy", "property": "values", "case": CASE}
    (folder / "regressions" / "kept.json").write_text(json.dumps(kept), encoding="utf-8")
    line = ["--device", "cpu", "--pairs", "numpy:numpy", "--cases", "40", "--seed", "1", "--report", str(folder)]
    summary = folder / "summary.md"
    github = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *line], capture_output=True, text=True, timeout=300, env={**os.environ, **github}
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert re.search(r"^::error title=numpy → numpy%3A values::a kept case fails again: ", run.stdout, re.MULTILINE)
    assert summary.read_text(encoding="utf-8").startswith("# Conformance on cpu\n")
    return folder / "report.html"


class Tags(HTMLParser):
    """Follows which elements are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def test_the_page_is_well_formed_and_complete(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert tags.open == [] and {"svg", "table", "style", "pre"} <= tags.seen
    assert "script" not in tags.seen and "http" not in text and "url(" not in text
    [kept] = (page.parent / "regressions").glob("numpy-numpy-values-*.json")
    for name in ("report.html", "report.md", "junit.xml"):
        written = (page.parent / name).read_text(encoding="utf-8")
        assert f"--device cpu --replay {kept}" in written, name
        assert not re.search(r"Some\(|ZeroCopy|InPlace|CopyNeeded", written), name


def test_the_command_of_a_failure_works_as_it_is_printed(page: Path, tmp_path: Path) -> None:
    text = (page.parent / "report.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^```sh\n(.*)\n```$", text, re.MULTILINE)
    assert shlex.split(command)[:2] == [sys.executable, str(SCRIPT)]
    # Neither the folder nor the search path of the run is known to a reader.
    bare = {name: value for name, value in os.environ.items() if name != "PATH"}
    shell = ["/bin/sh", "-c", command]
    run = subprocess.run(shell, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=bare)
    assert run.returncode == 1 and "numpy:numpy, values: FAILED: " in run.stdout, run.stdout + run.stderr


def look(page: Path, script: str, *options: str) -> str:
    """Opens the page in a browser, and returns what ``script`` finds there."""
    browser = next((found for found in map(shutil.which, BROWSERS) if found), None)
    if browser is None:
        pytest.skip(f"no browser: install one of {', '.join(BROWSERS)}")
    # The page has no scripts: this one is the test's, in a copy.
    text = page.read_text(encoding="utf-8")
    copy = page.with_name("looked-at.html")
    copy.write_text(text.replace("</body>", f"<script>document.title = {script}</script></body>"), encoding="utf-8")
    line = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'browser'}"]
    shown = subprocess.run(
        [*line, *options, "--dump-dom", copy.as_uri()], capture_output=True, text=True, errors="replace", timeout=120
    )
    found = re.search("<title>(.*?)</title>", shown.stdout)
    assert found, shown.stderr
    return found[1]


COLOUR = "getComputedStyle(document.body).backgroundColor"


def test_a_browser_shows_failures_first_with_their_picture(page: Path) -> None:
    first = "document.querySelector('section').id"
    wide = "document.querySelector('#failures svg.layout').getBoundingClientRect().width > 100"
    cells = "document.querySelectorAll('#failures svg.layout rect').length"
    assert look(page, f"[{first}, {wide}, {cells}].join()") == "failures,true,7"


def test_the_page_fits_a_phone_and_is_dark_where_that_is_preferred(page: Path) -> None:
    # The narrowest window of a headless browser is wider than a phone: so is a frame of the page in it.
    fits = "(document.body.style.width = '360px', document.querySelector('main').scrollWidth <= 360)"
    assert look(page, f"[{fits}, {COLOUR}].join(';')") == "true;rgb(251, 251, 250)"
    assert look(page, COLOUR, "--blink-settings=preferredColorScheme=0") == "rgb(21, 23, 26)"


@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_fits_the_window(page: Path, width: int) -> None:
    fits = "document.documentElement.scrollWidth <= innerWidth"
    script = f"[document.querySelectorAll('.matrix td').length > 0, {fits}].join()"
    assert look(page, script, f"--window-size={width},900") == "true,true"


# A run prints one plain line for each pair, and on a terminal a bar that the line replaces.


PAIR = re.compile(r"numpy → numpy  passed +\d+ cases +0 failed +\d+\.\d s")
MATRIX = re.compile(r"numpy        (\d+) of \1 \(\d+ not applicable\), \d+ cases")


def command(report: Path, *options: str) -> list[str]:
    line = ["--device", "cpu", "--pairs", "numpy:numpy", "--cases", "20", "--seed", "1", "--report", str(report)]
    return [sys.executable, str(SCRIPT), *line, *options]


def test_without_a_terminal_a_pair_is_one_plain_line(tmp_path: Path) -> None:
    run = subprocess.run(command(tmp_path), capture_output=True, text=True, timeout=300)
    lines = run.stdout.splitlines()
    assert run.returncode == 0, run.stderr
    assert lines[0] == "device cpu, seed 1" and PAIR.fullmatch(lines[1]) and lines[2] == "", lines[:3]
    assert lines[3] == "from ↓ to →  numpy" and MATRIX.fullmatch(lines[4]), lines[3:]
    assert re.fullmatch(r"\d+ passed, 0 failed", lines[-2]), lines[-2]
    assert lines[-1] == f"all of them are in {tmp_path}.tar.gz" and Path(f"{tmp_path}.tar.gz").is_file()
    assert "\x1b" not in run.stdout + run.stderr and "\r" not in run.stdout + run.stderr


def test_details_have_a_line_for_each_property(tmp_path: Path) -> None:
    run = subprocess.run(command(tmp_path, "-v"), capture_output=True, text=True, timeout=300)
    lines = run.stdout.splitlines()
    assert re.fullmatch(r"numpy → numpy  subject +\d+ cases  passed", lines[1]), lines[1]
    assert "numpy → numpy  order               0 cases  not applicable: the device has no streams" in lines
    last = [line for line in lines if line.startswith("numpy → numpy")][-1]
    assert PAIR.fullmatch(last), last


def on_terminal(line: list[str], environment: dict[str, str]) -> str:
    """Runs a program on a terminal, and returns what it prints."""
    parent, child = pty.openpty()
    with subprocess.Popen(line, stdin=child, stdout=child, stderr=child, env=environment) as run:
        os.close(child)
        printed = b""
        while True:
            try:
                some = os.read(parent, 1 << 16)
            except OSError:
                # The program has closed the terminal.
                break
            if not some:
                break
            printed += some
    os.close(parent)
    assert run.returncode == 0, printed
    return printed.decode()


def test_on_a_terminal_a_bar_stands_in_the_place_of_the_line(tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")} | {"TERM": "xterm"}
    printed = on_terminal(command(tmp_path), plain)
    assert re.search(r"/\d\d cases", printed) and "\x1b[2K" in printed and PAIR.search(printed)
    assert "\x1b" not in on_terminal(command(tmp_path), plain | {"CI": "true"})


# A case that the runner has kept runs first from then on, also that of an adapter whose name is not its framework's.


#: The index of a case that comes from a regression (``REPLAYED`` in ``conformance/src/engine.rs``).
REPLAYED = 2**32 - 1

KEPT = {
    "spec": {"dtype": "float32", "shape": [2], "strides": [1], "offset": 0, "base": 2, "read_only": False},
    "seed": 7,
}


def messages(*options: str) -> list[dict[str, Any]]:
    """Returns the messages of a worker."""
    worker = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, errors="replace", timeout=300
    )
    lines = [json.loads(line) for line in worker.stdout.splitlines()]
    assert lines and lines[-1] == "done", worker.stderr
    return lines


def refused(*options: str) -> str:
    """Runs the suite with options that it refuses, and returns why."""
    run = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=300)
    assert run.returncode == 2 and run.stdout == "", run.stdout + run.stderr
    return run.stderr


def test_a_file_that_is_no_case_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "nofile.json", tmp_path, binary):
        assert refused("--device", "cpu", "--replay", str(file)).startswith(f"error: the case cannot be read: {file}: ")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, Path("/proc/reports")):
        reason = refused("--device", "cpu", "--pairs", "numpy:numpy", "--report", str(folder))
        assert reason.startswith(f"error: reports cannot be written to {folder} ("), reason
        assert reason.endswith("name another folder with --report\n"), reason


@pytest.mark.parametrize("name", ["numpy", "numpy-interface", "dlpack", "dlpack-legacy", "cupy"])
def test_a_kept_case_is_replayed(name: str, tmp_path: Path) -> None:
    about = host.describe()
    if name not in about["versions"]:
        pytest.skip(about["refused"].get(name, "not installed"))
    device = "cpu"
    if name == "cupy":
        if not about["gpus"]:
            pytest.skip("no CUDA device")
        device = "cuda"
    folder = tmp_path / "regressions"
    folder.mkdir()
    # What only speaks DLPack takes nothing in.
    target = "numpy" if name.startswith("dlpack") else name
    kept = {"from": name, "to": target, "property": "values", "case": KEPT}
    (folder / f"{name}-{target}-values-1.json").write_text(json.dumps(kept), encoding="utf-8")
    said = messages(
        *("--worker", f"{name}:{target}", "--device", device, "--report", os.fspath(tmp_path)),
        *("--properties", "values", "--cases", "1", "--seed", "1"),
    )
    indices = [message["started"]["index"] for message in said if "started" in message]
    assert indices == [REPLAYED, 0]
    judged = [message["finished"] for message in said if "finished" in message]
    assert [(report["verdict"], report["cases"]) for report in judged] == [("passed", 2)]


# Faults in adapters are compiled only into the suite, and only where it is built for that.


ROOT = Path(__file__).parents[3]

#: A fault in an adapter, as the code asks for it.
PLANTED = re.compile(r'is_(?:planted|left_behind)\("(\w+)"\)')


def test_the_package_has_no_fault() -> None:
    sources = [path.read_text() for path in ROOT.glob("crates/bridge-*/src/**/*.rs")]
    names = {name for source in sources for name in PLANTED.findall(source)}
    assert len(names) >= 12, names
    library = Path(truebridge._core.__file__).read_bytes()
    assert [name for name in sorted(names) if name.encode() in library] == []


def test_every_fault_in_an_adapter_has_a_row_or_a_test() -> None:
    sources = [path.read_text() for path in ROOT.glob("crates/bridge-*/src/**/*.rs")]
    rows = (ROOT / "conformance/src/fault/real.rs").read_text()
    tests = ("planted", "core_planted", "tch_planted")
    rows += "".join((ROOT / f"conformance/tests/{name}.rs").read_text() for name in tests)
    missing = [name for source in sources for name in PLANTED.findall(source) if f'"{name}"' not in rows]
    assert missing == []


# Workers run under compute-sanitizer: what it finds fails the pair, and so does a sanitizer that saw nothing.


#: Stands for compute-sanitizer: runs the program after its own options, and reports what the test wants.
SANITIZER = """#!/bin/sh
# Each option has a value.
while [ "${{1#--}}" != "$1" ]; do
    [ "$1" = --log-file ] && log=$2
    shift 2
done
test "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 || exit 3
"$@"
{report}
"""

CLEAN = 'echo "========= ERROR SUMMARY: 0 errors" > "$log"'
FOUND = """echo "========= Invalid __global__ read of size 4 bytes" > "$log"
echo "========= ERROR SUMMARY: 1 error" >> "$log"
exit 86"""


def run(folder: Path, report: str) -> subprocess.CompletedProcess[str]:
    """Run a pair under a sanitizer that ends with these lines."""
    tool = folder / "bin/compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(SANITIZER.format(report=report))
    tool.chmod(0o755)
    options = ["--device", "cpu", "--pairs", "numpy:numpy", "--cases", "20", "--report", str(folder / "report")]
    environment = os.environ | {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
    command = [sys.executable, str(SCRIPT), *options, "--sanitizer", "memcheck"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_a_pair_of_which_nothing_is_found_passes(tmp_path: Path) -> None:
    ended = run(tmp_path, CLEAN)
    assert ended.returncode == 0 and ", 0 failed" in ended.stdout, ended


def test_what_is_found_fails_the_pair_and_is_quoted(tmp_path: Path) -> None:
    ended = run(tmp_path, FOUND)
    assert ended.returncode == 1, ended
    assert "the sanitizer found 1 error: Invalid __global__ read of size 4 bytes; all are in" in ended.stdout


def test_a_sanitizer_that_has_seen_nothing_is_not_taken_for_a_clean_run(tmp_path: Path) -> None:
    ended = run(tmp_path, "true")
    assert ended.returncode == 1 and "compute-sanitizer has seen no work" in ended.stdout, ended


def test_without_the_program_the_pair_says_so(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--pairs", "numpy:numpy", "--cases", "20", "--report", str(tmp_path)]
    command = [sys.executable, str(SCRIPT), *options, "--sanitizer", "initcheck"]
    environment = os.environ | {"PATH": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 1 and "the worker does not start" in ended.stdout, ended
