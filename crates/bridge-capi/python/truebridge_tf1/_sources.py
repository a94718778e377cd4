"""Tensors that can be fed: NumPy arrays, DLPack capsules and their producers, and memory of CUDA devices."""

import ctypes
import sys
from typing import Any, Optional, Sequence

import numpy as np

from . import _dtypes
from ._library import Device, Memory, Owned, library
from .errors import BridgeError, of_kind

CPU, CUDA = 1, 2

#: CUDA's legacy default stream. Producers order their work before it.
LEGACY = 1


def exported(x: Any) -> Owned:
    """Return ``x`` as a tensor of the library, which keeps ``x`` alive."""
    if isinstance(x, np.ndarray):
        return _of_numpy(x)
    if type(x).__name__ == "PyCapsule":
        return _of_capsule(x)
    if isinstance(getattr(x, "_opened", None), Owned):
        shared: Owned = x.exported()
        return shared
    _refuse(x)
    speaks = hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")
    interface = getattr(x, "__cuda_array_interface__", None)
    # With DLPack the producer orders its work, so it comes first unless the interface names the stream.
    if interface is not None and ("stream" in interface or not speaks):
        return _of_interface(x, interface)
    if speaks:
        return _of_producer(x)
    text = (
        "{}.{} is not a tensor: pass a NumPy array, a DLPack capsule, or an object with __dlpack__ or "
        "__cuda_array_interface__"
    )
    raise of_kind("not_a_tensor", text.format(type(x).__module__, type(x).__name__))


def copied(x: Any) -> Optional[Any]:
    """Return a compact copy of ``x`` by its own framework, on its device, or ``None`` where it makes no copies."""
    torch = _torch(x)
    try:
        if torch is not None:
            return x.clone(memory_format=torch.contiguous_format)
        copy = getattr(x, "copy", None)
        return copy() if callable(copy) else None
    except Exception as error:
        raise _raised(error) from error


def _torch(x: Any) -> Any:
    """Return PyTorch if ``x`` is one of its tensors."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, getattr(torch, "Tensor", ())) else None


def _refuse(x: Any) -> None:
    """Refuse tensors of PyTorch that cannot be exported, with advice."""
    if _torch(x) is None:
        return
    if x.requires_grad:
        raise of_kind("requires_grad", "the tensor takes part in automatic differentiation: call .detach() first")
    if x.is_sparse or x.is_quantized:
        text = "a sparse or quantised tensor has no plain memory: call .to_dense() or .dequantize() first"
        raise of_kind("not_a_tensor", text)


def resolved(x: Any, copy: Optional[bool]) -> Any:
    """Return ``x``, or a copy by PyTorch where PyTorch has deferred a conjugation or negation.

    PyTorch's own DLPack ignores a deferred negation.
    """
    if _torch(x) is None or not (x.is_conj() or x.is_neg()):
        return x
    if copy is False:
        text = "the tensor has a deferred conjugation or negation, which needs a copy: pass copy=None"
        raise of_kind("copy_needed", text)
    return x.resolve_conj().resolve_neg()


def _of_numpy(array: np.ndarray) -> Owned:
    if isinstance(array, np.ma.MaskedArray):
        raise of_kind("not_a_tensor", "tensors have no masks: call .filled(value) first, or pass .data and .mask apart")
    dtype = _dtypes.from_numpy(array.dtype)
    strides = _elements(array.shape, array.strides, array.itemsize)
    return _of_memory(array, array.ctypes.data, array.shape, strides, dtype, (CPU, 0), not array.flags.writeable, 0)


def _of_capsule(capsule: Any) -> Owned:
    tensor = Owned("tensor_drop")
    library().python_tensor(capsule, tensor.out)
    return tensor


def _of_producer(x: Any) -> Owned:
    try:
        kind, _ = x.__dlpack_device__()
        if kind != CUDA:
            capsule = x.__dlpack__()
        elif _torch(x) is None:
            capsule = x.__dlpack__(stream=LEGACY)
        else:
            # PyTorch orders the current stream of the current device, whatever the device of the tensor.
            with _torch(x).cuda.device_of(x):
                capsule = x.__dlpack__(stream=LEGACY)
    except BridgeError:
        raise
    except Exception as error:
        raise _raised(error) from error
    return _of_capsule(capsule)


def _of_interface(x: Any, interface: Any) -> Owned:
    """Read version 2 or 3 of the interface. The driver knows the device of the memory."""
    try:
        shape = [int(length) for length in interface["shape"]]
        address, read_only = interface["data"]
        numpy_dtype = np.dtype(interface["typestr"])
        steps = interface.get("strides")
        strides = None if steps is None else _elements(shape, [int(step) for step in steps], numpy_dtype.itemsize)
        stream, address = interface.get("stream"), int(address or 0)
        masked = interface.get("mask") is not None
    except BridgeError:
        raise
    except Exception as error:
        text = f"the __cuda_array_interface__ is malformed: {error!r:.200}"
        raise of_kind("protocol", text) from error
    if masked:
        raise of_kind("not_a_tensor", "tensors have no masks: pass the data without it")
    if stream is not None and (not isinstance(stream, int) or stream <= 0):
        text = "the __cuda_array_interface__ is malformed: stream {!r:.80} is invalid (1 is the legacy default stream)"
        raise of_kind("protocol", text.format(stream))
    dtype = _dtypes.from_numpy(numpy_dtype)
    return _of_memory(x, address, shape, strides, dtype, (CUDA, -1), bool(read_only), stream or 0)


def _elements(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Sequence[int]:
    """Convert strides from bytes to elements. The stride of a dimension with one element is ignored."""
    if len(shape) != len(strides):
        raise of_kind("protocol", f"shape {tuple(shape)} and strides {tuple(strides)} differ in length")
    if any(step % itemsize and length > 1 for length, step in zip(shape, strides)):
        text = "strides {} (bytes) are not whole elements of {} bytes: call numpy.ascontiguousarray first"
        raise of_kind("layout", text.format(tuple(strides), itemsize))
    return [step // itemsize for step in strides]


def _of_memory(
    owner: Any,
    address: int,
    shape: Sequence[int],
    strides: Optional[Sequence[int]],
    dtype: Any,
    device: Any,
    read_only: bool,
    stream: int,
) -> Owned:
    lengths = ctypes.c_int64 * len(shape)
    memory = Memory(
        data=address,
        shape=lengths(*shape),
        strides=None if strides is None else lengths(*strides),
        ndim=len(shape),
        read_only=read_only,
        dtype=dtype,
        device=Device(*device),
        stream=stream,
        release=ctypes.cast(ctypes.pythonapi.Py_DecRef, ctypes.c_void_p),
        owner=id(owner),
    )
    tensor, call = Owned("tensor_drop"), library().tensor_memory
    # From here on the library owns the reference, and releases it also where the call fails.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
    call(ctypes.byref(memory), tensor.out)
    return tensor


def _raised(error: Exception) -> BridgeError:
    first = (str(error).splitlines() or [""])[0]
    return of_kind("framework", f"the producer raised {type(error).__name__}: {first}")
