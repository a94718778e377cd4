"""cuda.core under test."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from truebridge_conformance.subjects import Capabilities
from truebridge_conformance.subjects.peers import Peer


class CudaCore(Peer):
    """Buffers of cuda.core: bytes of a CUDA device, which are int8 to others.

    Their ``__dlpack__`` takes no notice of ``stream``: users let the legacy default stream wait for their work, and
    their stream for it before they write again.
    """

    known: ClassVar[dict[int, Any]] = {}
    rank = (1, 1)
    compact = True

    def __init__(self, device: str) -> None:
        from cuda import core

        self.core = core
        self.there = core.Device(int(device.partition(":")[2] or 0))
        self.there.set_current()
        super().__init__(device)

    def capabilities(self) -> Capabilities:
        # A thread that uses the library makes a device the current one first, which the suite's threads do not.
        return dataclasses.replace(super().capabilities(), threads=False, legacy_stream=True)

    def makes(self, dtype: str) -> bool:
        return dtype == "int8"

    def stream(self) -> Any:
        """Return the stream that is passed to the library's calls."""
        return self.known.setdefault(self.handle_now, self.wrapped(self.handle_now))

    def allocate(self, nbytes: int) -> Any:
        made = self.there.allocate(max(nbytes, 1), stream=self.stream())
        return made if nbytes else self.core.Buffer.from_handle(int(made.handle), 0, owner=made)

    def over(self, memory: Any, dtype: str, shape: list[int], strides: list[int], offset: int) -> Any:
        return memory

    def seen(self, tensor: Any) -> tuple[str, list[int], list[int], int]:
        return "int8", [tensor.size], [1], int(tensor.handle)

    def submitted(self, tensor: Any) -> Any:
        if self.handle_now:
            self.core.LEGACY_DEFAULT_STREAM.wait(self.stream())
        return None

    def handle(self, stream: Any) -> int:
        return int(stream.handle)

    def made(self) -> Any:
        return self.there.create_stream()

    def wrapped(self, handle: int) -> Any:
        return self.core.Stream.from_handle(handle) if handle else self.core.LEGACY_DEFAULT_STREAM


subject = CudaCore
