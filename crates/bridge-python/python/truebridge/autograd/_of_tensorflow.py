"""Functions of TensorFlow whose runs are recorded, for nodes of other frameworks. Imports TensorFlow."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from .. import _core

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Recorded(NamedTuple):
    """What TensorFlow knows of a run."""

    #: A persistent tape, which goes on where gradients are differentiated: the function runs once.
    tape: Any
    #: Where the computation runs.
    device: str | None
    #: Tensors and variables, one for each input.
    sources: list[Any]
    #: Tensors, one for each output.
    targets: list[Any]
    #: The variable whose gradient trains parameters of PyTorch that the function uses, if there are any.
    anchors: list[Any]

    def derived(self, wanted: Sequence[int], given: Sequence[int], known: Sequence[Any], records: bool) -> Recorded:
        """Return the run that computes the gradients of the inputs ``wanted``: its outputs, some of them ``None``.

        ``known`` are the gradients of the outputs ``given``, tensors of another framework. They are inputs, after those
        of this run. The tape goes on if it ``records``.
        """
        views = converted(known)
        with on(self.device), _recording(self.tape) if records else contextlib.nullcontext():
            if records:
                self.tape.watch(views)
            targets = [self.targets[i] for i in given]
            sources = [*(self.sources[i] for i in wanted), *self.anchors]
            made = self.tape.gradient(targets, sources, output_gradients=views)[: len(wanted)]
            # Of the rows of a table that were read, TensorFlow makes slices.
            made = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in made]
        return self._replace(sources=[*self.sources, *views], targets=made)


def converted(tensors: Sequence[Any]) -> list[Any]:
    """Return tensors of another framework as eager tensors."""
    views = _core.convert_inside(list(tensors), "tensorflow", detach=True)
    # Each is its own object, so that a tensor that is passed twice has a gradient for each time.
    first = {id(view): i for i, view in reversed(list(enumerate(views)))}
    return [view if first[id(view)] == i else tf.identity(view) for i, view in enumerate(views)]


def on(device: str | None) -> Any:
    """Return the context in which TensorFlow computes on a device."""
    return contextlib.nullcontext() if device is None else tf.device(device)


@contextlib.contextmanager
def _recording(tape: Any) -> Iterator[None]:
    """Let the tape continue to record. TensorFlow warns of the cost; here the caller has requested it."""
    logger = tf.get_logger()
    quiet = _Quiet()
    logger.addFilter(quiet)
    try:
        with tape:
            yield
    finally:
        logger.removeFilter(quiet)


class _Quiet(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "GradientTape.gradient on a persistent tape" not in str(record.msg)
