"""Whether memory stays where it was: very many transfers each way, with the memory of host and device before and after.

Every transfer makes a view and drops it. Before a figure is taken, a part of the transfers has run already, so that
caches and pools have what they will keep.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tensor_bridge_conformance import host

#: Elements of the tensors (float32).
ELEMENTS = 1 << 18
#: Transfers that warm caches and pools up.
WARM_UP = 20_000
#: What resident host memory may grow by, in bytes for all transfers of a pair: far less than one byte a transfer at a
#: million, but allocators move about by that much.
SLACK = 4 << 20


@dataclass
class Row:
    """One pair: bytes after the transfers less bytes before, and views that were not given back."""

    path: str
    transfers: int
    seconds: float
    host_bytes: int
    framework_bytes: dict[str, int]
    views: int

    @property
    def passed(self) -> bool:
        """Whether everything is back."""
        return self.host_bytes <= SLACK and not any(self.framework_bytes.values()) and self.views == 0


@dataclass
class Framework:
    """A framework: how to make a tensor, how to take one, and the bytes that its allocator has in use on the device."""

    name: str
    make: Callable[[], Any]
    take: Callable[[Any], Any]
    used: Callable[[], int]


def main(argv: list[str]) -> int:
    """Run, print a table, write ``soak.json`` and ``soak.md``. Gives 0 when all memory is back."""
    parser = argparse.ArgumentParser(prog="--soak", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--transfers", type=int, default=1_000_000, help="for each pair (default: 1,000,000)")
    parser.add_argument("--report", default="conformance-report", metavar="DIR", help="where to write soak.json")
    options = parser.parse_args(argv)
    frameworks = [made for make in (_torch, _cupy, _numpy, _tensorflow) if (made := make(options.device))]
    pairs = [(source, target) for source in frameworks for target in frameworks if source is not target]
    rows = [_soak(source, target, frameworks, options.transfers) for source, target in pairs]
    about = host.describe(_FRAMEWORKS)
    table = _markdown(about, rows)
    print(table)
    report = Path(options.report)
    report.mkdir(parents=True, exist_ok=True)
    data = {"schema": 1, "host": about, "rows": [asdict(row) | {"passed": row.passed} for row in rows]}
    (report / "soak.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    (report / "soak.md").write_text(table, encoding="utf-8")
    return 0 if rows and all(row.passed for row in rows) else 1


_FRAMEWORKS = [
    {"name": "torch", "module": "torch", "distributions": ["torch"]},
    {"name": "cupy", "module": "cupy", "distributions": ["cupy-cuda13x", "cupy-cuda12x", "cupy"]},
    {"name": "numpy", "module": "numpy", "distributions": ["numpy"]},
    {"name": "tensorflow2", "module": "tensorflow", "distributions": ["tensorflow", "tensorflow-cpu"]},
]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _torch(device: str) -> Framework | None:
    torch, bridge = _module("torch"), _module("tensor_bridge")
    if torch is None:
        return None
    used = torch.cuda.memory_allocated if device == "cuda" else lambda: 0
    return Framework("torch", lambda: torch.zeros(ELEMENTS, device=device), bridge.to_torch, used)


def _cupy(device: str) -> Framework | None:
    cupy, bridge = _module("cupy"), _module("tensor_bridge")
    if cupy is None or device == "cpu":
        return None
    used = cupy.get_default_memory_pool().used_bytes
    return Framework("cupy", lambda: cupy.zeros(ELEMENTS, "float32"), bridge.to_cupy, used)


def _numpy(device: str) -> Framework | None:
    numpy, bridge = _module("numpy"), _module("tensor_bridge")
    if numpy is None or device == "cuda":
        return None

    def aligned() -> Any:
        """An array where TensorFlow takes it in place."""
        memory = numpy.zeros(4 * ELEMENTS + 64, dtype=numpy.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + 4 * ELEMENTS].view(numpy.float32)

    return Framework("numpy", aligned, bridge.to_numpy, lambda: 0)


def _tensorflow(device: str) -> Framework | None:
    tensorflow, bridge = _module("tensorflow"), _module("tensor_bridge")
    if tensorflow is None:
        return None
    place = "GPU:0" if device == "cuda" else "CPU:0"

    def make() -> Any:
        with tensorflow.device(place):
            return tensorflow.zeros([ELEMENTS])

    def used() -> int:
        if device == "cpu":
            return 0
        current: int = tensorflow.config.experimental.get_memory_info(place)["current"]
        return current

    return Framework("tensorflow2", make, bridge.to_tensorflow, used)


def _soak(source: Framework, target: Framework, frameworks: list[Framework], transfers: int) -> Row:
    def run(times: int) -> None:
        tensor = source.make()
        for _ in range(times):
            target.take(tensor)

    def memory() -> tuple[int, dict[str, int], int]:
        stats = _settled()
        return _resident(), {framework.name: framework.used() for framework in frameworks}, stats

    run(WARM_UP)
    memory()
    host_before, before, views_before = memory()
    started = time.perf_counter()
    run(transfers)
    seconds = time.perf_counter() - started
    host_after, after, views_after = memory()
    differences = {name: after[name] - before[name] for name in before}
    path = f"{source.name}→{target.name}"
    return Row(path, transfers, seconds, host_after - host_before, differences, views_after - views_before)


def _settled() -> int:
    """The views that are alive, when garbage is collected and nothing waits for the device any more."""
    bridge = importlib.import_module("tensor_bridge")
    gc.collect()
    patience = time.monotonic() + 10
    while bridge.stats()["retired"] and time.monotonic() < patience:
        time.sleep(0.01)
    stats = bridge.stats()
    alive: int = stats["leased"] - stats["released"] + stats["retired"] + stats["lost"]
    return alive


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _markdown(about: dict[str, Any], rows: list[Row]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    where = "; ".join([*about["gpus"], about["cpu"]])
    lines = [f"{where}; Python {about['python']}; {versions}; {about['date']}", ""]
    lines += [
        "| path | transfers | s | host, bytes | device, bytes | views left | verdict |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        device = sum(row.framework_bytes.values())
        figures = f"{row.transfers:,} | {row.seconds:.1f} | {row.host_bytes:+,} | {device:+,} | {row.views}"
        lines.append(f"| {row.path} | {figures} | {'back' if row.passed else 'NOT BACK'} |")
    return "\n".join(lines) + "\n"
