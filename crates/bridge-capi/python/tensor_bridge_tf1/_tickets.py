"""Tensors of other processes: tickets."""

import atexit
import ctypes
from typing import Any, Optional

import numpy as np

from . import _dtypes, _sources
from ._library import Memory, Owned, library
from ._trees import flattened, tree_of
from .errors import of_kind

#: Values of ``writing``, with the library's numbers (``tb_writing``).
_WRITING = {None: 0, "private": 1, "never": 2, "shared": 3}

#: Bytes of a ticket with the 0 at its end (``TB_TICKET_BYTES``).
_BYTES = 513


def share(x: Any, *, expires: float = 60.0, writing: Optional[str] = None) -> str:
    """Share a tensor with other processes of this user, and return the text of a ticket.

    ``x`` is what ``feed`` takes, or a dict, a list or a tuple of such, of numbers, strings and ``None``. The ticket can
    be opened for ``expires`` seconds, any number of times, by ``tensor_bridge.open`` and by ``open`` of this module.
    Memory of the host is copied once; that of a CUDA device is shared in place, where its allocator allows that. It is
    kept until the ticket has expired and every process that opened it has dropped the tensors or has died.

    ``writing`` says what a process that opens the ticket may do. With ``"private"`` it may write, and sees its own
    writes alone (the default on the host); with ``"never"`` no process may write; with ``"shared"`` all may, and see
    each other's writes (the default on a device).
    """
    leaves, tree = flattened(x)
    tensors = [_sources.lent(_sources.resolved(leaf, None)) for leaf in leaves]
    number = _WRITING.get(writing) if writing is None or isinstance(writing, str) else None
    if number is None:
        raise of_kind("argument", f"writing is {writing!r:.80}: it must be private, never or shared")
    pointers = (ctypes.c_void_p * len(tensors))(*[tensor._as_parameter_ for tensor in tensors])
    ticket = ctypes.create_string_buffer(_BYTES)
    text = None if tree is None else tree.encode()
    atexit.register(library().share_close)
    library().share(pointers, len(tensors), text, float(expires), number, ticket)
    return ticket.value.decode()


def open(ticket: Any) -> Any:
    """Return what another process has shared, as NumPy arrays over its memory, or ``Shared`` tensors on a CUDA device.

    ``ticket`` is the text of a ticket, or a ticket of ``tensor_bridge``. Both can be fed to graphs in place. When the
    last view of them is dropped, the memory goes back to the process that shares it.
    """
    opened = Owned("opened_drop")
    library().open(_text(ticket), opened.out)
    tree = library().opened_tree(opened)
    tensors = [_opened(opened, index) for index in range(library().opened_count(opened))]
    return tree_of(None if tree is None else tree.decode(), tensors)


def revoke(ticket: Any) -> None:
    """End a share of this process now. A process that has it open keeps the memory, and is told at its next call."""
    library().revoke(_text(ticket))


def _text(ticket: Any) -> bytes:
    text = getattr(ticket, "text", ticket)
    text = text.encode() if isinstance(text, str) else text
    if not isinstance(text, bytes) or b"\0" in text:
        raise of_kind("argument", f"a ticket is its text, not {type(ticket).__name__}")
    return text


class Shared:
    """A tensor of another process: ``feed`` and ``share`` take it, and NumPy on the host.

    On a CUDA device the work of that process on it is waited for, and its memory goes back behind the work here.
    """

    def __init__(self, opened: Owned, index: int) -> None:
        """Only ``open`` makes one."""
        self._opened, self._index = opened, index
        # What the interface below points to.
        self._tensor = self.lent()
        memory = Memory()
        library().tensor_info(self._tensor, ctypes.byref(memory))
        self.dtype = _dtypes.name((memory.dtype.code, memory.dtype.bits))
        self.shape = tuple(memory.shape[: memory.ndim])
        self.device = "cpu" if memory.device.kind == _sources.CPU else f"cuda:{memory.device.index}"
        if memory.device.kind != _sources.CPU:
            return
        numpy = _dtypes.to_numpy(self.dtype)
        # NumPy takes no null address.
        address = memory.data or ctypes.addressof(memory)
        self.__array_interface__ = {
            "version": 3,
            "shape": self.shape,
            "typestr": numpy.str if numpy.str[1] != "V" else f"|V{numpy.itemsize}",
            "strides": tuple(step * numpy.itemsize for step in memory.strides[: memory.ndim]),
            "data": (address, bool(memory.read_only)),
        }

    def lent(self) -> Owned:
        """Return the tensor, for the library."""
        tensor = Owned("tensor_drop")
        library().opened_tensor(self._opened, self._index, tensor.out)
        return tensor

    def __repr__(self) -> str:
        """Describe it, without its values."""
        return f"<Shared: {self.dtype} {list(self.shape)} on {self.device}>"


def _opened(opened: Owned, index: int) -> Any:
    tensor = Shared(opened, index)
    if tensor.device != "cpu":
        return tensor
    array = np.asarray(tensor)  # type: np.ndarray
    return array.view(_dtypes.to_numpy(tensor.dtype))
