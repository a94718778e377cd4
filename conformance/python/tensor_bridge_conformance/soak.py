"""Leaks: very many transfers each way, with the memory of host and device before and after.

Every transfer makes a view and drops it. Every run of a session of TensorFlow 1.x makes two: of its input and of its
output. The first transfers run before memory is read, so that caches and pools have grown to what they keep.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path as File
from typing import Any

from tensor_bridge_conformance import host
from tensor_bridge_conformance.reports import publish

#: Elements of the tensors (float32).
ELEMENTS = 1 << 18
#: Transfers that warm caches and pools up.
WARM_UP = 20_000
#: The most growth of resident host memory, in bytes for all transfers of a pair: the noise of allocators, and at a
#: million transfers four bytes each.
SLACK = 4 << 20


@dataclass
class Row:
    """One path: bytes after the transfers less bytes before, and the views made and released."""

    path: str
    transfers: int
    seconds: float
    host_bytes: int
    framework_bytes: dict[str, int]
    made: int
    returned: int
    #: Views that a transfer makes.
    each: int

    @property
    def passed(self) -> bool:
        """Whether every transfer made its views, and all memory was released."""
        counted = self.made == self.returned == self.each * self.transfers
        return self.host_bytes <= SLACK and not any(self.framework_bytes.values()) and counted


@dataclass
class Framework:
    """A framework: how to make a tensor, how to import one, and the bytes that it has in use on the device."""

    name: str
    make: Callable[[], Any]
    take: Callable[[Any], Any]
    used: Callable[[], int]


@dataclass
class Path:
    """A path: how its tensor is made, what is repeated with that tensor, and how often."""

    name: str
    make: Callable[[], Any]
    take: Callable[[Any], Any]
    times: int
    #: Views that each repetition makes.
    each: int = 1


def main(argv: list[str]) -> int:
    """Run, print a table, write ``soak.json`` and ``soak.md``. Return 0 when all memory was released."""
    parser = argparse.ArgumentParser(prog="--soak", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--transfers", type=int, default=1_000_000, help="for each pair (default: 1,000,000)")
    parser.add_argument("--runs", type=int, default=100_000, help="of a session of TensorFlow 1.x (default: 100,000)")
    parser.add_argument("--only", metavar="PATH", help="the one path to run, such as session or torch:numpy")
    parser.add_argument("--report", default="conformance-report", metavar="DIR", help="where to write soak.json")
    options = parser.parse_args(argv)
    makers = (_torch, _cupy, _numpy, _tensorflow, _tensorflow1)
    frameworks = [made for make in makers if (made := make(options.device))]
    paths = _pairs(frameworks, options.transfers) + _sessions(frameworks, options.runs)
    if options.only:
        paths = [path for path in paths if path.name == options.only.replace(":", "→")]
    rows = [_soak(path, frameworks) for path in paths]
    about = host.describe(*FRAMEWORKS)
    table = _markdown(about, rows)
    data = {"host": about, "rows": [asdict(row) | {"passed": row.passed} for row in rows]}
    publish(options.report, "soak", table, data)
    return 0 if rows and all(row.passed for row in rows) else 1


#: The frameworks whose versions the report names.
FRAMEWORKS = ("torch", "cupy", "numpy", "tensorflow", "tensorflow1")


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
        """Return an array at an address where TensorFlow imports it in place."""
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

    return Framework("tensorflow", make, bridge.to_tensorflow, used)


def _tensorflow1(device: str) -> Framework | None:
    """TensorFlow 1.x, whose tensors are outputs of a session. On a GPU only the driver counts its memory."""
    bridge = _module("tensor_bridge")
    torch, tensorflow1 = _module("torch"), _module("tensor_bridge.tensorflow1")
    if torch is None or not os.environ.get("TENSOR_BRIDGE_TENSORFLOW1"):
        return None
    session = tensorflow1.Session(_square_plus_itself(), {"x:0": ("float32", [None])}, "y:0")

    def make() -> Any:
        return session.run({"x:0": torch.zeros(ELEMENTS, device=device)})[0]

    def used() -> int:
        if device == "cpu":
            return 0
        free, whole = torch.cuda.mem_get_info()
        return int(whole - free)

    return Framework("tensorflow1", make, lambda tensor: bridge.convert(tensor, "tensorflow1"), used)


def _square_plus_itself() -> bytes:
    """Return a serialised ``GraphDef``: y = x x + x. It needs few kernels, which some GPUs compile at first use."""

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    def node(name: bytes, operation: bytes, inputs: list[bytes], attribute: bytes) -> bytes:
        float32 = bytes([6 << 3, 1])
        types = field(5, field(1, attribute) + field(2, float32))
        return field(1, field(1, name) + field(2, operation) + b"".join(field(3, each) for each in inputs) + types)

    x = node(b"x", b"Placeholder", [], b"dtype")
    return x + node(b"square", b"Mul", [b"x", b"x"], b"T") + node(b"y", b"Add", [b"square", b"x"], b"T")


def _pairs(frameworks: list[Framework], times: int) -> list[Path]:
    pairs = [(source, target) for source in frameworks for target in frameworks if source is not target]
    return [Path(f"{source.name}→{target.name}", source.make, target.take, times) for source, target in pairs]


def _sessions(frameworks: list[Framework], times: int) -> list[Path]:
    """Return runs of a session from PyTorch to PyTorch."""
    named = {framework.name: framework for framework in frameworks}
    if not {"torch", "tensorflow1"} <= named.keys():
        return []
    tensorflow1 = _module("tensor_bridge.tensorflow1")
    session = tensorflow1.Session(_square_plus_itself(), {"x:0": ("float32", [None])}, "y:0")
    return [Path("session", named["torch"].make, lambda x: session.run({"x:0": x}, "torch"), times, 2)]


def _soak(path: Path, frameworks: list[Framework]) -> Row:
    def memory() -> tuple[int, dict[str, int], int, int]:
        made, alive = _settled()
        return _resident(), {framework.name: framework.used() for framework in frameworks}, made, alive

    def run(times: int) -> None:
        for _ in range(times):
            path.take(tensor)

    tensor = path.make()
    run(min(WARM_UP, path.times))
    memory()
    host_before, before, made_before, alive_before = memory()
    started = time.perf_counter()
    run(path.times)
    seconds = time.perf_counter() - started
    host_after, after, made_after, alive_after = memory()
    differences = {name: after[name] - before[name] for name in before}
    made = made_after - made_before
    returned = made - (alive_after - alive_before)
    return Row(path.name, path.times, seconds, host_after - host_before, differences, made, returned, path.each)


def _settled() -> tuple[int, int]:
    """Return the views made, and those alive after garbage was collected and no retired memory waits for the device."""
    bridge = importlib.import_module("tensor_bridge")
    gc.collect()
    patience = time.monotonic() + 10
    while bridge.stats()["retired"] and time.monotonic() < patience:
        time.sleep(0.01)
    stats = bridge.stats()
    return stats["leased"], stats["leased"] - stats["released"] + stats["retired"] + stats["leaked"]


def _resident() -> int:
    pages = int(File("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _markdown(about: dict[str, Any], rows: list[Row]) -> str:
    lines = [host.heading(about), ""]
    lines += [
        "| path | transfers | s | host, bytes | device, bytes | views made | released | verdict |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        device = sum(row.framework_bytes.values())
        memory = f"{row.seconds:.1f} | {row.host_bytes:+,} | {device:+,}"
        counts = f"{row.made:,} | {row.returned:,} | {'back' if row.passed else 'NOT BACK'}"
        lines.append(f"| {row.path} | {row.transfers:,} | {memory} | {counts} |")
    return "\n".join(lines) + "\n"
