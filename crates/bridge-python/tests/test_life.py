"""Memory lives exactly as long as it is needed."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from memory import resident
from programs import Warm

torch: Any = pytest.importorskip("torch")


def test_a_view_outlives_its_producer() -> None:
    array = np.arange(1000.0)
    alive = weakref.ref(array)
    tensor = tb.to_torch(array)
    del array
    gc.collect()
    assert alive() is not None
    assert tensor.sum().item() == 499500
    del tensor
    assert alive() is None


def test_the_other_way_round() -> None:
    tensor = torch.arange(1000.0)
    array = tb.to_numpy(tensor)[10:]
    del tensor
    gc.collect()
    assert array[0] == 10


def test_a_failed_transfer_keeps_nothing() -> None:
    array = np.arange(4.0)
    alive = weakref.ref(array)
    with pytest.raises(tb.BridgeError):
        tb.to_torch(array[::-1], copy=False)
    with pytest.raises(tb.BridgeError):
        tb.to_torch(array, device="cuda:0")
    del array
    assert alive() is None


def test_chains_lead_back_to_the_same_memory() -> None:
    first = torch.arange(6.0)
    last = tb.to_torch(tb.to_numpy(tb.to_torch(tb.to_numpy(first))))
    assert last.data_ptr() == first.data_ptr()
    address = first.data_ptr()
    del first
    gc.collect()
    assert last.data_ptr() == address
    assert last.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("change", ["module.half()", "module.weight.data = torch.zeros(1)", "module.weight.set_()"])
def test_a_tensor_may_be_given_other_memory(change: str) -> None:
    module = torch.nn.Linear(512, 512, bias=False).requires_grad_(False)
    torch.nn.init.constant_(module.weight, 7)
    array = tb.to_numpy(module.weight)
    exec(change, {"module": module, "torch": torch})
    junk = [torch.zeros(512, 512) for _ in range(8)]
    assert (array == 7).all()
    del junk


@pytest.mark.parametrize("target", ["torch", "numpy"])
def test_a_weak_proxy_is_a_producer_and_no_owner(target: str) -> None:
    array = np.full(1 << 16, 7.0)
    view = tb.convert(weakref.proxy(array), target)
    del array
    junk = [np.zeros(1 << 16) for _ in range(8)]
    assert bool((view == 7).all())
    del junk


def test_an_exception_in_flight_survives_the_release() -> None:
    for _ in range(3):
        with pytest.raises(tb.BridgeTypeError):
            [tb.to_numpy(x) for x in (torch.ones(2), torch.ones(2), 3)]
        with pytest.raises(ZeroDivisionError):
            print(tb.to_torch(np.ones(2)), 1 / 0)


def test_views_may_be_dropped_on_any_thread() -> None:
    tensors = [tb.to_torch(np.full(100, float(i))) for i in range(100)]
    threads = [threading.Thread(target=tensors.pop) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not tensors


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_many_conversions_do_not_grow_the_process() -> None:
    tensor, array = torch.ones(1 << 18), np.ones(1 << 18)

    def round_trips(count: int) -> None:
        for _ in range(count):
            tb.to_numpy(tensor)
            tb.to_torch(array)
            try:
                tb.to_torch(array[::-1], copy=False)
            except tb.BridgeError:
                pass

    round_trips(1000)
    gc.collect()
    before = resident()
    round_trips(20000)
    gc.collect()
    assert resident() - before < 4 << 20


@pytest.mark.parametrize("keeper", ["view", "producer = None; sys.keep = view", "cycle = [view]; cycle.append(cycle)"])
def test_views_that_are_alive_at_exit(keeper: str, beside_torch: Warm) -> None:
    code = f"""
import sys, threading, numpy, torch, truebridge as tb
producer = torch.arange(4.0)
view = tb.to_numpy(producer)
back = tb.to_torch(view)
{keeper}
"""
    done = beside_torch.run(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_does_not_wait_for_a_thread_that_it_lacks(beside_torch: Warm) -> None:
    program = """
    import os, threading
    import numpy as np, torch
    import truebridge as tb

    began, forked, count = threading.Event(), threading.Event(), torch.cuda.device_count

    def waits():
        began.set()
        forked.wait()
        return count()

    torch.cuda.device_count = waits
    results = []
    thread = threading.Thread(target=lambda: results.append(tb.to_torch(np.ones(3))))
    thread.start()
    began.wait()
    torch.cuda.device_count = count
    if (child := os.fork()) == 0:
        os._exit(int(tb.to_torch(np.ones(3)).sum()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    # Nor does another thread wait, and what is made first is kept.
    assert tb.to_torch(np.ones(3)).sum() == 3
    forked.set()
    thread.join()
    assert results[0].sum() == 3
    """
    done = beside_torch.run(program)
    assert (done.returncode, done.stderr) == (0, "")
