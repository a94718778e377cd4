"""Functions of JAX as nodes of TensorFlow's tapes and graphs. Imports both frameworks.

Arguments are converted in place. Results and gradients are copied: arrays of JAX may share their memory, and are what
its derivatives are computed from; TensorFlow lets variables share memory that it writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import tensorflow as tf

from .. import _core
from ..errors import of_kind
from ._in_tensorflow import Call, Made, function_of
from ._leaves import filled
from ._of_jax import Functions, Run, differentiable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def wrapped(function: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
    """Return the function of TensorFlow that runs this one of JAX."""
    functions = Functions(function)
    return function_of(lambda call, inputs: _run(functions, call, inputs), jax.Array, "JAX", outputs)


def _run(functions: Functions, call: Call, inputs: list[Any]) -> Made:
    # The two flatten containers in their own orders.
    order, tree = jax.tree.flatten(tf.nest.pack_sequence_as(call.structure, range(len(call.leaves))))
    at = [k for k, i in enumerate(order) if i in call.at]
    computation = functions.of([call.leaves[i] for i in order], at, tree)
    arrays = _converted(inputs)
    run = computation.recorded([arrays[call.at.index(order[k])] for k in at])
    flat = call.flat(run.results)
    number = {id(x): i for i, x in enumerate(run.outputs)}
    inner = [at.index(order.index(i)) for i in call.at]
    outer = [None if y is None else number[id(y)] for y in flat]
    return Made(run.results, flat, Recorded(run, inner, outer), False)


class Recorded:
    """A run of JAX: for each input and output of a node the number of that of the run, or ``None``."""

    def __init__(self, run: Run, inner: Sequence[int | None], outer: Sequence[int | None]) -> None:
        self.run = run
        self.inner = inner
        self.outer = outer

    def reordered(self, inputs: Sequence[int | None], outputs: Sequence[int]) -> Recorded:
        """Return the same with these inputs and outputs. ``None`` stands for an input that has no gradient."""
        inner = [None if i is None else self.inner[i] for i in inputs]
        return Recorded(self.run, inner, [self.outer[i] for i in outputs])

    def differentiated(
        self, given: Sequence[int], known: list[Any], *, adds: bool = True
    ) -> tuple[list[Any], Callable[[], Recorded]]:
        """Return the gradients of the inputs, or ``None``, and what differentiates them.

        ``known`` are the gradients of the outputs ``given``. ``adds`` means nothing here: JAX has no parameters.
        """
        at = [k for k, i in enumerate(given) if self.outer[i] in self.run.linear.form.depends]
        outputs = [i for k in at if (i := self.outer[given[k]]) is not None]
        reached = self.run.reached([i for i in self.inner if i is not None], outputs)
        arrays = _converted([known[k] for k in at])
        made = dict(zip(reached, self.run.gradients(reached, outputs, arrays), strict=True)) if reached else {}

        def again() -> Recorded:
            run = self.run.pulled(reached, outputs, arrays)
            count = len(self.run.inputs)
            sent = filled([None] * len(known), at, range(count, count + len(at)))
            outer = [reached.index(i) if i in made else None for i in self.inner]
            return Recorded(run, [*self.inner, *sent], outer)

        return [None if i is None else made.get(i) for i in self.inner], again

    @staticmethod
    def memory_for(beside: Any) -> Any:
        """Return eight bytes of fresh memory on the device of a tensor."""
        return jax.numpy.zeros(8, jax.numpy.uint8, device=_core.convert_inside(beside, "jax").device)


def _converted(tensors: Sequence[Any]) -> list[Any]:
    """Return eager tensors as arrays on one device. TensorFlow keeps integers on the host."""
    arrays = _core.convert_inside(list(tensors), "jax")
    devices = {x.device for x in arrays if differentiable(x)}
    if len(devices) > 1:
        raise of_kind(
            "device", f"tensors are on {' and '.join(sorted(map(str, devices)))}: move them to one device first"
        )
    return [jax.device_put(x, device) if x.device != device else x for device in devices for x in arrays] or arrays
