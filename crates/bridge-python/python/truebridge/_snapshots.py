"""Values of a run that nothing changes later. ``truebridge_tf1`` ships this file as well (so it is Python 3.6).

The operations of a reference variable write to its memory even if it is shared, and the program may write to a tensor
that it has fed; ``tf.identity``, ``tf.reshape`` and the like share such memory. So a result is recorded after
TensorFlow's ``Snapshot``, which passes on memory that has no other reader, and copies any other.
"""

from typing import Any

#: The dtypes that ``Snapshot`` has a kernel for in every version, and the ones of the same size for others.
_AS = {"uint32": "int32", "uint64": "int64"}
_AS.update(
    (name, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16"),
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    )
)


def settled(tf: Any, y: Any) -> Any:
    """Return a tensor with the value of ``y`` when a run computes it, which nothing changes later."""
    dtype = y.dtype.base_dtype
    # TensorFlow computes nothing in the others: they are read from constants, or from what is fed.
    if dtype.name not in _AS:
        return y
    like = tf.as_dtype(_AS[dtype.name])
    if like == dtype:
        return tf.raw_ops.Snapshot(input=y)
    return tf.bitcast(tf.raw_ops.Snapshot(input=tf.bitcast(y, like)), dtype)
