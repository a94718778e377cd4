"""PyArrow under test."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

from typing import Any, ClassVar

from truebridge_conformance.subjects import Capabilities, Observed, Spec, Usual
from truebridge_conformance.subjects.common import elements
from truebridge_conformance.subjects.peers import Peer


class PyArrow(Peer):
    """PyArrow's arrays, which are marked read-only, and its tensors, which are not, in its memory.

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

    def values(self, seed: int) -> Any:
        return self.lens.numpy.frombuffer(elements(seed, 96), "float32")

    def own(self, seed: int) -> Any:
        return self.pyarrow.array(self.values(seed))

    def with_null(self, seed: int) -> Any:
        """Return an array whose first element is missing."""
        values = self.values(seed)
        return self.pyarrow.array(values, mask=self.lens.numpy.arange(values.size) == 0)

    def rows(self, seed: int) -> Any:
        """Return an array of which each element is a list of six."""
        return self.pyarrow.FixedSizeListArray.from_arrays(self.own(seed), 6)

    def shaped(self, seed: int) -> Any:
        """Return an array of which each element is a tensor."""
        kind = self.pyarrow.fixed_shape_tensor(self.pyarrow.float32(), [2, 3])
        return self.pyarrow.ExtensionArray.from_storage(kind, self.rows(seed))

    def usual(self) -> list[Usual]:
        arrow, own = self.pyarrow, self.own

        def tensor(seed: int) -> Any:
            return arrow.Tensor.from_numpy(self.values(seed).reshape(4, 6).copy())

        return [
            Usual("an array", own),
            Usual("a part of an array", lambda seed: own(seed)[3:9]),
            Usual("an array without elements", lambda seed: own(seed)[:0]),
            Usual("the part of an array that has no nulls", lambda seed: self.with_null(seed)[1:]),
            Usual("an array whose nulls were filled", lambda seed: self.with_null(seed).fill_null(1.0)),
            Usual("a column of a batch", lambda seed: arrow.record_batch({"x": own(seed)}).column(0)),
            Usual("a piece of a column of a table", lambda seed: arrow.table({"x": own(seed)}).column(0).chunk(0)),
            Usual("the values of lists", lambda seed: self.rows(seed).values),
            Usual("a tensor", tensor),
            Usual("a transposed tensor", lambda seed: arrow.Tensor.from_numpy(tensor(seed).to_numpy().T)),
            Usual("a part of a tensor", lambda seed: arrow.Tensor.from_numpy(tensor(seed).to_numpy()[1:, ::2])),
            Usual("a tensor of tensors", lambda seed: self.shaped(seed).to_tensor()),
            Usual("an array with a null", self.with_null, "not a tensor"),
            Usual("a column of a table", lambda seed: arrow.table({"x": own(seed)}).column(0), "not a tensor"),
            Usual("a batch", lambda seed: arrow.record_batch({"x": own(seed)}), "not a tensor"),
            Usual("a buffer", lambda _: arrow.allocate_buffer(96), "not a tensor"),
            Usual("a number", lambda seed: own(seed)[0], "not a tensor"),
            Usual("bools", lambda _: arrow.array([True, False]), "dtype"),
            Usual("texts", lambda _: arrow.array(["a", "b"]), "dtype"),
            Usual("dates", lambda _: arrow.array([1, 2], arrow.date32()), "dtype"),
            Usual("times", lambda _: arrow.array([1, 2], arrow.timestamp("s")), "dtype"),
            Usual("categories", lambda _: arrow.array(["a", "b"]).dictionary_encode(), "dtype"),
            Usual("lists", self.rows, "dtype"),
            Usual("records", lambda seed: arrow.array([{"x": seed & 7}]), "dtype"),
        ]

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
