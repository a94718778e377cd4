"""TensorFlow 1.15 in this process, beside everything else, without the Python of its time.

The package of 1.15 is a wheel for Python 3.7. Its libraries need no Python, so they can be loaded here: name the folder
of the unpacked wheel. A model that was saved as a frozen graph then runs on tensors of other frameworks, in place::

    tb.tensorflow1.open("tensorflow-1.15.5/tensorflow_core")
    with tb.tensorflow1.Session(
        graph_def, inputs={"x:0": ("float32", [None, 4])}, outputs=["y:0"]
    ) as session:
        (y,) = session.run({"x:0": torch_tensor}, "torch")

What a session gives is a ``Tensor``, which ``tensor_bridge.convert`` and the like take as any other framework's, and
which can be fed to sessions again; ``tensor_bridge.convert(x, "tensorflow1")`` makes one of ``x``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import _core
from ._core import Tensor
from .errors import BridgeValueError

if TYPE_CHECKING:
    from types import TracebackType

    from ._core import Target

__all__ = ["Session", "Tensor", "open"]


def open(folder: str | bytes | os.PathLike[Any] | None = None) -> str:
    """Load TensorFlow 1.15 from the folder of its package, and give its version.

    The folder is ``tensorflow_core`` of the unpacked wheel, or the one that it is in. Without one it is what the
    environment variable ``TENSOR_BRIDGE_TENSORFLOW1`` names. A process has one TensorFlow 1.x; to open it again does
    nothing. TensorFlow 2 may be there as well.
    """
    version, _ = _core.tensorflow1_open(None if folder is None else os.fsdecode(folder))
    return version


class Session:
    """A graph that was saved, and what runs it. It may be run on several threads at once.

    ``graph_def`` is a serialised ``GraphDef``: bytes, or the message itself. ``inputs`` names tensors of the graph,
    such as ``"x:0"``, with the dtype and the shape of what will be fed in their place, in which lengths may be
    ``None``. A third entry names the device where it will be, such as ``"/device:CPU:0"``; without it that is the first
    GPU, or the host if the session has none. ``outputs`` names the tensors that a run gives.

    GPU memory is taken as it is needed unless ``memory_growth`` is ``False``, and at most ``memory_fraction`` of it;
    ``visible_devices`` says which GPUs of the driver's are used. In TensorFlow 1.x the first session settles this for
    the process. Operations without a kernel for a GPU run on the CPU.

    ``config`` is a ``ConfigProto``, the message or its bytes, and wins. It is taken as it is, with
    ``allow_soft_placement=False`` unless it says ``True``, and if it has ``gpu_options``, memory grows only where they
    or ``memory_growth`` say so: a ``False`` is not written in a message, and cannot be told from what it leaves out.
    """

    def __init__(
        self,
        graph_def: Any,
        inputs: Mapping[str, Any],
        outputs: str | Sequence[str],
        *,
        memory_growth: bool | None = None,
        memory_fraction: float | None = None,
        visible_devices: Sequence[int] | None = None,
        config: Any = None,
    ) -> None:
        """Open the session."""
        declared = [(name, *_declared(*([how] if isinstance(how, str) else how))) for name, how in inputs.items()]
        devices = None if visible_devices is None else list(visible_devices)
        self._session = _core.Session(
            _serialised(graph_def),
            declared,
            [outputs] if isinstance(outputs, str) else list(outputs),
            memory_growth,
            memory_fraction,
            devices,
            None if config is None else _serialised(config),
        )

    def run(self, feeds: Mapping[str, Any], target: Target | None = None, *, copy: bool | None = None) -> list[Any]:
        """Run the graph once, on tensors of any framework, which are fed in place.

        Every input has to be fed, by its name; the outputs come in the order in which they were declared, as tensors of
        the framework ``target``, or without one as ``Tensor``. ``copy`` and the errors are those of
        ``tensor_bridge.convert``.
        """
        given = [(name, _fed(x, copy)) for name, x in feeds.items()]
        results = self._session.run(given)
        return results if target is None else [_core.convert(y, target) for y in results]

    @property
    def devices(self) -> list[str]:
        """The names of the devices that it can use."""
        return self._session.devices

    def close(self) -> None:
        """End the session. Results stay valid."""
        self._session.close()

    def __enter__(self) -> Session:
        """Close it at the end of a ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def _fed(x: Any, copy: bool | None) -> Tensor:
    if isinstance(x, Tensor) and not copy:
        return x
    fed: Tensor = _core.convert(x, "tensorflow1", copy=copy)
    return fed


def _serialised(message: Any) -> bytes:
    if isinstance(message, bytes):
        return message
    if not hasattr(message, "SerializeToString"):
        error = BridgeValueError(f"{message!r:.80} is no message: pass the bytes of a file, or the message itself")
        error.kind = "argument"
        raise error
    serialised: bytes = message.SerializeToString()
    return serialised


def _declared(
    dtype: Any, shape: Sequence[int | None] | None = None, device: str | None = None
) -> tuple[str, list[int | None] | None, str | None]:
    # "float32", torch.float32, tf.float32, numpy.float32 and numpy.dtype("float32").
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", str(dtype)))
    return name.rpartition(".")[2], None if shape is None else list(shape), device
