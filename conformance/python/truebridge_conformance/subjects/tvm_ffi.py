"""tvm-ffi under test."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from truebridge_conformance.subjects import Capabilities, Usual
from truebridge_conformance.subjects.peers import Peer


class TVMFFI(Peer):
    """Tensors of tvm-ffi over memory of NumPy or CuPy: from Python it allocates none.

    Its ``__dlpack__`` takes no notice of ``stream``: users let the legacy default stream wait for their work, and
    their stream for it before they write again.
    """

    known: ClassVar[dict[int, Any]] = {}

    def __init__(self, device: str) -> None:
        import tvm_ffi

        self.tvm_ffi = tvm_ffi
        super().__init__(device)

    def capabilities(self) -> Capabilities:
        # CuPy's own capsules say other strides where they are negative (14.2).
        return Capabilities(self.dtypes, negative_strides=self.on_host, copies=False, legacy_stream=True)

    def makes(self, dtype: str) -> bool:
        try:
            self.seen(self.tvm_ffi.from_dlpack(self.lens.module.empty(1, self.lens.named[dtype])))
        except (BufferError, RuntimeError, TypeError, ValueError):
            return False
        return True

    def allocate(self, nbytes: int) -> Any:
        with self.inside():
            return self.tvm_ffi.from_dlpack(self.lens.allocate(nbytes))

    def over(self, memory: Any, dtype: str, shape: list[int], strides: list[int], offset: int) -> Any:
        kind = self.lens.named[dtype]
        with self.inside():
            if 0 in shape:
                return self.tvm_ffi.from_dlpack(self.lens.module.empty(shape, kind))
            array = self.lens.module.from_dlpack(memory)
            bytewise = [stride * kind.itemsize for stride in strides]
            return self.tvm_ffi.from_dlpack(self.lens.view(array, kind, shape, offset, bytewise))

    def seen(self, tensor: Any) -> tuple[str, list[int], list[int], int]:
        return str(tensor.dtype), list(tensor.shape), list(tensor.strides), tensor.data_ptr()

    def own(self, seed: int) -> Any:
        with self.inside():
            return self.tvm_ffi.from_dlpack(self.lens.own(seed))

    def usual(self) -> list[Usual]:
        def of(change: Callable[[Any], Any]) -> Callable[[int], Any]:
            return lambda seed: self.tvm_ffi.from_dlpack(change(self.lens.own(seed)))

        return [
            Usual("a tensor", self.own),
            Usual("a tensor of a tensor", lambda seed: self.tvm_ffi.from_dlpack(self.own(seed))),
            Usual("a part of an array", of(lambda array: array[1:, ::2])),
            Usual("a transposed array", of(lambda array: array.T)),
            Usual("an array without elements", of(lambda array: array[:0])),
            Usual("a number in an array", of(lambda array: array[0, :1].reshape(()))),
            Usual("a shape", lambda _: self.tvm_ffi.Shape((4, 6)), "not a tensor"),
            Usual("a dtype", lambda _: self.tvm_ffi.dtype("float32"), "not a tensor"),
            Usual("a number", lambda seed: float(seed % 97), "not a tensor"),
        ]

    def submitted(self, tensor: Any) -> Any:
        if not self.on_host and self.handle_now:
            cuda = self.lens.cupy.cuda
            cuda.Stream.null.wait_event(cuda.ExternalStream(self.handle_now, self.index).record())
        return None

    def handle(self, stream: Any) -> int:
        return int(stream.ptr)

    def made(self) -> Any:
        return self.lens.made()

    def wrapped(self, handle: int) -> Any:
        return self.lens.wrapped(handle)


subject = TVMFFI
