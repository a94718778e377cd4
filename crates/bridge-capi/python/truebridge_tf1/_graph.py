"""The operations, in graphs and in eager execution."""

import ctypes
import threading
from typing import Any, Dict, Optional

from ._common.operations import INPUT, OUTPUT
from ._library import library
from .errors import of_kind

SUPPORTED = "supported is TensorFlow 1.15 (pip install tensorflow==1.15.5, for Python 3.6 and 3.7)"

#: Returns TensorFlow's stream and the driver's number of the GPU that it runs on, or -1.
DEVICE = "TruebridgeDevice"


def tensorflow() -> Any:
    """Return TensorFlow, of the one version that is supported."""
    try:
        import tensorflow as tf
    except ImportError as error:
        raise of_kind("missing", f"tensorflow cannot be imported ({error}): {SUPPORTED}") from error
    version = getattr(tf, "__version__", "without a version")
    if not version.startswith("1.15."):
        text = "this is TensorFlow {}: {}; for TensorFlow 2 there is the package truebridge"
        raise of_kind("version", text.format(version, SUPPORTED))
    return tf


class Operations:
    """The operations as TensorFlow knows them, registered once in a process."""

    _made: "Optional[Operations]" = None
    _making = threading.Lock()

    def __init__(self) -> None:
        """Register them, in Python as well."""
        tf = self.tf = tensorflow()
        from tensorflow.core.framework import op_def_pb2
        from tensorflow.python.framework import op_def_library, op_def_registry

        # It lives as long as the process, so it is never dropped.
        self.runtime = ctypes.c_void_p()
        library().runtime_loaded(1, ctypes.byref(self.runtime))
        graph, definitions = tf.Graph(), op_def_pb2.OpList()
        definitions.op.extend([graph._get_op_def(name) for name in (INPUT, OUTPUT)])
        op_def_registry.register_op_list(definitions)
        self._library = op_def_library.OpDefLibrary()
        self._library.add_op_list(definitions)
        self._gpus: Dict[int, str] = {}

    @classmethod
    def get(cls) -> "Operations":
        """Return those of this process."""
        if cls._made is None:
            with cls._making:
                if cls._made is None:
                    cls._made = cls()
        return cls._made

    def gpu(self, number: int) -> str:
        """Return the eager context's name of the driver's GPU ``number``.

        With ``visible_device_list`` and the like, TensorFlow's numbers differ from the driver's.
        """
        if number not in self._gpus:
            from tensorflow.python.eager import context

            for i in range(context.context().num_gpus()):
                name = f"/device:GPU:{i}"
                with self.tf.device("/cpu:0"):
                    zero = self.tf.constant(0.0)
                _, found = self.execute(DEVICE, "truebridge_device", name, zero.gpu(i)).numpy()
                self._gpus[int(found)] = name
        if number not in self._gpus:
            shown = ", ".join(f"cuda:{known}" for known in sorted(self._gpus)) or "no GPU"
            raise of_kind("device", f"the tensor is on cuda:{number}, and TensorFlow shows {shown} in this process")
        return self._gpus[number]

    def add(self, operation: str, name: str, **arguments: Any) -> Any:
        """Add the operation to the current graph and return its output."""
        return self._library.apply_op(operation, name=name, **arguments)

    def execute(self, operation: str, name: str, device: Optional[str], argument: Any, **attributes: int) -> Any:
        """Execute the operation on the device and return its output."""
        from tensorflow.python.eager import context, execute

        pairs = tuple(part for pair in attributes.items() for part in pair)
        with self.tf.device(device):
            made = execute.execute(operation.encode(), 1, [argument], pairs, context.context(), name)
        if context.context().is_async():
            # A tensor that is fed need not live longer than this call.
            context.async_wait()
        return made[0]
