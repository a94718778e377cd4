"""Corners on the host: strides that address nothing, extents, copies that producers refuse, forks, lost errors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from capsules import Producer

torch: Any = pytest.importorskip("torch")


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


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_an_error_of_the_current_stream_is_a_bridge_error() -> None:
    """PyTorch without a device has no current stream there, and sets an exception that must not stay set."""
    done = run("""
import sys
sys.path.insert(0, "crates/bridge-python/tests")
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
    done = run("""
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
""")
    assert (done.returncode, done.stderr) == (0, "")


def test_arrays_that_numpy_will_make_read_only_are_read_only() -> None:
    parts = np.broadcast_arrays(np.zeros((3, 1)), np.zeros((3, 5)))
    assert parts[0].__array_interface__["data"][1], "NumPy has changed what these arrays are"
    with pytest.raises(tb.BridgeError, match="read-only"):
        tb.to_torch(parts[0], copy=False)


def test_subclasses_cross_by_their_memory_whatever_their_attributes_say() -> None:
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
