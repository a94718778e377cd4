"""The page of a run, as a browser shows it: it opens from a file, in light and dark, and fits a phone."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import truebridge_conformance

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


def test_a_wide_matrix_has_the_width_of_the_window(page: Path) -> None:
    grown = "document.querySelectorAll('.matrix th').forEach((cell) => { cell.style.minWidth = '150px'; })"
    width = "document.querySelector('.full').getBoundingClientRect().width"
    script = f"({grown}, [{width} > 1600, {width} <= innerWidth, document.documentElement.scrollWidth <= innerWidth])"
    assert look(page, f"{script}.join()", "--window-size=1800,900") == "true,true,true"
