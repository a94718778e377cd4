"""PyTorch under test."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from truebridge_conformance import _conformance
from truebridge_conformance.subjects import Bench, Capabilities, Observed, Raising, Spec, Stream, Subject, Usual, shape
from truebridge_conformance.subjects.common import NAMES, allocator, collect, elements, placed, raising, taken
from truebridge_conformance.subjects.streams import CYCLES, PER_THREAD, ManyStreams


def pattern(byte: int, size: int) -> int:
    """Return the signed integer of ``size`` bytes that are all ``byte``."""
    return int.from_bytes(bytes([byte]) * size, "little", signed=True)


class Torch(ManyStreams):
    """PyTorch on one device."""

    known: ClassVar[dict[int, Any]] = {}
    waiting = 1
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
            tuple(self.named),
            defers=defers,
            gigabytes=True,
            parts=True,
            devices=several,
            graphs=self.cuda,
            watches=not self.cuda,
            imports=1,
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
        bits = self.bits(tensor.resolve_conj().resolve_neg())
        # PyTorch no longer resizes a storage of the host whose memory NumPy has seen.
        bits = bits.contiguous() if self.cuda else bits.clone(memory_format=self.torch.contiguous_format)
        return bytes(bits.reshape(-1).cpu().numpy().tobytes())

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

    def version(self, tensor: Any) -> int | None:
        return None if tensor.is_inference() else int(tensor._version)

    def own(self, seed: int, dtype: str = "float32", shape: tuple[int, ...] = (4, 6)) -> Any:
        """Return a tensor that owns its memory."""
        kind = getattr(self.torch, dtype)
        tensor = self.torch.empty(shape, dtype=kind, device=self.device)
        if tensor.numel():
            tensor.copy_(self.host(elements(seed, tensor.nbytes)).view(kind).view(shape))
        return tensor

    def tracked(self, seed: int) -> Any:
        return self.own(seed).requires_grad_()

    def inferred(self, seed: int) -> Any:
        with self.torch.inference_mode():
            return self.own(seed)

    def resized(self, seed: int, nbytes: int, start: int = 0) -> Any:
        """Return the rows of a tensor from ``start`` on, whose storage was resized."""
        tensor = self.own(seed)[start:]
        tensor.untyped_storage().resize_(nbytes)
        return tensor

    def learned(self, seed: int) -> Any:
        """Return a gradient, as ``backward`` leaves it."""
        leaf = self.tracked(seed)
        (leaf * self.own(seed + 1)).sum().backward()
        return leaf.grad

    def beside_its_gradient(self, seed: int) -> Any:
        """Return a tensor that has a gradient, and that autograd no longer tracks."""
        tensor = self.own(seed)
        tensor.grad = self.own(seed + 1)
        return tensor

    def quiet(self, make: Callable[[], Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    def replaced(self, tensor: Any) -> None:
        tensor.data = self.torch.zeros_like(tensor)

    def resized_later(self) -> list[Usual]:
        """Return what a view keeps only on the host, where the adapter does more than PyTorch's export.

        Elsewhere a view keeps the storage, and not its memory.
        """

        def resize(nbytes: int) -> Callable[[Any], Any]:
            return lambda tensor: tensor.untyped_storage().resize_(nbytes)

        return [
            Usual("a storage that is emptied later", self.own, afterwards=resize(0), public=False),
            Usual("a storage that grows later", self.own, afterwards=resize(1 << 16), public=False),
        ]

    def usual(self) -> list[Usual]:
        torch, own, quiet = self.torch, self.own, self.quiet
        quantised = self.torch.quantize_per_tensor

        class Tagged(torch.Tensor):  # type: ignore[misc, name-defined]
            pass

        class Wrapped(torch.Tensor):  # type: ignore[misc, name-defined]
            @classmethod
            def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
                return function(*arguments, **(keywords or {}))

        def wrapped(seed: int) -> Any:
            return torch.Tensor._make_subclass(Wrapped, own(seed))

        return [
            Usual("a tensor that owns its memory", own),
            Usual("a tensor in the order of channels", lambda seed: own(seed, shape=(2, 3, 2, 2)).mT),
            Usual("a number in a tensor", lambda seed: own(seed, shape=())),
            Usual("a tensor without elements", lambda seed: own(seed, shape=(3, 0))),
            Usual("a part of a tensor", lambda seed: own(seed)[1:, ::2]),
            Usual("an expanded row", lambda seed: own(seed, shape=(6,)).expand(4, 6)),
            Usual("a parameter without a gradient", lambda seed: torch.nn.Parameter(own(seed), requires_grad=False)),
            Usual("a buffer of a module", lambda seed: torch.nn.Buffer(own(seed))),
            Usual("a tensor of a subclass", lambda seed: own(seed).as_subclass(Tagged)),
            Usual("a detached tensor", lambda seed: self.tracked(seed).detach()),
            Usual("a part of a detached tensor", lambda seed: self.tracked(seed).detach()[1:]),
            Usual("a gradient", self.learned),
            Usual("a tensor that has a gradient", self.beside_its_gradient),
            Usual("a tensor of inference mode", self.inferred),
            Usual("a storage that has grown", lambda seed: self.resized(seed, 4096)),
            Usual("a pending conjugation", lambda seed: own(seed, "complex64").conj(), pending="conjugation"),
            Usual("a pending negation", lambda seed: own(seed, "complex64").conj().imag, pending="negation"),
            Usual("the real parts", lambda seed: own(seed, "complex64").real),
            *([] if self.cuda else self.resized_later()),
            Usual("a tensor that gets other memory later", own, afterwards=lambda x: x.set_(self.own(1))),
            Usual("a tensor whose data is replaced later", own, afterwards=self.replaced),
            Usual("a leaf that requires grad", self.tracked, "requires grad"),
            Usual("a result that requires grad", lambda seed: self.tracked(seed) * 2, "requires grad"),
            Usual("a parameter", lambda seed: torch.nn.Parameter(own(seed)), "requires grad"),
            Usual("an emptied storage", lambda seed: self.resized(seed, 0), "not a tensor"),
            Usual("a part of an emptied storage", lambda seed: self.resized(seed, 0, 1), "not a tensor"),
            Usual("a storage that has shrunk", lambda seed: self.resized(seed, 8), "layout"),
            Usual("a meta tensor", lambda seed: own(seed).to("meta"), "not a tensor"),
            Usual("a sparse tensor", lambda seed: own(seed).to_sparse(), "not a tensor"),
            Usual("sparse rows", lambda seed: quiet(own(seed).to_sparse_csr), "not a tensor"),
            Usual("a tensor of zeros alone", lambda _: torch._efficientzerotensor((4, 6)), "not a tensor"),
            Usual("a functionalised tensor", lambda seed: torch._to_functional_tensor(own(seed)), "not a tensor"),
            Usual("a parameter without a shape", lambda _: torch.nn.UninitializedParameter(), "not a tensor"),
            Usual("a subclass with its own dispatch", wrapped, "not a tensor"),
            Usual("quantised elements", lambda seed: quantised(own(seed), 0.1, 0, torch.qint8), "dtype"),
            Usual("bits", lambda seed: own(seed, "uint8").view(torch.bits16), "dtype"),
            Usual("elements of four bits", lambda seed: own(seed, "uint8").view(torch.uint4), "dtype"),
            Usual("a number", lambda seed: float(seed), "not a tensor"),
        ]

    def raising(self) -> Sequence[Raising]:
        torch = self.torch
        names = ("clone", "resolve_conj", "resolve_neg")
        functions = [(torch, "empty_strided"), (torch.jit, "is_tracing"), *((torch.Tensor, name) for name in names)]
        return raising(*functions, (torch.utils.dlpack, "from_dlpack"))

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
        return int(stream.cuda_stream)

    def current(self) -> Any:
        return self.torch.cuda.current_stream(self.device)

    def enter(self, stream: Any) -> None:
        self.torch.cuda.set_stream(stream)

    def made(self) -> Any:
        return self.torch.cuda.Stream(self.device)

    def blocking(self) -> list[Any]:
        return [self.torch.cuda.ExternalStream(PER_THREAD, self.device)]

    def join(self, earlier: int, later: int) -> None:
        self.known_as(later).wait_stream(self.known_as(earlier))

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
            collect()
            return None
        self.torch.cuda.synchronize()
        collect()
        self.torch.cuda.empty_cache()
        if self.pluggable is not None:
            return _conformance.plugged_in_use()
        return int(self.torch.cuda.memory_allocated())

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
