"""Functions of TensorFlow that JAX differentiates. Imports both frameworks.

Arguments are converted in place. Results and gradients are copied: TensorFlow may keep them, and lets them
share memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from ..errors import of_kind
from ._in_jax import function_of
from ._of_tensorflow import Recorded, converted, on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of JAX that runs this one of TensorFlow."""
    return function_of(function, _run, (tf.Tensor, tf.Variable), "TensorFlow")


class Record(NamedTuple):
    """A node of TensorFlow's in JAX."""

    run: Recorded

    def pulled(
        self, wanted: Sequence[int], given: Sequence[int], known: list[Any], records: bool
    ) -> tuple[list[Any], Record | None]:
        """Return the gradients of the inputs ``wanted``, or ``None``, and if ``records`` how they were computed."""
        run = self.run.derived(wanted, given, known, records)
        return run.targets, Record(run._replace(sources=[*run.sources, None])) if records else None


def _run(called: Callable[[list[Any]], list[Any]], inputs: list[Any], records: bool) -> tuple[list[Any], Record | None]:
    if not tf.executing_eagerly():
        raise of_kind("argument", "this runs eagerly: call it outside of tf.function and of graphs")
    sources = converted(inputs)
    device = next((source.device for source in sources), None)
    tape = tf.GradientTape(persistent=records)
    with on(device), tape:
        views = sources
        if records:
            tape.watch([x for x in sources if x.dtype.is_floating or x.dtype.is_complex])
            # Each gets its own gradient: TensorFlow leaks a tensor that is the gradient of two inputs.
            views = [tf.reshape(view, view.shape) for view in sources]
        targets = [tf.convert_to_tensor(y) for y in called(views)]
    used = tape.watched_variables()
    if used:
        text = (
            f"the function reads the trainable variable {used[0].name:.100}, which would get no gradient: pass its "
            "value as an argument, with layer.stateless_call(trained, others, x) of Keras, or freeze it with "
            "layer.trainable = False"
        )
        raise of_kind("argument", text)
    return targets, Record(Recorded(tape, device, sources, targets, [])) if records else None
