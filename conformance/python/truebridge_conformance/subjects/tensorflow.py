"""TensorFlow 2 under test."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import ctypes
import gc
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from truebridge_conformance.subjects import Bench, Capabilities, Observed, Spec, Stream, Subject, Usual, shape
from truebridge_conformance.subjects.common import DELAY, NAMES, Unwritable, collect, elements, row_major
from truebridge_conformance.subjects.streams import raw_stream

#: The most bytes of any tensor of the suite.
MOST = 1 << 20


class DLTensor(ctypes.Structure):
    """The head of what a DLPack capsule points to (``dlpack.h``)."""

    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class TensorFlow(Unwritable):
    """TensorFlow on one device."""

    def __init__(self, device: str) -> None:
        import numpy
        import tensorflow

        self.numpy = numpy
        self.tf = tensorflow
        kind, _, index = device.partition(":")
        self.cuda = kind == "cuda"
        self.name = f"GPU:{index or 0}" if self.cuda else "CPU:0"
        self.pointer = ctypes.pythonapi.PyCapsule_GetPointer
        self.pointer.restype = ctypes.c_void_p
        self.pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        self.named = {name: dtype for name in NAMES if (dtype := self.dtype(name)) is not None}
        if self.name == "GPU:0":
            # Where TensorFlow finds several, it leaves the last one current, which CuPy then works on.
            tensorflow.config.set_visible_devices(tensorflow.config.list_physical_devices("GPU")[:1], "GPU")
        with self.here():
            # Made before memory is counted, so that no fill waits for a copy to the device.
            every: Any = numpy.arange(256, dtype="uint8")
            self.every = tensorflow.unstack(tensorflow.constant(every))
            small = [dtype for dtype in self.named.values() if self.is_small_float(dtype)]
            self.tables = {dtype: tensorflow.constant(every.view(dtype.as_numpy_dtype)) for dtype in small}
            self.numbers = tensorflow.constant(numpy.arange(MOST), "int64")
            # On such numbers the series of `delay` runs to its limit: some milliseconds in one kernel.
            self.operand = tensorflow.fill([1 << 20], tensorflow.constant(1e6, "float64")) if self.cuda else None
        self.repeats = 1
        self.warm_up()
        if self.cuda:
            started = time.perf_counter()
            self.delay()
            self.tf.test.experimental.sync_devices()
            self.repeats = math.ceil(DELAY / (time.perf_counter() - started))
        gc.collect()
        gc.freeze()

    def capabilities(self) -> Capabilities:
        flags = dict(flag.partition("=")[::2] for flag in self.tf.sysconfig.get_compile_flags())
        # TensorFlow takes any address, and its kernels then end the process.
        aligned = int(flags["-DEIGEN_MAX_ALIGN_BYTES"])
        return Capabilities(tuple(self.named), writes=False, immutable=True, imports=aligned)

    def here(self) -> Any:
        return self.tf.device(self.name)

    def dtype(self, name: str) -> Any:
        # TensorFlow keeps these in host memory, even where it reports that they are on a GPU.
        if self.cuda and name == "int32":
            return None
        try:
            dtype = self.tf.as_dtype(name)
            with self.here():
                self.tf.gather(self.tf.constant(self.numpy.zeros(1, dtype.as_numpy_dtype)), [0])
        except (TypeError, ValueError, self.tf.errors.OpError):
            return None
        return dtype

    def is_small_float(self, dtype: Any) -> bool:
        """Return whether few operations take this dtype, and DLPack neither."""
        return "float8" in dtype.name

    def warm_up(self) -> None:
        """Load every kernel, so that the memory that they keep is allocated before memory is counted."""
        for name, dtype in self.named.items():
            tensor = self.create(Spec(name, [2], [1], 0, 2), bytes(2 * dtype.size))
            self.read(self.snapshot(self.fill(tensor, 1), self.allocate(1)))
        self.delay()
        self.settle()

    def full(self, shape: list[int], byte: int) -> Any:
        """Return bytes that a kernel has written."""
        return self.tf.fill(shape, self.every[byte])

    def create(self, spec: Spec, data: bytes) -> Any:
        known = self.named[spec.dtype]
        with self.here():
            tensor = self.tf.constant(self.numpy.frombuffer(data, known.as_numpy_dtype).reshape(spec.shape))
            if self.is_small_float(known):
                tensor = self.copied(tensor)
            elif not self.cuda:
                # It may be the array's own memory.
                tensor = self.tf.raw_ops.DeepCopy(x=tensor)
        self.tf.test.experimental.sync_devices()
        return tensor

    def copied(self, tensor: Any) -> Any:
        """Copy bit for bit, by the few operations that every dtype has on a GPU: reshaping is not one of them."""
        if tensor.shape.rank == 0:
            return self.tf.gather(self.tf.stack([tensor, tensor]), self.numbers[0])
        return self.tf.gather(tensor, self.numbers[: tensor.shape[0]])

    def observe(self, tensor: Any) -> Observed:
        if isinstance(tensor, self.tf.Variable):
            tensor = tensor.value()
        shape = tensor.shape.as_list()
        strides = row_major(shape)
        if self.is_small_float(tensor.dtype):
            return Observed(tensor.dtype.name, shape, strides, *self.place(tensor))
        capsule = self.tf.experimental.dlpack.to_dlpack(tensor)
        seen = DLTensor.from_address(self.pointer(capsule, b"dltensor"))
        address = (seen.data or 0) + seen.byte_offset
        device = {1: "cpu", 2: f"cuda:{seen.device_id}"}[seen.device_type]
        return Observed(tensor.dtype.name, shape, strides, address, False, device)

    def place(self, tensor: Any) -> tuple[int, bool, str]:
        """Return address, read-only and device of a dtype that DLPack does not know, by TensorFlow's C functions."""
        folder = Path(self.tf.__file__).parent
        # By its new and its old name.
        names = (f"python/{name}.so" for name in ("lib_pywrap_tensorflow_common", "_pywrap_tensorflow_internal"))
        library = next(folder / name for name in names if (folder / name).exists())
        handle_of = ctypes.PyDLL(str(library))["_Z18EagerTensor_HandlePK7_object"]
        functions = ctypes.CDLL(str(folder / "libtensorflow_cc.so.2"))
        address_of, new_status = functions.TFE_TensorHandleDevicePointer, functions.TF_NewStatus
        for function in (handle_of, address_of, new_status):
            function.restype = ctypes.c_void_p
        handle_of.argtypes, address_of.argtypes = [ctypes.py_object], [ctypes.c_void_p, ctypes.c_void_p]
        status = ctypes.c_void_p(new_status())
        address = address_of(handle_of(tensor), status)
        functions.TF_DeleteStatus(status)
        kind, _, index = tensor.backing_device.rpartition("/device:")[2].partition(":")
        return address or 0, False, f"cuda:{index}" if kind == "GPU" else "cpu"

    def read(self, tensor: Any) -> bytes:
        if self.cuda and tensor.dtype.name in self.named:
            # TensorFlow keeps the first host copy of a tensor on a GPU, and does not read the device again.
            tensor = self.snapshot(tensor, None)
        return bytes(tensor.numpy().tobytes())

    def fill(self, tensor: Any, byte: int) -> Any:
        dtype, shape = tensor.dtype, tensor.shape.as_list()
        with self.here():
            if dtype == self.tf.bool:
                return self.tf.cast(self.full(shape, byte), dtype)
            if self.is_small_float(dtype):
                return self.tf.gather(self.tables[dtype], self.tf.cast(self.full(shape, byte), "int64"))
            return self.tf.bitcast(self.full(shape + [dtype.size] * (dtype.size > 1), byte), dtype)

    def allocate(self, nbytes: int) -> Any:
        with self.here():
            return self.full([nbytes], 0x5A)

    def snapshot(self, source: Any, into: Any) -> Any:
        with self.here():
            if self.is_small_float(source.dtype):
                return self.copied(source)
            change = self.tf.cast if source.dtype == self.tf.bool else self.tf.bitcast
            return self.tf.raw_ops.DeepCopy(x=self.tf.reshape(change(source, self.tf.uint8), [-1]))

    def own(self, seed: int, dtype: str = "float32", shape: tuple[int, ...] = (4, 6)) -> Any:
        kind = self.tf.as_dtype(dtype)
        count = math.prod(shape)
        return self.create(Spec(dtype, list(shape), [], 0, count), elements(seed, count * kind.size))

    def variable(self, seed: int) -> Any:
        with self.here():
            return self.tf.Variable(self.own(seed))

    def unassigned(self, _: int) -> Any:
        from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

        return UninitializedVariable(dtype=self.tf.float32, shape=[2])

    def symbolic(self, seed: int) -> Any:
        """Return a tensor of a graph, which outlives the function that makes it."""
        seen: list[Any] = []
        self.tf.function(seen.append).get_concrete_function(self.own(seed))
        return seen[0]

    def usual(self) -> list[Usual]:
        tf, own, here = self.tf, self.own, self.here

        def ran(operation: Callable[[Any], Any]) -> Callable[[int], Any]:
            def make(seed: int) -> Any:
                with here():
                    return operation(own(seed))

            return make

        return [
            Usual("a tensor", own),
            Usual("a result", ran(lambda tensor: tensor + tensor)),
            Usual("a number in a tensor", lambda seed: own(seed, shape=())),
            Usual("a tensor without elements", lambda seed: own(seed, shape=(3, 0))),
            Usual("another shape of a tensor", ran(lambda tensor: tf.reshape(tensor, [6, 4]))),
            Usual("the last rows of a tensor", ran(lambda tensor: tensor[1:])),
            Usual("a column of a tensor", ran(lambda tensor: tensor[:, 1])),
            Usual("a transposed tensor", ran(tf.transpose)),
            Usual("an array of NumPy", ran(lambda tensor: tf.convert_to_tensor(tensor.numpy()))),
            Usual("a variable", self.variable),
            Usual("a variable that is assigned later", self.variable, afterwards=lambda x: x.assign(x + 1)),
            Usual("a ragged tensor", ran(lambda tensor: tf.RaggedTensor.from_tensor(tensor)), "not a tensor"),
            Usual("a sparse tensor", ran(tf.sparse.from_dense), "not a tensor"),
            Usual("indexed slices", ran(lambda tensor: tf.IndexedSlices(tensor, tensor[:, 0])), "not a tensor"),
            Usual("a variable without a value", self.unassigned, "not a tensor"),
            Usual("a symbolic tensor", self.symbolic, "not a tensor"),
            Usual("texts", lambda _: tf.constant(["a", "b"]), "dtype"),
            Usual("the handle of a variable", lambda seed: self.variable(seed).handle, "dtype"),
            Usual("quantised elements", lambda seed: tf.bitcast(own(seed, "uint8"), tf.quint8), "dtype"),
            Usual("a number", float, "not a tensor"),
        ]

    def delay(self) -> None:
        if self.cuda:
            with self.here():
                for _ in range(self.repeats):
                    self.tf.math.igamma(self.operand, self.operand)

    def settle(self) -> int | None:
        self.tf.test.experimental.sync_devices()
        collect()
        if not self.cuda:
            return None
        return int(self.tf.config.experimental.get_memory_info(self.name)["current"])

    def import_natively(self, other: Any) -> Any:
        if not hasattr(other, "__dlpack__"):
            return None
        # On a GPU without ordering, as in TensorFlow's documentation, which names no stream to wait for.
        capsule = other.__dlpack__(stream=-1) if self.cuda else other.__dlpack__()
        return self.tf.experimental.dlpack.from_dlpack(capsule)


subject: Callable[[str], Subject] = TensorFlow


BARS = {
    ("torch", "host"): None,
    **{("torch", "cross"): 1.1, ("torch", "cross, busy"): 0.3},
    **{("cupy", "cross"): 0.8, ("cupy", "cross, busy"): 0.3},
}


def bench(device: str) -> Bench | None:
    """Return what the benches need."""
    import tensorflow

    where = "GPU:0" if device == "cuda" else "CPU:0"

    def make(nbytes: int) -> Any:
        with tensorflow.device(where):
            return tensorflow.zeros(shape(nbytes))

    def used() -> int:
        return int(tensorflow.config.experimental.get_memory_info(where)["current"])

    if device == "cpu":
        return Bench(make, BARS, slices=False)
    if not tensorflow.config.list_physical_devices("GPU"):
        return None
    operand = tensorflow.fill([1 << 20], tensorflow.constant(1e6, "float64"))
    return Bench(
        make,
        BARS,
        slices=False,
        # TensorFlow does not show its stream, which is non-blocking, as this one is.
        stream=lambda: Stream(raw_stream(), only=True),
        occupy=lambda: tensorflow.math.igamma(operand, operand),
        unknown_reuse=True,
        used=used,
    )
