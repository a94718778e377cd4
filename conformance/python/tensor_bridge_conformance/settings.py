"""The pairs that the bench measures: how to make a tensor, and both ways across."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Cycles of a delay: about three milliseconds.
CYCLES = 6_000_000
#: Bytes between small tensors over one buffer: TensorFlow takes no smaller steps in place.
STEP = 64

#: The most that a transfer costs, as a multiple of what no way across can avoid.
OVER_FLOOR = 1.25
#: The most that a transfer costs, as a multiple of the native way, by streams.
CUPY_TO_TORCH = {"same": 0.20, "cross": 0.25}
TORCH_TO_CUPY = {"same": 0.14, "cross": 0.16}

Call = Callable[[Any], Any]
Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass
class Setting:
    """A pair with one choice of streams: how to make the tensor, both ways across, and the bar for their ratio."""

    path: str
    streams: str
    make: Callable[[int], Any]
    ours: Call
    native: Call
    bar: float | None
    #: Context of the measurement (the consumer's stream).
    inside: Context
    #: Called before every batch: waits for the device, and submits work where the device must be busy.
    before: Callable[[], Any]
    #: Converts a view back to the source's framework.
    back: Call | None = None
    #: Streams of which the second must wait for the first: at the conversion, and where the view is dropped.
    pairs: Callable[[], list[tuple[int, int]]] = list
    #: Streams in which one more event is needed: the one behind which memory of unknown reuse waits.
    records: Callable[[], list[int]] = list
    #: The bar for the ratio to the floor.
    floor_bar: float | None = None

    def floor(self, tensor: Any) -> Call:
        """Return the calls that no way across can avoid, for ``tensor``, which must live as long."""
        import tensor_bridge
        from tensor_bridge_conformance._conformance import Floor

        source, target = self.path.split("→")
        view = tensor_bridge.to_torch(tensor)
        device = view.device.index if view.is_cuda else -1
        rows, columns = view.shape
        # `Floor.cross` is a built-in method, as the functions of the package are.
        memory = (view.data_ptr(), (rows, columns), device)
        return Floor(source, target, memory, self.pairs(), self.records()).cross

    def parts(self, count: int) -> list[Any]:
        """Return ``count`` small tensors, no two at one address."""
        if self.path.startswith("tensorflow"):
            return [self.make(1 << 10) for _ in range(count)]
        whole = self.make(-(-count * STEP // 1024) * 1024).reshape(-1, STEP // 4)
        return [whole[index] for index in range(count)]


def all_on(device: str) -> list[Setting]:
    """Return the settings of the installed frameworks on a device: ``auto``, ``cpu`` or ``cuda``."""
    settings = []
    with contextlib.suppress(ImportError):
        import torch

        if device != "cpu" and torch.cuda.is_available():
            cupy = importlib.import_module("cupy")
            settings += _cuda_settings(torch, cupy)
            with contextlib.suppress(ImportError):
                settings += _cuda_settings_of_tensorflow(torch, cupy, importlib.import_module("tensorflow"))
        if device != "cuda":
            numpy = importlib.import_module("numpy")
            settings += _cpu_settings(torch, numpy)
            with contextlib.suppress(ImportError):
                settings += _cpu_settings_of_tensorflow(torch, numpy, importlib.import_module("tensorflow"))
    return settings


def _on_host(path: str, make: Callable[[int], Any], ours: Call, native: Call, back: Call | None = None) -> Setting:
    return Setting(path, "host", make, ours, native, None, contextlib.nullcontext, lambda: None, back)


def _cpu_settings(torch: Any, numpy: Any) -> list[Setting]:
    import tensor_bridge

    return [
        _on_host(
            "torch→numpy",
            lambda size: torch.empty(_shape(size), dtype=torch.float32),
            tensor_bridge.to_numpy,
            numpy.from_dlpack,
            tensor_bridge.to_torch,
        ),
        _on_host(
            "numpy→torch",
            lambda size: numpy.empty(_shape(size), dtype=numpy.float32),
            tensor_bridge.to_torch,
            torch.from_dlpack,
            tensor_bridge.to_numpy,
        ),
    ]


def _cpu_settings_of_tensorflow(torch: Any, numpy: Any, tensorflow: Any) -> list[Setting]:
    import tensor_bridge

    dlpack = tensorflow.experimental.dlpack

    def aligned(size: int) -> Any:
        """Return an array at an address where TensorFlow imports it in place."""
        memory = numpy.empty(size + 64, dtype=numpy.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + size].view(numpy.float32).reshape(_shape(size))

    def zeros(size: int) -> Any:
        """Return a tensor on the host, also where there is a GPU."""
        with tensorflow.device("CPU:0"):
            return tensorflow.zeros(_shape(size))

    return [
        _on_host(
            "torch→tensorflow",
            lambda size: torch.empty(_shape(size), dtype=torch.float32),
            tensor_bridge.to_tensorflow,
            lambda tensor: dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor)),
        ),
        _on_host(
            "tensorflow→torch",
            zeros,
            tensor_bridge.to_torch,
            lambda tensor: torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(tensor)),
        ),
        _on_host(
            "numpy→tensorflow",
            aligned,
            tensor_bridge.to_tensorflow,
            lambda array: dlpack.from_dlpack(array.__dlpack__()),
        ),
    ]


def _cuda_settings_of_tensorflow(torch: Any, cupy: Any, tensorflow: Any) -> list[Setting]:
    import tensor_bridge

    dlpack = tensorflow.experimental.dlpack

    operand = tensorflow.fill([1 << 20], tensorflow.constant(1e6, "float64"))
    # TensorFlow does not show its stream, which is non-blocking, as this one is.
    stand_in = torch.cuda.Stream()

    def occupy() -> None:
        """Submit milliseconds of work to the streams of all three."""
        torch.cuda.synchronize()
        tensorflow.math.igamma(operand, operand)
        torch.cuda._sleep(CYCLES)

    def pair(
        path: str, make: Callable[[int], Any], ours: Call, native: Call, bar: float, busy: float | None
    ) -> list[Setting]:
        from_tensorflow = path.startswith("tensorflow")
        tf, legacy = stand_in.cuda_stream, 0
        first, second = ((tf, legacy), (legacy, tf)) if from_tensorflow else ((legacy, tf), (tf, legacy))
        # TensorFlow has a stream of its own, and the others are on the legacy default stream.
        return [
            Setting(
                path,
                streams,
                make,
                ours,
                native,
                ratio,
                contextlib.nullcontext,
                before,
                pairs=lambda: [first, second],
                records=lambda: [tf] if from_tensorflow else [],
                floor_bar=OVER_FLOOR,
            )
            for streams, ratio, before in (("cross", bar, torch.cuda.synchronize), ("cross, busy", busy, occupy))
        ]

    def of_torch(size: int) -> Any:
        return torch.empty(_shape(size), dtype=torch.float32, device="cuda")

    def of_cupy(size: int) -> Any:
        return cupy.empty(_shape(size), dtype=cupy.float32)

    def of_tensorflow(size: int) -> Any:
        with tensorflow.device("GPU:0"):
            return tensorflow.zeros(_shape(size))

    # CuPy's `toDlpack` returns a versioned capsule, which TensorFlow refuses.
    pairs = [
        pair(
            "torch→tensorflow",
            of_torch,
            tensor_bridge.to_tensorflow,
            lambda tensor: dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor)),
            1.9,
            None,
        ),
        pair(
            "cupy→tensorflow",
            of_cupy,
            tensor_bridge.to_tensorflow,
            lambda array: dlpack.from_dlpack(array.__dlpack__(stream=-1)),
            1.9,
            None,
        ),
        pair(
            "tensorflow→torch",
            of_tensorflow,
            tensor_bridge.to_torch,
            lambda tensor: torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(tensor)),
            1.1,
            0.3,
        ),
        pair(
            "tensorflow→cupy",
            of_tensorflow,
            tensor_bridge.to_cupy,
            lambda tensor: cupy.from_dlpack(dlpack.to_dlpack(tensor)),
            0.8,
            0.3,
        ),
    ]
    return [setting for settings in pairs for setting in settings]


def _cuda_settings(torch: Any, cupy: Any) -> list[Setting]:
    import tensor_bridge

    torch_stream, cupy_stream = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    streams: dict[str, Context] = {
        # Both frameworks start on the legacy default stream.
        "same": contextlib.nullcontext,
        "cross": lambda: _both(torch.cuda.stream(torch_stream), cupy_stream),
    }
    of_both = (torch_stream.cuda_stream, cupy_stream.ptr)

    def occupy() -> None:
        """Submit milliseconds of work to the current streams of both."""
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)
        if (handle := cupy.cuda.get_current_stream().ptr) != torch.cuda.current_stream().cuda_stream:
            with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
                torch.cuda._sleep(CYCLES)

    def of_cupy(size: int) -> Any:
        return cupy.empty(_shape(size), dtype=cupy.float32)

    def of_torch(size: int) -> Any:
        return torch.empty(_shape(size), dtype=torch.float32, device="cuda")

    ways: list[tuple[str, Callable[[int], Any], Call, Call, Call, dict[str, float]]] = [
        ("cupy→torch", of_cupy, tensor_bridge.to_torch, torch.from_dlpack, tensor_bridge.to_cupy, CUPY_TO_TORCH),
        ("torch→cupy", of_torch, tensor_bridge.to_cupy, cupy.from_dlpack, tensor_bridge.to_torch, TORCH_TO_CUPY),
    ]
    settings = []
    for name, inside in streams.items():
        pairs = [of_both, of_both[::-1]] if name == "cross" else []
        for path, make, ours, native, back, bars in ways:
            for busy, before, bar in (("", torch.cuda.synchronize, bars[name]), (", busy", occupy, None)):
                settings.append(
                    Setting(
                        path,
                        name + busy,
                        make,
                        ours,
                        native,
                        bar,
                        inside,
                        before,
                        back,
                        pairs=lambda pairs=pairs: pairs,  # type: ignore[misc]
                        floor_bar=OVER_FLOOR,
                    )
                )
    return settings


@contextlib.contextmanager
def _both(first: Any, second: Any) -> Any:
    with first, second:
        yield


def _shape(size: int) -> tuple[int, int]:
    """Return the shape of a float32 tensor of ``size`` bytes."""
    return size // (4 * 256), 256
