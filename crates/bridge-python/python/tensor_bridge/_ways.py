"""The ways across that ``bench`` measures: those of this package, and those that the frameworks have themselves.

A framework on a device is a ``Side``. Every other is reached from it by DLPack or through an array of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

#: Where memory starts that every framework takes in place, in bytes.
_ALIGNMENT = 64


class Side(NamedTuple):
    """A framework on a device."""

    #: Returns a tensor with the elements of an array of the host.
    of_host: Callable[[Any], Any]
    #: Returns an array of the host with the elements of a tensor.
    to_host: Callable[[Any], Any]
    #: Returns a DLPack capsule without a version, the only kind that TensorFlow takes.
    capsule: Callable[[Any], Any]
    #: Takes a tensor by DLPack. TensorFlow takes a capsule.
    of_dlpack: Callable[[Any], Any]
    #: Returns a compact copy of the transposed matrix.
    transposed: Callable[[Any], Any]
    #: Waits for the device. TensorFlow leaves that to the other framework of a pair.
    wait: Callable[[], Any]


def native(source: str, sides: tuple[Side, Side], target: str) -> Callable[[Any], Any]:
    """Return the frameworks' own way, by DLPack."""
    lend, take = sides[0].capsule, sides[1].of_dlpack
    return (lambda x: take(lend(x))) if "tensorflow" in (source, target) and target != "numpy" else take


def through_host(sides: tuple[Side, Side]) -> Callable[[Any], Any]:
    """Return the way through an array of the host."""
    to_host, of_host = sides[0].to_host, sides[1].of_host
    return lambda x: of_host(to_host(x))


def aligned(array: Any) -> Any:
    """Return a copy of an array at an address that every framework takes in place: NumPy's own are aligned by luck."""
    import numpy

    memory = numpy.empty(array.nbytes + _ALIGNMENT, numpy.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _numpy(numpy: Any, index: int | None) -> Side:
    return Side(
        of_host=lambda array: array,
        to_host=lambda x: x,
        capsule=lambda x: x.__dlpack__(),
        of_dlpack=numpy.from_dlpack,
        transposed=lambda x: numpy.ascontiguousarray(x.T),
        wait=lambda: None,
    )


def _torch(torch: Any, index: int | None) -> Side:
    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    return Side(
        of_host=torch.from_numpy if index is None else lambda array: torch.from_numpy(array).to(device),
        to_host=(lambda x: x.numpy()) if index is None else lambda x: x.cpu().numpy(),
        capsule=torch.utils.dlpack.to_dlpack,
        of_dlpack=torch.from_dlpack,
        transposed=lambda x: x.t().contiguous(),
        wait=(lambda: None) if index is None else lambda: torch.cuda.synchronize(device),
    )


def _cupy(cupy: Any, index: int | None) -> Side:
    device = cupy.cuda.Device(index)

    def on_device(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(x: Any) -> Any:
            with device:
                return function(x)

        # The first device is current already.
        return call if index else function

    return Side(
        of_host=on_device(cupy.asarray),
        to_host=cupy.asnumpy,
        # Orders nothing, like the capsules of the others.
        capsule=lambda x: x.__dlpack__(stream=-1),
        of_dlpack=cupy.from_dlpack,
        transposed=on_device(lambda x: cupy.ascontiguousarray(x.T)),
        wait=device.synchronize,
    )


def _tensorflow(tensorflow: Any, index: int | None) -> Side:
    place, dlpack = "CPU:0" if index is None else f"GPU:{index}", tensorflow.experimental.dlpack

    def of_host(array: Any) -> Any:
        with tensorflow.device(place):
            return tensorflow.convert_to_tensor(array)

    return Side(
        of_host=of_host,
        to_host=lambda x: x.numpy(),
        capsule=dlpack.to_dlpack,
        of_dlpack=dlpack.from_dlpack,
        transposed=tensorflow.transpose,
        wait=lambda: None,
    )


#: How to make the side of a framework: from its module, and the number of the GPU, or ``None`` for the host.
SIDES: dict[str, Callable[[Any, int | None], Side]] = {
    "torch": _torch,
    "cupy": _cupy,
    "numpy": _numpy,
    "tensorflow": _tensorflow,
}
