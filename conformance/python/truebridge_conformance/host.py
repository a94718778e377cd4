"""The host that the suite runs on. Imports no framework: only the workers do."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any


def adapters(*names: str) -> list[dict[str, Any]]:
    """Return the adapters with these names, or all.

    Each has its name, and the module and distributions of its framework or the variable that names its folder.
    """
    from truebridge_conformance import _conformance

    known: list[dict[str, Any]] = json.loads(_conformance.adapters())
    return [adapter for adapter in known if not names or adapter["name"] in names]


def describe(*names: str) -> dict[str, Any]:
    """Describe the host, and for which of the adapters with these names, or of all, the framework is installed."""
    from truebridge.diagnostics import host

    driver, gpus = driver_and_gpus()
    versions: dict[str, str | None] = {}
    refused: dict[str, str | None] = {}
    host_only: dict[str, str | None] = {}
    for adapter in adapters(*names):
        name = adapter["name"]
        if "module" in adapter:
            versions[name] = _version(adapter["module"], adapter["distributions"])
        elif os.environ.get(adapter["variable"]):
            subject = importlib.import_module(f"truebridge_conformance.subjects.{name}")
            versions[name], refused[name], host_only[name] = subject.libraries()
    return {
        "date": host.date(),
        "commit": _commit(),
        "os": host.system(),
        "cpu": host.processor(),
        "cores": host.cores(),
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if version},
        "refused": {name: reason for name, reason in refused.items() if reason},
        "host_only": {name: reason for name, reason in host_only.items() if reason},
        "driver": driver,
        "gpus": gpus,
    }


def _commit() -> str | None:
    """Return the commit of the checkout that this file is in."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _version(module: str, distributions: list[str]) -> str | None:
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except ModuleNotFoundError:
        # Of the package that it would be in.
        return None
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def gpus() -> list[str]:
    """Return the names of the CUDA devices."""
    return driver_and_gpus()[1]


def heading(about: dict[str, Any]) -> str:
    """Return a description in one line, for the head of a report."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    where = "; ".join([*about["gpus"], about["cpu"]])
    return f"{where}; Python {about['python']}; {versions}; {about['date']}"


def driver_and_gpus() -> tuple[str | None, list[str]]:
    """Return the driver's version and the names of the devices, both from the driver."""
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
