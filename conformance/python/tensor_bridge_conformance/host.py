"""What the suite runs on. Imports no framework: that is left to the workers."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any


def describe(adapters: list[dict[str, Any]]) -> dict[str, Any]:
    """Describe the host, and which of ``adapters`` (name, module, distributions) have their framework installed."""
    driver, gpus = _cuda()
    versions = {adapter["name"]: _version(adapter["module"], adapter["distributions"]) for adapter in adapters}
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "os": _system(),
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if version},
        "driver": driver,
        "gpus": gpus,
    }


def _version(module: str, distributions: list[str]) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _field(path: str, key: str, separator: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = (line.split(separator, 1)[1] for line in lines if line.split(separator, 1)[0].strip() == key)
    return next((value.strip().strip('"') for value in found), None)


def _system() -> str:
    return _field("/etc/os-release", "PRETTY_NAME", "=") or platform.platform()


def _processor() -> str:
    return _field("/proc/cpuinfo", "model name", ":") or platform.machine()


def _cuda() -> tuple[str | None, list[str]]:
    """The driver's version and the names of the devices, asked from the driver itself."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, []
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None, []
    names = []
    for index in range(count.value):
        device, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
        if driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDeviceGetName(name, len(name), device)
            names.append(name.value.decode(errors="replace"))
    supported = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(supported))
    release = Path("/sys/module/nvidia/version")
    words = [release.read_text(encoding="utf-8").strip()] if release.is_file() else []
    words.append(f"CUDA {supported.value // 1000}.{supported.value % 1000 // 10}")
    return ", ".join(words), names
