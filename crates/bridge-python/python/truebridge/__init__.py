"""Use tensors of one framework in another, in place.

``to_torch``, ``to_cupy``, ``to_numpy``, ``to_jax`` and ``to_tensorflow`` take a tensor of any framework that this
package knows, a DLPack capsule, or any object with ``__dlpack__`` or an array interface. The result shares the memory
and is safe to use in the target's current stream. When its last view is dropped, the owner reuses the memory in stream
order.

Examples
--------
>>> import torch
>>> import truebridge as tb
>>> t = torch.zeros(2, 3)
>>> a = tb.to_numpy(t)  # a numpy.ndarray over the memory of t
>>> a[0, 0] = 42
>>> t[0]
tensor([42.,  0.,  0.])
>>> tb.plan(a[:, ::-1], "torch")
<Plan: copy of 24 bytes on cpu by host because of negative strides>
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Literal

from . import _core
from ._core import (
    Copier,
    Loan,
    Plan,
    Ticket,
    convert,
    copier,
    copy,
    lend,
    plan,
    profile,
    record_stream,
    stats,
    # adapters: begin to
    to_cupy,
    to_jax,
    to_numpy,
    to_paddle,
    to_tensorflow,
    to_torch,
    # adapters: end
)
from ._core import __version__ as __version__
from ._frameworks import compiled as _compiled
from .errors import (
    BridgeBufferError,
    BridgeConnectionError,
    BridgeDTypeError,
    BridgeError,
    BridgeImportError,
    BridgeLayoutError,
    BridgeMemoryError,
    BridgePermissionError,
    BridgeRuntimeError,
    BridgeTypeError,
    BridgeValueError,
    BridgeWarning,
    ImmutableWarning,
)
from .errors import of_kind as _of_kind

#: Not ``open``, which would replace the built-in where a program imports ``*``, and not the functions of pairs.
__all__ = [
    "BridgeBufferError",
    "BridgeConnectionError",
    "BridgeDTypeError",
    "BridgeDebugWarning",
    "BridgeError",
    "BridgeImportError",
    "BridgeLayoutError",
    "BridgeMemoryError",
    "BridgePermissionError",
    "BridgeRuntimeError",
    "BridgeTypeError",
    "BridgeValueError",
    "BridgeWarning",
    "Copier",
    "ImmutableWarning",
    "Loan",
    "Plan",
    "Ticket",
    "bench",
    "call",
    "connect",
    "convert",
    "copier",
    "copy",
    "debug",
    "doctor",
    "lend",
    "load",
    "plan",
    "profile",
    "record_stream",
    "reshard",
    "revoke",
    "save",
    "serve",
    "share",
    "stats",
    "to_onnxruntime",
    "trace",
    # adapters: begin public
    "to_cupy",
    "to_jax",
    "to_numpy",
    "to_paddle",
    "to_tensorflow",
    "to_torch",
    # adapters: end
]


if TYPE_CHECKING:
    from . import autograd as autograd
    from . import diagnostics as diagnostics
    from . import files as files
    from . import jax as jax
    from . import processes as processes
    from . import ray as ray
    from . import tensorflow as tensorflow
    from ._core import Target as Target
    from ._frameworks.calls import call
    from ._frameworks.onnxruntime import to_onnxruntime
    from ._frameworks.shards import reshard
    from .diagnostics.bench import bench
    from .diagnostics.debug import BridgeDebugWarning, debug
    from .diagnostics.doctor import doctor
    from .diagnostics.trace import trace
    from .files import load, save
    from .processes import connect, revoke, serve, share
    from .processes import open as open

    # isort: off
    from ._frameworks.pairs import (
        # adapters: begin convert
        convert_cupy_to_jax as convert_cupy_to_jax,
        convert_cupy_to_numpy as convert_cupy_to_numpy,
        convert_cupy_to_paddle as convert_cupy_to_paddle,
        convert_cupy_to_pytorch as convert_cupy_to_pytorch,
        convert_cupy_to_tf as convert_cupy_to_tf,
        convert_jax_to_cupy as convert_jax_to_cupy,
        convert_jax_to_numpy as convert_jax_to_numpy,
        convert_jax_to_paddle as convert_jax_to_paddle,
        convert_jax_to_pytorch as convert_jax_to_pytorch,
        convert_jax_to_tf as convert_jax_to_tf,
        convert_numpy_to_cupy as convert_numpy_to_cupy,
        convert_numpy_to_jax as convert_numpy_to_jax,
        convert_numpy_to_paddle as convert_numpy_to_paddle,
        convert_numpy_to_pytorch as convert_numpy_to_pytorch,
        convert_numpy_to_tf as convert_numpy_to_tf,
        convert_paddle_to_cupy as convert_paddle_to_cupy,
        convert_paddle_to_jax as convert_paddle_to_jax,
        convert_paddle_to_numpy as convert_paddle_to_numpy,
        convert_paddle_to_pytorch as convert_paddle_to_pytorch,
        convert_paddle_to_tf as convert_paddle_to_tf,
        convert_pytorch_to_cupy as convert_pytorch_to_cupy,
        convert_pytorch_to_jax as convert_pytorch_to_jax,
        convert_pytorch_to_numpy as convert_pytorch_to_numpy,
        convert_pytorch_to_paddle as convert_pytorch_to_paddle,
        convert_pytorch_to_tf as convert_pytorch_to_tf,
        convert_tf_to_cupy as convert_tf_to_cupy,
        convert_tf_to_jax as convert_tf_to_jax,
        convert_tf_to_numpy as convert_tf_to_numpy,
        convert_tf_to_paddle as convert_tf_to_paddle,
        convert_tf_to_pytorch as convert_tf_to_pytorch,
        # adapters: end
    )

    # isort: on
else:
    Target = Literal[tuple(_core.FRAMEWORKS)]

    #: Imported at first use, to keep the import short: modules, and the modules that names are in. ``tensorflow`` needs
    #: NumPy, as TensorFlow does, and ``ray`` needs Ray.
    _MODULES = (
        "autograd",
        "diagnostics",
        "files",
        "jax",
        "processes",
        "ray",
        "tensorflow",
    )
    _LAZY = {
        "bench": "diagnostics.bench",
        "call": "_frameworks.calls",
        "doctor": "diagnostics.doctor",
        "reshard": "_frameworks.shards",
        "to_onnxruntime": "_frameworks.onnxruntime",
        "trace": "diagnostics.trace",
        **dict.fromkeys(("BridgeDebugWarning", "debug"), "diagnostics.debug"),
        **dict.fromkeys(("load", "save"), "files"),
        **dict.fromkeys(("connect", "open", "revoke", "serve", "share"), "processes"),
    }

    _PAIRS = "_frameworks.pairs"

    def _imported(name: str) -> object:
        try:
            return importlib.import_module(f".{name}", __name__)
        except OSError as error:
            import errno

            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            text = "too many files are open: raise the limit of open files (ulimit -n)"
            raise _of_kind("out_of_memory", text) from error

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return _imported(name)
        module = _LAZY.get(name, _PAIRS if name.startswith("convert_") else None)
        if module is not None and hasattr(_imported(module), name):
            found = getattr(_imported(module), name)
            globals()[name] = found
            return found
        text = f"module {__name__!r} has no attribute {name!r}"
        meant = name.lower().replace("2", "_").rpartition("_")[2]
        meant = f"to_{ {'onnx': 'onnxruntime', **_core.ALIASES}.get(meant, meant) }"
        if meant in __all__ and not name.startswith("from_"):
            text += f": did you mean {meant}?"
        elif name in ("to", "tensor", "asarray", "array") or name.startswith(("to_", "from_", "as_", "convert_")):
            text += ": call convert(x, target), or to_torch(x), to_numpy(x) and the like"
        else:
            text += ": dir(truebridge) lists what it has"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])

    def __dir__() -> list[str]:
        pairs = [name for name in vars(_imported(_PAIRS)) if name.startswith("convert_")]
        special = (name for name in globals() if name.startswith("__"))
        return sorted({*special, *__all__, *_MODULES, *_LAZY, *pairs, "errors"})


_compiled.watch()

if os.environ.get("TRUEBRIDGE_TRACE"):
    importlib.import_module(".diagnostics.trace", __name__).start()
if os.environ.get("TRUEBRIDGE_DEBUG"):
    importlib.import_module(".diagnostics.debug", __name__).start()
