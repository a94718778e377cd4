"""The operations at the edges of graphs. ``truebridge_tf1`` ships this file as well (so it is Python 3.6)."""

from typing import Any

from .errors import of_kind

INPUT, OUTPUT = "TruebridgeInput", "TruebridgeOutput"


def typed(tf: Any, dtype: Any, shape: Any) -> "tuple[Any, Any]":
    """Return a dtype and a shape as TensorFlow's own."""
    # PyTorch's are known by their text alone.
    name = str(dtype) if type(dtype).__module__ == "torch" else ""
    try:
        dtype = tf.as_dtype(name[len("torch.") :] if name else dtype)
    except (TypeError, ValueError) as error:
        text = f"{shown(dtype)} is not a dtype of TensorFlow: pass one such as tf.float32, or its name"
        raise of_kind("dtype", text) from error
    try:
        lengths = tf.TensorShape(shape)
        lengths.as_proto()  # a length that has no 64 bits is an error here, before one of TensorFlow's own
        return dtype, lengths
    except (TypeError, ValueError) as error:
        raise of_kind("argument", f"{shown(shape)} is not a shape: {str(error):.200}") from error


def handle_of(x: Any) -> Any:
    """Return the tensor of the graph that holds the handle of an ``external_input``."""
    # Read from the graph: TensorFlow treats a tensor with an attribute ``handle`` as a variable.
    operation: Any = getattr(x, "op", None)
    if getattr(operation, "type", None) == "EnsureShape":
        operation = operation.inputs[0].op
    if getattr(operation, "type", None) != INPUT:
        raise of_kind("argument", f"{shown(x)} is not an external_input of a graph, and has no handle")
    return operation.inputs[0]


def shown(object: Any) -> str:
    """Describe an object in an error, whatever its size."""
    return f"an object of type {type(object).__name__}"
