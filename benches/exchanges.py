"""The frameworks' own methods of passing tensors on, in this process and to another one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from truebridge._core import Target


class Framework(NamedTuple):
    """A framework's own methods."""

    #: Makes a tensor on the device of an array, and an array of a tensor.
    up: Callable[[Any], Any]
    down: Callable[[Any], Any]


def framework(name: str, device: str) -> Framework:
    """Import a framework."""
    if name == "torch":
        import torch

        return Framework(lambda array: torch.from_numpy(array).to(device), lambda x: x.cpu().numpy())
    if name == "cupy":
        import cupy

        return Framework(cupy.asarray, cupy.asnumpy)
    import tensorflow as tf

    def up(array: Any) -> Any:
        with tf.device(device.replace("cuda", "GPU")):
            return tf.convert_to_tensor(array)

    # A tensor on a device keeps the array that its first ``numpy`` made. This one is new each time.
    return Framework(up, lambda x: tf.identity(x).numpy())


def native(source: str, target: str) -> tuple[Callable[[Any], Any], str]:
    """Return the frameworks' own exchange in place, and its name."""
    import torch

    if "tensorflow" not in (source, target):
        return torch.from_dlpack, "`torch.from_dlpack`"
    import tensorflow as tf

    dlpack = tf.experimental.dlpack
    if source == "tensorflow":
        return lambda x: torch.from_dlpack(dlpack.to_dlpack(x)), "`tf.experimental.dlpack`"
    return lambda x: dlpack.from_dlpack(x.__dlpack__()), "`tf.experimental.dlpack`"


def settle(device: str) -> None:
    """Wait for the device: for the streams of all frameworks."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


class There:
    """The side of another process that opens: its frameworks, and the memory of the host that it has mapped."""

    def __init__(self, target: Target, device: str) -> None:
        """Import the target."""
        import numpy

        import truebridge as tb

        # PyTorch waits for the device. It comes before TensorFlow.
        settle(device)
        self.device, self.own = device, framework(target, device)
        self.opens: dict[str, Callable[[str], Any]] = {
            "ours": lambda text: tb.open(text, target),
            "theirs": lambda path: self.own.up(numpy.memmap(path, numpy.float32, "r+")),
        }

    def opened(self, way: str, ticket: str) -> int:
        """Open, and return nanoseconds."""
        start = time.perf_counter_ns()
        y = self.opens[way](ticket)
        settle(self.device)
        taken = time.perf_counter_ns() - start
        del y
        return taken

    def total(self, way: str, ticket: str) -> float:
        """Return the sum of the elements."""
        return float(self.own.down(self.opens[way](ticket)).sum(dtype="float64"))


#: The side of Python 3.7. What is opened is ready to be fed.
THERE37 = """
import time
class There:
    def opened(self, way, ticket):
        start = time.perf_counter_ns()
        y = tb.feed(tb.open(ticket))
        return time.perf_counter_ns() - start
"""
