"""TensorFlow 1.x under test: through its C functions, and through the bridge where nothing else can do it.

Its graphs have tensors only while they run. The suite holds what the bridge makes of them: the bridge's input operation
passes a tensor into a run, and its output operation passes one out. What happens between the two is TensorFlow's own,
and so are the oracles: reads are fetched to the host, and an operation of the suite reports where a tensor is.
"""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

from truebridge_conformance import _conformance
from truebridge_conformance.sessions import FLOAT, HOST, INT32, UINT8, Library, Output, Session, Value
from truebridge_conformance.subjects import Bench, Capabilities, Observed, Path, Spec, Subject
from truebridge_conformance.subjects.common import DELAY, NAMES, Unwritable, collect, row_major

#: The codes of dtypes (``TF_DataType``).
CODES = {
    **{"float32": FLOAT, "float64": 2, "int32": INT32, "uint8": UINT8, "int16": 5, "int8": 6, "complex64": 8},
    **{"int64": 9, "bool": 10, "bfloat16": 14, "uint16": 17, "complex128": 18, "float16": 19, "uint32": 22},
    "uint64": 23,
}

#: What TensorFlow 1.15 looks for before it uses a CUDA device.
CUDA_10 = [
    *(f"lib{name}.so.10.0" for name in ("cudart", "cublas", "cufft", "curand", "cusolver", "cusparse")),
    "libcudnn.so.7",
]

#: Elements (float32) that a delay multiplies, and how often in one run: less than a millisecond on a GPU.
OPERAND = 1 << 24
CHAIN = 16

#: The operations of the bridge, and one of the suite that reports what a kernel sees.
INPUT, OUTPUT, ORACLE = "TruebridgeInput", "TruebridgeOutput", "ConformanceOracle"

#: Without an entry that has no gate, ``Copy`` returns its input (``debug_ops_spec``).
UNGATED = b"DebugIdentity;file:///dev/null;0"

#: The graphs of a dtype: the operations of a placeholder, each on the output of the one before. All but the first
#: take the handle of a tensor, and those that end in an output return one.
GRAPHS = {
    "make": [OUTPUT],
    "read": [INPUT],
    "see": [INPUT, ORACLE],
    "copy": [INPUT, "Copy", OUTPUT],
    "shape": [INPUT, "Copy", "Reshape", OUTPUT],
    "fill": [INPUT, "Copy", "Reshape", "Bitcast", OUTPUT],
    "delay": [INPUT, *["Mul"] * CHAIN, OUTPUT],
}


class TensorFlow1(Unwritable):
    """TensorFlow 1.x on one device.

    On a GPU it only copies, and in a delay multiplies floats: on a GPU that TensorFlow does not know, each kernel is
    compiled at its first use, all of them in many minutes. No run waits for the device at its end, or there would be
    no pending work to order: TensorFlow reads ``TF_SYNC_ON_FINISH`` when a session makes its devices.
    """

    #: Tensors of equal bytes on the device, by dtype, byte and size: a fill must not wait for a copy to the device. Two
    #: instances share them, as they share the allocator.
    constants: ClassVar[dict[tuple[str, int, int], Any]] = {}

    def __init__(self, device: str) -> None:
        kind, _, index = device.partition(":")
        self.device = device
        self.cuda = kind == "cuda"
        self.name = f"/device:GPU:{index or 0}" if self.cuda else HOST
        if self.cuda:
            os.environ["TF_SYNC_ON_FINISH"] = "false"
        self.library = Library.of(_conformance.tensorflow1()[1])
        self.session = Session(self.library)
        self.library.register(ORACLE)
        self.graphs: dict[tuple[str, int], tuple[list[Output], Output]] = {}
        self.named = {name: CODES[name] for name in NAMES if name in CODES}
        self.names = {code: name for name, code in self.named.items()}
        self.sizes = {name: self.library.TF_DataTypeSize(code) for name, code in self.named.items()}
        self.operand = self.make("float32", [OPERAND], struct.pack("f", 1) * OPERAND) if self.cuda else None
        self.repeats = 1
        self.warm_up()
        if self.cuda:
            one = self.constant("uint8", 0, 1)
            started = time.perf_counter()
            self.delay()
            self.read(one)
            self.repeats = math.ceil(DELAY / (time.perf_counter() - started))
        gc.collect()
        gc.freeze()

    def capabilities(self) -> Capabilities:
        return Capabilities(tuple(self.named), writes=False)

    def warm_up(self) -> None:
        """Build every graph and load every kernel, so that what they keep is allocated before memory is counted."""
        for name, size in self.sizes.items():
            tensor = self.create(Spec(name, [2], [1], 0, 2), bytes(2 * size))
            self.read(self.snapshot(self.fill(tensor, 1), self.allocate(1)))
            self.observe(tensor)
        self.delay()
        self.settle()

    def graph(self, what: str, code: int) -> tuple[list[Output], Output]:
        """Return the inputs and the output of one of ``GRAPHS``, which is built at its first use."""
        if (what, code) not in self.graphs:
            add = self.session.add
            given = add("Placeholder", {"dtype": code if what == "make" else INT32})
            fed, factor = [given], given
            for operation in GRAPHS[what]:
                inputs = [given]
                if operation == "Reshape":
                    fed.append(add("Placeholder", {"dtype": INT32}))
                    inputs.append(fed[1])
                elif operation == "Mul":
                    inputs.append(factor)
                attributes: dict[str, int | bytes] = {}
                if operation == INPUT:
                    attributes = {"T": UINT8 if what == "fill" else code}
                elif operation == "Bitcast":
                    attributes = {"type": code}
                elif operation == "Copy":
                    attributes = {"debug_ops_spec": UNGATED}
                given = add(operation, attributes, inputs, self.name)
                factor = given if operation == INPUT else factor
            self.graphs[what, code] = fed, given
        return self.graphs[what, code]

    def given(self, what: str, code: int, *values: Value) -> bytes:
        """Run a graph on these values, and return its output."""
        fed, fetch = self.graph(what, code)
        return self.session.run(list(zip(fed, values, strict=True)), fetch)

    def tensor(self, what: str, code: int, *values: Value) -> Any:
        """Run a graph whose output is the handle of a tensor, and take that tensor."""
        return _conformance.tensorflow1_take(struct.unpack("2i", self.given(what, code, *values)))

    def handle(self, tensor: Any) -> Value:
        return INT32, [2], struct.pack("2i", *tensor.handle)

    def make(self, dtype: str, shape: list[int], data: bytes) -> Any:
        code = self.named[dtype]
        return self.tensor("make", code, (code, shape, data))

    def constant(self, dtype: str, byte: int, nbytes: int) -> Any:
        key = dtype, byte, nbytes
        if key not in self.constants:
            self.constants[key] = self.make(dtype, [nbytes], bytes([byte]) * nbytes)
        return self.constants[key]

    def create(self, spec: Spec, data: bytes) -> Any:
        if self.cuda and data:
            kind, values = ("bool", 2) if spec.dtype == "bool" else ("uint8", 256)
            for byte in range(values):
                self.constant(kind, byte, len(data))
        return self.make(spec.dtype, spec.shape, data)

    def observe(self, tensor: Any) -> Observed:
        seen = self.given("see", self.named[tensor.dtype], self.handle(tensor))
        code, address, *shape = struct.unpack(f"{len(seen) // 8}q", seen)
        device = located(address) if self.cuda and math.prod(shape) else self.device
        # Without elements a kernel sees an arbitrary address.
        return Observed(self.names[code], shape, row_major(shape), address if math.prod(shape) else 0, False, device)

    def read(self, tensor: Any) -> bytes:
        return self.given("read", self.named[tensor.dtype], self.handle(tensor))

    def fill(self, tensor: Any, byte: int) -> Any:
        dtype, shape = tensor.dtype, list(tensor.shape)
        size = self.sizes[dtype]
        nbytes = math.prod(shape) * size
        if not self.cuda:
            return self.make(dtype, shape, bytes([byte]) * nbytes)
        what, kind = ("shape", dtype) if dtype in ("bool", "uint8") else ("fill", "uint8")
        whole = shape + [size] * (size > 1)
        lengths = INT32, [len(whole)], struct.pack(f"{len(whole)}i", *whole)
        return self.tensor(what, self.named[dtype], self.handle(self.constant(kind, byte, nbytes)), lengths)

    def allocate(self, nbytes: int) -> Any:
        if not self.cuda:
            return self.make("uint8", [nbytes], b"\x5a" * nbytes)
        return self.snapshot(self.constant("uint8", 0x5A, nbytes), None)

    def snapshot(self, source: Any, into: Any) -> Any:
        return self.tensor("copy", self.named[source.dtype], self.handle(source))

    def delay(self) -> None:
        if self.cuda:
            for _ in range(self.repeats):
                self.tensor("delay", FLOAT, self.handle(self.operand))

    def settle(self) -> int | None:
        collect()
        if not self.cuda:
            return None
        self.constants.clear()
        fed, fetch = self.graph("copy", UINT8)
        one = self.make("uint8", [1], b"\0")
        # The fetch waits for the copy, and so for all that was submitted to the stream before.
        self.read(one)
        given, used = self.session.run_traced([(fed[0], self.handle(one))], fetch)
        _conformance.tensorflow1_take(struct.unpack("2i", given))
        return used

    def import_natively(self, other: Any) -> None:
        """TensorFlow 1.x takes tensors of other frameworks only through the host."""


#: ``CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL``
ORDINAL = 9


def located(address: int) -> str:
    """Return the device of an address, from the driver."""
    ordinal = ctypes.c_int(-1)
    failed = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(ctypes.byref(ordinal), ORDINAL, ctypes.c_uint64(address))
    return "cpu" if failed else f"cuda:{ordinal.value}"


subject: Callable[[str], Subject] = TensorFlow1


def square_plus_itself() -> bytes:
    """Return a serialised ``GraphDef``: y = x x + x. It needs few kernels, which some GPUs compile at first use."""

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    def node(name: bytes, operation: bytes, inputs: list[bytes], attribute: bytes) -> bytes:
        float32 = bytes([6 << 3, 1])
        types = field(5, field(1, attribute) + field(2, float32))
        return field(1, field(1, name) + field(2, operation) + b"".join(field(3, each) for each in inputs) + types)

    x = node(b"x", b"Placeholder", [], b"dtype")
    return x + node(b"square", b"Mul", [b"x", b"x"], b"T") + node(b"y", b"Add", [b"square", b"x"], b"T")


def bench(device: str) -> Bench | None:
    """Return what the benches need. Tensors are outputs of a session. On a GPU only the driver counts their memory."""
    import torch

    import truebridge.tensorflow.v1

    if not os.environ.get("TRUEBRIDGE_TENSORFLOW1") or (device == "cuda" and not torch.cuda.is_available()):
        return None
    session = truebridge.tensorflow.v1.Session(square_plus_itself(), {"x:0": ("float32", [None])}, "y:0")

    def given(nbytes: int) -> Any:
        return torch.zeros(nbytes // 4, device=device)

    def used() -> int:
        free, whole = torch.cuda.mem_get_info()
        return int(whole - free)

    return Bench(
        lambda nbytes: session.run({"x:0": given(nbytes)})[0],
        slices=False,
        used=used if device == "cuda" else lambda: 0,
        path=Path("session", given, lambda x: session.run({"x:0": x}, "torch"), 2),
    )


def libraries() -> tuple[str | None, str | None, str | None]:
    """Return the version of TensorFlow 1.x, or why it cannot be used, and why not on a CUDA device.

    Runs in a separate process, because it loads the libraries. The description of the host calls this.
    """
    path = f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parents[2])!r})"
    command = [sys.executable, "-c", f"{path}; from {__name__} import tell; tell()"]
    child = subprocess.run(command, capture_output=True, text=True, errors="replace")
    said = (child.stdout if child.returncode == 0 else child.stderr).strip().splitlines()
    if child.returncode:
        last = (
            said[-1].removeprefix("RuntimeError: ")
            if said
            else f"the process that loads it ends with {child.returncode}"
        )
        return None, last, None
    version, missing = json.loads(said[-1])
    return version, None, missing


def tell() -> None:
    """Print the version of TensorFlow 1.x, and what it lacks to use a CUDA device."""
    version, _, cuda = _conformance.tensorflow1()
    missing = None if cuda else "it is a build without CUDA: the wheel tensorflow-gpu has one"
    for library in CUDA_10 if cuda else []:
        try:
            ctypes.CDLL(library)
        except OSError:
            missing = f"it needs CUDA 10.0 and cuDNN 7, and {library} is not found: see LD_LIBRARY_PATH"
            break
    print(json.dumps([version, missing]))
