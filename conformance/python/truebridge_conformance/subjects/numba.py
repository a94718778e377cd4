"""Numba under test."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

from typing import Any, ClassVar

from truebridge_conformance.subjects import Capabilities
from truebridge_conformance.subjects.common import row_major
from truebridge_conformance.subjects.peers import Peer


class Numba(Peer):
    """Numba on one CUDA device. Its arrays have ``__cuda_array_interface__``, which names the stream that they have."""

    known: ClassVar[dict[int, Any]] = {}

    def __init__(self, device: str) -> None:
        from numba import cuda

        self.cuda = cuda
        cuda.select_device(int(device.partition(":")[2] or 0))
        super().__init__(device)

    def makes(self, dtype: str) -> bool:
        try:
            self.cuda.device_array(1, self.lens.named[dtype])
        except (NotImplementedError, TypeError, ValueError):
            return False
        # The interface writes NumPy's kinds: those of ``ml_dtypes`` are not among them.
        return bool(self.lens.named[dtype].kind != "V")

    def capabilities(self) -> Capabilities:
        # Numba's interface calls arrays with strides of 0 contiguous (numba-cuda 0.30).
        return Capabilities(self.dtypes, broadcasts=False, copies=False)

    def stream(self) -> Any:
        """Return the stream that is passed to Numba's calls."""
        return self.known.setdefault(self.handle_now, self.wrapped(self.handle_now))

    def allocate(self, nbytes: int) -> Any:
        return self.cuda.device_array(nbytes, "uint8", stream=self.stream())

    def over(self, memory: Any, dtype: str, shape: list[int], strides: list[int], offset: int) -> Any:
        kind = self.lens.named[dtype]
        bytewise = tuple(stride * kind.itemsize for stride in strides)
        data = memory.gpu_data.view(offset) if memory.size else memory.gpu_data
        array = self.cuda.cudadrv.devicearray.DeviceNDArray
        return array(tuple(shape), bytewise, kind, stream=self.stream(), gpu_data=data)

    def seen(self, tensor: Any) -> tuple[str, list[int], list[int], int]:
        shape, interface = list(tensor.shape), tensor.__cuda_array_interface__
        # It leaves out the strides of contiguous arrays, and with them those of dimensions of length 1.
        bytewise = interface["strides"]
        strides = row_major(shape) if bytewise is None else [stride // tensor.dtype.itemsize for stride in bytewise]
        return tensor.dtype.name, shape, strides, interface["data"][0]

    def submitted(self, tensor: Any) -> Any:
        return tensor.bind(self.stream())

    def handle(self, stream: Any) -> int:
        return int(stream)

    def made(self) -> Any:
        return self.cuda.stream()

    def wrapped(self, handle: int) -> Any:
        return self.cuda.external_stream(handle) if handle else self.cuda.legacy_default_stream()


subject = Numba
