"""TensorFlow 1.15 on a CUDA device, in separate processes: options, orders of imports, the end of a program."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from graphs import AS_BUILT, double, has_gpu

torch: Any = pytest.importorskip("torch")
pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not has_gpu():
    pytest.skip("TensorFlow 1.15 has no GPU", allow_module_level=True)


SETUP = """
import sys
sys.modules["tensorflow.python.pywrap_dlopen_global_flags"] = None
import truebridge as tb

def session(outputs=("y",), config=b"", **options):
    return tb.tensorflow.v1.Session(DOUBLE, {"x": ("float32", [None])}, outputs, config=AS_BUILT + config, **options)
"""


def run(code: str, **settings: str | None) -> subprocess.CompletedProcess[str]:
    merged = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **settings}
    env = {name: value for name, value in merged.items() if value is not None}
    command = [sys.executable, "-c", f"DOUBLE = {double()!r}\nAS_BUILT = {AS_BUILT!r}\n{SETUP}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=env)


def succeeds(code: str, **settings: str | None) -> None:
    done = run(code, **settings)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_is_fed_before_any_session_is_ordered() -> None:
    succeeds(
        """
import torch
tb.tensorflow.v1.open()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    # The first use of a kernel waits for the device.
    tensor = torch.zeros(1 << 20, device="cuda") + 0
    tensor += 0
    torch.cuda._sleep(1_000_000_000)
    tensor += 3
    fed = tb.convert(tensor, "tensorflow1", copy=False)
    assert not side.query(), "the conversion has waited for the writer"
assert (fed.address, fed.device) == (tensor.data_ptr(), "cuda:0")
opened = session(["y", "x"])
computed, same = opened.run({"x": fed}, "torch")
assert (computed == 6).all() and torch.equal(same, tensor)
for value in range(10):
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        tensor.fill_(value)
        fed = tb.convert(tensor, "tensorflow1", copy=False)
    assert (opened.run({"x": fed}, "torch")[0] == 2 * value).all()
"""
    )


#: Options of the first session, and GiB of the device that it takes, of the ``whole``. The configuration says that it
#: takes an eighth at once.
OPTIONS = {
    "by themselves": ("", "< 4"),
    "as it is needed": ("memory_growth=True, memory_fraction=0.2", "< 4"),
    "a part at once": ("memory_growth=False, memory_fraction=0.1", "> 0.08 * whole"),
    "by the configuration": ("config=bytes([0x32, 11, 9, 0, 0, 0, 0, 0, 0, 0xC0, 0x3F, 0x20, 0])", "> 0.1 * whole"),
    # As messages are written: without what is false.
    "by what the configuration leaves out": (
        "config=bytes([0x32, 9, 9, 0, 0, 0, 0, 0, 0, 0xC0, 0x3F])",
        "> 0.1 * whole",
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_memory_is_taken_as_the_options_say(case: str) -> None:
    options, taken = OPTIONS[case]
    succeeds(
        f"""
import torch
tensor = torch.ones(1 << 20, device="cuda")
torch.cuda.synchronize()
before, total = torch.cuda.mem_get_info()
whole = total / 2**30
with session({options}) as opened:
    assert (opened.run({{"x": tensor}}, "torch")[0] == 2).all()
    used = (before - torch.cuda.mem_get_info()[0]) / 2**30
    assert used {taken}, (used, whole)
""",
        TF_FORCE_GPU_ALLOW_GROWTH=None,
    )


def test_devices_that_are_not_there_are_refused() -> None:
    succeeds(
        """
import torch
count = torch.cuda.device_count()
listed = str(count).encode()
listed = bytes([0x32, len(listed) + 2, 0x2A, len(listed)]) + listed  # gpu_options { visible_device_list }
for options in ({"visible_devices": [count]}, {"config": listed}, {"visible_devices": [0], "config": listed}):
    try:
        session(**options)
    except tb.BridgeValueError as error:
        assert error.kind == "device" and "no GPU" in str(error), error
    else:
        raise SystemExit("no error")
with session(visible_devices=[0]) as opened:
    assert sum("/device:GPU:" in name for name in opened.devices) == 1, opened.devices
    assert (opened.run({"x": torch.ones(64, device="cuda")}, "torch")[0] == 2).all()
"""
    )


def test_managed_memory_of_tensorflow_converts() -> None:
    succeeds(
        """
import torch
with session(["y", "x"]) as opened:
    for value in range(1, 21):
        tensor = torch.full((1 << 20,), float(value), device="cuda")
        computed, same = opened.run({"x": tensor})
        assert (computed.device, same.device) == ("cuda:0", "cuda:0")
        assert (tb.to_torch(computed, copy=False) == 2 * value).all()
        assert (tb.to_torch(computed, copy=True) == 2 * value).all()
""",
        TF_FORCE_UNIFIED_MEMORY="1",
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_the_second_device_alone() -> None:
    succeeds(
        """
import torch
with session(["y", "x"], visible_devices=[1]) as opened:
    tensor = torch.ones(1 << 20, device="cuda:1")
    computed, same = opened.run({"x": tensor})
    assert (computed.device, same.device) == ("cuda:1", "cuda:1")
    assert (tb.to_torch(computed) == 2).all()
    try:
        opened.run({"x": torch.ones(64, device="cuda:0")})
    except tb.BridgeError as error:
        assert "cuda:0" in str(error), error
    else:
        raise SystemExit("no error")
"""
    )


ORDERS = list(itertools.permutations(["torch", "cupy", "tensorflow", "tensorflow1"]))[::4]

ORDER = """
for name in {order}:
    tb.tensorflow.v1.open() if name == "tensorflow1" else __import__(name)
import cupy, tensorflow as tf, torch
x = torch.arange(4096.0, device="cuda")
with session(["y", "x"]) as opened:
    y, same = opened.run({{"x": x}})
array = tb.to_cupy(same, copy=False)
two = tb.to_tensorflow(array, copy=False)
assert tb.to_torch(two, copy=False).data_ptr() == array.data.ptr == same.address != x.data_ptr()
assert torch.equal(tb.to_torch(y), 2 * x)
assert (two * 2).numpy().tolist() == (array * 2).get().tolist() == (2 * x).tolist()
a = torch.ones(64, 64, device="cuda")
assert (a @ a).sum().item() == (tb.to_cupy(a) @ tb.to_cupy(a)).sum() == 64**3
"""


@pytest.fixture(scope="module")
def orders() -> Iterator[dict[tuple[str, ...], Future[subprocess.CompletedProcess[str]]]]:
    """One process for each order, a few at a time."""
    with ThreadPoolExecutor(3) as pool:
        yield {order: pool.submit(run, ORDER.format(order=order)) for order in ORDERS}


@pytest.mark.parametrize("order", ORDERS, ids=",".join)
def test_any_order_of_imports_works(
    order: tuple[str, ...], orders: dict[tuple[str, ...], Future[subprocess.CompletedProcess[str]]]
) -> None:
    done = orders[order].result()
    assert done.returncode == 0, done.stderr[-3000:]


def complaints(stderr: str) -> list[str]:
    """The lines that are not TensorFlow's log, some of which no setting turns off."""
    logged = re.compile(r"WARNING: All log messages before absl|[IWE]\d{4} |\d{4}-\d\d-\d\d [\d:.]+: [IWE] |\s*$")
    return [line for line in stderr.splitlines() if not logged.match(line)]


@pytest.mark.parametrize("end", ["pass", "sys.keep = (opened, views, results)", "torch.cuda._sleep(100_000_000)"])
def test_views_and_sessions_that_are_alive_at_exit(end: str) -> None:
    done = run(
        f"""
import torch
opened = session(["y", "x"])
tensor = torch.ones(1 << 20, device="cuda")
results = [result for _ in range(3) for result in opened.run({{"x": tensor}})]
views = [tb.to_torch(result) for result in results]
del tensor
{end}
"""
    )
    assert (done.returncode, complaints(done.stderr)) == (0, [])
