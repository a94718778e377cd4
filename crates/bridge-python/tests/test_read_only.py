"""The rule for read-only memory.

What a framework never changes crosses in place. What is protected is refused where the target would allow writes,
unless the caller promises to write nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import capsules
import truebridge as tb

np: Any = pytest.importorskip("numpy")
torch: Any = pytest.importorskip("torch")


def flagged(_: Path) -> Any:
    array = np.arange(16, dtype=np.float32)
    array.flags.writeable = False
    return array


def mapped(folder: Path) -> Any:
    path = folder / "numbers"
    path.write_bytes(np.arange(16, dtype=np.float32).tobytes())
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.float32)


class Marked:
    """A producer that marks its memory as read-only."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(max_version=(1, 0))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


PROTECTED: dict[str, Callable[[Path], Any]] = {
    "the flag of NumPy": flagged,
    "a file that is mapped to read": mapped,
    "the mark of DLPack": lambda folder: Marked(flagged(folder)),
}


@pytest.mark.parametrize("kind", PROTECTED)
def test_protected_memory_needs_a_promise(kind: str, tmp_path: Path) -> None:
    x = PROTECTED[kind](tmp_path)
    for keywords in ({}, {"copy": False}, {"read_only": False}):
        with pytest.raises(tb.BridgeBufferError, match="read-only.*copy=True.*read_only=True") as caught:
            tb.to_torch(x, **keywords)
        assert caught.value.kind == "read_only"
        with pytest.raises(tb.BridgeBufferError, match="read_only=True"):
            tb.plan(x, "torch", **keywords)
    view = tb.to_torch(x, copy=False, read_only=True)
    assert tb.plan(x, "torch", read_only=True).zero_copy
    assert view.tolist() == list(range(16))
    assert view.data_ptr() == tb.to_numpy(x).ctypes.data
    assert not tb.to_numpy(x).flags.writeable


def test_the_promise_is_for_each_tensor_of_a_tree(tmp_path: Path) -> None:
    tree = {"weights": [flagged(tmp_path), np.ones(3, np.float32)]}
    with pytest.raises(tb.BridgeBufferError, match=r"tree\['weights'\]\[0\]: .*read_only=True"):
        tb.to_torch(tree)
    views = tb.to_torch(tree, copy=False, read_only=True)["weights"]
    assert [view.data_ptr() for view in views] == [x.ctypes.data for x in tree["weights"]]


def test_the_promise_makes_arrays_of_numpy_read_only() -> None:
    t = torch.zeros(4)
    array = tb.to_numpy(t, read_only=True)
    assert array.ctypes.data == t.data_ptr()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert tb.to_numpy(t).flags.writeable
    assert tb.to_numpy(t, copy=True, read_only=True).flags.writeable


def test_tensors_that_never_change_cross_without_a_promise() -> None:
    tf: Any = pytest.importorskip("tensorflow")
    x = tf.constant([1.0, 2.0])
    view = tb.to_torch(x, copy=False)
    array = tb.to_numpy(x, copy=False)
    assert view.data_ptr() == array.ctypes.data
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 9
    # What was protected before it came to TensorFlow is protected still.
    assert tb.to_torch(array[1:], copy=False).tolist() == [2.0]
    frozen = tb.to_numpy(torch.ones(64))
    frozen.flags.writeable = False
    with pytest.raises(tb.BridgeBufferError, match="read_only=True"):
        tb.to_torch(tb.to_tensorflow(frozen, copy=False))
    assert tb.to_torch(tb.to_tensorflow(frozen, copy=False), read_only=True).data_ptr() == frozen.ctypes.data


@pytest.mark.parametrize("writes", [False, True])
def test_an_array_without_elements_keeps_the_mark(writes: bool) -> None:
    producer = capsules.Producer()
    producer.shape[0], producer.tensor.data, producer.managed.flags = 0, None, 0 if writes else 1
    array = tb.to_numpy(producer.capsule())
    assert (array.shape, array.flags.writeable) == ((0,), writes)
