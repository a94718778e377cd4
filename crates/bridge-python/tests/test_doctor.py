"""``doctor``: each finding is provoked by a set-up that is broken on purpose, and GPUs by what a probe would print."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import types
import typing
from pathlib import Path
from typing import Any

import pytest

import truebridge as tb
from truebridge import __main__
from truebridge._frameworks.table import ALL
from truebridge.diagnostics import doctor, report

TENSORFLOW1 = os.environ.get("TRUEBRIDGE_TENSORFLOW1")

GPU = {"name": "H200", "memory": 141 << 30, "capability": [9, 0], "pools": True}
DRIVER: dict[str, Any] = {
    "gpus": 1,
    "library": True,
    "version": "13.0",
    "module": "580.1",
    "devices": [GPU],
    "error": None,
}
PROFILE = {"private_functions": True}
TORCH = {"installed": True, "version": "2.11", "build": "CUDA 13.0", "devices": 1, "profile": PROFILE}
#: A framework that is not one of these is missing.
MISSING = {"installed": False}
PRINTED: dict[str, dict[str, Any]] = {
    "driver": DRIVER,
    "torch": {**TORCH, "allocator": "native"},
    "cupy": {**TORCH, "version": "14.2", "allocator": "MemoryPool"},
    "numpy": {**TORCH, "version": "2.4", "build": "CPU", "devices": 0},
    "tensorflow": {**TORCH, "version": "2.21", "takes_all_memory": False},
    "pairs": {"pairs": []},
}


def printing(monkeypatch: pytest.MonkeyPatch, **changes: dict[str, Any]) -> None:
    """Replace the processes of the probes by what they print."""

    def run(probes: list[list[str]], *rest: Any) -> list[tuple[int | None, str, str]]:
        names = [arguments[-1] if arguments[0] == "framework" else arguments[0] for arguments in probes]
        return [(0, json.dumps({**PRINTED.get(name, MISSING), **changes.get(name, {})}), "") for name in names]

    monkeypatch.setattr(doctor, "_run", run)
    monkeypatch.setattr(doctor, "_imported", lambda: {})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("TRUEBRIDGE_TENSORFLOW1", raising=False)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder at the start of the path, in which every framework is missing until a test writes one."""
    for name in ALL:
        write(tmp_path, name, "raise ModuleNotFoundError('left out')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("TRUEBRIDGE_TENSORFLOW1", raising=False)
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(textwrap.dedent(text))


def only(report: Any, kind: str, subject: str) -> str:
    """Return the text and the advice of the one finding of this kind about this subject."""
    (found,) = [finding for finding in report.findings if (finding.kind, finding.subject) == (kind, subject)]
    assert found.advice
    assert str(found) in str(report)
    return f"{found.text} {found.advice}"


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


@pytest.fixture(scope="module")
def on_the_host() -> dict[str, Any]:
    """Return what the doctor reports where no framework sees a GPU, of a process that has imported none."""
    code = """
        import sys, truebridge as tb
        report = tb.doctor()
        assert not set(tb._core.FRAMEWORKS) & set(sys.modules), "imported in the caller's process"
        print(report.as_json())
    """
    done = python(code, CUDA_VISIBLE_DEVICES="", TRUEBRIDGE_TENSORFLOW1="")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_machine_without_a_gpu_has_no_findings(on_the_host: dict[str, Any]) -> None:
    assert [finding for finding in on_the_host["findings"] if finding["kind"] != "hidden"] == []
    versions = {framework["name"]: framework["version"] for framework in on_the_host["frameworks"]}
    assert versions["numpy"] == pytest.importorskip("numpy").__version__
    assert not any(framework["imported"] for framework in on_the_host["frameworks"])


def test_the_matrix_says_what_convert_does(on_the_host: dict[str, Any]) -> None:
    torch, np = pytest.importorskip("torch"), pytest.importorskip("numpy")
    methods = {(pair["source"], pair["target"]): pair for pair in on_the_host["matrix"]["pairs"]}
    assert methods["torch", "numpy"]["method"] == methods["numpy", "torch"]["method"] == "in place"
    tensor = torch.zeros(64)
    assert np.shares_memory(tb.to_numpy(tensor, copy=False), tensor.numpy())
    assert methods["torch", "numpy"]["reason"] is None
    if ("numpy", "tensorflow") in methods:
        # Whatever address NumPy has chosen: the plan is for one that fits, and says so.
        pair = methods["numpy", "tensorflow"]
        assert pair["method"] == "in place" and pair["reason"] is not None
        assert "aligned to 64 bytes" in pair["reason"] and "NumPy's own usually is not" in pair["reason"]
        assert methods["torch", "tensorflow"]["reason"] is None


BROKEN = {
    "raises": ("raise RuntimeError('half installed')", "broken", "RuntimeError: half installed"),
    "exits": ("raise SystemExit('no licence')", "broken", "SystemExit: no licence"),
    "library": (
        "raise ImportError('libcudart.so.13: cannot open shared object file')",
        "broken",
        "LD_LIBRARY_PATH",
    ),
    "crashes": ("import os; os.abort()", "crash", "SIGABRT"),
    "ends": (
        "import os, sys; print('the last words', file=sys.stderr); os._exit(3)",
        "crash",
        "status 3: the last words",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_framework_that_cannot_be_imported_is_found(case: str, faked: Path) -> None:
    text, kind, words = BROKEN[case]
    write(faked, "torch", text)
    assert words in only(tb.doctor(), kind, "torch")


def test_a_framework_that_hangs_is_found(faked: Path) -> None:
    write(faked, "torch", "import subprocess; subprocess.run(['sleep', '1000'])")
    start = time.monotonic()
    assert "has not ended after 3 s" in only(tb.doctor(timeout=3), "hang", "torch")
    assert time.monotonic() - start < 60


def test_what_a_framework_prints_is_not_taken_for_facts(faked: Path) -> None:
    write(faked, "torch", "print('{\"installed\": false}'); raise ImportError('broken')")
    assert "ImportError: broken" in only(tb.doctor(), "broken", "torch")


def test_a_version_that_is_refused_is_found(faked: Path) -> None:
    pytest.importorskip("numpy")
    (faked / "numpy.py").unlink()
    write(faked, "tensorflow", "__version__ = '2.3'")
    assert "2.3 is refused" in only(tb.doctor(), "version", "tensorflow")


def test_a_framework_that_is_something_else_is_found(faked: Path) -> None:
    write(faked, "numpy", "__version__ = '0.1'")
    assert "no attribute" in only(tb.doctor(), "broken", "numpy")


def kinds(report: Any) -> list[str]:
    return [finding.kind for finding in report.findings]


@pytest.mark.skipif(not TENSORFLOW1, reason="TRUEBRIDGE_TENSORFLOW1 names no folder of TensorFlow 1.15")
def test_tensorflow_1_is_found(faked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TENSORFLOW1
    monkeypatch.setenv("TRUEBRIDGE_TENSORFLOW1", TENSORFLOW1)
    report = tb.doctor()
    (found,) = [framework for framework in report.frameworks if framework.name == "tensorflow1"]
    assert found.version == "1.15.5" and "tensorflow1" not in [finding.subject for finding in report.findings]


def test_a_folder_without_tensorflow_1_is_found(faked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEBRIDGE_TENSORFLOW1", str(faked / "nowhere"))
    assert "nowhere" in only(tb.doctor(), "broken", "tensorflow1")


def test_a_healthy_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    printing(monkeypatch)
    report = tb.doctor()
    assert report.findings == ()
    assert "cuda:0  H200, 141 GiB, compute capability 9.0" in str(report)
    assert [framework.allocator for framework in report.frameworks] == ["native", "MemoryPool", None, None]


LIBCUDA = """
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned flags) { return atoi(getenv("FAKE_ERROR")); }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "no luck"; return code == 999; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index + 40; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, device == 41 ? "B" : "A", length); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)device << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 1 : attribute == 115 ? device == 40 : -1;
    return 0;
}
"""


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a driver that has two GPUs."""
    folder = tmp_path_factory.mktemp("driver")
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    (folder / "cuda.c").write_text(LIBCUDA)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"], cwd=folder, check=True)
    return folder


def asked(libcuda: Path, error: int) -> dict[str, Any]:
    variables = {"LD_LIBRARY_PATH": str(libcuda), "FAKE_ERROR": str(error)}
    return doctor.ask({"driver": ["driver"]}, 100, variables)["driver"]


def test_the_driver_is_asked(libcuda: Path) -> None:
    facts = asked(libcuda, 0)
    assert (facts["version"], facts["error"], facts["library"]) == ("12.8", None, True)
    first = {"name": "A", "memory": 40 << 30, "capability": [9, 1], "pools": True}
    assert facts["devices"] == [first, {"name": "B", "memory": 41 << 30, "capability": [9, 1], "pools": False}]


@pytest.mark.parametrize(("code", "text"), [(803, "error 803: no luck"), (999, "error 999")])
def test_a_driver_that_fails_says_why(code: int, text: str, libcuda: Path) -> None:
    facts = asked(libcuda, code)
    assert (facts["version"], facts["error"], facts["devices"]) == ("12.8", text, [])


ON_GPUS: dict[str, tuple[dict[str, dict[str, Any]], str, str, str]] = {
    "a CPU build": ({"torch": {"build": "CPU", "devices": 0}}, "build", "torch", "install a build for CUDA"),
    "a ROCm build": ({"torch": {"build": "ROCm 6.4", "devices": 0}}, "build", "torch", "for ROCm 6.4"),
    "a build that sees nothing": (
        {"torch": {"devices": 0, "cuda_error": "RuntimeError: the driver is too old"}},
        "no_cuda",
        "torch",
        "the driver is too old",
    ),
    "a version that was not tested": (
        {"tensorflow": {"profile": {"private_functions": False}}},
        "untested",
        "tensorflow",
        "tensors on a GPU are refused",
    ),
    "a refused version": (
        {"torch": {"refusal": {"kind": "version", "text": "PyTorch 2.1 is too old"}}},
        "version",
        "torch",
        "too old",
    ),
    "TensorFlow takes all": ({"tensorflow": {"takes_all_memory": True}}, "memory", "tensorflow", "ALLOW_GROWTH"),
    "PyTorch's allocator": (
        {"torch": {"allocator": "cudaMallocAsync"}},
        "allocator",
        "torch",
        "PYTORCH_CUDA_ALLOC_CONF",
    ),
    "CuPy's allocator": ({"cupy": {"allocator": "MemoryAsyncPool"}}, "allocator", "cupy", "set_allocator"),
    "no driver": (
        {"driver": {"library": False, "devices": [], "error": "libcuda.so.1: not there"}},
        "driver",
        "CUDA driver",
        "--gpus all",
    ),
    "a driver that does not start": (
        {"driver": {"devices": [], "error": "error 803: versions differ"}},
        "driver",
        "CUDA driver",
        "error 803",
    ),
    "an old GPU": ({"driver": {"devices": [{**GPU, "capability": [6, 1]}]}}, "old_gpu", "cuda:0", "capability 6.1"),
    "no pools": ({"driver": {"devices": [{**GPU, "pools": False}]}}, "driver", "cuda:0", "CUDA 11.2"),
}


@pytest.mark.parametrize("case", ON_GPUS)
def test_findings_on_a_gpu(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, kind, subject, words = ON_GPUS[case]
    printing(monkeypatch, **changes)
    report = tb.doctor()
    assert words in only(report, kind, subject)
    assert kinds(report) == [kind]


def test_gpus_that_are_hidden_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    printing(monkeypatch, driver={"devices": [], "error": "error 100: no device"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES='7'" in only(tb.doctor(), "hidden", "CUDA driver")


@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("order", [("tensorflow", "torch"), ("torch", "tensorflow")])
def test_the_order_of_imports_is_judged(order: tuple[str, str], shows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    printing(monkeypatch)
    monkeypatch.setattr(doctor, "_imported", lambda: {name: types.ModuleType(name) for name in order})
    flags = "tensorflow.python.pywrap_dlopen_global_flags"
    monkeypatch.setitem(sys.modules, flags, types.ModuleType(flags) if shows else None)  # type: ignore[arg-type]
    report = tb.doctor()
    if shows and order[0] == "tensorflow":
        assert "import torch before tensorflow" in only(report, "import_order", "torch")
    else:
        assert report.findings == ()


def test_the_allocator_of_this_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    printing(monkeypatch)
    torch = types.SimpleNamespace(
        version=types.SimpleNamespace(cuda="13.0"),
        cuda=types.SimpleNamespace(get_allocator_backend=lambda: "cudaMallocAsync"),
    )
    monkeypatch.setattr(doctor, "_imported", lambda: {"torch": torch})
    report = tb.doctor()
    assert "cudaMallocAsync" in only(report, "allocator", "torch")
    assert [framework.imported for framework in report.frameworks] == [True, False, False, False]


def test_frameworks_that_do_not_work_together_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    printing(monkeypatch)
    run, good = doctor._run, ("tensorflow", "numpy", "cupy", "torch")

    def crashing(probes: list[list[str]], *rest: Any) -> list[tuple[int | None, str, str]]:
        crashes = probes[0][0] == "pairs" and tuple(probes[0][1:]) not in works
        return [(-11, "", "")] if crashes else run(probes, *rest)

    monkeypatch.setattr(doctor, "_run", crashing)
    works = {good}
    words = only(tb.doctor(), "import_order", "frameworks")
    assert "SIGSEGV" in words and " then ".join(good) in words
    works = set()
    assert "leave one of them out" in only(tb.doctor(), "pairs", "frameworks")


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "long", None, True])
def test_a_time_that_is_none_is_refused(timeout: Any) -> None:
    with pytest.raises(tb.BridgeValueError, match="positive number of seconds"):
        tb.doctor(timeout=timeout)


@pytest.mark.parametrize("executable", ["", None, "/nowhere/python"])
def test_a_program_without_a_python_says_so(executable: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(tb.BridgeImportError, match="python -m truebridge doctor"):
        tb.doctor()


def test_an_interrupt_ends_the_processes(faked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = faked / "pid"
    write(faked, "torch", f"import os, time; open({str(pid)!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(1000)")

    def interrupted(*arguments: Any) -> None:
        while not pid.exists() or not pid.read_text().endswith(" "):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "_status", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tb.doctor()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command(as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pair = {"source": "torch", "target": "cupy", "device": "cuda:0", "method": "refused", "reason": "no memory"}
    printing(monkeypatch, pairs={"pairs": [pair]}, torch={"build": "CPU", "devices": 0})
    assert __main__.main(["doctor", *["--json"] * as_json]) == 1
    printed = capsys.readouterr().out
    if as_json:
        assert json.loads(printed)["matrix"]["pairs"] == [pair]
    else:
        assert "refused [1]" in printed and "[1] no memory" in printed


def test_the_package_is_a_command() -> None:
    done = python(
        "import runpy, sys; sys.argv[1:] = ['--version']; runpy.run_module('truebridge', run_name='__main__')"
    )
    assert (done.returncode, done.stdout.strip()) == (0, tb.__version__)


def test_a_command_with_nonsense_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["doctor", "--timeout", "-1"]) == 2
    assert capsys.readouterr().err.startswith("python -m truebridge: error: ")
    with pytest.raises(SystemExit):
        __main__.main(["cure"])


def test_the_page_explains_every_kind() -> None:
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    table = page.partition("## Findings")[2]
    named = {kind for cells in re.findall(r"^\| (`.*?) \|", table, re.M) for kind in re.findall(r"`(\w+)`", cells)}
    assert named == set(typing.get_args(report.FindingKind))


@pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="needs CUDA")
def test_a_gpu_that_is_there_is_found() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    report = tb.doctor()
    assert len(report.gpus) == torch.cuda.device_count()
    assert report.gpus[0].name == torch.cuda.get_device_name(0)
    assert report.gpus[0].capability == torch.cuda.get_device_capability(0)
    assert not {"build", "no_cuda", "driver", "crash", "hang", "broken"} & set(kinds(report)), str(report)
    methods = {(pair.source, pair.target): pair.method for pair in report.matrix.pairs if pair.device == "cuda:0"}
    if "cupy" in [framework.name for framework in report.frameworks]:
        assert methods["torch", "cupy"] == methods["cupy", "torch"] == "in place"
    assert methods["torch", "numpy"] == "refused"
