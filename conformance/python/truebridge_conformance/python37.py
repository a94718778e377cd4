"""TensorFlow 1.15 under test in a Python 3.7, over ``truebridge_tf1``: run as a program, it serves the suite.

What it says is specified in ``conformance/src/processes/wire.rs``. Its tensors are arrays in shared memory, which
sessions take in place; what a session returns has its own memory. The file is Python 3.7 and imports nothing of its
own package, which is not.
"""

from __future__ import annotations

import gc
import json
import os
import struct
import sys
from typing import Any, BinaryIO

#: Names of ``tf.DType``, which the suite uses, too. The other dtypes of this series have no kernel for a fill.
NAMES = ("float32", "float64", "int32", "uint8", "int16", "int8", "complex64", "int64", "bool", "complex128", "float16")

#: Seconds that tickets are valid: each ends with its tensor.
TIME = 3600.0


class Subject:
    """The framework. A session reads every tensor, and makes what is filled."""

    def __init__(self) -> None:
        """Load TensorFlow, and build the graphs."""
        import numpy
        import tensorflow
        import truebridge_tf1

        self.np, self.tb, self.tf = numpy, truebridge_tf1, tensorflow.compat.v1
        self.tf.logging.set_verbosity("ERROR")
        self.graph = self.tf.Graph()
        self.session = self.tf.Session(graph=self.graph)
        self.graphs: dict[str, Any] = {}
        self.tensors: dict[int, Any] = {}
        self.tickets: dict[int, list[str]] = {}
        self.last = 0

    def of(self, dtype: str) -> Any:
        """Return the graph of a dtype: its input's handle, what is fetched, what is filled, and a fill's inputs."""
        if dtype not in self.graphs:
            with self.graph.as_default(), self.tf.device("/cpu:0"):
                x = self.tb.external_input(dtype, None)
                shape = self.tf.placeholder(self.tf.int32, [None])
                value = self.tf.placeholder(dtype, [])
                filled = self.tb.external_output(self.tf.fill(shape, value))
                self.graphs[dtype] = self.tb.handle_of(x), self.tf.identity(x), filled, (shape, value)
        return self.graphs[dtype]

    def shared(self, array: Any) -> tuple[Any, str]:
        """Copy an array into shared memory. Return it there, and its ticket, which lasts as long as the array."""
        ticket = self.tb.share(array, expires=TIME, writing="shared")
        return self.tb.open(ticket), ticket

    def publish(self, tensor: Any, own: str) -> tuple[Any, bytes]:
        """Share a tensor, which lies in the shared memory of its own ticket."""
        writing = "shared" if tensor.flags.writeable else "never"
        ticket = self.tb.share(tensor, expires=TIME, writing=writing)
        self.last += 1
        self.tensors[self.last], self.tickets[self.last] = tensor, [ticket, own]
        return {"made": {"id": self.last, "ticket": ticket, "address": self.address(tensor)}}, b""

    def address(self, tensor: Any) -> int:
        """Return where a tensor lies."""
        return int(tensor.__array_interface__["data"][0])

    def read(self, tensor: Any) -> Any:
        """Feed a tensor in place, and fetch it to the host, as sessions do."""
        handle, fetched, _, _ = self.of(tensor.dtype.name)
        return self.session.run(fetched, {handle: self.tb.feed(tensor, copy=False)})

    def filled(self, dtype: str, shape: tuple[int, ...], byte: int) -> tuple[Any, str]:
        """Return a tensor of equal bytes, made by a kernel and copied into shared memory, and its ticket."""
        _, _, output, (size, value) = self.of(dtype)
        numpy = self.np.dtype(dtype)
        element = self.np.frombuffer(bytes([byte]) * numpy.itemsize, numpy)[0]
        made = self.tb.take(self.session.run(output, {size: self.np.array(shape, self.np.int32), value: element}))
        return self.shared(made.numpy())

    def hello(self) -> tuple[Any, bytes]:
        """Return what this framework is and can do."""
        profile = {
            "name": "tensorflow1",
            "dtypes": NAMES,
            "rank": {"start": 0, "end": getattr(self.np, "MAXDIMS", 64)},
            "strides": "compact",
            "alignment": 64,
            "devices": ["cpu"],
            "keeps_read_only": True,
            "waits_on_export": False,
        }
        flags = dict.fromkeys(("negative_strides", "read_only", "unaligned", "writes", "gigabytes", "copies"), False)
        can = {"dtypes": NAMES, "defers": [], **flags}
        return {"hello": {"profile": profile, "device": "cpu", "can": can, "streams": []}}, b""

    def create(self, spec: Any, data: bytes) -> tuple[Any, bytes]:
        """Make a compact tensor."""
        array = self.np.frombuffer(data, spec["dtype"])
        count = 1
        for length in spec["shape"]:
            count *= length
        array = array[spec["offset"] : spec["offset"] + count].reshape(spec["shape"])
        return self.publish(*self.shared(array))

    def answer(self, name: str, given: Any, data: bytes) -> tuple[Any, bytes]:
        """Do what a request says. Return the answer, and the bytes that follow it."""
        if name == "hello":
            return self.hello()
        if name == "create":
            return self.create(given, data)
        if name == "allocate":
            return self.publish(*self.filled("uint8", (given,), 0))
        if name == "empty":
            return self.publish(*self.shared(self.np.zeros(given[1], given[0])))
        if name == "open":
            # A copy, because the other process takes its memory back, and freed memory cannot be fed.
            return self.publish(*self.shared(self.tb.open(given)))
        if name == "observe":
            tensor = self.tensors[given]
            strides = [1] * len(tensor.shape)
            for d in reversed(range(len(strides) - 1)):
                strides[d] = strides[d + 1] * max(tensor.shape[d + 1], 1)
            seen = {"dtype": tensor.dtype.name, "shape": tensor.shape, "strides": strides, "device": "cpu"}
            read_only = not tensor.flags.writeable
            return {"observed": {**seen, "address": self.address(tensor), "read_only": read_only}}, b""
        if name == "read":
            return "elements", self.read(self.tensors[given]).tobytes()
        if name == "fill":
            tensor = self.tensors[given[0]]
            return self.publish(*self.filled(tensor.dtype.name, tensor.shape, given[1]))
        if name == "snapshot":
            copy = self.np.frombuffer(self.read(self.tensors[given["from"]]).tobytes(), "uint8")
            return self.publish(*self.shared(copy))
        if name in ("drop", "drop_on_thread"):
            del self.tensors[given]
            for ticket in self.tickets.pop(given):
                self.tb.revoke(ticket, leases=False)
            return "done", b""
        if name == "settle":
            gc.collect()
            stats = self.tb.stats()
            return {"used": stats["leased"] - stats["released"]}, b""
        if name in ("note", "delay", "check"):
            return "done", b""
        return {"failed": ["framework", f"{name} is for devices with streams"]}, b""


def received(requests: BinaryIO) -> tuple[Any, bytes] | None:
    """Return the next request, and the bytes that follow it; ``None`` at the end."""
    lengths = requests.read(16)
    if len(lengths) < 16:
        return None
    text, data = struct.unpack("<QQ", lengths)
    return json.loads(requests.read(text)), requests.read(data)


def main() -> None:
    """Serve the suite at the standard input and output, until it closes its end."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    subject = Subject()
    while True:
        request = received(requests)
        if request is None:
            return
        said, data = request
        name, given = (said, None) if isinstance(said, str) else next(iter(said.items()))
        try:
            answer, data = subject.answer(name, given, data)
        except subject.tb.BridgeError as error:
            answer, data = {"failed": [error.kind, str(error)]}, b""
        except (ValueError, TypeError, subject.tf.errors.OpError) as error:
            answer, data = {"failed": ["framework", f"{type(error).__name__}: {error}"]}, b""
        text = json.dumps(answer).encode()
        answers.write(struct.pack("<QQ", len(text), len(data)) + text + data)
        answers.flush()


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    main()
