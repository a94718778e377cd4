"""TensorFlow 1.15 in this process, without the Python that it was made for.

The package of 1.15 is a wheel for Python 3.7. Its libraries do not need Python, so any Python can load them from the
folder of the unpacked wheel. A frozen graph, or a saved model, then runs on tensors of other frameworks, in place::

    tb.tensorflow.v1.open("tensorflow-1.15.5/tensorflow_core")
    with tb.tensorflow.v1.Session(
        graph_def, inputs={"x:0": ("float32", [None, 4])}, outputs=["y:0"]
    ) as session:
        (y,) = session.run({"x:0": torch_tensor}, "torch")

A session returns each result as a ``Tensor``, which ``truebridge.convert`` and the like accept, and which can be fed
to sessions again; ``truebridge.convert(x, "tensorflow1")`` returns ``x`` as one.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import _core
from .._core import Tensor
from ..errors import of_kind

if TYPE_CHECKING:
    from types import TracebackType

    from .._core import Target

__all__ = ["Session", "Tensor", "open"]


def open(folder: str | bytes | os.PathLike[Any] | None = None) -> str:
    """Load TensorFlow 1.15 from the folder of its package.

    A process can have one TensorFlow 1.x, also next to TensorFlow 2. Opening it again does nothing.

    Parameters
    ----------
    folder : str or path, optional
        ``tensorflow_core`` of the unpacked wheel, or its parent. The default is the folder that the environment
        variable ``TRUEBRIDGE_TENSORFLOW1`` names.

    Returns
    -------
    str
        The version.

    Raises
    ------
    BridgeImportError
        If there is no TensorFlow 1.15 in the folder, or another one was opened before.

    Examples
    --------
    >>> import truebridge as tb
    >>> tb.tensorflow.v1.open("tensorflow1")
    '1.15.5'
    """
    version, _ = _core.tensorflow1_open(None if folder is None else os.fsdecode(folder))
    return version


class Session:
    """A frozen graph that can be run, on several threads at once. ``of_saved_model`` opens a saved model.

    The end of a ``with`` block closes it.

    Parameters
    ----------
    graph_def : bytes or GraphDef
        The graph, serialised or as a message.
    inputs : dict of str to dtype or (dtype, shape) or (dtype, shape, device)
        The tensors of the graph that a run replaces by the fed ones, such as ``"x:0"``. Lengths of the shape, in
        elements, may be ``None``. The device is that of the fed tensor, such as ``"/device:CPU:0"``; the default is the
        first GPU, or the host if the session has none.
    outputs : str or sequence of str
        The tensors that a run returns.
    memory_growth : bool, optional
        GPU memory is taken as it is needed, unless this is ``False``.
    memory_fraction : float, optional
        The part of the GPU's memory that is taken at most: above 0, at most 1.
    visible_devices : sequence of int, optional
        The driver's numbers of the GPUs to use.
    config : ConfigProto or bytes, optional
        The message or its bytes. It takes precedence, and is used as it is, with ``allow_soft_placement=False`` unless
        it says ``True``. If it has ``gpu_options``, memory grows only if they or ``memory_growth`` say so: a message
        does not contain ``False``, which cannot be distinguished from a missing field.

    Raises
    ------
    BridgeImportError
        If no TensorFlow 1.15 is open.
    BridgeError
        If an argument has no such value, or TensorFlow refuses the graph.

    Notes
    -----
    In TensorFlow 1.x the first session sets the options about GPUs for the process. Operations without a kernel for a
    GPU run on the CPU.

    Examples
    --------
    >>> import pathlib, torch
    >>> import truebridge as tb
    >>> version = tb.tensorflow.v1.open("tensorflow1")
    >>> graph_def = pathlib.Path("model.pb").read_bytes()  # y = 2 * x + 1
    >>> with tb.tensorflow.v1.Session(graph_def, {"x:0": ("float32", [None])}, "y:0") as session:
    ...     session.run({"x:0": torch.arange(3.0)}, "torch")
    [tensor([1., 3., 5.])]
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
        declared = [(name, *_declared(name, how)) for name, how in _named(inputs, "inputs")]
        self._session = _core.Session(
            _serialised(graph_def),
            declared,
            _names(outputs, "outputs"),
            *_options(memory_growth, memory_fraction, visible_devices, config),
        )

    @classmethod
    def of_saved_model(
        cls,
        folder: str | bytes | os.PathLike[Any],
        signature: str = "serving_default",
        *,
        tags: Sequence[str] = ("serve",),
        memory_growth: bool | None = None,
        memory_fraction: float | None = None,
        visible_devices: Sequence[int] | None = None,
        config: Any = None,
    ) -> Session:
        """Open a signature of a saved model, with its variables restored and its tables filled.

        Parameters
        ----------
        folder : str or path
            The folder that holds ``saved_model.pb``.
        signature : str, optional
            The signature. A run is fed by the names of its inputs, and returns the outputs in the order of their names.
        tags : sequence of str, optional
            The graph with exactly these tags is loaded.
        memory_growth, memory_fraction, visible_devices, config
            As for ``Session``.

        Returns
        -------
        Session
            The session. ``outputs`` lists the names of the outputs.

        Raises
        ------
        BridgeImportError
            If no TensorFlow 1.15 is open.
        BridgeError
            If there is no such model or signature, or TensorFlow refuses it.
        """
        session = cls.__new__(cls)
        options = _options(memory_growth, memory_fraction, visible_devices, config)
        (signature,), tags = _names(signature, "signature"), _names(tags, "tags")
        path = os.fsdecode(folder)
        if not os.path.isdir(path):
            raise of_kind(
                "argument", f"{path:.300} is not a folder: name the folder of a saved model, with saved_model.pb"
            )
        session._session = _core.Session.of_saved_model(path, signature, tags, *options)
        return session

    def run(self, feeds: Mapping[str, Any], target: Target | None = None, *, copy: bool | None = None) -> list[Any]:
        """Run the graph once, on tensors that are fed in place.

        Parameters
        ----------
        feeds : dict of str to tensor
            A tensor of any framework for each input, by its name.
        target : Target, optional
            The framework of the results. The default is ``"tensorflow1"``.
        copy : bool, optional
            As for ``convert``, of the fed tensors. The results are not copied again: they are memory that no other
            tensor has.

        Returns
        -------
        list of tensor
            The outputs, in the order of their declaration. They do not change later, and you may write to them: an
            output that is a variable, a constant, a fed tensor or a part of these is copied.

        Raises
        ------
        BridgeError
            If an input is missing or does not fit, if TensorFlow fails, and as for ``convert``.
        """
        fed = [(name, _fed(name, x, copy)) for name, x in _named(feeds, "feeds")]
        results = self._session.run(fed, target)
        return results if target is None else [_core.convert_inside(y, target) for y in results]

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs, in the order in which ``run`` returns them."""
        return self._session.outputs

    @property
    def devices(self) -> list[str]:
        """The full names of the devices that it can use."""
        return self._session.devices

    def close(self) -> None:
        """Close the session. Results stay valid."""
        self._session.close()

    def __enter__(self) -> Session:
        """Return the session, which the end of the ``with`` block closes."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the session."""
        self.close()


def _options(
    memory_growth: bool | None, memory_fraction: float | None, visible_devices: Sequence[int] | None, config: Any
) -> tuple[bool | None, float | None, list[int] | None, bytes | None]:
    if memory_growth not in (None, False, True):
        raise of_kind("argument", f"memory_growth is {memory_growth!r:.80}: it must be True, False or None")
    if memory_fraction is not None and not isinstance(memory_fraction, int | float):
        raise of_kind("argument", f"memory_fraction is {memory_fraction!r:.80}: pass a number above 0, at most 1")
    devices = None
    if visible_devices is not None:
        try:
            devices = [operator.index(number) for number in visible_devices]
        except TypeError:
            devices = [-1]
        if not all(0 <= number < 1 << 32 for number in devices):
            text = f"visible_devices is {visible_devices!r:.80}: pass the driver's numbers of GPUs, from 0 on, or []"
            raise of_kind("argument", text)
    growth = None if memory_growth is None else bool(memory_growth)
    return growth, memory_fraction, devices, None if config is None else _serialised(config)


def _named(given: Any, what: str) -> Iterable[tuple[str, Any]]:
    """Return the items of a dict by names."""
    if not isinstance(given, Mapping) or not all(map(_is_text, given)):
        raise of_kind("argument", f'{what} is {given!r:.80}: pass a dict by names of tensors, such as "x:0"')
    return given.items()


def _is_text(name: Any) -> bool:
    """Return whether a name can be passed on: half a surrogate pair is not text."""
    return isinstance(name, str) and not any("\ud800" <= letter <= "\udfff" for letter in name)


def _names(given: Any, what: str) -> list[str]:
    """Return one name, or several, as a list."""
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(map(_is_text, names)):
        raise of_kind("argument", f"{what} is {given!r:.80}: pass a str, or several where there can be")
    return list(names)


def _fed(name: str, x: Any, copy: bool | None) -> Tensor:
    fed = x if isinstance(x, Tensor) and not copy else _core.convert_inside(x, "tensorflow1", copy=copy)
    if not isinstance(fed, Tensor):
        text = f"the input {name} is fed a container of type {type(x).__name__}: feed one tensor by each name"
        raise of_kind("not_a_tensor", text)
    return fed


def _serialised(message: Any) -> bytes:
    if isinstance(message, bytes):
        return message
    if not hasattr(message, "SerializeToString"):
        raise of_kind("argument", f"{message!r:.80} is not a message: pass the bytes of a file, or the message itself")
    serialised: bytes = message.SerializeToString()
    return serialised


def _declared(name: str, how: Any) -> tuple[str, list[int | None] | None, str | None]:
    """Return dtype, shape and device of an input."""
    items = how if isinstance(how, tuple | list) else (how,)
    if not 1 <= len(items) <= 3:
        text = (
            f"the input {name} is declared by {len(items)} items: pass dtype, (dtype, shape) or (dtype, shape, device)"
        )
        raise of_kind("argument", text)
    dtype, shape, device = (*items, None, None)[:3]
    # "float32", torch.float32, tf.float32, numpy.float32 and numpy.dtype("float32").
    dtype = dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", str(dtype)))
    if not (device is None or _is_text(device)):
        text = f'the device of the input {name} is {device!r:.80}: pass a name, such as "/device:CPU:0"'
        raise of_kind("argument", text)
    return str(dtype).rpartition(".")[2], _lengths(name, shape), device


def _lengths(name: str, shape: Any) -> list[int | None] | None:
    try:
        if hasattr(shape, "as_list"):  # a TensorShape, of numbers or of Dimensions
            shape = None if shape.rank is None else shape.as_list()
        lengths = None if shape is None else [None if n is None else operator.index(n) for n in shape]
        if not all(n is None or 0 <= n < 1 << 63 for n in lengths or []):
            raise ValueError("the lengths of a shape are below 2^63")
        return lengths
    except (TypeError, ValueError) as error:
        text = f"the shape of the input {name} is {shape!r:.80}: pass lengths, with None for those that vary"
        raise of_kind("argument", text) from error
