"""A suite of another project judges the package: over a checkout that is made up here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge_conformance
from truebridge_conformance.judge import replace, report, suites, verdicts
from truebridge_conformance.judge.errors import BadList
from truebridge_conformance.judge.replace import Replaced, importing, of_another_framework

SCRIPT = Path(truebridge_conformance.__file__).parents[1] / "judge.py"

TESTS = '''
import numpy as np
import pytest
from numpy import from_dlpack

def test_passes():
    x = np.arange(4)
    assert np.from_dlpack(x, copy=False).ctypes.data == x.ctypes.data
    assert from_dlpack(x, copy=True).ctypes.data != x.ctypes.data

def test_is_listed():
    with pytest.raises(TypeError, match="words of NumPy"):
        raise TypeError("words of NumPy" if own() else np.from_dlpack(np.ones(3)).dtype.name)

def test_fails_natively_as_well():
    np.from_dlpack(np.ones(2))
    assert False, "by itself"

def test_never_reaches():
    assert np.arange(3)[0] == 0

def test_is_skipped():
    pytest.skip("no such device")

@pytest.mark.xfail(reason="not written")
def test_is_expected_to_fail():
    np.from_dlpack(np.datetime64("2021-05-27"))

def own():
    """Return whether the functions are NumPy's own."""
    return not hasattr(np.from_dlpack, "__wrapped__")

def test_fails():
    assert own() or np.from_dlpack(np.ones(2))[0] == 7

def test_aborts():
    import os
    if not own():
        np.from_dlpack(np.ones(2))
        os.abort()

def test_runs_after_the_abort():
    assert np.from_dlpack(np.ones(2)).shape == (2,)
'''

LISTED = {
    "suite": "numpy",
    "tests": "test_is_listed",
    "error": r"words of NumPy.*from_dlpack\(ndarray of float64 \(3,\)\)$",
    "verdict": "not_applicable",
    "reason": "the test looks for words",
}
STALE = {**LISTED, "tests": "test_passes", "verdict": "expected", "reason": "it passes by now"}
ELSEWHERE = {**STALE, "where": {"device": "cuda"}}


def checkout(folder: Path, tests: str = TESTS) -> Path:
    """Makes a checkout of NumPy with these tests, whose files for pytest would fail every run."""
    place = folder / "numpy" / suites.SUITES["numpy"].files[0]
    place.parent.mkdir(parents=True)
    place.write_text(tests, encoding="utf-8")
    for file in ("conftest.py", "numpy/__init__.py", "numpy/conftest.py"):
        (folder / "numpy" / file).write_text("raise RuntimeError('of the checkout')", encoding="utf-8")
    (folder / "numpy" / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option", encoding="utf-8")
    return folder / "numpy"


def judge(
    folder: Path, *options: str, program: tuple[str, ...] = (str(SCRIPT),), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program, "--report", "reports", "--device", "cpu", *options],
        cwd=folder,
        env={**os.environ, "PYTEST_ADDOPTS": "--no-such-option", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def written(folder: Path, entries: list[dict[str, Any]]) -> str:
    (folder / "list.json").write_text(json.dumps(entries), encoding="utf-8")
    return str(folder / "list.json")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("judged")
    path = str(checkout(folder))
    done = judge(folder, "--suite", "numpy", "--path", path, "--expected", written(folder, [LISTED, STALE, ELSEWHERE]))
    return done, folder / "reports" / "numpy"


def test_each_test_has_a_verdict_with_its_reason(judged: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, folder = judged
    rows = json.loads((folder / "report.json").read_text(encoding="utf-8"))["judged"]
    said = {row["test"].partition("::")[2]: (row["verdict"], row["reason"].partition("\n")[0]) for row in rows}
    assert said == {
        "test_passes": ("passed", ""),
        "test_is_listed": ("not_applicable", "the test looks for words"),
        "test_fails_natively_as_well": (
            "not_applicable",
            "fails with the framework's own function as well: AssertionError: by itself",
        ),
        "test_never_reaches": ("not_applicable", "did not reach the package"),
        "test_is_skipped": ("not_applicable", "the suite skips it: no such device"),
        "test_is_expected_to_fail": ("not_applicable", "the suite skips it: expected to fail: not written"),
        "test_fails": ("failed", said["test_fails"][1]),
        "test_aborts": ("failed", "the process was ended by SIGABRT"),
        "test_runs_after_the_abort": ("passed", ""),
    }, done.stdout + done.stderr
    assert said["test_fails"][1].startswith("AssertionError"), said
    calls = {row["test"].partition("::")[2]: row["calls"] for row in rows}
    assert (calls["test_passes"], calls["test_never_reaches"], calls["test_aborts"]) == (2, 0, None)


def test_the_table_names_failures_and_stale_entries(judged: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, folder = judged
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert [line.rsplit(maxsplit=1) for line in lines[1:5]] == [
        ["passed", "2"],
        ["failed", "2"],
        ["failed, with a reason in the list", "0"],
        ["not applicable", "5"],
    ]
    assert [line.split()[0] for line in lines[5:8]] == ["FAILED", "FAILED", "stale:"]
    assert "it passes by now" in lines[7] and "numpy.from_dlpack(ndarray of float64 (2,))" in done.stdout
    whole = (folder / "report.md").read_text(encoding="utf-8")
    assert "| 2 | failed" not in whole and "| failed | 2 |" in whole and "## Stale" in whole


def test_a_failure_with_a_reason_does_not_fail_the_run(tmp_path: Path) -> None:
    entries = [LISTED, {**LISTED, "tests": "test_[fa]*", "error": "Assert|SIGABRT", "verdict": "expected"}]
    path = str(checkout(tmp_path))
    done = judge(tmp_path, "--suite", "numpy", "--path", path, "--expected", written(tmp_path, entries))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stale" not in done.stdout and "failed, with a reason in the list      3" in done.stdout


def test_a_test_without_an_end_is_a_failure(tmp_path: Path) -> None:
    path = str(checkout(tmp_path, "import time\ndef test_waits():\n    time.sleep(60)\n"))
    done = judge(tmp_path, "--suite", "numpy", "--path", path, "--seconds", "1", "--expected", written(tmp_path, []))
    assert "not applicable                         1" in done.stdout, done.stdout + done.stderr
    assert "no end within 1 s" in (tmp_path / "reports" / "numpy" / "report.md").read_text(encoding="utf-8")


def test_an_abort_at_the_end_is_a_failure(tmp_path: Path) -> None:
    leaves = "import atexit, os, numpy as np\ndef test_one():\n    np.from_dlpack(np.ones(2))\n    "
    path = str(checkout(tmp_path, leaves + "atexit.register(os.abort)\n"))
    done = judge(tmp_path, "--suite", "numpy", "--path", path, "--expected", written(tmp_path, []))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED outside of the tests: the process was ended by SIGABRT" in done.stdout


def test_aborts_without_end_are_given_up(tmp_path: Path) -> None:
    aborts = "import os, pytest, numpy as np\n@pytest.mark.parametrize('n', range(100))\ndef test_one(n):\n    "
    path = str(checkout(tmp_path, aborts + "hasattr(np.from_dlpack, '__wrapped__') and os.abort()\n"))
    # Each abort costs a process: three of them are enough here.
    code = "import sys; from truebridge_conformance.judge import main, run; run.MOST_ABORTS = 3; "
    code += "sys.exit(main(sys.argv[1:]))"
    options = ("--suite", "numpy", "--path", path, "--expected", written(tmp_path, []))
    done = judge(tmp_path, *options, program=("-c", code))
    assert done.returncode == 1 and "outside of the tests: too many tests abort" in done.stdout, done.stderr


def test_a_file_that_cannot_be_loaded_is_not_silent(tmp_path: Path) -> None:
    broken = "import numpy as np\nassert not hasattr(np.from_dlpack, '__wrapped__'), 'ours'\ndef test_one(): pass\n"
    path = str(checkout(tmp_path, broken))
    done = judge(tmp_path, "--suite", "numpy", "--path", path, "--expected", written(tmp_path, []))
    assert done.returncode == 1 and "ours" in done.stdout, done.stdout + done.stderr


#: Stands for the extension module of nanobind's tests, in Python: it returns what it was called with, and shapes.
EXTENSION = """
import numpy as np

class Cls: ...

def get_shape(x): return list(np.from_dlpack(x).shape)
def passthrough(x): return x
def ret(): return 7
"""

NANOBIND = """
import numpy as np
import test_ndarray_ext as t
from common import three

def test_takes_a_loan():
    assert t.get_shape(np.ones((2, three))) == [2, 3] and t.Cls()
    assert not ours() or type(t.passthrough(x=np.ones(2))).__name__ == "Loan"

def test_never_reaches():
    assert t.ret() == 7 and t.passthrough(5) == 5

def test_fails():
    x = np.ones(2)
    assert t.passthrough(x) is x

def ours():
    return hasattr(t.get_shape, "__wrapped__")
"""

#: Stands for cmake: it writes down its arguments, and its build is the module.
CMAKE = """#!/bin/sh
echo "$@" >> "$0.log"
case "$1" in
    --build) mkdir -p "$2/tests" && cp "$0.py" "$2/tests/test_ndarray_ext.py";;
    *) test -d "$2/ext/robin_map" || { echo "no robin_map"; exit 1; };;
esac
"""


def nanobind(folder: Path) -> Path:
    """Makes a checkout of nanobind, with its submodule, and with an empty PyTorch: to import it takes seconds."""
    tests = folder / "nanobind" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_ndarray.py").write_text(NANOBIND, encoding="utf-8")
    (tests / "common.py").write_text("three = 3", encoding="utf-8")
    (tests / "torch.py").touch()
    (folder / "nanobind/ext/robin_map").mkdir(parents=True)
    return folder / "nanobind"


def cmake(folder: Path) -> Path:
    """Makes a folder with such a cmake, and a compiler."""
    programs = folder / "programs"
    programs.mkdir()
    for name, text in (("cmake", CMAKE), ("c++", "#!/bin/sh\n")):
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    (programs / "cmake.py").write_text(EXTENSION, encoding="utf-8")
    return programs


def test_a_module_is_built_for_the_tests_and_takes_loans(tmp_path: Path) -> None:
    path, programs = nanobind(tmp_path), cmake(tmp_path)
    options = ("--suite", "nanobind", "--path", str(path), "--expected", written(tmp_path, []))
    done = judge(tmp_path, *options, PATH=f"{programs}:{os.environ['PATH']}")
    rows = json.loads((tmp_path / "reports/nanobind/report.json").read_text(encoding="utf-8"))["judged"]
    said = {row["test"].partition("::")[2]: (row["verdict"], row["calls"]) for row in rows}
    expected = {
        "test_takes_a_loan": ("passed", 2),
        "test_never_reaches": ("not_applicable", 0),
        "test_fails": ("failed", 1),
    }
    assert said == expected and done.returncode == 1, done.stdout + done.stderr
    assert "test_ndarray_ext.passthrough(ndarray of float64 (2,))" in done.stdout
    configured, built = (programs / "cmake.log").read_text(encoding="utf-8").splitlines()
    assert f"-S {path} " in configured and "-DPython_EXECUTABLE=" in configured
    out = Path(built.split()[1])
    assert built.endswith("--target test_ndarray_ext") and not out.exists() and tmp_path not in out.parents


def test_a_module_that_is_built_already_is_used(tmp_path: Path) -> None:
    (tmp_path / "built").mkdir()
    options = ("--suite", "nanobind", "--path", str(nanobind(tmp_path)), "--extension", "built", "--tests", "loan")
    done = judge(tmp_path, *options)
    assert done.returncode == 2 and "built has no test_ndarray_ext" in done.stderr, done.stderr
    (tmp_path / "built/test_ndarray_ext.py").write_text(EXTENSION, encoding="utf-8")
    done = judge(tmp_path, *options)
    assert done.returncode == 0 and "passed                                 1" in done.stdout, done.stdout + done.stderr


def test_what_keeps_a_module_from_being_built_is_said(tmp_path: Path) -> None:
    path, programs = nanobind(tmp_path), cmake(tmp_path)
    (path / "ext/robin_map").rmdir()
    options = ("--suite", "nanobind", "--path", str(path))
    done = judge(tmp_path, *options, PATH=f"{programs}:{os.environ['PATH']}")
    assert done.returncode == 2 and "git submodule update --init):\nno robin_map" in done.stderr, done.stderr
    for program, said in (("c++", "a C++ compiler is missing"), ("cmake", "cmake is missing")):
        (programs / program).unlink()
        done = judge(tmp_path, *options, PATH=str(programs), CXX="")
        assert done.returncode == 2 and said in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--suite", "numpy"], "pass a checkout of numpy/numpy with --path"),
        (["--suite", "cupy"], "pass a checkout of cupy/cupy with --path"),
        (["--suite", "numpy", "--expected", "nowhere.json"], "nowhere.json: "),
        (["--suite", "nanobind"], "pass a checkout of wjakob/nanobind with --path"),
        (["--suite", "none"], "invalid choice: 'none'"),
    ],
)
def test_what_cannot_judge_says_why(options: list[str], said: str, tmp_path: Path) -> None:
    done = judge(tmp_path, *options, "--path", str(tmp_path))
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_an_empty_file_judges_nothing(tmp_path: Path) -> None:
    done = judge(tmp_path, "--suite", "numpy", "--path", str(checkout(tmp_path, "")))
    assert done.returncode == 2 and "no test ran" in done.stderr, done.stderr


def test_the_report_says_what_was_set_for_the_tests(tmp_path: Path) -> None:
    file = tmp_path / suites.SUITES["array-api-tests"].files[0]
    file.parent.mkdir()
    # To import the others takes seconds.
    for name in ("torch", "jax"):
        (tmp_path / f"{name}.py").touch()
    file.write_text("import os\ndef test_one():\n    assert os.environ['ARRAY_API_TESTS_MODULE'] == 'mine'\n")
    pytest.importorskip("hypothesis")
    pytest.importorskip("ndindex")
    done = judge(tmp_path, "--suite", "array-api-tests", "--path", str(tmp_path), ARRAY_API_TESTS_MODULE="mine")
    assert done.returncode == 0, done.stdout + done.stderr
    whole = (tmp_path / "reports" / "array-api-tests" / "report.md").read_text(encoding="utf-8")
    assert "`ARRAY_API_TESTS_MODULE=mine`" in whole and "`CI=true`" in whole


def test_a_missing_framework_is_named(tmp_path: Path) -> None:
    file = tmp_path / suites.SUITES["tvm-ffi"].files[0]
    file.parent.mkdir(parents=True)
    file.touch()
    hidden = "import importlib.util as u, sys; find = u.find_spec; "
    hidden += "u.find_spec = lambda name, *rest: None if name == 'tvm_ffi' else find(name, *rest); "
    hidden += "from truebridge_conformance.judge import main; sys.exit(main(sys.argv[1:]))"
    done = judge(tmp_path, "--suite", "tvm-ffi", "--path", str(tmp_path), program=("-c", hidden))
    assert done.returncode == 2 and "tvm-ffi needs apache-tvm-ffi" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "change",
    [{"suite": "none"}, {"verdict": "passed"}, {"reason": " "}, {"error": ""}, {"error": "("}, {"other": 1}],
)
def test_a_malformed_entry_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadList):
        verdicts.expected(Path(written(tmp_path, [{**LISTED, **change}])))


def test_the_list_of_the_repository_is_whole() -> None:
    entries = verdicts.expected(verdicts.LIST)
    assert entries and all(entry.reason.endswith(".") for entry in entries)
    assert not set(report.WORDS) ^ {"passed", "failed", "expected", "not_applicable"}


def test_every_suite_has_functions_to_replace() -> None:
    for name, suite in suites.SUITES.items():
        assert suite.files and all(framework in suites.FUNCTIONS for framework in suite.frameworks), name


class Box:
    """Stands for a framework's module."""

    @staticmethod
    def take(x: Any, device: Any = None, copy: bool | None = None) -> str:
        return "native"


def test_keywords_reach_the_package_and_its_own_calls_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def convert(x: Any, target: str, **keywords: Any) -> str:
        seen.append((target, keywords))
        return Box.take(x)

    monkeypatch.setattr("truebridge.convert", convert)
    monkeypatch.setattr(replace, "_owner", lambda _name: Box)
    monkeypatch.setattr(Box, "take", Box.take)
    before = replace.calls()
    assert replace.install([Replaced("box.take", importing("numpy")), Replaced("box.none", importing("numpy"))]) == [
        "box.take"
    ]
    assert Box.take(np.ones(2), device="cpu", copy=False) == "native"
    assert seen == [("numpy", {"device": "cpu", "copy": False})]
    assert replace.calls() - before == 1
    assert replace.last() == "box.take(ndarray of float64 (2,), device=cpu, copy=False)"


def test_a_general_function_is_an_exchange_for_memory_of_another_framework_on_a_device() -> None:
    class ProtocolObject:
        __cuda_array_interface__ = {}

    when = of_another_framework("numpy")
    assert when(ProtocolObject()) and when(ProtocolObject(), copy=False)
    assert not when(np.ones(2)) and not when([1, 2]) and not when(ProtocolObject(), dtype="int8")
    assert not of_another_framework(ProtocolObject.__module__)(ProtocolObject())
