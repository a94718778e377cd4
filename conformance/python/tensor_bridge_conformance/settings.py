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

    return [
        _on_host(
            "torch→tensorflow",
            lambda size: torch.empty(_shape(size), dtype=torch.float32),
            tensor_bridge.to_tensorflow,
            lambda tensor: dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor)),
        ),
        _on_host(
            "tensorflow→torch",
            lambda size: tensorflow.zeros(_shape(size)),
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

    def occupy() -> None:
        """Submit milliseconds of work to the streams of all three."""
        torch.cuda.synchronize()
        tensorflow.math.igamma(operand, operand)
        torch.cuda._sleep(CYCLES)

    def pair(path: str, make: Callable[[int], Any], ours: Call, native: Call, bar: float) -> list[Setting]:
        # TensorFlow has a stream of its own, and the others are on the legacy default stream.
        return [
            Setting(path, "cross", make, ours, native, bar, contextlib.nullcontext, torch.cuda.synchronize),
            Setting(path, "cross, busy", make, ours, native, None, contextlib.nullcontext, occupy),
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
            1,
        ),
        pair(
            "cupy→tensorflow",
            of_cupy,
            tensor_bridge.to_tensorflow,
            lambda array: dlpack.from_dlpack(array.__dlpack__(stream=-1)),
            1,
        ),
        pair(
            "tensorflow→torch",
            of_tensorflow,
            tensor_bridge.to_torch,
            lambda tensor: torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(tensor)),
            1 / 3,
        ),
        pair(
            "tensorflow→cupy",
            of_tensorflow,
            tensor_bridge.to_cupy,
            lambda tensor: cupy.from_dlpack(dlpack.to_dlpack(tensor)),
            1 / 2,
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
    settings = []
    for name, inside in streams.items():
        settings.append(
            Setting(
                "cupy→torch",
                name,
                lambda size: cupy.empty(_shape(size), dtype=cupy.float32),
                tensor_bridge.to_torch,
                torch.from_dlpack,
                1 / 4,
                inside,
                torch.cuda.synchronize,
                tensor_bridge.to_cupy,
            )
        )
        settings.append(
            Setting(
                "torch→cupy",
                name,
                lambda size: torch.empty(_shape(size), dtype=torch.float32, device="cuda"),
                tensor_bridge.to_cupy,
                cupy.from_dlpack,
                1 / 5,
                inside,
                torch.cuda.synchronize,
                tensor_bridge.to_torch,
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
