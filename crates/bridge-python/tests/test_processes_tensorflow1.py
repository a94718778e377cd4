"""Tensors of PyTorch in the sessions of TensorFlow 1.15 in a Python 3.7, and back: two processes, one memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

import truebridge as tb
from truebridge import processes
from truebridge_conformance.others import Other, python37, wait_until

torch: Any = pytest.importorskip("torch")

PYTHON37 = python37()
if PYTHON37 is None:
    pytest.skip("there is no Python 3.7 with TensorFlow 1.15", allow_module_level=True)

#: On the device of both, where both have one.
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

#: Rounds of the tests of order, and of the test of memory.
ROUNDS, MANY = (int(os.environ.get(f"TRUEBRIDGE_{name}", usual)) for name, usual in (("ROUNDS", 20), ("MANY", 200)))

COUNT = 1 << 20

#: Doubles what a ticket opens, and shares the result. The kernels are those of addition and multiplication alone.
DOUBLE = """
import gc, os, warnings
warnings.simplefilter("ignore")
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
tf.compat.v1.logging.set_verbosity("ERROR")
sessions = {}
def session_on(device):
    if device not in sessions:
        with tf.Graph().as_default(), tf.device("/cpu:0" if device == "cpu" else "/device:GPU:0"):
            options = tf.compat.v1.ConfigProto(gpu_options=tf.compat.v1.GPUOptions(allow_growth=True))
            session = tf.compat.v1.Session(config=options)
            x = tb.external_input(tf.float32, [None])
            y = x + x
            for _ in range(8):
                y = y * 1.0
            sessions[device] = session, tb.handle_of(x), tb.external_output(y)
    return sessions[device]
taken = ticket = None
def run(device, tensor):
    global taken, ticket
    session, handle, output = session_on(device)
    taken = tb.take(session.run(output, {handle: tb.feed(tensor, copy=False)}))
    if ticket is not None:
        tb.revoke(ticket)
    ticket = tb.share(taken)
    return ticket
"""


@pytest.fixture(scope="module")
def tensorflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Other]:
    """Return a process of Python 3.7 that doubles."""
    folder = tmp_path_factory.mktemp("ipc")
    folder.chmod(0o700)
    processes.configure(folder=folder)
    assert PYTHON37 is not None
    other = Other([PYTHON37], "truebridge_tf1", TRUEBRIDGE_IPC=str(folder))
    other.define(DOUBLE)
    yield other
    other.kill()


@pytest.mark.parametrize("device", DEVICES)
def test_a_session_computes_on_the_memory_of_pytorch(tensorflow: Other, device: str) -> None:
    x = torch.arange(COUNT, dtype=torch.float32, device=device)
    ticket = tb.share(x)
    y = tb.open(tensorflow.text(f"run({device!r}, tb.open({ticket.text!r}))"), "torch")
    assert y.device == x.device and torch.equal(y, 2 * x)
    if device == "cuda":
        # Both ways in place: what is written here is there.
        x.fill_(5)
        y = tb.open(tensorflow.text(f"run({device!r}, tb.open({ticket.text!r}))"), "torch")
        assert (y == 10).all().item()
        y.fill_(7)
        y = tb.open(tensorflow.text(f"run({device!r}, taken)"), "torch")
        assert (y == 14).all().item()
    tb.revoke(ticket)


@pytest.mark.skipif(DEVICES == ["cpu"], reason="no CUDA device")
def test_the_work_of_each_is_after_that_of_the_other(tensorflow: Other) -> None:
    """Each side works after a delay, and the other must wait; results are read late, and their memory reused."""
    there = back = 0
    side = torch.cuda.Stream()
    x = torch.zeros(COUNT, device="cuda")
    kept: list[tuple[int, Any]] = []
    for i in range(1, ROUNDS + 1):
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            x.fill_(i)
            ticket = tb.share(x, copy=False)
        text = tensorflow.text(f"run('cuda', tb.open({ticket.text!r}))")
        with torch.cuda.stream(side):
            y = tb.open(text, "torch")
            first = y[:16].clone()
            torch.cuda._sleep(10_000_000)
            # Read late: TensorFlow's next result must not take this memory before.
            late = y.clone()
            del y
        tensorflow("taken = None")
        tb.revoke(ticket)
        with torch.cuda.stream(side):
            kept.append((i, first))
            there += not (first == 2 * i).all().item()
            back += not (late == 2 * i).all().item()
    assert (there, back) == (0, 0), f"{there} and {back} of {ROUNDS}"


@pytest.mark.parametrize("device", DEVICES)
def test_the_memory_of_many_rounds_comes_back(tensorflow: Other, device: str) -> None:
    def resident() -> tuple[int, ...]:
        gc.collect()
        tensorflow("taken = None; gc.collect()")
        wait_until(lambda: processes.held()["leases"] == 0)
        if device == "cpu":
            return (processes.held()["nbytes"],)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), processes.held()["nbytes"]

    def rounds(count: int) -> None:
        for i in range(count):
            ticket = tb.share(torch.full((1000,), float(i), device=device), expires=600)
            y = tb.open(tensorflow.text(f"run({device!r}, tb.open({ticket.text!r}))"), "torch")
            assert y[-1].item() == 2 * i
            tb.revoke(ticket)

    rounds(20)
    before, leased = resident(), tensorflow("tb.stats()['leased'] - tb.stats()['released']")
    rounds(MANY)
    # What may still be read is kept for a moment.
    wait_until(lambda: resident() == before)
    assert tensorflow("tb.stats()['leased'] - tb.stats()['released']") == leased
