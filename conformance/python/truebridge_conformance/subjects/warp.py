"""Warp under test."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

from typing import Any, ClassVar

from truebridge_conformance.subjects import Capabilities, Usual
from truebridge_conformance.subjects.common import elements
from truebridge_conformance.subjects.peers import Peer


class Warp(Peer):
    """Warp on one device. Its arrays have ``__dlpack__``, which waits for the current stream."""

    known: ClassVar[dict[int, Any]] = {}
    rank = (1, 4)

    def __init__(self, device: str) -> None:
        import warp

        warp.config.quiet = True
        self.warp = warp
        self.there = warp.get_device("cpu" if device == "cpu" else device)
        super().__init__(device)
        if not self.on_host:
            # Warp makes its own stream for each device, and starts in it.
            self.handle_now = self.handle(self.there.stream)
            self.known[self.handle_now] = self.there.stream

    def capabilities(self) -> Capabilities:
        # Its capsules have no flags: nothing says that the memory may be written to.
        return Capabilities(self.dtypes, immutable=True, copies=False)

    def makes(self, dtype: str) -> bool:
        return hasattr(self.warp, dtype)

    def allocate(self, nbytes: int) -> Any:
        return self.warp.empty(nbytes, self.warp.uint8, device=self.there)

    def over(self, memory: Any, dtype: str, shape: list[int], strides: list[int], offset: int) -> Any:
        kind, size = getattr(self.warp, dtype), self.size(dtype)
        bytewise = tuple(stride * size for stride in strides)
        made = self.warp.array(
            ptr=(memory.ptr or 0) + offset, dtype=kind, shape=tuple(shape), strides=bytewise, device=self.there
        )
        made.memory_of_suite = memory
        return made

    def own(self, seed: int, **keywords: Any) -> Any:
        numpy = self.lens.numpy
        values = numpy.frombuffer(elements(seed, 96), "float32").reshape(4, 6)
        return self.warp.array(values, dtype=self.warp.float32, device=self.there, **keywords)

    def usual(self) -> list[Usual]:
        own = self.own
        return [
            Usual("an array", own),
            Usual("a part of an array", lambda seed: own(seed)[1:, ::2]),
            Usual("a transposed array", lambda seed: own(seed).transpose()),
            Usual("a flat array", lambda seed: own(seed).flatten()),
            Usual("an array of another shape", lambda seed: own(seed).reshape((2, 12))),
            Usual("bytes seen as another dtype", lambda seed: own(seed).view(self.warp.int32)),
            Usual("an array with a gradient", lambda seed: own(seed, requires_grad=True)),
            Usual("a copy", lambda seed: self.warp.clone(own(seed))),
            Usual(
                "chosen rows",
                lambda seed: own(seed)[self.warp.array([0, 2], dtype=int, device=self.there)],
                "not a tensor",
            ),
            Usual("a number", lambda seed: float(seed % 97), "not a tensor"),
        ]

    def seen(self, tensor: Any) -> tuple[str, list[int], list[int], int]:
        dtype = tensor.dtype.__name__
        strides = [stride // self.size(dtype) for stride in tensor.strides]
        return dtype, list(tensor.shape), strides, tensor.ptr or 0

    def handle(self, stream: Any) -> int:
        return int(stream.cuda_stream or 0)

    def enter(self, stream: Any) -> None:
        self.warp.set_stream(stream, self.there)

    def made(self) -> Any:
        return self.warp.Stream(self.there)

    def wrapped(self, handle: int) -> Any:
        return self.warp.Stream(self.there, cuda_stream=handle) if handle else self.there.null_stream

    def settle(self) -> int | None:
        super().settle()
        return int(self.warp.get_mempool_used_mem_current(self.there)) if self.there.is_mempool_enabled else None


subject = Warp
