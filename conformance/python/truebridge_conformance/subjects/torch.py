"""PyTorch under test."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, ClassVar

from truebridge_conformance import _conformance
from truebridge_conformance.subjects import Bench, Capabilities, Observed, Spec, Stream, Subject, shape
from truebridge_conformance.subjects.common import NAMES, allocator, placed, taken
from truebridge_conformance.subjects.streams import CYCLES, ManyStreams


def pattern(byte: int, size: int) -> int:
    """Return the signed integer of ``size`` bytes that are all ``byte``."""
    return int.from_bytes(bytes([byte]) * size, "little", signed=True)


class Torch(ManyStreams):
    """PyTorch on one device."""

    known: ClassVar[dict[int, Any]] = {}
    #: The allocator that ``prepare`` has set, if any.
    pluggable: ClassVar[Any] = None

    def __init__(self, device: str) -> None:
        import torch

        super().__init__()
        self.torch = torch
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.named = {name: getattr(torch, name) for name in NAMES if hasattr(torch, name)}
        self.names = {dtype: name for name, dtype in self.named.items()}
        # Objects that exist now stay: garbage collection need not visit them.
        gc.collect()
        gc.freeze()
        if self.cuda:
            # The other framework of the process works on this device, too.
            torch.cuda.set_device(self.device)
            self.keep_streams()

    def capabilities(self) -> Capabilities:
        several = self.cuda and self.torch.cuda.device_count() > 1
        defers = ("conjugation", "negation", "negated_conjugation")
        return Capabilities(
            tuple(self.named), defers=defers, gigabytes=True, parts=True, devices=several, graphs=self.cuda
        )

    def bits(self, tensor: Any) -> Any:
        """Return the same memory as integers, which no kernel changes; 16 bytes become two integers of 8."""
        torch = self.torch
        if tensor.dtype == torch.complex128:
            return torch.view_as_real(tensor).view(torch.int64)
        return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])

    def host(self, data: bytes) -> Any:
        torch = self.torch
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    def place(self, spec: Spec, nbytes: int) -> Any:
        return placed(self.allocate, self.torch.Tensor.data_ptr, nbytes, spec.align)

    def view(self, memory: Any, spec: Spec) -> Any:
        elements = memory.view(self.named[spec.dtype])
        return elements.as_strided(spec.shape, spec.strides, elements.storage_offset() + spec.offset)

    def create_unwritten(self, spec: Spec) -> Any:
        return self.view(self.place(spec, spec.base * self.named[spec.dtype].itemsize), spec)

    def create(self, spec: Spec, data: bytes) -> Any:
        memory = self.place(spec, len(data))
        memory.copy_(self.host(data))
        tensor = self.view(memory, spec)
        if spec.pending in {"conjugation", "negated_conjugation"}:
            tensor = tensor.conj()
        if spec.pending in {"negation", "negated_conjugation"}:
            tensor = self.torch._neg_view(tensor)
        if self.cuda:
            self.torch.cuda.current_stream().synchronize()
        return tensor

    def observe(self, tensor: Any) -> Observed:
        name, shape, strides = self.names[tensor.dtype], list(tensor.shape), list(tensor.stride())
        return Observed(name, shape, strides, tensor.data_ptr(), False, str(tensor.device))

    def read(self, tensor: Any) -> bytes:
        tensor = tensor.resolve_conj().resolve_neg()
        data: bytes = self.bits(tensor).contiguous().reshape(-1).cpu().numpy().tobytes()
        return data

    def write(self, tensor: Any, data: bytes) -> None:
        bits = self.bits(tensor)
        bits.copy_(self.host(data).view(bits.dtype).view(bits.shape))

    def fill(self, tensor: Any, byte: int) -> None:
        bits = self.bits(tensor)
        bits.fill_(byte if bits.itemsize == 1 else pattern(byte, bits.itemsize))

    def allocate(self, nbytes: int) -> Any:
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device=self.device)

    def snapshot(self, source: Any, into: Any) -> None:
        bits = self.bits(source)
        into.view(bits.dtype).view(bits.shape).copy_(bits)

    def part(self, tensor: Any, start: int) -> Any:
        return tensor[start:]

    def use_device(self, index: int) -> int:
        before: int = self.torch.cuda.current_device()
        self.torch.cuda.set_device(index)
        return before

    def begin_capture(self) -> Any:
        # As `torch.cuda.graph` does it: what is collected during the capture must not call the driver.
        self.torch.cuda.synchronize()
        gc.collect()
        graph = self.torch.cuda.CUDAGraph()
        graph.capture_begin()
        return graph

    def end_capture(self, graph: Any) -> None:
        graph.capture_end()

    def replay(self, graph: Any) -> None:
        graph.replay()

    def handle(self, stream: Any) -> int:
        handle: int = stream.cuda_stream
        return handle

    def current(self) -> Any:
        return self.torch.cuda.current_stream(self.device)

    def enter(self, stream: Any) -> None:
        self.torch.cuda.set_stream(stream)

    def made(self) -> Any:
        return self.torch.cuda.Stream(self.device)

    def wrapped(self, handle: int) -> Any:
        default = self.torch.cuda.default_stream(self.device)
        return default if handle == default.cuda_stream else self.torch.cuda.ExternalStream(handle, self.device)

    def streams(self) -> list[int]:
        return super().streams() if self.cuda else []

    def fresh(self, external: bool) -> int | None:
        return super().fresh(external) if self.cuda else None

    def delay(self) -> None:
        if self.cuda:
            self.torch.cuda._sleep(CYCLES)

    def settle(self) -> int | None:
        if not self.cuda:
            gc.collect()
            return None
        self.torch.cuda.synchronize()
        gc.collect()
        self.torch.cuda.empty_cache()
        if self.pluggable is not None:
            return _conformance.plugged_in_use()
        used: int = self.torch.cuda.memory_allocated()
        return used

    def import_natively(self, other: Any) -> Any:
        return taken(self.torch.from_dlpack, other)


subject: Callable[[str], Subject] = Torch


def prepare() -> None:
    """Set the allocator, which PyTorch accepts only before the first allocation."""
    if allocator("torch") == "pluggable" and Torch.pluggable is None:
        import torch

        memory = torch.cuda.memory
        Torch.pluggable = memory.CUDAPluggableAllocator(_conformance.__file__, "tb_plug_malloc", "tb_plug_free")
        memory.change_current_allocator(Torch.pluggable)


BARS = {
    **{("numpy", "host"): None, ("tensorflow", "host"): None},
    **{("cupy", "same"): 0.14, ("cupy", "same, busy"): None, ("cupy", "cross"): 0.16, ("cupy", "cross, busy"): None},
    **{("tensorflow", "cross"): 1.9, ("tensorflow", "cross, busy"): None},
    **{("jax", "host"): None, ("jax", "cross"): 0.17, ("jax", "cross, busy"): None},
}


def bench(device: str) -> Bench | None:
    """Return what the benches need."""
    import torch

    def make(nbytes: int) -> Any:
        return torch.empty(shape(nbytes), dtype=torch.float32, device=device)

    def stream() -> Stream:
        made = torch.cuda.Stream()
        return Stream(made.cuda_stream, lambda: torch.cuda.stream(made))

    if device == "cpu":
        return Bench(make, BARS, back=("numpy",))
    if not torch.cuda.is_available():
        return None
    return Bench(
        make,
        BARS,
        back=("cupy",),
        stream=stream,
        occupy=lambda: torch.cuda._sleep(CYCLES),
        used=torch.cuda.memory_allocated,
    )
