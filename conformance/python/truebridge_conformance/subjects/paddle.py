"""PaddlePaddle under test."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from truebridge_conformance.subjects import Bench, Capabilities, Observed, Raising, Spec, Subject, Usual, shape
from truebridge_conformance.subjects.common import NAMES, SingleStream, beginning, collect, elements, raising, taken

#: Names that Paddle has without kernels. Its functions take the first for bfloat16.
WITHOUT_KERNELS = ("uint16", "uint32", "uint64")

#: The integers by the bytes of an element.
BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class Paddle(SingleStream):
    """PaddlePaddle, on the host."""

    def __init__(self, device: str) -> None:
        import numpy
        import paddle

        self.numpy = numpy
        self.paddle: Any = paddle
        names = (name for name in NAMES if name not in WITHOUT_KERNELS)
        self.named = {name: getattr(paddle, name) for name in names if hasattr(paddle, name)}
        self.names = {dtype: name for name, dtype in self.named.items()}
        # Objects that exist now stay: garbage collection need not visit them.
        gc.collect()
        gc.freeze()

    def capabilities(self) -> Capabilities:
        # No unaligned ones: a kernel for complex numbers ends the process.
        names = tuple(self.named)
        return Capabilities(names, negative_strides=True, gigabytes=True, copies=False, parts=True, imports=1)

    def bits(self, tensor: Any) -> Any:
        """Return the same memory as integers, which no kernel changes; elements of 16 bytes keep their dtype."""
        size = tensor.element_size()
        return tensor.view(BITS[size]) if size in BITS else tensor

    def host(self, data: bytes) -> Any:
        """Return a tensor of these bytes. `to_tensor` leaks objects."""
        tensor = self.allocate(0)
        tensor.get_tensor().set(self.numpy.frombuffer(data, "uint8"), self.paddle.CPUPlace())
        return tensor

    def over(self, memory: Any, start: int, spec: Spec) -> Any:
        # Paddle miscounts the offset where it views a part of a tensor as another dtype.
        dtype = self.named[spec.dtype]
        start += spec.offset * self.paddle.empty([], dtype).element_size()
        return memory.view(dtype).as_strided(spec.shape, spec.strides, start)

    def place(self, spec: Spec, nbytes: int) -> tuple[Any, int]:
        # Bytes are viewed as any dtype where there are some, and a whole number of elements.
        return beginning(lambda length: self.allocate((length // 16 + 1) * 16), self.address, nbytes, spec.align)

    def address(self, tensor: Any) -> int:
        return int(tensor.data_ptr())

    def create_unwritten(self, spec: Spec) -> Any:
        size = self.paddle.empty([], self.named[spec.dtype]).element_size()
        return self.over(*self.place(spec, spec.base * size), spec)

    def create(self, spec: Spec, data: bytes) -> Any:
        memory, start = self.place(spec, len(data))
        if data:
            memory.as_strided([len(data)], [1], start).copy_(self.host(data), True)
        return self.over(memory, start, spec)

    def observe(self, tensor: Any) -> Observed:
        name, address = self.names[tensor.dtype], self.address(tensor)
        return Observed(name, list(tensor.shape), list(tensor.strides), address, False, "cpu")

    def read(self, tensor: Any) -> bytes:
        # `numpy` copies all memory that a view is a part of.
        return bytes(self.bits(tensor).clone().numpy().tobytes() if tensor.size else b"")

    def write(self, tensor: Any, data: bytes) -> None:
        if data:
            bits = self.bits(tensor)
            bits.copy_(self.host(data).view(bits.dtype).reshape(bits.shape), True)

    def fill(self, tensor: Any, byte: int) -> None:
        self.write(tensor, bytes([byte]) * (tensor.size * tensor.element_size()))

    def allocate(self, nbytes: int) -> Any:
        return self.paddle.empty([nbytes], "uint8")

    def snapshot(self, source: Any, into: Any) -> None:
        if source.size:
            bits = self.bits(source)
            into.view(bits.dtype).reshape(bits.shape).copy_(bits, True)

    def part(self, tensor: Any, start: int) -> Any:
        # A slice leaks objects, and has less than seven dimensions.
        offset = tensor.offset + start * tensor.strides[0] * tensor.element_size()
        return tensor.as_strided([tensor.shape[0] - start, *tensor.shape[1:]], tensor.strides, offset)

    def version(self, tensor: Any) -> int | None:
        return int(tensor.inplace_version)

    def own(self, seed: int, dtype: str = "float32", shape: tuple[int, ...] = (4, 6)) -> Any:
        """Return a tensor that owns its memory."""
        tensor = self.paddle.empty(shape, dtype)
        self.write(tensor, elements(seed, tensor.size * tensor.element_size()))
        return tensor

    def tracked(self, seed: int) -> Any:
        tensor = self.own(seed)
        tensor.stop_gradient = False
        return tensor

    def emptied(self, seed: int, how: str) -> Any:
        tensor = self.own(seed)
        getattr(tensor, how)()
        return tensor

    def rows(self, seed: int) -> Any:
        """Return a gradient of which some rows are stored."""
        layer = self.paddle.nn.Embedding(4, 6, sparse=True)
        layer(self.paddle.to_tensor([seed % 4])).sum().backward()
        return layer.weight.grad

    def of_a_program(self) -> Any:
        paddle = self.paddle
        paddle.enable_static()
        try:
            with paddle.static.program_guard(paddle.static.Program()):
                return paddle.static.data("x", [4, 6])
        finally:
            paddle.disable_static()

    def usual(self) -> list[Usual]:
        paddle, own = self.paddle, self.own
        # One for all calls: Paddle keeps every program and mesh.
        symbol, mesh = self.of_a_program(), paddle.distributed.ProcessMesh([0], dim_names=["x"])

        class Tagged(paddle.Tensor):  # type: ignore[misc, name-defined]
            pass

        def learned(seed: int) -> Any:
            leaf = self.tracked(seed)
            (leaf * own(seed + 1)).sum().backward()
            return leaf.grad

        def parameter(seed: int) -> Any:
            made = paddle.create_parameter([4, 6], "float32")
            made.set_value(own(seed))
            return made

        def distributed(seed: int) -> Any:
            return paddle.distributed.shard_tensor(own(seed), mesh, [paddle.distributed.Replicate()])

        return [
            Usual("a tensor that owns its memory", own),
            Usual("a number in a tensor", lambda seed: own(seed, shape=())),
            Usual("a tensor without elements", lambda seed: own(seed, shape=(3, 0))),
            Usual("a tensor without a shape", lambda _: paddle.Tensor()),
            Usual("a part of a tensor", lambda seed: own(seed)[1:, ::2]),
            Usual("a tensor from its end", lambda seed: own(seed)[::-1]),
            Usual("a transposed tensor", lambda seed: own(seed).T),
            Usual("an expanded row", lambda seed: own(seed, shape=(6,)).expand([4, 6])),
            Usual("a row that is repeated in place", lambda seed: own(seed, shape=(6,)).as_strided([4, 6], [0, 1])),
            Usual("the real parts", lambda seed: paddle.as_real(own(seed, "complex64"))[..., 0]),
            Usual("a tensor over NumPy's memory", self.over_numpy),
            Usual("a tensor that was imported", lambda seed: paddle.from_dlpack(own(seed))),
            Usual("a tensor of a subclass", lambda seed: Tagged(own(seed).numpy())),
            Usual("a detached tensor", lambda seed: self.tracked(seed).detach()),
            Usual("a tensor of another place", lambda seed: own(seed).cpu()),
            Usual("a tensor that is cleared later", own, afterwards=lambda x: x._clear()),
            Usual("a tensor whose data is cleared later", own, afterwards=lambda x: x._clear_data()),
            Usual("a tensor that gets other memory later", own, afterwards=lambda x: x.set_(own(1))),
            Usual("a tensor that requires grad", self.tracked, "requires grad"),
            Usual("a result that requires grad", lambda seed: self.tracked(seed) * 2, "requires grad"),
            Usual("a parameter", parameter, "requires grad"),
            Usual("a gradient", learned, "requires grad"),
            Usual("a cleared tensor", lambda seed: self.emptied(seed, "_clear"), "consumed"),
            Usual("a tensor whose data is cleared", lambda seed: self.emptied(seed, "_clear_data"), "consumed"),
            Usual("coordinates of a sparse tensor", lambda seed: own(seed).to_sparse_coo(2), "not a tensor"),
            Usual("rows of a sparse tensor", lambda seed: own(seed).to_sparse_csr(), "not a tensor"),
            Usual("selected rows", self.rows, "not a tensor"),
            Usual("a distributed tensor", distributed, "not a tensor"),
            Usual("a tensor of a program", lambda _: symbol, "not a tensor"),
            Usual("a number", lambda seed: float(seed), "not a tensor"),
        ]

    def over_numpy(self, seed: int) -> Any:
        array = self.numpy.frombuffer(bytearray(elements(seed, 96)), "float32").reshape(4, 6)
        return self.paddle.from_dlpack(array)

    def raising(self) -> Sequence[Raising]:
        names = ("is_dense", "get_tensor", "view", "as_strided")
        return raising(*((self.paddle.Tensor, name) for name in names), (self.paddle, "empty"))

    def delay(self) -> None:
        pass

    def settle(self) -> int | None:
        collect()
        return None

    def import_natively(self, other: Any) -> Any:
        made = taken(self.paddle.from_dlpack, other)
        return made if made is not None and made.dtype in self.names else None


subject: Callable[[str], Subject] = Paddle


def bench(device: str) -> Bench | None:
    """Return what the benches need."""
    import paddle

    def make(nbytes: int) -> Any:
        return paddle.empty(shape(nbytes), "float32")

    return Bench(make, {("torch", "host"): None, ("numpy", "host"): None}) if device == "cpu" else None
