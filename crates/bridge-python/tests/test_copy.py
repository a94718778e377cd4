"""``tb.copy``: into a tensor that exists, of another framework or of the same, on the host.

The properties ``elements`` and ``targets`` of the suite judge values, broadcasts, deferred operations, counted writes,
and targets that share memory with other tensors. Any views are copied in ``test_copy_trees.py``.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from capsules import Wrapper

torch: Any = pytest.importorskip("torch")


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def test_a_tensor_of_tensorflow_is_copied_into_a_part() -> None:
    source = pytest.importorskip("tensorflow").constant(numbers(4, 6))
    out, expected = torch.zeros(6, 8), np.zeros((6, 8), np.float32)
    part = out.T[1:5]
    assert tb.copy(source, out=part) is part
    expected[:, 1:5] = numbers(4, 6).T
    np.testing.assert_array_equal(out.numpy(), expected)


def test_leading_dimensions_of_length_1_are_dropped_as_numpy_does() -> None:
    for shape, into in [((1, 2), (2,)), ((1,), ()), ((1, 1, 3), (3,)), ((1, 0), (0,)), ((1, 1, 3), (2, 3))]:
        source, target, expected = numbers(*shape) + 1, torch.zeros(into), np.zeros(into, np.float32)
        np.copyto(expected, source)
        tb.copy(source, out=target)
        np.testing.assert_array_equal(target.numpy(), expected)
    for shape, into in [((2, 1), (2,)), ((2, 3), (3,)), ((0, 3), (3,)), ((1, 3), (2,))]:
        with pytest.raises(tb.BridgeLayoutError, match="reshape or slice"):
            tb.copy(numbers(*shape), out=torch.zeros(into))


def test_interleaved_slices_of_one_array_are_copied() -> None:
    array = numbers(4, 6)
    expected = array.copy()
    expected[:, 1::2] = expected[:, ::2]
    tb.copy(array[:, ::2], out=array[:, 1::2])
    np.testing.assert_array_equal(array, expected)


def broadcast() -> object:
    return torch.zeros(1, 3).expand(2, 3)


def windows() -> object:
    return np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (2, 3), (8, 4))


def read_only() -> object:
    array = np.zeros((2, 3), np.float32)
    array.flags.writeable = False
    return array


def tensorflow(name: str) -> object:
    tf = pytest.importorskip("tensorflow")
    return getattr(tf, name)(np.zeros((2, 3), np.float32))


class Interface:
    """A tensor that is known only by a protocol."""

    def __init__(self) -> None:
        self.array = np.zeros((2, 3), np.float32)
        self.__array_interface__ = self.array.__array_interface__


def records() -> np.ndarray:
    """Return records whose fields have strides that are not a whole number of elements."""
    return np.array([(i, i, -i) for i in range(6)], [("a", "f4"), ("b", "i1"), ("c", "i2")]).reshape(2, 3)


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str, str]] = {
    "another shape": (lambda: torch.zeros(3, 2), ValueError, "layout", "reshape or slice"),
    "fewer dimensions": (lambda: np.zeros(3, np.float32), ValueError, "layout", "reshape or slice"),
    "another dtype": (lambda: torch.zeros(2, 3, dtype=torch.int32), TypeError, "dtype", "cast the source first"),
    "requires grad": (
        lambda: torch.zeros(2, 3, requires_grad=True),
        BufferError,
        "requires_grad",
        r"^the target: .* pass its \.detach\(\), which shares its memory$",
    ),
    "read-only": (read_only, BufferError, "read_only", "pass a writable one"),
    "broadcast": (broadcast, ValueError, "layout", "two elements at one address"),
    "overlapping windows": (windows, ValueError, "layout", "two elements at one address"),
    "a tensor of tensorflow": (lambda: tensorflow("constant"), BufferError, "read_only", "cannot be overwritten"),
    "a variable of tensorflow": (lambda: tensorflow("Variable"), BufferError, "read_only", r"variable\.assign\("),
    "a field of records": (lambda: records()["a"], ValueError, "layout", "target are not a whole number of elements"),
    "a protocol": (Interface, BufferError, "read_only", "a tensor of torch, cupy or numpy"),
    "a capsule": (lambda: torch.zeros(2, 3).__dlpack__(), ValueError, "argument", "^the target: .* consumes"),
    "a number": (lambda: 3, TypeError, "not_a_tensor", "^the target is a int, which is not a tensor"),
    "numbers": (lambda: [0, 0, 0], ValueError, "argument", "the target is a list and the source"),
    "sparse": (
        lambda: torch.eye(3).to_sparse(),
        TypeError,
        "not_a_tensor",
        "^the target: a tensor of layout .* assign",
    ),
    "masked": (lambda: np.ma.zeros((2, 3), np.float32), TypeError, "not_a_tensor", "^the target: .* assign"),
    "another byte order": (lambda: np.zeros((2, 3), ">f4"), TypeError, "dtype", "^the target: .*byte order: .* assign"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_to_is_refused(case: str) -> None:
    make, builtin, kind, words = REFUSED[case]
    with pytest.raises(tb.BridgeError, match=words) as caught:
        tb.copy(np.ones((2, 3), np.float32), out=make())
    assert isinstance(caught.value, builtin)
    assert caught.value.kind == kind
    # They make other tensors, in which the copy would be lost.
    assert not any(name in str(caught.value) for name in (".to_dense", ".filled", ".astype", "asarray", "detach="))


def test_a_copier_writes_no_more_than_copy_does() -> None:
    """An object that is known only by a protocol does not say that it may be written to: it may be one of JAX."""
    jnp = pytest.importorskip("jax.numpy")

    array = jnp.ones(3)
    source = np.full(3, 7, np.float32)
    for call in (tb.copy, tb.copier):
        with pytest.raises(tb.BridgeBufferError, match="only be written by its owner"):
            call(source, out=Wrapper(array))
        with pytest.raises(tb.BridgeBufferError, match=r"^tree\[1\]: .*only be written by its owner"):
            call([source, source], out=[torch.zeros(3), Wrapper(array)])
    assert array.tolist() == [1, 1, 1]
    assert tb.copy(np.float64(3), out=np.zeros(2)).tolist() == [3, 3]
    with pytest.raises(tb.BridgeValueError, match=r"asarray\(\)"):
        tb.copier(np.float64(3), out=np.zeros(2))


def test_nothing_is_written_where_the_source_is_refused() -> None:
    target = np.zeros(3, np.float32)
    for source, words in [
        (torch.ones(3, requires_grad=True), r"call \.detach\(\) on the source first$"),
        ([1, 2, 3], "not a tensor"),
        ([np.ones(3, np.float32)], "^the target is a tensor and the source a list of tensors"),
        (3, "not a tensor"),
    ]:
        with pytest.raises(tb.BridgeError, match=words):
            tb.copy(source, out=target)
    assert not target.any()
    with pytest.raises(TypeError):
        tb.copy(target, target)  # type: ignore[misc]


def test_fields_of_records_are_copied() -> None:
    whole = records()
    for source in (whole["a"], whole["a"].T, whole["c"][::-1, ::2], whole["a"][1]):
        for make in (np.zeros_like, lambda array: torch.zeros(array.shape, dtype=getattr(torch, array.dtype.name))):
            target = make(np.ascontiguousarray(source))
            assert tb.copy(source, out=target) is target
            np.testing.assert_array_equal(target, source)
    target = torch.zeros(4, 2, 3)
    tb.copy([whole["a"], whole["a"][0]], out=[target[0], target[1:]])
    np.testing.assert_array_equal(target[0], whole["a"])
    np.testing.assert_array_equal(target[1:], np.broadcast_to(whole["a"][0], (3, 2, 3)))
    with pytest.raises(tb.BridgeError, match=r"tree\[0\]: the framework of the source .* copy it with copy\(\)"):
        tb.copier([whole["a"]], out=[target[0]])


@pytest.mark.parametrize("start", [0, 2])
def test_a_storage_that_was_freed_is_told_from_a_tensor_without_one(start: int) -> None:
    freed, target = torch.ones(5)[start : start + 3], np.zeros(3, np.float32)
    freed.untyped_storage().resize_(0)
    for call in (lambda: tb.copy(freed, out=target), lambda: tb.to_numpy(freed)):
        with pytest.raises(tb.BridgeError, match="storage of this tensor was freed or resized") as error:
            call()
        assert error.value.kind == "not_a_tensor"
    with pytest.raises(tb.BridgeError, match="ZeroTensor"):
        tb.copy(torch._efficientzerotensor(3), out=target)


def test_a_capsule_is_a_source() -> None:
    target = np.zeros(3, np.float32)
    capsule = torch.ones(3).__dlpack__()
    tb.copy(capsule, out=target)
    assert target.all()
    with pytest.raises(tb.BridgeBufferError, match="consumed"):
        tb.copy(capsule, out=target)


def test_other_threads_run_while_much_is_copied() -> None:
    source, target = np.ones(1 << 18), np.zeros(1 << 18)
    # The first conversion imports modules, and releases the GIL for them.
    tb.copy(source, out=target)
    begun, stop, ran = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        stop.wait()
        ran.set()

    thread = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    # From here on a thread runs only where another releases the GIL by itself: as `begun.wait` does, until the thread
    # waits in turn, and as `stop.set` does not.
    sys.setswitchinterval(1000)
    try:
        thread.start()
        begun.wait()
        stop.set()
        seen = False
        for _ in range(100):
            tb.copy(source, out=target)
            seen = seen or ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert seen
    assert target.all()


def test_a_negation_of_integers_that_is_deferred_is_made_by_pytorch() -> None:
    negated, one, two = torch._neg_view(torch.arange(4).int()), torch.full((4,), 9).int(), torch.zeros(2, 2)
    tb.copy(negated, out=one)
    assert one.tolist() == [0, -1, -2, -3]
    tb.copy([negated[1:3], torch.ones(2)], out=[one[2:], two])
    assert (one.tolist(), two.tolist()) == ([0, -1, -1, -2], [[1.0, 1.0]] * 2)
    with pytest.raises(tb.BridgeError, match="negation of integers"):
        tb.copier(negated, out=one)


# A copy on the host asks for huge pages in the memory that it allocates, and never in memory of the caller.


with_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no transparent huge pages"
)

NBYTES = 64 << 20
HUGE = 2 << 20
SOURCE = np.zeros((4096, NBYTES // 4096), np.uint8).T


def asks(address: int) -> bool:
    """Return whether the mapping of an address asks for huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        start, dash, end = first.partition("-")
        if dash:
            inside = int(start, 16) <= address < int(end, 16)
        elif first == "VmFlags:" and inside:
            return "hg" in rest
    raise ValueError(f"{address:#x} is not mapped")


def mapped() -> torch.Tensor:
    """Return memory that is mapped for itself: the heap may have asked for huge pages, for an earlier tensor."""
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, NBYTES), np.uint8))


@with_huge_pages
def test_a_fresh_copy_asks_for_whole_huge_pages() -> None:
    # NumPy asks for them itself.
    copy = tb.to_torch(SOURCE, copy=True)
    assert asks(copy.data_ptr() + HUGE) and asks(copy.data_ptr() + NBYTES - 2 * HUGE)


@with_huge_pages
def test_memory_of_the_caller_is_left_as_it_is() -> None:
    out = mapped().view(SOURCE.shape)
    tb.copy(SOURCE, out=out)
    assert not asks(out.data_ptr() + HUGE)
