"""The machine that something was measured on, for the heads of reports."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path

__all__ = ["cores", "date", "processor", "system"]


def date() -> str:
    """Return the time now, as ISO 8601 writes it in UTC."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def system() -> str:
    """Return the name and the version of the operating system."""
    return _field("/etc/os-release", "PRETTY_NAME", "=") or platform.platform()


def processor() -> str:
    """Return the model of the processor."""
    return _field("/proc/cpuinfo", "model name", ":") or platform.machine()


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _field(path: str, key: str, separator: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = (line.split(separator, 1)[1] for line in lines if line.split(separator, 1)[0].strip() == key)
    return next((value.strip().strip('"') for value in found), None)
