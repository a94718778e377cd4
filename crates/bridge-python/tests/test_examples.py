"""The extension modules of the examples: functions in Rust that every framework calls with its own tensors."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

import truebridge as tb
from capsules import CPU, Producer, is_valid
from memory import resident
from programs import Warm

scaled: Any = pytest.importorskip("scaled", reason="the bundle has it")

torch: Any = pytest.importorskip("torch")

# The extension module of examples/kernel: a kernel in Rust that every framework calls with its own tensors.


VALUES = np.arange(-3, 9, dtype=np.float32)


def _tensorflow(array: Any) -> Any:
    tensorflow = pytest.importorskip("tensorflow")
    with tensorflow.device("CPU:0"):
        return tensorflow.constant(array)


ON_THE_HOST: dict[str, Callable[[Any], Any]] = {
    "torch": torch.from_numpy,
    "numpy": lambda array: array,
    "tensorflow": _tensorflow,
}


@pytest.mark.parametrize("name", ON_THE_HOST)
def test_a_vector_is_scaled_in_its_framework(name: str) -> None:
    x = ON_THE_HOST[name](VALUES)
    result = scaled.scale(x, 2.5)
    assert type(result) is type(x)
    assert np.array_equal(np.asarray(result), VALUES * 2.5)
    assert np.array_equal(np.asarray(x), VALUES), "the argument is left as it was"


def test_strides_are_followed() -> None:
    assert np.array_equal(scaled.scale(VALUES[::-2], 2), VALUES[::-2] * 2)
    assert scaled.scale(torch.from_numpy(VALUES)[::3], 2).tolist() == (VALUES[::3] * 2).tolist()
    assert scaled.scale(torch.zeros(0), 2).shape == (0,)


@pytest.mark.parametrize(
    ("argument", "error", "text"),
    [
        (3, TypeError, r"int is not a tensor: pass numpy\.asarray"),
        (torch.zeros(2, 2), ValueError, "pass a vector, not the shape"),
        (torch.zeros(2, dtype=torch.float64), TypeError, "pass float32, not float64"),
        (torch.zeros(2).to_sparse(), TypeError, "to_dense"),
    ],
)
def test_nonsense_is_refused(argument: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        scaled.scale(argument, 1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["torch", "cupy", "tensorflow"])
def test_a_kernel_runs_after_the_work_in_the_frameworks_stream(name: str) -> None:
    """The vector is written late: a kernel in another stream would read what was there before."""
    count = 1 << 22
    if name == "tensorflow":
        tensorflow: Any = pytest.importorskip("tensorflow")
        with tensorflow.device("GPU:0"):
            slow = tensorflow.fill([2048, 2048], 1.0)
            for _ in range(8):
                slow = tensorflow.linalg.matmul(slow, slow) / 2048.0
            result = scaled.scale(tensorflow.fill([count], 1.0) * slow[0, 0], 3.0)
            assert np.array_equal(result.numpy(), np.full(count, 3.0, np.float32))
        return
    cupy: Any = pytest.importorskip("cupy")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), cupy.cuda.ExternalStream(side.cuda_stream):
        x = torch.zeros(count, device="cuda") if name == "torch" else cupy.zeros(count, dtype=cupy.float32)
        torch.cuda._sleep(20_000_000)
        x += 1
        result = scaled.scale(x[::2], 3.0)
        assert type(result) is type(x)
        side.synchronize()
        assert float(result.min()) == float(result.max()) == 3.0 and result.shape == (count // 2,)


# The extension module of examples/kernel over producers that are known only by a protocol.


READ_ONLY = 1


class ProtocolObject:
    """A vector of capsules.Producer in a framework that is not in the table, whose results are arrays of NumPy."""

    def __init__(self, *, legacy: bool = False, flags: int = 0) -> None:
        self.legacy, self.flags = legacy, flags
        self.producers: list[Producer] = []
        self.produced: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0)

    def __dlpack__(self, **arguments: Any) -> Any:
        if self.legacy and "max_version" in arguments:
            raise TypeError("unexpected keyword argument max_version")
        producer = Producer(legacy=self.legacy)
        if not self.legacy:
            producer.managed.flags = self.flags
        self.producers.append(producer)
        return producer.capsule()

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        return SimpleNamespace(from_dlpack=self._from_dlpack)

    def _from_dlpack(self, x: Any) -> Any:
        self.produced.append(x)
        return np.from_dlpack(x)


KINDS: dict[str, dict[str, Any]] = {
    "legacy": {"legacy": True},
    "versioned": {},
    "read-only": {"flags": READ_ONLY},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_producer_is_read_in_place_and_released_once(kind: str) -> None:
    x = ProtocolObject(**KINDS[kind])
    result = scaled.scale(x, 2.0)
    assert type(result) is np.ndarray
    assert result.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert x.producers and [producer.deleted for producer in x.producers] == [1] * len(x.producers)


def test_the_producer_is_released_where_the_call_fails() -> None:
    class Matrix(ProtocolObject):
        def __dlpack__(self, **arguments: Any) -> Any:
            capsule = super().__dlpack__(**arguments)
            self.producers[-1].tensor.ndim = 2
            return capsule

    x = Matrix()
    with pytest.raises(ValueError, match="pass a vector, not the shape"):
        scaled.scale(x, 2.0)
    assert [producer.deleted for producer in x.producers] == [1]


def test_a_producer_without_a_framework_is_refused_before_anything_runs() -> None:
    class WithoutFromDlpack(ProtocolObject):
        def __array_namespace__(self, *, api_version: str | None = None) -> Any:
            return SimpleNamespace()

    x = WithoutFromDlpack()
    with pytest.raises(ValueError, match="WithoutFromDlpack names no framework that makes tensors"):
        scaled.scale(x, 2.0)
    assert [producer.deleted for producer in x.producers] == [1]
    plain = SimpleNamespace(__array_interface__=np.ones(3, np.float32).__array_interface__)
    with pytest.raises(ValueError, match="SimpleNamespace names no framework that makes tensors"):
        scaled.scale(plain, 2.0)


def test_a_capsule_is_refused_unread() -> None:
    producer = Producer()
    capsule = producer.capsule()
    with pytest.raises(ValueError, match="pass the tensor that it came from"):
        scaled.scale(capsule, 2.0)
    assert is_valid(capsule, b"dltensor_versioned") and producer.deleted == 0


def test_what_the_producer_raises_is_the_cause() -> None:
    class Refuses(ProtocolObject):
        def __dlpack__(self, **arguments: Any) -> Any:
            raise BufferError("the memory is not mine to export")

    with pytest.raises(BufferError, match="not mine to export") as caught:
        scaled.scale(Refuses(), 2.0)
    assert type(caught.value.__cause__) is BufferError

    class Interrupted(ProtocolObject):
        def __dlpack__(self, **arguments: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scaled.scale(Interrupted(), 2.0)


def test_a_framework_that_refuses_the_result_gets_nothing() -> None:
    class Refuses(ProtocolObject):
        def _from_dlpack(self, x: Any) -> Any:
            raise TypeError("no such arrays here")

    with pytest.raises(RuntimeError, match="no such arrays here"):
        scaled.scale(Refuses(), 2.0)


def test_the_result_is_an_object_of_the_array_api() -> None:
    x = ProtocolObject()
    scaled.scale(x, 2.0)
    (produced,) = x.produced
    assert produced.__dlpack_device__() == (CPU, 0)
    for arguments, name in (
        ({}, b"dltensor"),
        ({"max_version": None, "stream": None}, b"dltensor"),
        ({"max_version": (0, 8)}, b"dltensor"),
        ({"max_version": (1, 0), "copy": None, "dl_device": (CPU, 0)}, b"dltensor_versioned"),
        ({"max_version": (2, 5), "copy": False}, b"dltensor_versioned"),
    ):
        assert is_valid(produced.__dlpack__(**arguments), name), arguments
    for arguments in ({"copy": True}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError, match="cannot be copied or moved"):
            produced.__dlpack__(**arguments)
    first, second = np.from_dlpack(produced), torch.from_dlpack(produced)
    del produced, x
    gc.collect()
    assert first.ctypes.data == second.data_ptr() and second.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert first.ctypes.data % 64 == 0


def test_results_are_returned() -> None:
    class Large(ProtocolObject):
        array = np.ones(1 << 20, np.float32)

        def __dlpack__(self, **arguments: Any) -> Any:
            return self.array.__dlpack__(**arguments)

    def make(count: int) -> int:
        for _ in range(count):
            x = Large()
            assert scaled.scale(x, 3.0)[-1] == 3
        gc.collect()
        return resident()

    before = make(5)
    assert make(100) - before < 100 << 20, "100 results of 4 MiB each"


def test_arrays_of_jax_come_back_as_arrays_of_jax() -> None:
    jax: Any = pytest.importorskip("jax")
    cpu = jax.devices("cpu")[0]
    x = jax.device_put(np.arange(64, dtype=np.float32), cpu)
    result = scaled.scale(x, 2.0)
    assert isinstance(result, jax.Array) and result.devices() == {cpu}
    assert np.array_equal(result, np.arange(64, dtype=np.float32) * 2)
    assert np.array_equal(result + 1, np.arange(64, dtype=np.float32) * 2 + 1), "JAX computes with it"
    with pytest.raises(TypeError, match="pass float32, not int32"):
        scaled.scale(x.astype("int32"), 2.0)


class OnDevice:
    """A tensor of PyTorch as another framework would show it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.tensor.__dlpack__(**arguments)

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        return torch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_kernel_runs_after_the_work_of_the_producer() -> None:
    """The vector is written late in one stream, and the result is read in another that is ordered by nothing else."""
    count = 1 << 22
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.zeros(count, device="cuda")
        torch.cuda._sleep(20_000_000)
        x += 1
        result = scaled.scale(OnDevice(x), 3.0)
        assert float(result.min()) == float(result.max()) == 3.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_of_a_producer_is_kept_until_the_kernel_has_run() -> None:
    """The kernel waits in the default stream, while the producer's allocator could reuse the vector in its own."""
    count = 1 << 22
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(count, device="cuda")
        address = x.data_ptr()
        scaled.scale(x, 3.0)  # the first launch compiles the kernel
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # in the legacy default stream
    with torch.cuda.stream(side):
        external = OnDevice(x)
        del x
        result = scaled.scale(external, 3.0)
        del external
        other = torch.full((count,), 7.0, device="cuda")
        assert other.data_ptr() != address
        assert float(result.min()) == float(result.max()) == 3.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_arrays_of_jax_on_a_device_come_back_as_arrays_of_jax() -> None:
    jax: Any = pytest.importorskip("jax")
    try:
        gpu = jax.devices("cuda")[0]
    except RuntimeError:
        pytest.skip("this JAX has no CUDA")
    x = jax.device_put(np.arange(1 << 20, dtype=np.float32), gpu)
    for _ in range(4):
        x = jax.jit(lambda x: x + 1)(x)
    result = scaled.scale(x, 2.0)
    assert isinstance(result, jax.Array) and result.devices() == {gpu}
    assert np.array_equal(result, (np.arange(1 << 20, dtype=np.float32) + 4) * 2)


# The programs of the gallery run, on the host and on a GPU. Each compares its results with those of another way.


with_tensorflow = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="no TensorFlow")

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"

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


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    process = Warm("torch", "keras")
    yield process
    process.close()


def printed(name: str, *arguments: str, warm: Warm | None = None, **settings: str) -> list[str]:
    """Run a program, in a new process or where its frameworks are imported already, and return its lines."""
    if name == "frozen_service" and not os.environ.get("TRUEBRIDGE_TENSORFLOW1"):
        pytest.skip("TRUEBRIDGE_TENSORFLOW1 names no folder of TensorFlow 1.15")
    if importlib.util.find_spec(framework := "jax" if "jax" in name else "keras") is None:
        pytest.skip(f"no {framework}")
    settings["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [str(EXAMPLES / f"{name}.py"), *arguments]
    if warm:
        code = f"sys.argv = {command}; runpy.run_path(sys.argv[0], run_name='__main__')"
        done = warm.run(f"import gc, runpy, sys; gc.freeze(); {code}", **settings)
    else:
        command, environment = [sys.executable, *command], {**os.environ, **settings}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.stdout.splitlines()


def device(name: str, lines: list[str]) -> str | None:
    """Return the device that the last line names."""
    said = re.fullmatch(PROGRAMS[name], lines[-1])
    assert said, lines
    return said.groupdict().get("device")


@with_tensorflow
@pytest.mark.parametrize("name", PROGRAMS)
def test_gallery_the_program_runs_on_the_host(name: str, request: pytest.FixtureRequest) -> None:
    # TensorFlow 1.15 has a process without TensorFlow 2.
    warm = None if name == "frozen_service" else request.getfixturevalue("warm")
    lines = printed(name, warm=warm, CUDA_VISIBLE_DEVICES="")
    assert device(name, lines) in ("cpu", "CPU", None)
    if name == "cupy_to_keras":
        assert lines[0].startswith("preprocessing in numpy")


@with_tensorflow
def test_gallery_the_service_takes_the_folder_of_tensorflow() -> None:
    folder = os.environ.get("TRUEBRIDGE_TENSORFLOW1", "")
    lines = printed("frozen_service", folder, CUDA_VISIBLE_DEVICES="", TRUEBRIDGE_TENSORFLOW1="/nowhere")
    assert device("frozen_service", lines) == "cpu"


@with_tensorflow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", PROGRAMS)
def test_gallery_the_program_runs_on_a_gpu(name: str) -> None:
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


@with_tensorflow
def test_gallery_the_page_shows_every_program() -> None:
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
    tb.tensorflow.v1.open()
    return module


@with_tensorflow
def test_gallery_the_service_answers_in_parallel(service: Any) -> None:
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
        tb.tensorflow.v1.Session(service.frozen(), inputs, ["y:0"]) as session,
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


@with_tensorflow
def test_gallery_the_service_notices_wrong_answers(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = service.frozen()
    monkeypatch.setattr(service, "frozen", lambda: graph)
    monkeypatch.setattr(service, "OFFSET", service.OFFSET + 1)
    monkeypatch.setattr(sys, "argv", ["frozen_service.py", "--requests=2"])
    with pytest.raises(AssertionError):
        service.main()
