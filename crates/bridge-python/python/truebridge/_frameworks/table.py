"""The frameworks on the Python side: a row for each, in the module that has its name.

``_core.FRAMEWORKS`` names them. A row is all that the rest of the package knows of one framework: how to find out what
is installed, how to make a tensor, how the framework itself exchanges tensors. No row imports its framework. Type
checkers cannot read the rows: after a change to one, ``cargo xtask generate tables`` writes the lists for them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import _core

#: Elements of the small tensors that ``Framework.small`` makes, of float32.
SMALL = 64
#: An address that every framework takes in place is divisible by this number of bytes.
ALIGNMENT = 64


class Example(NamedTuple):
    """How an example in the documentation uses a framework."""

    #: An import, a tensor of three ones, and its shape as Python shows it.
    imported: str
    ones: str
    shape: str
    #: The device to name where this framework is the target and the tensor may be elsewhere.
    device: str = ""


class Side(NamedTuple):
    """A framework on a device: how ``bench`` makes, reads and exchanges its tensors."""

    #: Returns a tensor with the elements of an array of the host.
    of_host: Callable[[Any], Any]
    #: Returns an array of the host with the elements of a tensor.
    to_host: Callable[[Any], Any]
    #: Returns a DLPack capsule without a version.
    capsule: Callable[[Any], Any]
    #: Takes a tensor by DLPack: an object with ``__dlpack__``, or a capsule.
    of_dlpack: Callable[[Any], Any]
    #: Returns a compact copy of the transposed matrix.
    transposed: Callable[[Any], Any]
    #: Waits for the device, or does nothing where the other framework of a pair has to.
    wait: Callable[[], Any]
    #: Whether ``of_dlpack`` takes capsules.
    takes_capsules: bool = True
    #: Whether the framework exchanges only capsules.
    capsules_only: bool = False


@dataclass(frozen=True)
class Framework:
    """What is special to one framework."""

    #: Its name in prose.
    label: str
    #: Its name in ``convert_SOURCE_to_TARGET``.
    alias: str
    #: Its class of tensors, as a program writes it.
    tensor: str
    #: That class by its module and name, as the object itself has them.
    kind: tuple[str, str]
    #: How to get it.
    install: str
    example: Example
    #: Returns what the framework was built for, such as ``CUDA 13.0`` or ``CPU``. May raise, and then says why.
    build: Callable[[Any], str]
    #: Returns the number of CUDA devices that it sees. May raise, and then says why.
    devices: Callable[[Any], int]
    #: Returns a tensor of ``SMALL`` elements, in the module, on ``"cpu"`` or ``"cuda"``, by the number of the device.
    small: Callable[[Any, str, int], Any]
    #: Returns the side on a GPU, by its number, or on the host for ``None``.
    side: Callable[[Any, int | None], Side]
    #: What divides the addresses of the tensors that it makes on the host.
    alignment: int = ALIGNMENT
    #: Whether it has tensors on the host, and on GPUs.
    on_host: bool = True
    on_gpus: bool = True
    #: That class with its parameters, as a type checker writes it, where it has some.
    annotation: str | None = None
    #: Returns how it gets memory of a GPU: ``allocator`` and ``takes_all_memory``.
    settings: Callable[[Any], dict[str, Any]] = lambda module: {}
    #: Environment variables with which it takes only what it needs of a GPU's memory, and the call that does the same.
    sparing: Mapping[str, str] = field(default_factory=dict)
    spare: str = ""
    #: Allocators whose memory the driver shares with no other process, and what to use instead.
    unshared: Mapping[str, str] = field(default_factory=dict)
    #: Returns whether it hides CUDA's libraries from what is loaded after it. Called once it is imported.
    hides_cuda: Callable[[], bool] = lambda: False
    #: Where to read which versions work on GPUs, if tensors on a GPU are refused with a version that was not tested.
    tested: str | None = None
    #: Returns the bytes of a tensor's elements, and whether they are on a GPU.
    nbytes: Callable[[Any], int] = lambda x: math.prod(x.shape) * int(x.dtype.itemsize)
    on_gpu: Callable[[Any], bool] = lambda x: "cuda" in str(x.device).lower()


@dataclass(frozen=True)
class Folder:
    """What is special to a framework that Python does not import: this package loads its libraries from a folder."""

    #: Its name in prose.
    label: str
    #: The class of its tensors in ``_core.pyi``.
    tensor: str
    #: What the environment variable names.
    folder: str
    #: Loads the libraries from that folder. Returns the version, and the folder of the libraries.
    load: Callable[[], tuple[str, str]]


def _rows(folders: bool) -> dict[str, Any]:
    names = [name for name, variable in _core.FRAMEWORKS.items() if (variable is not None) == folders]
    return {name: importlib.import_module(f"{__package__}.{name}").FRAMEWORK for name in names}


#: Every framework that Python imports, in an order in which all can be: what hides CUDA's libraries comes last.
ALL: dict[str, Framework] = _rows(folders=False)
#: Every framework in a folder that an environment variable names.
FOLDERS: dict[str, Folder] = _rows(folders=True)
#: The environment of a process that shares a GPU with others.
SPARING: dict[str, str] = {name: value for row in ALL.values() for name, value in row.sparing.items()}
