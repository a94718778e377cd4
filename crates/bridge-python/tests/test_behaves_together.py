"""Threads, tasks, forked and started processes, and subinterpreters, all at once with conversions."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from memory import eventually, views
from programs import Warm
from truebridge import processes

torch: Any = pytest.importorskip("torch")

THREADS = 16


def started(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


@pytest.mark.parametrize("shared", [True, False])
def test_sixteen_threads_convert_at_once(shared: bool) -> None:
    """All begin together, with one tensor or each with its own, and drop views that another thread has made."""
    common = np.full(64, -1.0)
    barrier, before = threading.Barrier(THREADS), views()
    handed: list[Any] = []

    def work(number: int) -> bool:
        array = common if shared else np.full(64, float(number))
        barrier.wait(60)
        good = True
        for i in range(200):
            tensor = tb.to_torch(array if i % 2 else {"x": array})
            tensor = tensor if i % 2 else tensor["x"]
            back = tb.to_numpy(tensor, permute=(0,))
            good &= back.ctypes.data == array.ctypes.data and back[0] == array[0]
            handed.append(tensor)
            if len(handed) > THREADS:
                handed.pop(0)
        return good

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(work, range(THREADS)))
    del handed[:]
    eventually(lambda: views() == before)


def test_tasks_convert_and_share_at_once() -> None:
    async def task(number: int) -> list[float]:
        array = np.full(8, float(number))
        tensor = tb.to_torch(array)
        await asyncio.sleep(0)
        moved = await asyncio.to_thread(tb.to_numpy, tensor)
        await asyncio.sleep(0)
        return list(tb.to_torch({"x": moved})["x"][:1].tolist())

    async def main() -> list[list[float]]:
        return await asyncio.gather(*(task(number) for number in range(100)))

    assert asyncio.run(main()) == [[float(number)] for number in range(100)]


def test_a_task_that_is_cancelled_leaves_no_view() -> None:
    async def task(entered: asyncio.Event) -> None:
        view = tb.to_torch(np.ones(3))
        entered.set()
        await asyncio.sleep(60)
        del view

    async def main() -> None:
        entered = asyncio.Event()
        running = asyncio.create_task(task(entered))
        await entered.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    before = views()
    asyncio.run(main())
    eventually(lambda: views() == before)


@pytest.mark.parametrize("end", ["os._exit(0)", "raise SystemExit", "pass"])
def test_a_child_converts_and_ends_as_it_likes(end: str, beside_torch: Warm) -> None:
    """The parent has live views, a share that it has opened, and threads that convert while it forks."""
    done = beside_torch.run(f"""
        import os, threading, warnings, numpy as np, torch, truebridge as tb
        from truebridge import processes
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        source, stop = torch.arange(4.0), threading.Event()
        view = tb.to_numpy(source)
        ticket = tb.share(np.arange(5))
        opened = tb.open(ticket, "torch")
        def work():
            while not stop.is_set():
                tb.to_numpy(tb.to_torch(np.ones(8)))
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            child = os.fork()
            if child == 0:
                stop.set()
                assert tb.to_torch(view + 1).tolist() == [1, 2, 3, 4]
                assert tb.to_numpy({{"a": source}}, copy=True)["a"].tolist() == [0, 1, 2, 3]
                big = np.ones(1 << 20)
                assert tb.to_torch(big[::-1])[0] == 1
                del view, opened
                {end}
                break
            assert os.waitpid(child, 0)[1] == 0, "a child failed"
        else:
            stop.set()
            for thread in threads:
                thread.join()
            held = processes.held()
            assert (held["shares"], held["leases"], opened.tolist()) == (1, 1, [0, 1, 2, 3, 4]), held
    """)
    assert (done.returncode, done.stderr) == (0, "")


#: A machine with a GPU: a driver that says when it is started, and the library that counts GPUs without it.
DRIVER = """
#include <stdio.h>
int cuInit(unsigned flags) { fputs("the driver was started\\n", stderr); return 100; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
"""
NVML = """
int nvmlInit(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a PyTorch for CUDA")
@pytest.mark.parametrize(("asks", "starts"), [("", False), ("torch.cuda.is_available()", True)])
def test_tensors_of_the_host_do_not_start_the_driver(
    asks: str, starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that is forked after the driver was started cannot use CUDA."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    for library, code in (("libcuda.so.1", DRIVER), ("libnvidia-ml.so.1", NVML)):
        command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", library]
        subprocess.run(command, input=code, text=True, cwd=tmp_path, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    done = started(f"""
        import numpy as np, torch, truebridge as tb
        assert tb.to_torch(np.ones((3, 4)).T, copy=True).sum() == 12
        x = tb.to_torch(np.ones(8))
        tb.to_numpy({{"a": x}}), tb.plan(x, "numpy"), tb.copy(x, out=np.zeros(8)), tb.stats()
        tb.open(tb.share(x), "torch")
        {asks}
    """)
    assert (done.returncode, "the driver was started" in done.stderr) == (0, starts), done.stderr


def _worker(array: Any, text: str) -> tuple[float, list[float]]:
    return tb.to_torch(array).sum().item(), tb.open(text, "numpy").tolist()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_of_multiprocessing(method: str) -> None:
    """A view is pickled as an array is; a ticket opens the memory itself."""
    view, shares = tb.to_numpy(torch.arange(4.0)), processes.held()["shares"]
    ticket = tb.share(np.arange(3.0))
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(_worker, (view, ticket.text)) == (6, [0, 1, 2])
    tb.revoke(ticket)
    # Those of other tests may end by their time.
    assert processes.held()["shares"] <= shares


INTERPRETERS = """
try:
    import _interpreters as interpreters
    def run(code):
        failed = interpreters.exec(interpreters.create({config!r}), code)
        return failed and failed.formatted
except ImportError:
    import _xxsubinterpreters as interpreters
    def run(code):
        try:
            interpreters.run_string(interpreters.create(isolated={config!r} == "isolated"), code)
        except interpreters.RunFailedError as error:
            return str(error)
import sys
code = f"import sys; sys.path[:] = {{sys.path}}; import truebridge"
"""

ORDERS: dict[str, Callable[[str], str]] = {
    "before": lambda refused: f"{refused}\nimport truebridge as tb",
    "after": lambda refused: f"import truebridge as tb\n{refused}",
}


@pytest.mark.parametrize("config", ["legacy", "isolated"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_subinterpreter_is_refused_and_the_main_one_goes_on(order: str, config: str) -> None:
    refused = "text = run(code)\nassert text and 'ImportError' in text, text"
    if config == "legacy":
        # Python itself refuses others from 3.12 on.
        refused += "\nassert 'main interpreter only' in text, text"
    program = INTERPRETERS.format(config=config) + ORDERS[order](refused)
    done = started(program + "\nimport numpy as np\nassert tb.to_numpy(np.ones(2)).tolist() == [1, 1]")
    assert (done.returncode, done.stderr) == (0, "")
