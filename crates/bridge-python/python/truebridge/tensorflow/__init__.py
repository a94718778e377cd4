"""Tensors of other frameworks inside TensorFlow's graphs: ``tf.function`` and graphs of version 1.

Eager tensors do not need this module: ``truebridge.to_tensorflow(x)`` returns one, which a ``tf.function`` accepts.
But a graph is built once and run many times, and the ``feed_dict`` of a session copies through the host. So a run is
fed a handle and returns one: a tensor of two ``int32`` in host memory. The tensor of the handle stays in place::

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        handle = tb.tensorflow.placeholder()
        x = tb.tensorflow.external_input(tf.float32, [None, 4], handle)
        y = tb.tensorflow.external_output(2 * x + 1)
        fetched = session.run(y, {handle: tb.tensorflow.feed(torch_tensor)})
        result = tb.tensorflow.take(fetched, "torch")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = ["Feed", "external_input", "external_output", "feed", "handle_of", "placeholder", "take"]

if TYPE_CHECKING:
    from . import v1 as v1
    from .edges import Feed, external_input, external_output, feed, handle_of, placeholder, take
else:

    def __getattr__(name: str) -> object:
        """Import the attribute's module: ``v1`` does not need NumPy, and the functions do."""
        if name in ("edges", "operations", "v1"):
            return importlib.import_module(f".{name}", __name__)
        if name in __all__:
            return getattr(importlib.import_module(".edges", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return [*__all__, "v1"]
