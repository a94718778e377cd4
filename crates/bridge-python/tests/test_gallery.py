"""The programs of the gallery run, on the host and on a GPU. Each compares its results with those of another way."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")
pytest.importorskip("tensorflow")

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
if not EXAMPLES.is_dir():
    pytest.skip("the examples are in the repository alone", allow_module_level=True)

#: Each program, and what its last line says.
PROGRAMS = {
    "cupy_to_keras": "scores equal those of the same batch from the host",
    "frozen_service": r"TensorFlow 1\.15\.\d answered 32 requests on tensors of PyTorch on (?P<device>\w+), in place",
    "jax_layer_in_torch": r"loss \S+ before, \S+ after 100 steps on (?P<device>\w+)",
    "keras_layer_in_torch": r"loss \S+ before, \S+ after 100 steps on (?P<device>\w+); kernel in place",
    "loader_to_tensorflow": r"96 images arrived as float32 of shape \(32, 3, 64, 64\) on \S+device:(?P<device>\w+):0",
    "torch_to_jax": r"1280 images of PyTorch classified by JAX on (?P<device>\w+), in place",
    "shared_weights": r"weights shared once, on (?P<device>\w+)\S*: the server saw every step",
}
#: What the line of ``cupy_to_keras`` before that says of a batch.
IN_PLACE = "<Plan: zero copy on cuda:0>"


def printed(name: str, *arguments: str, **settings: str) -> list[str]:
    """Run a program, and return its lines."""
    if name == "frozen_service" and not os.environ.get("TRUEBRIDGE_TENSORFLOW1"):
        pytest.skip("TRUEBRIDGE_TENSORFLOW1 names no folder of TensorFlow 1.15")
    pytest.importorskip("jax" if "jax" in name else "keras")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **settings}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.stdout.splitlines()


def device(name: str, lines: list[str]) -> str | None:
    """Return the device that the last line names."""
    said = re.fullmatch(PROGRAMS[name], lines[-1])
    assert said, lines
    return said.groupdict().get("device")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_runs_on_the_host(name: str) -> None:
    lines = printed(name, CUDA_VISIBLE_DEVICES="")
    assert device(name, lines) in ("cpu", "CPU", None)
    if name == "cupy_to_keras":
        assert lines[0].startswith("preprocessing in numpy")


def test_the_service_takes_the_folder_of_tensorflow() -> None:
    folder = os.environ.get("TRUEBRIDGE_TENSORFLOW1", "")
    lines = printed("frozen_service", folder, CUDA_VISIBLE_DEVICES="", TRUEBRIDGE_TENSORFLOW1="/nowhere")
    assert device("frozen_service", lines) == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_runs_on_a_gpu(name: str) -> None:
    if name == "cupy_to_keras":
        pytest.importorskip("cupy")
    if name == "frozen_service":
        from graphs import has_gpu

        if not has_gpu():
            pytest.skip("TensorFlow 1.15 sees no GPU")
    lines = printed(name)
    assert device(name, lines) in ("cuda", "GPU", None)
    if name == "cupy_to_keras":
        assert lines[0].startswith("preprocessing in cupy") and lines[1].endswith(IN_PLACE)


def test_the_page_shows_every_program() -> None:
    shown = re.findall(r"<!-- code: \.\./examples/(\w+)\.py -->", (ROOT / "docs/gallery.md").read_text())
    assert sorted(shown) == sorted(PROGRAMS)
    for name in shown:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80


@pytest.fixture
def service() -> Any:
    """The program of the service, as a module."""
    if not os.environ.get("TRUEBRIDGE_TENSORFLOW1"):
        pytest.skip("TRUEBRIDGE_TENSORFLOW1 names no folder of TensorFlow 1.15")
    spec = importlib.util.spec_from_file_location("frozen_service", EXAMPLES / "frozen_service.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tb.tensorflow1.open()
    return module


def test_the_service_answers_in_parallel(service: Any) -> None:
    """No request of four is answered before all four run."""
    together = threading.Barrier(4, timeout=60)
    inputs = {"x:0": ("float32", service.SHAPE, "/device:CPU:0")}
    frames = np.random.RandomState(3).randint(0, 256, (4, *service.SHAPE), np.uint8)

    class Together:
        def run(self, feeds: Any) -> Any:
            together.wait()
            return session.run(feeds)

    service.Service.session, service.Service.device = Together(), "cpu"
    with (
        tb.tensorflow1.Session(service.frozen(), inputs, ["y:0"]) as session,
        ThreadingHTTPServer(("127.0.0.1", 0), service.Service) as server,
        ThreadPoolExecutor(4) as clients,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        answers = [json.load(answer) for answer in clients.map(lambda frame: urlopen(url, frame.tobytes()), frames)]
        server.shutdown()
    for frame, answer in zip(frames, answers, strict=True):
        assert answer["pixel"] == (service.GAIN * (frame / np.float32(255)) + service.OFFSET).argmax()
        assert answer["in_place"]


def test_the_service_notices_wrong_answers(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = service.frozen()
    monkeypatch.setattr(service, "frozen", lambda: graph)
    monkeypatch.setattr(service, "OFFSET", service.OFFSET + 1)
    monkeypatch.setattr(sys, "argv", ["frozen_service.py", "--requests=2"])
    with pytest.raises(AssertionError):
        service.main()
