"""CuPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .table import SMALL, Example, Framework, Side

if TYPE_CHECKING:
    from collections.abc import Callable


def _build(cupy: Any) -> str:
    runtime = cupy.cuda.runtime
    if getattr(runtime, "is_hip", False):
        return "ROCm"
    version = runtime.runtimeGetVersion()
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _small(cupy: Any, kind: str, index: int) -> Any:
    with cupy.cuda.Device(index):
        return cupy.zeros(SMALL, cupy.float32)


def _settings(cupy: Any) -> dict[str, Any]:
    allocator = cupy.cuda.get_allocator()
    # A method of a pool, or a function.
    return {"allocator": type(getattr(allocator, "__self__", allocator)).__name__}


def _side(cupy: Any, index: int | None) -> Side:
    device = cupy.cuda.Device(index)

    def on_device(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(x: Any) -> Any:
            with device:
                return function(x)

        # The first device is current already.
        return call if index else function

    return Side(
        of_host=on_device(cupy.asarray),
        to_host=cupy.asnumpy,
        # Orders nothing, like the capsules of the others.
        capsule=lambda x: x.__dlpack__(stream=-1),
        of_dlpack=cupy.from_dlpack,
        transposed=on_device(lambda x: cupy.ascontiguousarray(x.T)),
        wait=device.synchronize,
    )


FRAMEWORK = Framework(
    label="CuPy",
    alias="cupy",
    tensor="cupy.ndarray",
    kind=("cupy", "ndarray"),
    install="`pip install cupy-cuda12x` or `cupy-cuda13x`, whichever the driver supports, and only one of them",
    example=Example("import cupy", "cupy.ones(3)", "(3,)", "cuda"),
    build=_build,
    devices=lambda cupy: int(cupy.cuda.runtime.getDeviceCount()),
    small=_small,
    side=_side,
    on_host=False,
    settings=_settings,
    unshared={"MemoryAsyncPool": "call cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)"},
)
