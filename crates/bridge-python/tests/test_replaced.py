"""Views keep their memory when PyTorch gives a storage another: ``share_memory_``, ``resize_``, a queue, a loader."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
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


#: What moves memory of any owner, and what moves PyTorch's own alone.
MOVES = (shared, shared_by_a_slice, shared_by_a_module, pickled_for_a_process)
OWN = (grown, shrunk)


def loan(tensor: Any) -> Callable[[], Any]:
    lent = tb.lend(tensor)
    return lambda: np.from_dlpack(lent)


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


def test_random_programs(tmp_path: Path) -> None:
    """Make, view, move, and drop tensors, beside the elements that every view must have."""
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
    stop, failed = threading.Event(), []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            while not stop.is_set():
                tensor = of_torch()
                views = [tb.to_numpy(tensor) for _ in range(3)]
                draw.choice([shared, grown, lambda _: None])(tensor)
                del tensor
                assert all((x == NUMBERS).all() for x in views)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    stop.wait(2)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_loader_and_a_queue_pass_a_tensor_with_its_view() -> None:
    pytest.importorskip("torch.utils.data")
    warm = Warm("torch")
    done = warm.run("""
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
    warm.close()
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
