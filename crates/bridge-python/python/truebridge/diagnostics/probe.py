"""The probes that the subprocesses of ``doctor`` run.

Each probe runs in a separate process, so that a framework that crashes or hangs does not affect the caller. Its last
line is JSON. ``settings`` also runs in the caller's process, on frameworks that the caller has imported.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from .. import _core
from .._frameworks.table import ALL, FOLDERS, SPARING
from ..errors import BridgeError
from .report import told

#: Where the answer is printed.
_out = 1


def main(arguments: list[str]) -> None:
    """Run the probe that the first argument names, and print what it returns as JSON."""
    global _out
    # What the frameworks print themselves goes to standard error.
    _out = os.dup(1)
    os.dup2(2, 1)
    name, *rest = arguments
    text = json.dumps(_PROBES[name](*rest))
    with os.fdopen(_out, "w") as file:
        file.write(text)
        file.flush()
        # The end of the interpreter is not judged: what it finds is known.
        os._exit(0)


def _tell(share: float) -> None:
    """Print how much of the work is done, before the line of JSON."""
    os.write(_out, f"{share:.3f}\n".encode())


def framework(name: str) -> dict[str, Any]:
    """Import a framework, and return its version, what it was built for, the devices it sees, and its settings."""
    if importlib.util.find_spec(name) is None:
        return {"installed": False}
    try:
        module = importlib.import_module(name)
    except BaseException as error:
        return {"installed": True, "error": told(error)}
    facts: dict[str, Any] = {"installed": True, "version": str(getattr(module, "__version__", "unknown"))}
    row = ALL[name]
    for key, read, otherwise in (("build", row.build, None), ("devices", row.devices, 0)):
        try:
            facts[key] = read(module)
        except Exception as error:
            facts[key] = otherwise
            facts["cuda_error"] = told(error)
    if facts["devices"]:
        facts.update(settings(name, module))
    # A profile may start the framework's devices, and the other probes need memory of them as well.
    os.environ.update(SPARING)
    try:
        facts["profile"] = dict(_core.profile(name))  # type: ignore[arg-type]
    except BridgeError as error:
        facts["refusal"] = {"kind": error.kind, "text": str(error)}
    return facts


def settings(name: str, module: Any) -> dict[str, Any]:
    """Return how an imported framework gets memory of a GPU: its allocator, and whether it takes the whole GPU."""
    try:
        return ALL[name].settings(module)
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
    """Return the CUDA driver's version and devices, and the GPUs that the kernel has."""
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


def folder(name: str) -> dict[str, Any]:
    """Load a framework from the folder that its environment variable names, and return its version."""
    try:
        version, path = FOLDERS[name].load()
    except BridgeError as error:
        return {"installed": True, "error": str(error)}
    return {"installed": True, "version": version, "folder": str(path)}


def bench(seconds: str) -> dict[str, Any]:
    """Measure what ``bench`` shows."""
    from . import measure

    return measure.bench(seconds, _tell)


_PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "bench": bench,
    "framework": framework,
    "pairs": pairs,
    "driver": driver,
    "folder": folder,
}


def _tensors(name: str, module: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield a device and a maker of a tensor there, for each device on which this framework has tensors."""
    row = ALL[name]
    if row.on_host:
        yield "cpu", lambda: row.small(module, "cpu", 0)
    try:
        count = row.devices(module)
    except Exception:
        count = 0
    for index in range(count):
        yield f"cuda:{index}", lambda index=index: row.small(module, "cuda", index)  # type: ignore[misc]


def _planned(source: str, target: str, device: str, tensor: Any) -> dict[str, Any]:
    try:
        plan = _core.plan(tensor, target)  # type: ignore[call-overload]
    except Exception as error:
        return _pair(source, target, device, "refused", str(error))
    if not plan.zero_copy:
        return _pair(source, target, device, "copy", plan.reason)
    alignment, own = _core.profile(target)["alignment"], ALL[source].alignment  # type: ignore[arg-type]
    rare = f"only memory aligned to {alignment} bytes; {ALL[source].label}'s own usually is not"
    return _pair(source, target, device, "in place", rare if device == "cpu" and own < alignment else None)


def _pair(source: str, target: str, device: str, method: str, reason: str | None) -> dict[str, Any]:
    return {"source": source, "target": target, "device": device, "method": method, "reason": reason}


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
