"""Random numbers of TensorFlow in functions that PyTorch runs again. Imports both frameworks.

``torch.utils.checkpoint`` runs a function again in the backward, with PyTorch's generators as they were at first. Those
of TensorFlow cannot be set back: each operation has one inside its compiled kernel. So a second run that draws from a
generator is an error. Random numbers that are computed from a seed are the same in each run.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import tensorflow as tf
import torch
from tensorflow.python.eager import context
from tensorflow.python.framework import op_callbacks

from ..errors import of_kind

#: TensorFlow replaces a function of its module while a thread watches.
_LOCK = threading.RLock()

#: How the names of operations begin whose generator is a variable. Others with a generator have an attribute ``seed2``.
_WITH_VARIABLE = ("Rng", "StatefulStandardNormal", "StatefulTruncatedNormal", "StatefulUniform", "StatefulRandom")
_OTHERS = ("NonDeterministicInts", "RiscRandomUniform")

#: What Keras draws with: it computes from a seed, which it counts up in a variable of integers.
_FROM_A_SEED, _COUNTS = "StatelessRandom", "an assignment to integers"
_INTEGERS = {dtype.as_datatype_enum for dtype in (tf.int32, tf.int64, tf.uint32, tf.uint64)}


class Draws:
    """Watches what TensorFlow runs, if PyTorch runs it inside of a backward."""

    def __init__(self) -> None:
        self.watches = torch._C._current_graph_task_id() != -1
        self.seen: set[str] = set()

    def __enter__(self) -> None:
        if self.watches:
            _LOCK.acquire()
            op_callbacks.add_op_callback(self._see)

    def __exit__(self, *raised: object) -> None:
        if self.watches:
            op_callbacks.remove_op_callback(self._see)
            _LOCK.release()

    def check(self) -> None:
        """Refuse results that were drawn again. A checkpoint that has what it needs stops before, and uses none."""
        drawn = self.seen - {_FROM_A_SEED, _COUNTS}
        if drawn or {_FROM_A_SEED, _COUNTS} <= self.seen:
            text = (
                "PyTorch runs this function of TensorFlow again in the backward, as torch.utils.checkpoint does, and "
                f"it draws other random numbers than at first ({', '.join(sorted(drawn)) or 'a generator of Keras'}): "
                "draw them from a seed that is an argument, with tf.random.stateless_uniform or "
                "tf.nn.experimental.stateless_dropout, or leave the function out of the checkpoint"
            )
            raise of_kind("argument", text)

    def _see(
        self, name: str | bytes, inputs: Any, attributes: Any, outputs: Any, op_name: Any = None, graph: Any = None
    ) -> None:
        if graph is None:
            name = name.decode() if isinstance(name, bytes) else name
            known = dict(zip(attributes[::2], attributes[1::2], strict=True))
            self.seen |= _drawn(name, known.get("dtype"), "seed2" in known, known.get("dropout", 1.0)) | _in_function(
                name
            )


def _drawn(name: str, dtype: Any, seeded: bool, dropout: float) -> frozenset[str]:
    """Return what an operation contributes."""
    if name.startswith(_FROM_A_SEED):
        return frozenset([_FROM_A_SEED])
    if name.startswith("Assign") and dtype in _INTEGERS:
        return frozenset([_COUNTS])
    if name.startswith(_WITH_VARIABLE) or name in _OTHERS or (seeded and dropout):
        return frozenset([name])
    return frozenset()


@functools.cache
def _in_function(name: str) -> frozenset[str]:
    """Return what the operations of a compiled function contribute, and those of the functions that it calls."""
    if not context.context().has_function(name):
        return frozenset()
    found: frozenset[str] = frozenset()
    for node in context.context().get_function_def(name).node_def:
        attributes = node.attr
        dropout = attributes["dropout"].f if "dropout" in attributes else 1.0
        dtype = attributes["dtype"].type if "dtype" in attributes else None
        found |= _drawn(node.op, dtype, "seed2" in attributes, dropout) | _in_function(node.op)
        for value in attributes.values():
            for function in [value.func, *value.list.func]:
                found |= _in_function(function.name)
    return found
