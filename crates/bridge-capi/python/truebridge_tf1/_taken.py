"""Tensors that a run fetched, for other frameworks."""

import ctypes
from typing import Any, Dict, Optional, Tuple

import numpy as np

from . import _dtypes
from ._library import Info, Owned, library
from ._sources import CPU, CUDA, LEGACY
from .errors import of_kind

#: How many dimensions arrays have at most: NumPy names it where they are fewer than tensors can have.
MOST = getattr(np, "MAXDIMS", 64)  # type: int


class Taken:
    """A tensor that a run fetched, in TensorFlow's memory, for other frameworks to use in place. ``take`` returns it.

    ``torch.utils.dlpack.from_dlpack(taken)``, as any other consumer of ``__dlpack__``, returns a tensor that shares
    the memory and keeps it. Consumers of ``__cuda_array_interface__`` do so on a CUDA device, and ``numpy()`` on the
    host. It may be used any number of times, also in a graph: ``feed(taken)``.
    """

    def __init__(self, external: Owned) -> None:
        """Only ``take`` makes one."""
        self._external = external
        self._info = Info()
        self._used = None  # type: Optional[Owned]
        library().external_info(external, ctypes.byref(self._info))

    @property
    def shape(self) -> Tuple[int, ...]:
        """Lengths, in elements. The memory is compact, row-major."""
        return tuple(self._info.shape[: self._info.ndim])

    @property
    def dtype(self) -> str:
        """The name of the element type, such as ``"float32"``."""
        return _dtypes.name((self._info.dtype.code, self._info.dtype.bits))

    @property
    def device(self) -> str:
        """Where the memory is: ``"cpu"``, ``"cuda:0"``."""
        kind, index = self.__dlpack_device__()
        return "cpu" if kind == CPU else f"cuda:{index}"

    @property
    def read_only(self) -> bool:
        """Whether the memory must not be written: it was fed from read-only memory."""
        return bool(self._info.read_only)

    def __repr__(self) -> str:
        """Describe it, without its values."""
        return f"<Taken: {self.dtype} {list(self.shape)} on {self.device}>"

    def __dlpack_device__(self) -> Tuple[int, int]:
        """The device, by DLPack's numbers."""
        return (self._info.device.kind, self._info.device.index)

    def __dlpack__(
        self,
        stream: Optional[int] = None,
        max_version: Optional[Tuple[int, int]] = None,
        dl_device: Optional[Tuple[int, int]] = None,
        copy: Optional[bool] = None,
    ) -> Any:
        """Return a capsule over the memory. The consumer's ``stream`` waits for TensorFlow's, on the device.

        The stream must live as long as the consumer's tensor. Read-only memory needs ``max_version`` 1.0 or later,
        because older capsules have no flag for it.
        """
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise of_kind("device", f"the tensor is on {self.device}: move it with the consumer's framework")
        if copy:
            raise of_kind("argument", "the tensor is shared in place: copy it with the consumer's framework")
        if stream is not None and (stream < -1 or (stream == 0 and self._info.device.kind == CUDA)):
            raise of_kind("argument", f"stream {stream} is invalid: 1 is CUDA's legacy default stream")
        capsule = ctypes.c_void_p()
        # With -1 the caller orders the work; waiting all the same costs the host nothing.
        handle = LEGACY if stream is None or stream < 0 else stream
        versioned = max_version is not None and max_version[0] >= 1
        library().python_capsule(self._external, handle, versioned, ctypes.byref(capsule))
        made = ctypes.cast(capsule, ctypes.py_object).value
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(made))
        return made

    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]:
        """The interface, for memory on a CUDA device. It names the stream in which the memory is written.

        The consumer keeps this object until its work is done, and calls ``record_stream`` for work in a stream that
        does not wait for the legacy default stream.
        """
        if self._info.device.kind != CUDA:
            raise AttributeError(f"the tensor is on {self.device}: use numpy() or __dlpack__")
        self._use()
        if self.dtype == "bfloat16":
            raise of_kind("dtype", "the interface has no dtype bfloat16: use __dlpack__")
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": _dtypes.to_numpy(self.dtype).str,
            "data": (self._info.data or 0, self.read_only),
            "strides": None,
            "stream": self._info.stream,
        }

    def record_stream(self, stream: int) -> None:
        """Record that the memory is used on one more CUDA stream.

        TensorFlow's stream waits for it before the memory is reused. The legacy default stream, and those passed to
        ``__dlpack__``, need no record.

        Parameters
        ----------
        stream : int
            The driver's handle of the stream, which must live as long as this object.

        Raises
        ------
        BridgeError
            If the driver fails.
        """
        if self._info.device.kind == CUDA:
            library().view_used(self._use(), stream)

    def _use(self) -> Owned:
        """Return the view of the interface, which is dropped with this object."""
        if self._used is None:
            used = Owned("view_drop")
            library().external_view(self._external, LEGACY, used.out)
            self._used = used
        return self._used

    def numpy(self) -> Any:
        """Return the memory as an array, in place; on the host only.

        Returns
        -------
        numpy.ndarray
            Writeable, unless the tensor is read-only.

        Raises
        ------
        BridgeValueError
            If the tensor is on a CUDA device, or has more dimensions than this NumPy's arrays (32 before NumPy 2).
        """
        if self._info.device.kind != CPU:
            text = "the tensor is on {}, and NumPy has arrays on the host: copy it there with a framework that uses it"
            raise of_kind("device", text.format(self.device))
        if len(self.shape) > MOST:
            text = "the tensor has {} dimensions, and NumPy {} has at most {}: squeeze or reshape it first"
            raise of_kind("layout", text.format(len(self.shape), np.__version__, MOST))
        dtype = _dtypes.to_numpy(self.dtype)
        if 0 in self.shape:
            return np.empty(self.shape, dtype)
        return np.asarray(_Bytes(self, dtype.itemsize)).view(dtype).reshape(self.shape)

    def __array__(self, dtype: Any = None) -> Any:
        """Return the array for NumPy's own functions: ``numpy.asarray(taken)``."""
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)


class _Bytes:
    """A view of a taken tensor, as the base of arrays: dropped with the last of them."""

    def __init__(self, taken: Taken, itemsize: int) -> None:
        self._view = Owned("view_drop")
        library().external_view(taken._external, 0, self._view.out)
        count = int(np.prod(taken.shape, dtype=np.int64)) * itemsize
        data = (taken._info.data, taken.read_only)
        self.__array_interface__ = {"version": 3, "shape": (count,), "typestr": "|u1", "data": data}
