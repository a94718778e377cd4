"""What the subprocesses of ``doctor`` find out.

Each probe runs in a process of its own, so that a framework that crashes or hangs there harms no caller. It prints one
line of JSON. ``settings`` also runs in the caller's process, on frameworks that the caller has imported.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from . import _core
from .errors import BridgeError

#: The frameworks in the order in which they can be imported on every machine: TensorFlow's libraries hide those of CUDA
#: from what is loaded later.
FRAMEWORKS = ("torch", "cupy", "numpy", "tensorflow")

#: Elements of the tensors that ``pairs`` plans with, and the bytes to which each target can take them in place.
_LENGTH, _ALIGNMENT = 64, 64


def main(arguments: list[str]) -> None:
    """Run the probe that the first argument names, and print what it returns as JSON."""
    # What the frameworks print themselves goes to standard error.
    out = os.dup(1)
    os.dup2(2, 1)
    name, *rest = arguments
    text = json.dumps(_PROBES[name](*rest))
    with os.fdopen(out, "w") as file:
        file.write(text)
        file.flush()
        # The end of the interpreter is not judged: what it finds is known.
        os._exit(0)


def framework(name: str) -> dict[str, Any]:
    """Import a framework, and return its version, what it was built for, the devices it sees, and its settings."""
    if importlib.util.find_spec(name) is None:
        return {"installed": False}
    try:
        module = importlib.import_module(name)
    except BaseException as error:
        return {"installed": True, "error": told(error)}
    facts: dict[str, Any] = {"installed": True, "version": str(getattr(module, "__version__", "unknown"))}
    for key, read, otherwise in (("build", _BUILDS, None), ("devices", DEVICES, 0)):
        try:
            facts[key] = read[name](module)
        except Exception as error:
            facts[key] = otherwise
            facts["cuda_error"] = told(error)
    if facts["devices"]:
        facts.update(settings(name, module))
    # The profile starts TensorFlow's devices, and the other probes need memory of them as well.
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    try:
        facts["profile"] = dict(_core.profile(name))  # type: ignore[arg-type]
    except BridgeError as error:
        facts["refusal"] = {"kind": error.kind, "text": str(error)}
    return facts


def settings(name: str, module: Any) -> dict[str, Any]:
    """Return how an imported framework gets memory of a GPU: its allocator, and whether it takes the whole GPU."""
    try:
        return _SETTINGS.get(name, lambda module: {})(module)
    except Exception:
        # A build without CUDA has no allocator to ask about.
        return {}


def pairs(*names: str) -> dict[str, Any]:
    """Import the frameworks in this order, and plan each conversion between them, on each device."""
    modules = {name: importlib.import_module(name) for name in names}
    planned = []
    for source, module in modules.items():
        for device, make in _tensors(source, module):
            try:
                tensor = make()
            except Exception as error:
                reason = f"{source} makes no tensor there: {told(error)}"
                planned += [_pair(source, target, device, "refused", reason) for target in names if target != source]
                continue
            planned += [_planned(source, target, device, tensor) for target in names if target != source]
    return {"pairs": planned}


def driver() -> dict[str, Any]:
    """Return what the CUDA driver says of its version and its devices, and which GPUs the kernel has."""
    facts: dict[str, Any] = {"gpus": _gpus(), "module": _module(), "version": None, "devices": [], "error": None}
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {**facts, "error": str(error), "library": False}
    facts["library"] = True
    version = ctypes.c_int()
    if not cuda.cuDriverGetVersion(ctypes.byref(version)):
        facts["version"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    if code := cuda.cuInit(0):
        return {**facts, "error": _error(cuda, code)}
    count = ctypes.c_int()
    if code := cuda.cuDeviceGetCount(ctypes.byref(count)):
        return {**facts, "error": _error(cuda, code)}
    return {**facts, "devices": [_device(cuda, index) for index in range(count.value)]}


def tensorflow1() -> dict[str, Any]:
    """Load TensorFlow 1.15 from the folder that ``TENSOR_BRIDGE_TENSORFLOW1`` names."""
    try:
        version, folder = _core.tensorflow1_open(None)
    except BridgeError as error:
        return {"installed": True, "error": str(error)}
    return {"installed": True, "version": version, "folder": str(folder)}


def bench(seconds: str) -> dict[str, Any]:
    """Measure what ``bench`` shows."""
    from . import _measure

    return _measure.bench(seconds)


_PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "bench": bench,
    "framework": framework,
    "pairs": pairs,
    "driver": driver,
    "tensorflow1": tensorflow1,
}


def told(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {error!s:.1000}".rstrip(": ")


def _torch_build(torch: Any) -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    hip = getattr(torch.version, "hip", None)
    return f"ROCm {hip}" if hip else "CPU"


def _torch_devices(torch: Any) -> int:
    if torch.version.cuda and not torch.cuda.is_available():
        # Says why, where ``is_available`` says only that.
        torch.cuda.init()
    return int(torch.cuda.device_count()) if torch.version.cuda else 0


def _cupy_build(cupy: Any) -> str:
    runtime = cupy.cuda.runtime
    if getattr(runtime, "is_hip", False):
        return "ROCm"
    version = runtime.runtimeGetVersion()
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _tensorflow_build(tensorflow: Any) -> str:
    if not tensorflow.test.is_built_with_cuda():
        return "ROCm" if tensorflow.test.is_built_with_rocm() else "CPU"
    return f"CUDA {tensorflow.sysconfig.get_build_info().get('cuda_version', '')}".rstrip()


#: What a framework was built for, and how many CUDA devices it sees. Each may raise, and then says why.
_BUILDS: dict[str, Callable[[Any], str]] = {
    "torch": _torch_build,
    "cupy": _cupy_build,
    "numpy": lambda numpy: "CPU",
    "tensorflow": _tensorflow_build,
}
DEVICES: dict[str, Callable[[Any], int]] = {
    "torch": _torch_devices,
    "cupy": lambda cupy: int(cupy.cuda.runtime.getDeviceCount()),
    "numpy": lambda numpy: 0,
    "tensorflow": lambda tensorflow: len(tensorflow.config.list_physical_devices("GPU")),
}


def _cupy_settings(cupy: Any) -> dict[str, Any]:
    allocator = cupy.cuda.get_allocator()
    # A method of a pool, or a function.
    return {"allocator": type(getattr(allocator, "__self__", allocator)).__name__}


def _tensorflow_settings(tensorflow: Any) -> dict[str, Any]:
    config = tensorflow.config
    forced = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == "true"

    def bounded(gpu: Any) -> bool:
        return config.experimental.get_memory_growth(gpu) or config.get_logical_device_configuration(gpu) is not None

    return {"takes_all_memory": not forced and not all(map(bounded, config.get_visible_devices("GPU")))}


_SETTINGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "torch": lambda torch: {"allocator": str(torch.cuda.get_allocator_backend())} if torch.version.cuda else {},
    "cupy": _cupy_settings,
    "tensorflow": _tensorflow_settings,
}


def _tensors(name: str, module: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield a device and a maker of a tensor there, for each device on which this framework has tensors."""
    if name == "numpy":
        yield "cpu", lambda: _aligned(module)
        return
    if name != "cupy":
        yield "cpu", lambda: _MAKERS[name](module, "cpu", 0)
    try:
        count = DEVICES[name](module)
    except Exception:
        count = 0
    for index in range(count):
        yield f"cuda:{index}", lambda index=index: _MAKERS[name](module, "cuda", index)  # type: ignore[misc]


def _aligned(numpy: Any) -> Any:
    """Return an array whose address every target can take: NumPy's own are aligned by luck."""
    memory = numpy.zeros(_LENGTH * 4 + _ALIGNMENT, numpy.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + _LENGTH * 4].view(numpy.float32)


def _of_cupy(cupy: Any, kind: str, index: int) -> Any:
    with cupy.cuda.Device(index):
        return cupy.zeros(_LENGTH, cupy.float32)


def _of_tensorflow(tensorflow: Any, kind: str, index: int) -> Any:
    with tensorflow.device(f"{'GPU' if kind == 'cuda' else 'CPU'}:{index}"):
        return tensorflow.zeros([_LENGTH], tensorflow.float32)


_MAKERS: dict[str, Callable[[Any, str, int], Any]] = {
    "torch": lambda torch, kind, index: torch.zeros(_LENGTH, device=torch.device(kind, index)),
    "cupy": _of_cupy,
    "tensorflow": _of_tensorflow,
}


def _planned(source: str, target: str, device: str, tensor: Any) -> dict[str, Any]:
    try:
        plan = _core.plan(tensor, target)  # type: ignore[call-overload]
    except Exception as error:
        return _pair(source, target, device, "refused", str(error))
    return _pair(source, target, device, "in place" if plan.zero_copy else "copy", plan.reason)


def _pair(source: str, target: str, device: str, way: str, reason: str | None) -> dict[str, Any]:
    return {"source": source, "target": target, "device": device, "way": way, "reason": reason}


def _gpus() -> int:
    """Return how many GPUs have a device file here, also those that CUDA_VISIBLE_DEVICES hides."""
    return sum(name.removeprefix("nvidia").isdigit() for name in os.listdir("/dev") if name.startswith("nvidia"))


def _module() -> str | None:
    try:
        with open("/sys/module/nvidia/version") as file:
            return file.read().strip()
    except OSError:
        return None


def _error(cuda: Any, code: int) -> str:
    text = ctypes.c_char_p()
    if cuda.cuGetErrorString(code, ctypes.byref(text)) or text.value is None:
        return f"error {code}"
    return f"error {code}: {text.value.decode(errors='replace')}"


#: Numbers of ``CUdevice_attribute``.
_MAJOR, _MINOR, _POOLS = 75, 76, 115


def _device(cuda: Any, index: int) -> dict[str, Any]:
    device, name, total, value = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)

    def attribute(number: int) -> int:
        return 0 if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device) else value.value

    return {
        "name": name.value.decode(errors="replace"),
        "memory": total.value,
        "capability": [attribute(_MAJOR), attribute(_MINOR)],
        "pools": bool(attribute(_POOLS)),
    }
