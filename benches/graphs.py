"""Graphs of TensorFlow 1.x that are built and run by its C functions, for the bench of sessions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from truebridge_conformance.sessions import FLOAT, Buffer, Library, Output, Pointer

#: A deallocator that leaves memory to its owner.
Leave = ctypes.CFUNCTYPE(None, c_void_p, c_size_t, c_void_p)

#: Return and argument types of the functions that the suite itself does not use.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "TF_SetAttrShape": (None, [c_void_p, c_char_p, POINTER(c_int64), c_int]),
    "TF_SetAttrString": (None, [c_void_p, c_char_p, c_char_p, c_size_t]),
    "TF_NewTensor": (c_void_p, [c_int, POINTER(c_int64), c_int, c_void_p, c_size_t, Leave, c_void_p]),
    "TF_GraphToGraphDef": (None, [c_void_p, POINTER(Buffer), c_void_p]),
    "TF_SessionRun": (
        None,
        [
            *(c_void_p, c_void_p),
            *(POINTER(Output), POINTER(c_void_p), c_int),
            *(POINTER(Output), POINTER(c_void_p), c_int),
            *(POINTER(c_void_p), c_int, c_void_p, c_void_p),
        ],
    ),
}


class Graph:
    """A graph that is built by TensorFlow's own functions, and a session for it. Both live until the process ends."""

    def __init__(self, folder: Path, config: bytes) -> None:
        """Make an empty graph, in the TensorFlow that is loaded from this folder."""
        self.library = Library.of(folder)
        mine = ctypes.CDLL(str(folder / "python/_pywrap_tensorflow_internal.so"), os.RTLD_NOLOAD | os.RTLD_LOCAL)
        self.functions = {name: getattr(mine, name) for name in FUNCTIONS}
        for name, (result, arguments) in FUNCTIONS.items():
            self.functions[name].restype, self.functions[name].argtypes = result, arguments
        self.graph, self.status = self.library.TF_NewGraph(), self.library.TF_NewStatus()
        options = self.library.TF_NewSessionOptions()
        self.library.TF_SetConfig(options, config, len(config))
        self.session = self.library.TF_NewSession(self.graph, options)
        self.library.TF_DeleteSessionOptions(options)

    def add(self, operation: str, name: str, inputs: Sequence[Output] = (), **attributes: Any) -> Output:
        """Add an operation, and return its first output. Attributes are types, shapes and strings."""
        new = self.library.TF_NewOperation(self.graph, operation.encode(), name.encode())
        for each in inputs:
            self.library.TF_AddInput(new, each)
        for attribute, value in attributes.items():
            if isinstance(value, int):
                self.library.TF_SetAttrType(new, attribute.encode(), value)
            elif isinstance(value, str):
                self.functions["TF_SetAttrString"](new, attribute.encode(), value.encode(), len(value))
            else:
                self.functions["TF_SetAttrShape"](new, attribute.encode(), (c_int64 * len(value))(*value), len(value))
        return Output(self.library.TF_FinishOperation(new), 0)

    def line(self, inputs: Mapping[str, Output]) -> Output:
        """Add ``two * x + one``."""
        product = self.add("Mul", "product", [inputs["two"], inputs["x"]])
        return self.add("Add", "y", [product, inputs["one"]])

    def placeholder(self, name: str, shape: Sequence[int]) -> Output:
        """Add an input that must be fed."""
        return self.add("Placeholder", name, dtype=FLOAT, shape=shape)

    def variable(self, name: str, array: Any) -> Output:
        """Add a tensor of TensorFlow's own with these values."""
        handle = self.add("VarHandleOp", name, dtype=FLOAT, shape=array.shape, shared_name=f"{name}_{self.graph}")
        value = self.placeholder(f"{name}/value", array.shape)
        assign = self.add("AssignVariableOp", f"{name}/assign", [handle, value], dtype=FLOAT)
        tensor = self.tensor(array)
        self.run(feeds={0: (value, tensor)}, targets=[assign])()
        self.library.TF_DeleteTensor(tensor)
        return self.add("ReadVariableOp", f"{name}/read", [handle], dtype=FLOAT)

    def tensor(self, array: Any) -> Pointer:
        """Make a tensor over an array, which must outlive it."""
        shape = (c_int64 * array.ndim)(*array.shape)
        made = self.functions["TF_NewTensor"](FLOAT, shape, array.ndim, array.ctypes.data, array.nbytes, _LEAVE, None)
        return Pointer(made)

    def run(
        self,
        feeds: Mapping[int, tuple[Output, Pointer]] | None = None,
        fetches: Sequence[Output] = (),
        targets: Sequence[Output] = (),
    ) -> Callable[[], list[int]]:
        """Return a run, to be called any number of times. It returns the fetched tensors, which the caller deletes."""
        places, tensors = zip(*feeds.values(), strict=True) if feeds else ((), ())
        fetched = (Pointer * len(fetches))()
        arguments = (
            *(self.session, None),
            *((Output * len(places))(*places), (Pointer * len(places))(*tensors), len(places)),
            *((Output * len(fetches))(*fetches), fetched, len(fetches)),
            *((Pointer * len(targets))(*(target.oper for target in targets)), len(targets), None, self.status),
        )
        function, code, status = self.functions["TF_SessionRun"], self.library.TF_GetCode, self.status

        def call() -> list[int]:
            function(*arguments)
            if code(status):
                raise RuntimeError(self.library.TF_Message(status).decode(errors="replace"))
            return list(fetched)

        return call

    def serialised(self) -> bytes:
        """Return the serialised ``GraphDef``."""
        buffer = Buffer()
        self.functions["TF_GraphToGraphDef"](self.graph, ctypes.byref(buffer), self.status)
        if self.library.TF_GetCode(self.status):
            raise RuntimeError(self.library.TF_Message(self.status).decode(errors="replace"))
        return ctypes.string_at(buffer.data, buffer.length)


_LEAVE = Leave(lambda *_: None)
