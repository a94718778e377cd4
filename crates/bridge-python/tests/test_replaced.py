"""Views keep their memory when PyTorch gives a storage another: ``share_memory_``, ``resize_``, a queue, a loader."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from capsules import Producer
from programs import Warm

torch: Any = pytest.importorskip("torch")


COUNT = 5000
NUMBERS = np.arange(COUNT, dtype=np.float32)


def of_torch() -> Any:
    return torch.arange(COUNT, dtype=torch.float32)


def of_numpy() -> Any:
    return torch.from_numpy(NUMBERS.copy())


def of_this_package() -> Any:
    return tb.to_torch(NUMBERS.copy())


def shared(tensor: Any) -> None:
    tensor.share_memory_()


def shared_by_a_slice(tensor: Any) -> None:
    tensor[7:].share_memory_()


def shared_by_a_module(tensor: Any) -> None:
    module = torch.nn.Module()
    module.register_buffer("buffer", tensor)
    module.share_memory()


def pickled_for_a_process(tensor: Any) -> None:
    assert torch.multiprocessing.reductions  # It says how tensors are pickled for another process.
    ForkingPickler.dumps(tensor)


def grown(tensor: Any) -> None:
    tensor.resize_(100 * COUNT)


def shrunk(tensor: Any) -> None:
    tensor.untyped_storage().resize_(0)


#: What moves memory of any owner, and what moves only PyTorch's.
MOVES = (shared, shared_by_a_slice, shared_by_a_module, pickled_for_a_process)
OWN = (grown, shrunk)


def loan(tensor: Any) -> Callable[[], Any]:
    loaned = tb.lend(tensor)
    return lambda: np.from_dlpack(loaned)


def value(tensor: Any) -> Callable[[], Any]:
    pytest.importorskip("onnxruntime")
    made = tb.to_onnxruntime(tensor)
    return lambda: made.numpy()


def view(framework: str) -> Callable[[Any], Callable[[], Any]]:
    def made(tensor: Any) -> Callable[[], Any]:
        pytest.importorskip(framework)
        x = tb.convert(tensor, framework, read_only=True)
        return lambda: np.asarray(x)

    return made


TARGETS = {
    **{framework: view(framework) for framework in ("numpy", "jax", "tensorflow", "torch")},
    "loan": loan,
    "value": value,
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("make", [of_torch, of_numpy, of_this_package])
def test_a_view_has_its_elements_after_every_move(make: Callable[[], Any], target: str) -> None:
    for move in MOVES + OWN * (make is of_torch):
        tensor = make()
        read, part = TARGETS[target](tensor), tb.to_numpy(tensor[3:])
        move(tensor)
        reused = [torch.full((COUNT,), -1.0) for _ in range(20)]
        assert (read() == NUMBERS).all() and (part == NUMBERS[3:]).all(), move
        if tensor.numel() == COUNT and tensor.untyped_storage().nbytes():
            # The tensor has other memory now, with the same elements, and its next views are of that.
            tensor[0] = 9
            assert tb.to_numpy(tensor)[0] == 9 and read()[0] == 0
        # A view can be copied, saved and converted again.
        out = np.zeros(COUNT - 3, np.float32)
        tb.copy(part, out=out)
        assert (out == NUMBERS[3:]).all() and (tb.to_numpy(tb.to_torch(part)) == NUMBERS[3:]).all()
        del tensor, read, part, reused


def test_memory_is_freed_once_after_the_last_view() -> None:
    for order in ("the view first", "the tensor first"):
        array = NUMBERS.copy()
        alive = weakref.ref(array)
        tensor = torch.from_numpy(array)
        del array
        views = [tb.to_numpy(tensor), tb.to_numpy(tensor[1:])]
        if order == "the view first":
            del views
            tensor.share_memory_()
        else:
            tensor.share_memory_()
            views.pop()
            gc.collect()
            assert alive() is not None and (views[0] == NUMBERS).all()
            del views
        gc.collect()
        assert alive() is None, order


def test_a_storage_without_views_is_as_before() -> None:
    """What PyTorch asks of memory, and does with it, after an export that has ended."""
    tensor = of_torch()
    tb.to_numpy(tensor)
    assert not tensor.is_shared() and not torch._C._is_cow_tensor(tensor)
    lazily = torch._lazy_clone(tensor)
    tensor[0] = 5
    assert lazily[0] == 0
    tensor.share_memory_()
    assert tensor.is_shared()
    address = tensor.data_ptr()
    tb.to_numpy(tensor)
    tensor.share_memory_()
    assert tensor.data_ptr() == address, "memory that processes share stays where it is"
    assert tensor.resize_(3).tolist() == [5, 1, 2]


def test_random_programs() -> None:
    """Make, view, move and drop tensors, and compare each view with the elements that it must have."""
    for seed in range(40):
        draw = random.Random(seed)
        tensors: list[tuple[Any, Any]] = []
        views: list[tuple[Any, Any]] = []
        for _ in range(60):
            match draw.choice(["make", "view", "view", "slice", "move", "drop", "forget", "write"]):
                case "make":
                    start = draw.randrange(1 << 20)
                    numbers = np.arange(start, start + draw.randint(1, 3000), dtype=np.float32)
                    made = draw.choice([torch.from_numpy, tb.to_torch, lambda x: torch.from_numpy(x).clone()])
                    tensors.append((made(numbers.copy()), numbers))
                case "view" if tensors:
                    tensor, numbers = draw.choice(tensors)
                    views.append((tb.convert(tensor, draw.choice(["numpy", "torch"])), numbers))
                case "slice" if tensors:
                    tensor, numbers = draw.choice(tensors)
                    start = draw.randrange(len(numbers))
                    tensors.append((tensor[start:], numbers[start:]))
                case "move" if tensors:
                    draw.choice([shared, pickled_for_a_process])(draw.choice(tensors)[0])
                case "drop" if views:
                    views.pop(draw.randrange(len(views)))
                case "forget" if tensors:
                    tensors.pop(draw.randrange(len(tensors)))
                case "write":
                    torch.full((draw.randint(1, 3000),), -1.0)
            for x, numbers in tensors + views:
                assert (np.asarray(x) == numbers).all(), seed


def test_views_are_dropped_on_any_thread_while_memory_moves() -> None:
    end = time.monotonic() + 1

    def work(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < end:
            tensor = of_torch()
            views = [tb.to_numpy(tensor) for _ in range(3)]
            draw.choice([shared, grown, lambda _: None])(tensor)
            del tensor
            assert all((x == NUMBERS).all() for x in views)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_a_loader_and_a_queue_pass_a_tensor_with_its_view(beside_torch: Warm) -> None:
    done = beside_torch.run("""
import numpy as np, torch
import truebridge as tb

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, i):
        x = torch.full((2000,), float(i))
        return x, tb.to_numpy(x), tb.to_numpy(x[5:])

loader = torch.utils.data.DataLoader(Numbers(), batch_size=None, num_workers=2)
for i, batch in enumerate(loader):
    for x in batch:
        assert (np.asarray(x) == i).all(), i

def read(queue, back):
    back.put([float(np.asarray(x).sum()) for x in queue.get()])

context = torch.multiprocessing.get_context("fork")
queue, back = context.Queue(), context.Queue()
child = context.Process(target=read, args=(queue, back))
child.start()
x = torch.arange(2000.0)
view = tb.to_numpy(x)
queue.put([x, view])
assert back.get(timeout=60) == [1999000.0] * 2
child.join()
assert (view == np.arange(2000.0)).all()
print("right")
""")
    assert done.stdout == "right\n", done.stderr


def test_a_view_of_weights_that_are_mapped_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(torch.nn.Linear(60, 60).state_dict(), path)
    module = torch.nn.Linear(60, 60)
    module.load_state_dict(torch.load(path, mmap=True), assign=True)
    views = tb.to_numpy(module.state_dict())
    expected = {name: x.copy() for name, x in views.items()}
    module.share_memory()
    path.unlink()
    assert all((views[name] == expected[name]).all() for name in expected)
    assert module.weight.is_shared()


# Corners on the host: strides that address nothing, extents, copies that producers refuse, forks, lost errors.


@pytest.mark.parametrize("shape", [(2, 3, 1, 1), (2, 1, 8, 8), (1, 1)])
def test_strides_that_address_nothing_are_kept(shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape)
    if len(shape) == 4:
        tensor = tensor.to(memory_format=torch.channels_last)
    array = tb.to_numpy(tensor)
    assert array.strides == tuple(4 * stride for stride in tensor.stride())
    assert tb.to_torch(array).stride() == torch.from_dlpack(tensor).stride() == tensor.stride()
    if len(shape) == 4:
        assert tb.to_torch(array).is_contiguous(memory_format=torch.channels_last)


def test_strides_without_elements_are_kept() -> None:
    tensor = torch.empty(0, 3, 2, 2).to(memory_format=torch.channels_last)
    assert tb.to_torch(tensor).stride() == tensor.stride()


def test_strides_that_no_framework_can_hold_are_replaced() -> None:
    array = np.lib.stride_tricks.as_strided(np.zeros(3, np.float32), (1, 3), (-(1 << 40), 4))
    assert tb.to_torch(array).stride() == (3, 1)
    assert tb.to_numpy(tb.to_torch(array)).tolist() == [[0, 0, 0]]


def test_an_extent_of_2_to_the_63_is_refused() -> None:
    array = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (2,), (2**63 - 1,))
    producer = Producer()
    producer.tensor.code, producer.tensor.bits = 1, 8
    producer.shape[0], producer.strides[0] = 2, 2**63 - 1
    for source in (array, producer.capsule()):
        with pytest.raises(tb.BridgeValueError, match="2\\^63") as caught:
            tb.to_torch(source)
        assert caught.value.kind == "layout"
    assert producer.deleted == 1


def test_giants_of_stride_0_keep_their_length() -> None:
    tensor = torch.zeros(1).expand(2**33)
    array = tb.to_numpy(tensor)
    assert (array.shape, array.strides) == ((2**33,), (0,))
    assert tb.to_torch(array).shape == (2**33,)


def test_an_error_of_the_current_stream_is_a_bridge_error(beside_torch: Warm) -> None:
    """PyTorch without a device has no current stream there, and sets an exception that must not stay set."""
    done = beside_torch.run("""
import torch
if torch.cuda.is_available():
    raise SystemExit
torch.cuda.device_count, torch.cuda.init = lambda: 1, lambda: None
import truebridge as tb
from capsules import CUDA, Producer
producer = Producer()
producer.tensor.device_type, producer.shape[0] = CUDA, 0
try:
    tb.to_torch(producer.capsule())
except tb.BridgeRuntimeError as error:
    assert "no current stream" in str(error) and error.__cause__ is not None, error
else:
    raise AssertionError("there is no stream")
assert producer.deleted == 1
""")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_forgets_the_threads_of_its_parent() -> None:
    """The parent forks while another of its threads drops tensors; the child must not wait for that thread."""
    code = """
import os, threading, time
import numpy as np
import truebridge as tb

class Slow(np.ndarray):
    def __del__(self):
        entered.set()
        leave.wait(60)

entered, leave = threading.Event(), threading.Event()
tensor = tb.to_numpy(np.zeros(3).view(Slow))
thread = threading.Thread(target=lambda: globals().pop("tensor"))
thread.start()
entered.wait(60)
took = []
for _ in range(5):
    start = time.monotonic()
    if os.fork() == 0:
        raise SystemExit
    os.wait()
    took.append(time.monotonic() - start)
leave.set()
thread.join()
# A child that waits takes a second each time; one on a busy machine may take long once.
assert min(took) < 0.9, f"the children took {took} s"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_arrays_that_numpy_will_make_read_only_are_read_only() -> None:
    parts = np.broadcast_arrays(np.zeros((3, 1)), np.zeros((3, 5)))
    assert parts[0].__array_interface__["data"][1], "NumPy has changed what these arrays are"
    with pytest.raises(tb.BridgeError, match="read-only"):
        tb.to_torch(parts[0], copy=False)


def test_subclasses_convert_by_their_memory_whatever_their_attributes_say() -> None:
    class Odd(np.ndarray):
        @property
        def __array_struct__(self) -> Any:
            raise AttributeError

        strides = shape = dtype = property(lambda self: 1 / 0)

    plain = np.arange(24, dtype=np.int16).reshape(2, 3, 4)[::-1, :, 1:]
    assert tb.to_numpy(plain.view(Odd)).tolist() == plain.tolist()


def test_arrays_over_a_lease_have_the_flags_of_their_memory() -> None:
    tensor = torch.arange(24.0).reshape(2, 3, 4)
    for permuted in (tensor, tensor.permute(2, 0, 1), tensor[:, ::2], tensor[0, 0, 0], tensor.to(torch.bfloat16)):
        array = tb.to_numpy(permuted)
        assert array.flags.c_contiguous == permuted.is_contiguous()
        assert (array.flags.writeable, array.flags.aligned, array.flags.owndata) == (True, True, False)
        assert (array.ctypes.data, array.base is None) == (permuted.data_ptr(), False)
        assert array.astype(float).tolist() == permuted.tolist()
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    again = tb.to_numpy(frozen)
    assert not again.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        again.flags.writeable = True


# Memory lives exactly as long as it is needed: the suite judges it by `life`, `users`, `raises` and `growth`.


@pytest.mark.parametrize("target", ["torch", "numpy"])
def test_a_weak_proxy_is_a_producer_and_no_owner(target: str) -> None:
    array = np.full(1 << 16, 7.0)
    view = tb.convert(weakref.proxy(array), target)
    del array
    junk = [np.zeros(1 << 16) for _ in range(8)]
    assert bool((view == 7).all())
    del junk


def test_views_that_are_alive_at_exit(beside_torch: Warm) -> None:
    done = beside_torch.run("""
import sys, torch, truebridge as tb
view = tb.to_numpy(torch.arange(4.0))
back = tb.to_torch(view)
sys.keep = tb.to_numpy(torch.arange(4.0))
cycle = [tb.to_numpy(torch.arange(4.0))]
cycle.append(cycle)
""")
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
