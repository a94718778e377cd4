"""Tensors of a CUDA device in other processes: in place, in order in both directions, and returned."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

import truebridge as tb
from truebridge import processes
from truebridge_conformance.others import Other, wait_until

torch: Any = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

#: Cycles of the device's clock: some ten milliseconds.
DELAY = 20_000_000

ROUNDS = 50

#: Processes that are killed in a test, and the seed of the times.
KILLS, SEED = (int(os.environ.get(f"TRUEBRIDGE_{name}", usual)) for name, usual in (("KILLS", 5), ("SEED", 7)))


pytestmark = pytest.mark.usefixtures("ipc_folder")


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    """Return another process with PyTorch."""
    process = Other()
    process("import torch; torch.cuda.init()")
    yield process
    process.kill()


def leases() -> int:
    return processes.held()["leases"]


@pytest.fixture(autouse=True)
def _nothing_is_leased() -> Iterator[None]:
    yield
    gc.collect()
    wait_until(lambda: leases() == 0)


def test_another_process_has_the_same_memory(other: Other) -> None:
    x = torch.arange(12, dtype=torch.float32, device="cuda").reshape(3, 4)
    ticket = tb.share(x.t()[1:], copy=False)
    other(f"y = tb.open({ticket.text!r}, 'torch', copy=False)")
    assert other("(y.tolist(), y.is_cuda, tuple(y.stride()))") == repr((x.t()[1:].tolist(), True, (1, 4)))
    other("y.fill_(7); torch.cuda.synchronize()")
    assert (x[:, 1:] == 7).all().item() and (x[:, 0] != 7).all().item()
    assert leases() == 1
    other("del y")
    wait_until(lambda: leases() == 0)
    tb.revoke(ticket)


def test_a_tensor_without_elements_is_on_its_device(other: Other) -> None:
    for x in (torch.empty(0, 3, device="cuda"), torch.arange(6, device="cuda")[6:]):
        ticket = tb.share(x)
        assert other(f"(lambda y: (tuple(y.shape), y.device.type))(tb.open({ticket.text!r}, 'torch'))") == repr(
            (tuple(x.shape), "cuda")
        )
        tb.revoke(ticket)


def test_a_process_opens_its_own_in_place() -> None:
    x = torch.ones(1000, device="cuda")
    ticket = tb.share(x[10:])
    y = tb.open(ticket, "torch")
    assert y.data_ptr() == x.data_ptr() + 40
    x[10] = 5
    assert y[0].item() == 5
    del y
    tb.revoke(ticket)


def test_the_reader_waits_for_the_writer(other: Other) -> None:
    wrong = 0
    x = torch.zeros(1 << 20, device="cuda")
    side = torch.cuda.Stream()
    other("scope = torch.cuda.stream(torch.cuda.Stream()); scope.__enter__()")
    for i in range(ROUNDS):
        with torch.cuda.stream(side):
            torch.cuda._sleep(DELAY)
            x.fill_(i)
            ticket = tb.share(x)
        other(f"y = tb.open({ticket.text!r}, 'torch'); z = y.clone(); del y")
        wrong += other("(z.min().item(), z.max().item())") != repr((float(i), float(i)))
        tb.revoke(ticket)
    other("scope.__exit__(None, None, None)")
    assert wrong == 0, f"{wrong} of {ROUNDS}"


@pytest.mark.parametrize("framework", ["torch", "cupy"])
def test_memory_is_reused_after_the_readers(other: Other, framework: str) -> None:
    library = pytest.importorskip(framework)
    device = {"device": "cuda"} if framework == "torch" else {}
    wrong = reused = 0
    for i in range(ROUNDS):
        x = library.full((1 << 20,), float(i), dtype=library.float32, **device)
        address = tb.to_torch(x).data_ptr()
        ticket = tb.share(x)
        del x
        # The view is dropped while its stream has not read it.
        other(f"y = tb.open({ticket.text!r}, 'torch'); torch.cuda._sleep({DELAY}); z = y.clone(); del y")
        tb.revoke(ticket)
        wait_until(lambda: leases() == 0)
        # The allocators hand the same block out, PyTorch's when the readers are done.
        again = [library.full((1 << 20,), -1.0, dtype=library.float32, **device) for _ in range(4)]
        reused += any(tb.to_torch(one).data_ptr() == address for one in again)
        wrong += other("(z.min().item(), z.max().item())") != repr((float(i), float(i)))
        del again
    assert wrong == 0, f"{wrong} of {ROUNDS}"
    assert reused or framework == "torch"


def test_memory_that_is_allocated_again_is_not_mistaken(other: Other) -> None:
    for i in range(ROUNDS):
        x = torch.full((8 << 20,), float(i), device="cuda")
        ticket = tb.share(x)
        # What it has opened before, it may have open still.
        assert other(f"float(tb.open({ticket.text!r}, 'torch').max())") == repr(float(i))
        tb.revoke(ticket)
        wait_until(lambda: leases() == 0)
        del x
        torch.cuda.empty_cache()


def test_parts_of_memory_that_was_freed_are_opened_again(other: Other) -> None:
    cupy: Any = pytest.importorskip("cupy")
    # Each array is an allocation of the driver's, which puts several into one block, and later others in their place.
    with cupy.cuda.using_allocator(None):
        neighbour = cupy.ones(8)
        for i in range(ROUNDS):
            for nbytes in (100, 1000, 300):
                x = cupy.full(nbytes, i, dtype=cupy.uint8)
                ticket = tb.share(x, copy=False)
                assert other(f"int(tb.open({ticket.text!r}, 'torch').max())") == repr(i)
                tb.revoke(ticket)
                wait_until(lambda: leases() == 0)
                del x
        del neighbour


def test_a_drop_waits_for_no_work(other: Other) -> None:
    other("x = torch.ones(1000, device='cuda')")
    y = tb.open(other.text("tb.share(x).text"), "torch")
    assert y[0].item() == 1
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50 * DELAY)
    del y
    assert not side.query()
    side.synchronize()


def test_the_owner_waits_for_the_writers(other: Other) -> None:
    for i in range(ROUNDS):
        x = torch.zeros(1 << 20, device="cuda")
        ticket = tb.share(x)
        other(f"y = tb.open({ticket.text!r}, 'torch'); torch.cuda._sleep({DELAY}); y.fill_({i})")
        other("t = tb.share(y).text; del y")
        back = tb.open(other.text("t"), "torch")
        assert (back.min().item(), back.max().item()) == (i, i)
        assert back.data_ptr() == x.data_ptr()
        tb.revoke(ticket)
        del back
        other("tb.revoke(t)")


@pytest.mark.parametrize(
    ("environment", "copied"),
    [
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            False,
        ),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync", "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, True),
    ],
    ids=["expandable", "async"],
)
def test_every_allocator_of_pytorch(environment: dict[str, str], copied: bool) -> None:
    sharer = Other(**environment)
    try:
        sharer("import torch; x = torch.arange(20 << 20, dtype=torch.int32, device='cuda')")
        ticket = sharer.text("tb.share(x).text")
        y = tb.open(ticket, "torch")
        assert (y[0].item(), y[-1].item(), y.numel()) == (0, (20 << 20) - 1, 20 << 20)
        again = tb.open(sharer.text("tb.share(x).text"), "torch")
        assert copied or again.data_ptr() == y.data_ptr()
        del again
        y[0] = 5
        torch.cuda.synchronize()
        assert sharer("x[0].item()") == ("0" if copied else "5")
        refused = sharer("tb.share(x, copy=False) and None")
        assert refused == ("'copy_needed'" if copied else "None")
        del y
    finally:
        sharer.kill()


@pytest.fixture
def pool() -> Iterator[Other]:
    """Return another process, in which CuPy allocates from a pool that can be shared."""
    pytest.importorskip("cupy")
    process = Other(CONFORMANCE_CUPY_ALLOCATOR="shared")
    process("import cupy; from truebridge_conformance.subjects.cupy import pool as shared; pool = shared(cupy)")
    yield process
    process.kill()


def test_a_pool_that_can_be_shared_exports_in_place(pool: Other, other: Other) -> None:
    pool("x = cupy.arange(1 << 20, dtype=cupy.int32)")
    assert pool("tb.processes.transport(x[3:])") == "'pool'"
    ticket, again = (pool.text("tb.share(x, copy=False).text") for _ in range(2))
    y, z = tb.open(ticket, "torch"), tb.open(again, "torch")
    assert y.data_ptr() == z.data_ptr()
    y[0] = 5
    torch.cuda.synchronize()
    assert pool("int(x[0])") == "5"
    del y
    assert (z[0].item(), z[-1].item()) == (5, (1 << 20) - 1)
    # A third process, and the one that shares.
    passed = tb.share(z[7:], copy=False)
    assert other(f"tb.open({passed.text!r}, 'torch')[0].item()") == "7"
    assert pool(f"tb.open({ticket!r}, 'cupy').data.ptr == x.data.ptr") == "True"
    tb.revoke(passed)
    del z


def test_memory_of_a_pool_is_reused_after_the_readers(pool: Other) -> None:
    wrong = reused = 0
    for i in range(ROUNDS):
        pool("x = None; before = pool.used_bytes()")
        pool(f"x = cupy.full(1 << 20, {i}, dtype=cupy.float32); t = tb.share(x); address = x.data.ptr; del x")
        y = tb.open(pool.text("t.text"), "torch")
        torch.cuda._sleep(DELAY)
        z = y.clone()
        del y
        pool("tb.revoke(t); import time; until = time.monotonic() + 30")
        pool("while pool.used_bytes() > before and time.monotonic() < until: time.sleep(0.001)")
        # The pool hands the same memory out.
        reused += pool("(x := cupy.full(1 << 20, -1, dtype=cupy.float32)).data.ptr == address") == "True"
        wrong += (z.min().item(), z.max().item()) != (i, i)
    assert wrong == 0, f"{wrong} of {ROUNDS}"
    assert reused


def test_cupy_shares_and_opens(other: Other) -> None:
    cupy: Any = pytest.importorskip("cupy")
    x = cupy.arange(1000, dtype=cupy.int32)
    ticket = tb.share(x, copy=False)
    other("import cupy")
    assert other(f"int(tb.open({ticket.text!r}, 'cupy').sum())") == repr(499500)
    assert other(f"int(tb.open({ticket.text!r}, 'torch').sum())") == repr(499500)
    tb.revoke(ticket)


def test_tensorflow_opens_in_place_and_copies_what_it_must() -> None:
    pytest.importorskip("tensorflow")
    reader = Other()
    try:
        reader("import torch; import tensorflow as tf")
        x = torch.arange(1024, dtype=torch.float32, device="cuda").reshape(32, 32)
        # TensorFlow has no strides, and begins at multiples of 64 bytes.
        for shared, in_place in ((x, True), (x.t(), False), (x.flatten()[1:], False)):
            ticket = tb.share(shared, copy=False)
            reader(f"y = tb.open({ticket.text!r}, 'tensorflow')")
            assert reader("('GPU' in y.device, y.numpy().tolist())") == repr((True, shared.tolist()))
            wait_until(lambda in_place=in_place: leases() == in_place)  # type: ignore[misc]
            reader("del y")
            wait_until(lambda: leases() == 0)
            tb.revoke(ticket)
    finally:
        reader.kill()


def test_a_copy_hides_its_neighbours() -> None:
    x = torch.arange(1000, device="cuda")
    ticket = tb.share(x[:10], copy=True)
    y = tb.open(ticket, "torch")
    x.zero_()
    assert y.tolist() == list(range(10))
    del y
    tb.revoke(ticket)


def test_private_memory_of_a_device_is_refused() -> None:
    with pytest.raises(tb.BridgeValueError, match="private"):
        tb.share(torch.ones(1, device="cuda"), writing="private")


def test_a_killed_reader_gives_back() -> None:
    reader = Other()
    x = torch.ones(1 << 20, device="cuda")
    ticket = tb.share(x)
    reader(f"y = tb.open({ticket.text!r}, 'torch')")
    assert leases() == 1
    reader.kill()
    start = time.monotonic()
    wait_until(lambda: leases() == 0)
    assert time.monotonic() - start < 5
    tb.revoke(ticket)


def test_a_dead_owner_is_a_typed_error() -> None:
    sharer = Other()
    sharer("import torch")
    ticket = sharer.text("tb.share(torch.arange(10, device='cuda')).text")
    y = tb.open(ticket, "torch")
    assert y.tolist() == list(range(10))
    sharer.kill()

    def gone() -> bool:
        try:
            tb.to_torch(y)
        except tb.BridgeConnectionError as error:
            return error.kind == "gone"
        return False

    wait_until(gone)


def test_many_rounds_leave_nothing(other: Other) -> None:
    def rounds(count: int) -> None:
        for i in range(count):
            ticket = tb.share({"x": torch.full((1000,), i, device="cuda")})
            assert other(f"int(tb.open({ticket.text!r}, 'torch')['x'][-1])") == str(i)
            tb.revoke(ticket)
        wait_until(lambda: leases() == 0)

    rounds(20)
    gc.collect()
    before = torch.cuda.memory_allocated()
    rounds(300)
    # What may still be read is kept for a moment.
    wait_until(lambda: torch.cuda.memory_allocated() <= before)


def test_a_process_in_namespaces_of_its_own(namespaces: list[str]) -> None:
    inside = Other([*namespaces, sys.executable])
    try:
        inside("import torch; x = torch.arange(1000, device='cuda')")
        y = tb.open(inside.text("tb.share(x, copy=False).text"), "torch")
        y += 1
        torch.cuda.synchronize()
        assert inside("(x[0].item(), x[-1].item())") == "(1, 1000)"
        ticket = tb.share(y[10:])
        assert inside(f"tb.open({ticket.text!r}, 'torch')[0].item()") == "11"
        tb.revoke(ticket)
    finally:
        inside.kill()
    wait_until(lambda: leases() == 0)


def test_devices_are_matched_by_uuid_and_not_by_number() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    reversed_order = Other(CUDA_VISIBLE_DEVICES="1,0")
    alone = Other(CUDA_VISIBLE_DEVICES="0")
    try:
        for index in (0, 1):
            x = torch.full((1000,), float(index), device=f"cuda:{index}")
            ticket = tb.share(x, copy=False)
            reversed_order("import torch")
            reversed_order(f"y = tb.open({ticket.text!r}, 'torch', copy=False)")
            assert reversed_order("(y.device.index, y.sum().item())") == repr((1 - index, 1000.0 * index))
            reversed_order("y += 1; torch.cuda.synchronize(y.device); del y")
            assert x.sum().item() == 1000 * (index + 1)
            opened = alone(f"tb.open({ticket.text!r}, 'torch').sum().item()")
            assert opened == ("1000.0" if index == 0 else "'device'")
            tb.revoke(ticket)
    finally:
        reversed_order.kill()
        alone.kill()


#: A process that reads, or shares, until it is killed.
PROGRAM = """
import sys
import torch, truebridge as tb
def reader(text):
    while True:
        y = tb.open(text, "torch")
        z = y + 0
        assert (z == z[0]).all().item()
        del y
def sharer(value):
    x = torch.full((1 << 20,), value, device="cuda")
    for _ in range(1000):
        print(tb.share(x).text, flush=True)
        sys.stdin.readline()
"""


@pytest.mark.parametrize("role", ["reader", "sharer"])
def test_a_process_that_is_killed_at_any_time_leaves_nothing(role: str) -> None:
    random, kills = Random(SEED), KILLS
    x = torch.full((1 << 20,), 3.0, device="cuda")
    ticket = tb.share(x, expires=1000)
    before = leases()
    for kill in range(kills):
        call = f"reader({ticket.text!r})" if role == "reader" else f"sharer({float(kill)})"
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM + call], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None and process.stdout is not None
        if role == "reader":
            wait_until(lambda: leases() > before or process.poll() is not None)  # noqa: B023
            time.sleep(random.uniform(0, 0.01))
        else:
            for _ in range(random.randrange(1, 4)):
                y = tb.open(process.stdout.readline().strip(), "torch")
                assert (y == float(kill)).all().item()
                process.stdin.write("\n")
                process.stdin.flush()
            timer = threading.Timer(random.uniform(0, 0.01), process.kill)
            timer.start()
            with contextlib.suppress(tb.BridgeConnectionError):
                for _ in range(1000):
                    text = process.stdout.readline().strip()
                    if not text:
                        break
                    again = tb.open(text, "torch")
                    process.stdin.write("\n")
                    process.stdin.flush()
                    assert (again == float(kill)).all().item()
            timer.join()
        assert process.poll() is None or role == "sharer"
        process.kill()
        process.wait()
        wait_until(lambda: leases() == before, 5)
    assert (x == 3).all().item()
    tb.revoke(ticket)


#: A process whose last work is pending for half a minute, unless it is killed: it shares, or reads and gives back.
PENDING = """
import sys
import torch, truebridge as tb
role = sys.argv[1]
x = torch.zeros(1 << 20, device="cuda")
torch.cuda.synchronize()
text = sys.stdin.readline().strip()
if role == "reader":
    y = tb.open(text, "torch")
    torch.cuda.synchronize()
torch.cuda._sleep(50_000_000_000)
if role == "reader":
    z = y.clone()
    del y
    print("dropped", flush=True)
else:
    x.fill_(1)
    print(tb.share(x).text, flush=True)
sys.stdin.read()
"""

#: A process that waits for those, which it kills: with its host in a call of the device, which calls nothing meanwhile.
SURVIVOR = """
import os, random, subprocess, sys, threading, time
import torch, truebridge as tb
program, role, rounds, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
draws = random.Random(seed)
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
command, pipe = [sys.executable, "-c", program, role], subprocess.PIPE
peers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(rounds)]
for peer in peers:
    x = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    ticket = tb.share(x, expires=1000)
    peer.stdin.write(ticket.text + "\\n")
    peer.stdin.flush()
    said, opened = peer.stdout.readline().strip(), time.monotonic()
    if role == "sharer":
        y = tb.open(said, "torch")
        opened = time.monotonic() - opened
        assert opened < 2, f"an open waited for the device: {opened:.2f} s"
        z = y.clone()
        assert not torch.cuda.current_stream().query(), "the reader does not wait for the writer"
    else:
        while tb.processes.held()["leases"]:
            time.sleep(0.001)
    tb.revoke(ticket)
    del x
    waits = threading.Thread(target=torch.cuda.synchronize, daemon=True)
    waits.start()
    time.sleep(draws.uniform(0, 0.3))
    assert waits.is_alive(), "the device waits for nothing"
    peer.kill()
    peer.wait()
    start = time.monotonic()
    waits.join(10)
    if waits.is_alive():
        print("the device hangs", flush=True)
        os._exit(1)
    # What the owner enqueues later goes on as well.
    torch.ones(1 << 20, device="cuda").sum().item()
    torch.cuda.synchronize()
    print(f"{role}: went on after {time.monotonic() - start:.3f} s", flush=True)
    y = z = None
while tb.processes.held()["leases"]:
    time.sleep(0.001)
"""


@pytest.mark.parametrize("role", ["sharer", "reader"])
def test_a_process_that_is_killed_with_pending_work_does_not_delay_the_other(role: str) -> None:
    command = [sys.executable, "-c", SURVIVOR, PENDING, role, str(2 * KILLS), str(SEED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 + 20 * KILLS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("went on") == 2 * KILLS
    print(done.stdout)


def test_connections_that_have_ended_leave_no_files(other: Other) -> None:
    other("x = torch.ones(1000, device='cuda')")
    text = other.text("tb.share(x, expires=1000).text")

    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def once() -> None:
        y = tb.open(text, "torch")
        assert y[0].item() == 1
        del y
        gc.collect()

    once()
    torch.cuda.synchronize()
    before = files()
    for _ in range(ROUNDS):
        once()
    wait_until(lambda: files() <= before)
