"""TensorFlow 1.x under test, as the suite uses it: through its C functions, and the bridge where nothing else will do.

Its graphs have tensors only while they run. What the suite holds is what the bridge makes of them: its input operation
takes a tensor into a run, and its output operation takes one out. What happens between the two is TensorFlow's own, and
so are the witnesses: what is read is fetched to the host, and an operation of the suite tells where a tensor is.
"""

# What the methods promise is said in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import ctypes
import gc
import math
import os
import struct
import time
from typing import Any, ClassVar

from tensor_bridge_conformance import _conformance
from tensor_bridge_conformance.sessions import FLOAT, HOST, INT32, UINT8, Library, Output, Session, Value
from tensor_bridge_conformance.subjects import DELAY, NAMES

#: The codes of dtypes (``TF_DataType``).
CODES = {
    **{"float32": FLOAT, "float64": 2, "int32": INT32, "uint8": UINT8, "int16": 5, "int8": 6, "complex64": 8},
    **{"int64": 9, "bool": 10, "bfloat16": 14, "uint16": 17, "complex128": 18, "float16": 19, "uint32": 22},
    "uint64": 23,
}

#: Elements (float32) of what is multiplied in a delay, and how often in one run: below a millisecond on a GPU.
OPERAND = 1 << 24
CHAIN = 16

#: The operations of the bridge, and one of the suite's that tells what a kernel sees.
INPUT, OUTPUT, WITNESS = "TensorBridgeInput", "TensorBridgeOutput", "ConformanceWitness"

#: Without an entry that nobody has to open a gate for, ``Copy`` passes its input on (``debug_ops_spec``).
UNGATED = b"DebugIdentity;file:///dev/null;0"

#: The graphs of a dtype: what comes after a placeholder, each with what the one before gives. All but the first begin
#: with the handle of a tensor, and those that end in an output give one.
GRAPHS = {
    "make": [OUTPUT],
    "read": [INPUT],
    "see": [INPUT, WITNESS],
    "copy": [INPUT, "Copy", OUTPUT],
    "shape": [INPUT, "Copy", "Reshape", OUTPUT],
    "fill": [INPUT, "Copy", "Reshape", "Bitcast", OUTPUT],
    "delay": [INPUT, *["Mul"] * CHAIN, OUTPUT],
}


class Tensorflow1:
    """TensorFlow 1.x on one device. Nothing writes to its tensors, and a GPU has one stream for all of them.

    On a GPU nothing is done but to copy, and in a delay to multiply floats: kernels are compiled at their first use on
    a GPU that TensorFlow does not know, all of them in many minutes. And no run waits for the device at its end, or
    there would be nothing pending to be ordered: TensorFlow reads ``TF_SYNC_ON_FINISH`` when a session makes its
    devices.
    """

    writes = False
    makes_negative_strides = False
    makes_read_only = False
    unaligned = False
    puts_off = ()

    #: Tensors of equal bytes on the device, by dtype, byte and size: a fill may not wait for one to get there. Two
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
        self.library.register(WITNESS)
        self.graphs: dict[tuple[str, int], tuple[list[Output], Output]] = {}
        self.named = {name: CODES[name] for name in NAMES if name in CODES}
        self.dtypes = list(self.named)
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

    def warm_up(self) -> None:
        """Builds every graph and loads every kernel, so that what they keep is there before anything is counted."""
        for name, size in self.sizes.items():
            tensor = self.create(name, [2], [1], 0, 2, 0, False, None, bytes(2 * size))
            self.read(self.snapshot(self.fill(tensor, 1), self.allocate(1)))
            self.observe(tensor)
        self.delay()
        self.settle()

    def graph(self, what: str, code: int) -> tuple[list[Output], Output]:
        """Where one of ``GRAPHS`` is fed and what it gives; it is built at the first use."""
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
        """What a graph gives when it is fed these values."""
        fed, fetch = self.graph(what, code)
        return self.session.run(list(zip(fed, values, strict=True)), fetch)

    def tensor(self, what: str, code: int, *values: Value) -> Any:
        """The same where it is the handle of a tensor."""
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

    def create(
        self,
        dtype: str,
        shape: list[int],
        strides: list[int],
        offset: int,
        base: int,
        align: int,
        read_only: bool,
        pending: str | None,
        data: bytes,
    ) -> Any:
        if self.cuda and data:
            kind, values = ("bool", 2) if dtype == "bool" else ("uint8", 256)
            for byte in range(values):
                self.constant(kind, byte, len(data))
        return self.make(dtype, shape, data)

    def observe(self, tensor: Any) -> tuple[str, list[int], list[int], int, bool, str]:
        seen = self.given("see", self.named[tensor.dtype], self.handle(tensor))
        code, address, *shape = struct.unpack(f"{len(seen) // 8}q", seen)
        strides = [math.prod(max(length, 1) for length in shape[dim + 1 :]) for dim in range(len(shape))]
        elements = math.prod(shape)
        if not elements:
            # A kernel sees some address or other.
            return self.names[code], shape, strides, 0, False, self.device
        return self.names[code], shape, strides, address, False, located(address) if self.cuda else self.device

    def read(self, tensor: Any) -> bytes:
        return self.given("read", self.named[tensor.dtype], self.handle(tensor))

    def write(self, tensor: Any, data: bytes) -> None:
        raise TypeError("nothing writes to tensors of TensorFlow")

    def fill(self, tensor: Any, byte: int) -> Any:
        dtype, shape = tensor.dtype, list(tensor.shape)
        size = self.sizes[dtype]
        nbytes = math.prod(shape) * size
        if not self.cuda:
            return self.make(dtype, shape, bytes([byte]) * nbytes)
        what, kind = ("shape", dtype) if dtype in ("bool", "uint8") else ("fill", "uint8")
        whole = shape + [size] * (size > 1)
        told = INT32, [len(whole)], struct.pack(f"{len(whole)}i", *whole)
        return self.tensor(what, self.named[dtype], self.handle(self.constant(kind, byte, nbytes)), told)

    def allocate(self, nbytes: int) -> Any:
        if not self.cuda:
            return self.make("uint8", [nbytes], b"\x5a" * nbytes)
        return self.snapshot(self.constant("uint8", 0x5A, nbytes), None)

    def snapshot(self, source: Any, into: Any) -> Any:
        return self.tensor("copy", self.named[source.dtype], self.handle(source))

    def streams(self) -> list[int]:
        return []

    def fresh(self, external: bool) -> None:
        """There is one stream."""

    def delay(self) -> None:
        if self.cuda:
            for _ in range(self.repeats):
                self.tensor("delay", FLOAT, self.handle(self.operand))

    def settle(self) -> int | None:
        gc.collect()
        if not self.cuda:
            return None
        self.constants.clear()
        fed, fetch = self.graph("copy", UINT8)
        one = self.make("uint8", [1], b"\0")
        # What is fetched has to be there, and so has all that was put into the stream before.
        self.read(one)
        given, used = self.session.run_traced([(fed[0], self.handle(one))], fetch)
        _conformance.tensorflow1_take(struct.unpack("2i", given))
        return used

    def import_natively(self, other: Any) -> None:
        """There is no way of its own: it takes tensors of others by the host alone."""


#: ``CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL``
ORDINAL = 9


def located(address: int) -> str:
    """The device of an address, as the driver says."""
    ordinal = ctypes.c_int(-1)
    failed = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(ctypes.byref(ordinal), ORDINAL, ctypes.c_uint64(address))
    return "cpu" if failed else f"cuda:{ordinal.value}"
