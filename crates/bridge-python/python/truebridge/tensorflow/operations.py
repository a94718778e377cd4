"""Edges of graphs: their operations, and results that nothing changes later.

``truebridge_tf1`` ships this file as well (so it is Python 3.6).
"""

from typing import Any

from ..errors import of_kind

INPUT, OUTPUT = "TruebridgeInput", "TruebridgeOutput"

#: The dtypes that ``Snapshot`` has a kernel for in every version, and the ones of the same size for others.
_AS = {"uint32": "int32", "uint64": "int64"}
_AS.update(
    (name, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16"),
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    )
)


def typed(tf: Any, dtype: Any, shape: Any) -> "tuple[Any, Any]":
    """Return a dtype and a shape as TensorFlow's own."""
    # PyTorch's are known only by their text.
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


def settled(tf: Any, y: Any) -> Any:
    """Return a tensor with the value of ``y`` when a run computes it, which nothing changes later.

    The operations of a reference variable write to its memory even if it is shared, and the program may write to a
    tensor that it has fed; ``tf.identity``, ``tf.reshape`` and the like share such memory. So a result is recorded
    after TensorFlow's ``Snapshot``, which passes on memory that has no other reader, and copies any other.
    """
    dtype = y.dtype.base_dtype
    # TensorFlow computes nothing in the others: they are read from constants, or from what is fed.
    if dtype.name not in _AS:
        return y
    like = tf.as_dtype(_AS[dtype.name])
    if like == dtype:
        return tf.raw_ops.Snapshot(input=y)
    return tf.bitcast(tf.raw_ops.Snapshot(input=tf.bitcast(y, like)), dtype)
