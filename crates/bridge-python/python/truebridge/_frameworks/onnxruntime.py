"""Tensors for sessions of ONNX Runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _core
from ..errors import of_kind

if TYPE_CHECKING:
    import onnxruntime

_CUDA = "CUDAExecutionProvider"
#: The dtypes that ONNX Runtime takes by DLPack. It has bool, which its DLPack lacks.
_DTYPES = frozenset(
    ["bfloat16", "bool", *(f"float{bits}" for bits in (16, 32, 64))]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
)


def to_onnxruntime(
    x: Any, session: Any = None, *, copy: bool | None = None, read_only: bool = False
) -> onnxruntime.OrtValue:
    """Return an ``OrtValue`` of ONNX Runtime over the memory of ``x``, as an input or an output of ``session``.

    Parameters
    ----------
    x : tensor
        As for ``to_torch``.
    session : onnxruntime.InferenceSession, optional
        The session that the value is for. A tensor on a CUDA device needs it.
    copy : bool, optional
        As for ``to_torch``. A copy is needed where ``x`` is not compact in row-major order.
    read_only : bool, optional
        Whether you promise that the value is only an input. Then it may be of read-only memory, which ONNX Runtime
        cannot mark.

    Returns
    -------
    onnxruntime.OrtValue
        In place, or a copy. It keeps the memory.

    Raises
    ------
    BridgeError
        As for ``to_torch``. ``kind`` is ``"argument"`` for a tensor on a CUDA device where the stream of the session
        is not known, and ``"dtype"`` for a dtype that ONNX Runtime does not take.

    Notes
    -----
    On a CUDA device the value is ready in the compute stream of the session, and the owner of the memory waits for that
    stream when the value is dropped. ONNX Runtime does not expose its stream: make one, and pass its handle to the
    session as the option ``user_compute_stream`` of ``CUDAExecutionProvider``. A run waits for its results, so
    ``to_torch`` takes them in order.

    See Also
    --------
    lend : for other libraries.

    Examples
    --------
    >>> import onnxruntime
    >>> import torch
    >>> import truebridge as tb
    >>> value = tb.to_onnxruntime(torch.ones(2, 3))
    >>> value.data_type(), value.shape()
    ('tensor(float)', [2, 3])
    >>> tb.to_torch(value)
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    try:
        from onnxruntime import OrtValue
    except ImportError as error:
        is_there = not isinstance(error, ModuleNotFoundError)
        text = f"cannot import onnxruntime: {error}" if is_there else "install onnxruntime: pip install onnxruntime"
        raise of_kind("missing", text) from error
    stream = None if session is None else _compute_stream(session)
    loan = _core.lend(x, stream, copy=copy, order="C", read_only=read_only)
    if not isinstance(loan, _core.Loan):
        raise of_kind("argument", "one value is one tensor: pass the tensors of a container one by one")
    if loan.stream is not None and stream is None:
        raise of_kind(
            "argument",
            "the stream of the session is not known: pass the session, and make it with the option user_compute_stream"
            f" of {_CUDA}, the handle of a CUDA stream",
        )
    return _value(OrtValue, loan)


def _value(kind: type[onnxruntime.OrtValue], loan: _core.Loan) -> onnxruntime.OrtValue:
    if loan.dtype_name not in _DTYPES:
        raise of_kind("dtype", f"ONNX Runtime has no dtype {loan.dtype_name} in DLPack: cast the tensor first")
    if loan.dtype_name != "bool":
        return kind.from_dlpack(loan)
    if loan.stream is not None:
        raise of_kind("dtype", "ONNX Runtime cannot take bool on a device by DLPack: cast the tensor to uint8 first")
    import numpy

    return kind.ortvalue_from_numpy(numpy.asarray(loan))


def _compute_stream(session: Any) -> int | None:
    """Return the stream that the program has made for the session; ``None`` where there is none."""
    if not hasattr(session, "get_provider_options"):
        kind = type(session).__name__
        raise of_kind("argument", f"session is a {kind}: pass the InferenceSession that the value is for")
    options = session.get_provider_options().get(_CUDA, {})
    # The address as text, "0" where none was given.
    return int(options.get("user_compute_stream") or "0", 0) or None
