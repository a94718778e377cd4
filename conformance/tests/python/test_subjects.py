"""The subjects make what a case says, at the address that it names."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import truebridge_conformance
from truebridge_conformance._conformance import borrowed
from truebridge_conformance.subjects import Spec, Subject
from truebridge_conformance.subjects.common import GRAIN
from truebridge_conformance.subjects.streams import ManyStreams

torch: Any = pytest.importorskip("torch")


def subject(framework: str) -> Subject:
    if framework == "cupy" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("no CUDA device")
    module = importlib.import_module(f"truebridge_conformance.subjects.{framework}")
    made: Subject = module.subject("cuda:0" if framework == "cupy" else "cpu")
    return made


@pytest.mark.parametrize("align", [0, 4, 16, 32, 64])
@pytest.mark.parametrize("framework", ["torch", "numpy", "cupy"])
def test_a_base_buffer_lies_where_the_case_says(framework: str, align: int) -> None:
    made = subject(framework)
    data = bytes(range(16))
    # Many, because one may lie there by chance.
    for _ in range(20):
        tensor = made.create(Spec("float32", [2], [2], 1, 4, align), data)
        assert made.observe(tensor).address % GRAIN == align + 4
        assert made.read(tensor) == data[4:8] + data[12:16]


def test_a_single_stream_cannot_be_switched() -> None:
    made = subject("numpy")
    assert made.streams() == [] and made.fresh(False) is None
    with pytest.raises(RuntimeError, match="single stream"):
        made.use(1)


class Handles(ManyStreams):
    """A framework whose streams are their handles."""

    known: ClassVar[dict[int, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.next, self.now = 0x10, 0
        self.keep_streams()

    def handle(self, stream: Any) -> int:
        return int(stream)

    def current(self) -> Any:
        return self.now

    def enter(self, stream: Any) -> None:
        self.now = stream

    def made(self) -> Any:
        self.next += 0x10
        return self.next

    def wrapped(self, handle: int) -> Any:
        return handle


def test_streams_of_a_case_are_dropped_and_those_of_the_process_stay() -> None:
    framework = Handles()
    kept = framework.streams()
    assert len(kept) == 2 and Handles().streams() == kept
    fresh = framework.fresh(external=False)
    assert fresh is not None and fresh not in kept
    assert framework.use(fresh) == 0 and framework.use(kept[0]) == fresh
    framework.end(fresh)
    framework.end(kept[0])
    assert list(framework.known) == kept


# A library that is known only by its protocol is a member of the suite, as a source.


SCRIPT = Path(truebridge_conformance.__file__).parents[1] / "conformance.py"

#: Stands for tvm-ffi: tensors over NumPy's memory, whose producer copies on request, and badly.
LIBRARY = """
import numpy as np

class Tensor:
    def __init__(self, array):
        self.array = array
        self.dtype, self.shape = array.dtype.name, array.shape
        self.strides = tuple(stride // array.itemsize for stride in array.strides)

    def data_ptr(self):
        return self.array.__array_interface__["data"][0]

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, copy=None, **keywords):
        array = np.zeros_like(self.array) if copy else self.array
        return EXPORT

Shape, dtype = tuple, str

def from_dlpack(array):
    array.__dlpack__()
    return Tensor(array.array if isinstance(array, Tensor) else array)
"""


def judged(folder: Path, pair: str, dlpack: str, cases: int = 150) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Run the suite with the library, whose ``__dlpack__`` returns ``dlpack``. Return the run, and the report."""
    (folder / "tvm_ffi.py").write_text(LIBRARY.replace("EXPORT", dlpack))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    line = [sys.executable, str(SCRIPT), "--device", "cpu", "--pairs", pair, "--cases", str(cases), "--seed", "3"]
    run = subprocess.run(
        [*line, "--report", str(folder / "report")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    report = folder / "report/report.json"
    return run, json.loads(report.read_text()) if report.exists() else None


@pytest.mark.parametrize("target", ["torch", "numpy"])
def test_its_tensors_convert_and_its_copies_are_not_asked_for(target: str, tmp_path: Path) -> None:
    run, report = judged(tmp_path, f"tvm_ffi:{target}", "array.__dlpack__(**keywords)")
    assert run.returncode == 0, run.stdout + run.stderr
    (pair,) = report["pairs"]
    assert {"values", "aliasing", "life", "copy"} <= {judged["name"] for judged in pair["properties"]}


def test_one_that_exports_other_memory_is_found(tmp_path: Path) -> None:
    run, _ = judged(tmp_path, "tvm_ffi:numpy", "array.copy().__dlpack__(**keywords)")
    assert run.returncode == 1
    assert "FAILED" in run.stdout


def test_it_is_not_a_target(tmp_path: Path) -> None:
    run, _ = judged(tmp_path, "numpy:tvm_ffi", "array.__dlpack__(**keywords)")
    assert run.returncode == 2
    assert "run tvm_ffi:numpy" in run.stderr


# A borrow says what the framework says of its tensor, and keeps nothing.


def said(array: np.ndarray[Any, Any], **more: object) -> dict[str, object]:
    """Return what a borrow of memory that NumPy sees as ``array`` says."""
    return {
        "data": array.ctypes.data,
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "strides": [stride // array.itemsize for stride in array.strides],
        "device": "cpu",
        "read_only": False,
        "stream": None,
        **more,
    }


TENSORS: dict[str, Callable[[], Any]] = {
    "scalar": lambda: torch.tensor(1.5),
    "vector": lambda: torch.arange(5),
    "transposed": lambda: torch.ones(2, 3, dtype=torch.float16).T,
    "slice": lambda: torch.arange(24.0).reshape(4, 6)[1:, ::2],
    "five dimensions": lambda: torch.ones(1, 2, 3, 2, 1, dtype=torch.uint8),
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_torch(name: str) -> None:
    tensor = TENSORS[name]()
    assert borrowed(tensor) == said(tensor.numpy())


def test_a_tensor_without_elements_is_borrowed() -> None:
    assert borrowed(torch.ones(0, 3))["shape"] == [0, 3]
    assert borrowed(np.ones((3, 0)))["shape"] == [3, 0]


def test_a_tensor_that_requires_grad_is_borrowed_as_in_extensions_of_torch() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert borrowed(parameter) == said(parameter.detach().numpy())


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_dtypes_that_numpy_lacks(name: str) -> None:
    tensor = torch.ones(3).to(getattr(torch, name))
    assert borrowed(tensor)["dtype"] == name


@pytest.mark.parametrize("writable", [True, False])
def test_numpy(writable: bool) -> None:
    array = np.arange(12, dtype=np.int16).reshape(3, 4)[::-1, 1:]
    array.flags.writeable = writable
    assert borrowed(array) == said(array, read_only=not writable)


def test_tensorflow() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    with tensorflow.device("CPU:0"):
        tensors = tensorflow.constant([[1.0, 2.0], [3.0, 4.0]]), tensorflow.constant(3, tensorflow.int32)
        variable = tensorflow.Variable([1.0, 2.0])
    for tensor in tensors:
        assert borrowed(tensor) == said(np.asarray(memoryview(tensor)), read_only=True)
    assert borrowed(variable)["shape"] == [2]


def test_nothing_is_kept() -> None:
    tensors = [torch.ones(3), np.ones(3)]
    before = [sys.getrefcount(tensor) for tensor in tensors]
    for _ in range(10):
        assert [borrowed(tensor)["shape"] for tensor in tensors] == [[3], [3]]
    assert [sys.getrefcount(tensor) for tensor in tensors] == before


def fake() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "number": (lambda: 3, "NotATensor: int is not a tensor"),
    "class": (lambda: torch.Tensor, "NotATensor"),
    "conjugated": (lambda: torch.ones(3, dtype=torch.complex64).conj(), "CopyNeeded: .*resolve_conj"),
    "negated": (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "CopyNeeded: .*resolve_neg"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "NotATensor: .*to_dense"),
    "meta": (lambda: torch.ones(3, device="meta"), "NotATensor: .*meta"),
    "fake": (fake, "NotATensor: .*plain tensor"),
    "masked": (lambda: np.ma.masked_array([1.0], [0]), "NotATensor: .*filled"),
    "strings": (lambda: np.array(["a"]), "Dtype: .*counterpart"),
    "odd strides": (lambda: np.zeros(3, [("a", "u1"), ("b", "f4")])["b"], "CopyNeeded: .*whole number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_plain_memory_is_refused(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(RuntimeError, match=f"^{text}"):
        borrowed(make())


def cuda() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return pytest.importorskip("cupy")


def test_on_a_device_the_stream_is_the_current_one() -> None:
    cupy = cuda()
    tensor, array = torch.ones(2, 3, device="cuda"), cupy.ones((2, 3), order="F")
    stream, other = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    with torch.cuda.stream(stream), other:
        of_torch, of_cupy = borrowed(tensor), borrowed(array)
    assert (of_torch["data"], of_torch["stream"]) == (tensor.data_ptr(), stream.cuda_stream)
    assert (of_cupy["data"], of_cupy["stream"]) == (array.data.ptr, other.ptr)
    assert of_torch["device"] == of_cupy["device"] == "cuda:0"
    assert (of_torch["strides"], of_cupy["strides"]) == ([3, 1], [1, 2])
    # The legacy default stream, by its handle.
    assert borrowed(tensor)["stream"] == borrowed(array)["stream"] == 1


def test_on_a_device_tensorflow_names_its_own_stream() -> None:
    cuda()
    tensorflow = pytest.importorskip("tensorflow")
    if not tensorflow.config.list_physical_devices("GPU"):
        pytest.skip("no GPU for TensorFlow")
    with tensorflow.device("GPU:0"):
        said = borrowed(tensorflow.ones([2, 3]) + 1)
    assert said["device"] == "cuda:0" and said["stream"] not in (None, 0, 1)
