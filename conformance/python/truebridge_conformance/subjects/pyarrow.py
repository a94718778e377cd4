"""PyArrow under test."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

from typing import Any, ClassVar

from truebridge_conformance.subjects import Capabilities, Observed, Spec
from truebridge_conformance.subjects.peers import Peer


class PyArrow(Peer):
    """PyArrow's arrays, which are marked read-only, and its tensors, which are not, in memory of its own.

    A vector that is read-only is an array, and everything else is a tensor.
    """

    known: ClassVar[dict[int, Any]] = {}

    def __init__(self, device: str) -> None:
        import pyarrow

        self.pyarrow = pyarrow
        super().__init__(device)

    def capabilities(self) -> Capabilities:
        return Capabilities(self.dtypes, read_only=True, copies=False)

    def makes(self, dtype: str) -> bool:
        numpy = self.lens.numpy
        try:
            made = self.pyarrow.Tensor.from_numpy(numpy.empty(1, self.lens.named[dtype]))
        except (self.pyarrow.ArrowException, TypeError, ValueError):
            return False
        # Of bools it makes uint8.
        return bool(self.seen(made)[0] == dtype)

    def allocate(self, nbytes: int) -> Any:
        return self.over(self.pyarrow.allocate_buffer(nbytes), "uint8", [nbytes], [1], 0)

    def over(self, memory: Any, dtype: str, shape: list[int], strides: list[int], offset: int) -> Any:
        numpy, kind = self.lens.numpy, self.lens.named[dtype]
        if isinstance(memory, self.pyarrow.Tensor):
            memory = memory.to_numpy()
        bytewise = [stride * kind.itemsize for stride in strides]
        return self.pyarrow.Tensor.from_numpy(numpy.ndarray(shape, kind, memory, offset, bytewise))

    def create(self, spec: Spec, data: bytes) -> Any:
        made = super().create(spec, data)
        if not spec.read_only:
            return made
        array = made.to_numpy()
        if array.ndim == 1 and array.flags.c_contiguous and array.size:
            return self.pyarrow.Array.from_buffers(made.type, array.size, [None, self.pyarrow.py_buffer(array)])
        array = array.view()
        array.flags.writeable = False
        return self.pyarrow.Tensor.from_numpy(array)

    def seen(self, tensor: Any) -> tuple[str, list[int], list[int], int]:
        kind = self.lens.numpy.dtype(tensor.type.to_pandas_dtype())
        if isinstance(tensor, self.pyarrow.Array):
            memory = tensor.buffers()[1]
            return kind.name, [len(tensor)], [1], memory.address + tensor.offset * kind.itemsize
        strides = [stride // kind.itemsize for stride in tensor.strides]
        return kind.name, list(tensor.shape), strides, tensor.to_numpy().__array_interface__["data"][0]

    def observe(self, tensor: Any) -> Observed:
        is_array = isinstance(tensor, self.pyarrow.Array)
        return super().observe(tensor)._replace(read_only=is_array or not tensor.is_mutable)


subject = PyArrow
