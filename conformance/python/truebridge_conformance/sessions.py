"""TensorFlow's C functions for graphs and sessions (``tensorflow/c/c_api.h``), in a library that is already loaded."""

# TensorFlow documents what the functions do.
# ruff: noqa: D102, D105, D107
from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

#: Codes of dtypes that operations are built with.
FLOAT, INT32, UINT8, INT64 = 1, 3, 4, 9

#: The device of host memory.
HOST = "/device:CPU:0"

#: A ``ConfigProto``: memory of the GPU as it is needed, and graphs that are run as they were built
#: (``gpu_options.allow_growth``, ``graph_options.rewrite_options.disable_meta_optimizer``).
CONFIG = bytes([0x32, 2, 0x20, 1, 0x52, 5, 0x52, 3, 0x98, 1, 1])

#: ``RunOptions`` that request statistics (``trace_level: SOFTWARE_TRACE``), and the path of fields to one in the
#: ``RunMetadata`` (``step_stats.dev_stats.node_stats.memory.allocator_bytes_in_use``).
TRACE = bytes([8, 1])
IN_USE = (1, 1, 2, 6, 5)

#: A pointer to a tensor, or to another object of the C interface.
Pointer = c_void_p
#: A value to feed: code, shape and bytes.
Value = tuple[int, list[int], bytes]


class Output(ctypes.Structure):
    """``TF_Output``: one output of an operation of a graph."""

    _fields_: ClassVar = [("oper", c_void_p), ("index", c_int)]


class Buffer(ctypes.Structure):
    """``TF_Buffer``."""

    _fields_: ClassVar = [("data", c_void_p), ("length", c_size_t), ("deallocator", c_void_p)]


Compute = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)

#: Return types of the functions, and types of their arguments. In the second table the last argument is a status.
PLAIN: dict[str, tuple[Any, list[Any]]] = {
    "TF_NewStatus": (c_void_p, []),
    "TF_DeleteStatus": (None, [c_void_p]),
    "TF_GetCode": (c_int, [c_void_p]),
    "TF_Message": (c_char_p, [c_void_p]),
    "TF_DataTypeSize": (c_size_t, [c_int]),
    "TF_NewGraph": (c_void_p, []),
    "TF_NewSessionOptions": (c_void_p, []),
    "TF_DeleteSessionOptions": (None, [c_void_p]),
    "TF_NewOperation": (c_void_p, [c_void_p, c_char_p, c_char_p]),
    "TF_AddInput": (None, [c_void_p, Output]),
    "TF_SetAttrType": (None, [c_void_p, c_char_p, c_int]),
    "TF_SetAttrStringList": (None, [c_void_p, c_char_p, POINTER(c_char_p), POINTER(c_size_t), c_int]),
    "TF_SetDevice": (None, [c_void_p, c_char_p]),
    "TF_AllocateTensor": (c_void_p, [c_int, POINTER(c_int64), c_int, c_size_t]),
    "TF_DeleteTensor": (None, [c_void_p]),
    "TF_TensorType": (c_int, [c_void_p]),
    "TF_NumDims": (c_int, [c_void_p]),
    "TF_Dim": (c_int64, [c_void_p, c_int]),
    "TF_TensorByteSize": (c_size_t, [c_void_p]),
    "TF_TensorData": (c_void_p, [c_void_p]),
    "TF_NewOpDefinitionBuilder": (c_void_p, [c_char_p]),
    "TF_OpDefinitionBuilderAddInput": (None, [c_void_p, c_char_p]),
    "TF_OpDefinitionBuilderAddOutput": (None, [c_void_p, c_char_p]),
    "TF_OpDefinitionBuilderAddAttr": (None, [c_void_p, c_char_p]),
    "TF_OpDefinitionBuilderSetIsStateful": (None, [c_void_p, ctypes.c_bool]),
    "TF_OpDefinitionBuilderSetShapeInferenceFunction": (None, [c_void_p, c_void_p]),
    "TF_NewKernelBuilder": (c_void_p, [c_char_p, c_char_p, c_void_p, Compute, c_void_p]),
    "TF_KernelBuilder_HostMemory": (None, [c_void_p, c_char_p]),
}
CHECKED: dict[str, tuple[Any, list[Any]]] = {
    "TF_SetConfig": (None, [c_void_p, c_char_p, c_size_t, c_void_p]),
    "TF_NewSession": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "TF_FinishOperation": (c_void_p, [c_void_p, c_void_p]),
    "TF_SessionRun": (
        None,
        [
            *(c_void_p, POINTER(Buffer)),
            *(POINTER(Output), POINTER(c_void_p), c_int),
            *(POINTER(Output), POINTER(c_void_p), c_int),
            *(POINTER(c_void_p), c_int, POINTER(Buffer), c_void_p),
        ],
    ),
    "TF_RegisterOpDefinition": (None, [c_void_p, c_void_p]),
    "TF_RegisterKernelBuilder": (None, [c_char_p, c_void_p, c_void_p]),
    "TF_GetInput": (None, [c_void_p, c_int, POINTER(c_void_p), c_void_p]),
    "TF_SetOutput": (None, [c_void_p, c_int, c_void_p, c_void_p]),
}


class Library:
    """The functions, by their names. Those of ``CHECKED`` raise ``RuntimeError`` instead of taking a status."""

    @staticmethod
    @cache
    def of(folder: Path) -> Library:
        return Library(folder)

    def __init__(self, folder: Path) -> None:
        path = folder / "python/_pywrap_tensorflow_internal.so"
        self._library = ctypes.CDLL(str(path), os.RTLD_NOLOAD | os.RTLD_LOCAL)
        for name, (result, arguments) in (PLAIN | CHECKED).items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, self._checked(function) if name in CHECKED else function)
        self._kernel = Compute(self._oracle)
        self._registered: set[bytes] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"{name} is in no table")

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            status = self.TF_NewStatus()
            try:
                result = function(*arguments, status)
                if self.TF_GetCode(status):
                    raise RuntimeError(self.TF_Message(status).decode(errors="replace"))
                return result
            finally:
                self.TF_DeleteStatus(status)

        return call

    def tensor(self, code: int, shape: Sequence[int], data: bytes) -> Pointer:
        """Make a tensor in host memory. The caller deletes it."""
        made = Pointer(self.TF_AllocateTensor(code, (c_int64 * len(shape))(*shape), len(shape), len(data)))
        ctypes.memmove(self.TF_TensorData(made), data, len(data))
        return made

    def shape(self, tensor: Pointer) -> list[int]:
        return [self.TF_Dim(tensor, dim) for dim in range(self.TF_NumDims(tensor))]

    def register(self, oracle: str) -> None:
        """Register an operation that reports what a kernel sees of its input: the code, the address and the shape."""
        name = oracle.encode()
        if name in self._registered:
            return
        self._registered.add(name)
        builder = self.TF_NewOpDefinitionBuilder(name)
        self.TF_OpDefinitionBuilderAddInput(builder, b"x: T")
        self.TF_OpDefinitionBuilderAddOutput(builder, b"seen: int64")
        self.TF_OpDefinitionBuilderAddAttr(builder, b"T: type")
        self.TF_OpDefinitionBuilderSetIsStateful(builder, True)
        unknown = ctypes.cast(self._library.TF_ShapeInferenceContextSetUnknownShape, c_void_p)
        self.TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, unknown)
        self.TF_RegisterOpDefinition(builder)
        for device in (b"CPU", b"GPU"):
            kernel = self.TF_NewKernelBuilder(name, device, None, self._kernel, None)
            self.TF_KernelBuilder_HostMemory(kernel, b"seen")
            self.TF_RegisterKernelBuilder(name, kernel)

    def _oracle(self, _: Any, context: int) -> None:
        given = Pointer()
        self.TF_GetInput(context, 0, ctypes.byref(given))
        seen = [self.TF_TensorType(given), self.TF_TensorData(given) or 0, *self.shape(given)]
        report = self.tensor(INT64, [len(seen)], bytes((c_int64 * len(seen))(*seen)))
        self.TF_SetOutput(context, 0, report)
        self.TF_DeleteTensor(report)
        self.TF_DeleteTensor(given)


class Session:
    """A graph that grows, and the session that runs it. Both live until the process ends."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.graph = library.TF_NewGraph()
        self.operations = 0
        options = library.TF_NewSessionOptions()
        library.TF_SetConfig(options, CONFIG, len(CONFIG))
        self.session = library.TF_NewSession(self.graph, options)
        library.TF_DeleteSessionOptions(options)

    def add(
        self, operation: str, attributes: dict[str, int | bytes], inputs: Sequence[Output] = (), device: str = HOST
    ) -> Output:
        """Add an operation, and return its first output. Attributes are types, or lists of one string."""
        library = self.library
        self.operations += 1
        new = library.TF_NewOperation(self.graph, operation.encode(), f"{operation}_{self.operations}".encode())
        for each in inputs:
            library.TF_AddInput(new, each)
        for name, value in attributes.items():
            if isinstance(value, int):
                library.TF_SetAttrType(new, name.encode(), value)
            else:
                strings, lengths = (c_char_p * 1)(value), (c_size_t * 1)(len(value))
                library.TF_SetAttrStringList(new, name.encode(), strings, lengths, 1)
        library.TF_SetDevice(new, device.encode())
        return Output(library.TF_FinishOperation(new), 0)

    def run(self, feeds: Sequence[tuple[Output, Value]], fetch: Output) -> bytes:
        """Feed values, and return the bytes of ``fetch``."""
        return self._run(feeds, fetch, None, None)

    def run_traced(self, feeds: Sequence[tuple[Output, Value]], fetch: Output) -> tuple[bytes, int]:
        """Do the same, and return as well the most bytes in use that the allocator of an operation counted."""
        options = Buffer(ctypes.cast(c_char_p(TRACE), c_void_p), len(TRACE), None)
        about = Buffer()
        given = self._run(feeds, fetch, options, about)
        counts = fields(ctypes.string_at(about.data, about.length), IN_USE)
        return given, max((count for count in counts if isinstance(count, int)), default=0)

    def _run(
        self, feeds: Sequence[tuple[Output, Value]], fetch: Output, options: Buffer | None, about: Buffer | None
    ) -> bytes:
        library = self.library
        places = (Output * len(feeds))(*(place for place, _ in feeds))
        values = (Pointer * len(feeds))(*(library.tensor(*value) for _, value in feeds))
        fetched = Pointer()
        try:
            library.TF_SessionRun(
                *(self.session, options, places, values, len(feeds)),
                *(ctypes.byref(fetch), ctypes.byref(fetched), 1, None, 0, about),
            )
            return ctypes.string_at(library.TF_TensorData(fetched), library.TF_TensorByteSize(fetched))
        finally:
            for tensor in (*values, fetched):
                if tensor:
                    library.TF_DeleteTensor(tensor)


def fields(message: bytes, path: Sequence[int]) -> Iterator[int | bytes]:
    """Yield the values of a serialised protocol buffer at a path of field numbers."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while at < len(message):
        field, kind = divmod(number(), 8)
        if kind == 0:
            value: int | bytes = number()
        else:
            size = {1: 8, 5: 4}.get(kind) or number()
            value, at = message[at : at + size], at + size
        if field == path[0] and len(path) == 1:
            yield value
        elif field == path[0] and isinstance(value, bytes):
            yield from fields(value, path[1:])
