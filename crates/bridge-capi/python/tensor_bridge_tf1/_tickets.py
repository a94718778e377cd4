"""Tensors of other processes: tickets."""

import atexit
import ctypes
from typing import Any

import numpy as np

from . import _dtypes, _sources
from ._library import Memory, Owned, library
from ._trees import flattened, tree_of
from .errors import of_kind

#: Values of ``writing``, with the library's numbers (``tb_writing``).
_WRITING = {"private": 0, "never": 1, "shared": 2}

#: Bytes of a ticket with the 0 at its end (``TB_TICKET_BYTES``).
_BYTES = 513


def share(x: Any, *, expires: float = 60.0, writing: str = "private") -> str:
    """Share a tensor with other processes of this user, and return the text of a ticket.

    ``x`` is what ``feed`` takes, in host memory, or a dict, a list or a tuple of such, of numbers, strings and
    ``None``. The ticket can be opened for ``expires`` seconds, any number of times, by ``tensor_bridge.open`` and by
    ``open`` of this module. The memory is copied once, and kept until then and until every process that opened the
    ticket has dropped the tensors or has died.

    ``writing`` says what a process that opens the ticket may do. With ``"private"`` it may write, and sees its own
    writes alone; with ``"never"`` no process may write; with ``"shared"`` all may, and see each other's writes.
    """
    leaves, tree = flattened(x)
    tensors = [_sources.lent(_sources.resolved(leaf, None)) for leaf in leaves]
    number = _WRITING.get(writing) if isinstance(writing, str) else None
    if number is None:
        raise of_kind("argument", f"writing is {writing!r:.80}: it must be private, never or shared")
    pointers = (ctypes.c_void_p * len(tensors))(*[tensor._as_parameter_ for tensor in tensors])
    ticket = ctypes.create_string_buffer(_BYTES)
    text = None if tree is None else tree.encode()
    atexit.register(library().share_close)
    library().share(pointers, len(tensors), text, float(expires), number, ticket)
    return ticket.value.decode()


def open(ticket: Any) -> Any:
    """Return what another process has shared, as NumPy arrays over its memory.

    ``ticket`` is the text of a ticket, or a ticket of ``tensor_bridge``. The arrays can be fed to graphs in place. When
    the last view of them is dropped, the memory goes back to the process that shares it.
    """
    opened = Owned("opened_drop")
    library().open(_text(ticket), opened.out)
    tree = library().opened_tree(opened)
    arrays = [_array(opened, index) for index in range(library().opened_count(opened))]
    return tree_of(None if tree is None else tree.decode(), arrays)


def revoke(ticket: Any) -> None:
    """End a share of this process now. A process that has it open keeps the memory, and is told at its next call."""
    library().revoke(_text(ticket))


def _text(ticket: Any) -> bytes:
    text = getattr(ticket, "text", ticket)
    text = text.encode() if isinstance(text, str) else text
    if not isinstance(text, bytes) or b"\0" in text:
        raise of_kind("argument", f"a ticket is its text, not {type(ticket).__name__}")
    return text


class _Opened:
    """A tensor of another process, as NumPy's array interface."""

    def __init__(self, opened: Owned, index: int) -> None:
        self._tensor = Owned("tensor_drop")
        library().opened_tensor(opened, index, self._tensor.out)
        memory = Memory()
        library().tensor_info(self._tensor, ctypes.byref(memory))
        dtype = _dtypes.to_numpy(_dtypes.name((memory.dtype.code, memory.dtype.bits)))
        shape = tuple(memory.shape[: memory.ndim])
        self.dtype = dtype
        # NumPy takes no null address.
        address = memory.data or ctypes.addressof(memory)
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str if dtype.str[1] != "V" else f"|V{dtype.itemsize}",
            "strides": tuple(step * dtype.itemsize for step in memory.strides[: memory.ndim]),
            "data": (address, bool(memory.read_only)),
        }


def _array(opened: Owned, index: int) -> np.ndarray:
    tensor = _Opened(opened, index)
    array = np.asarray(tensor)  # type: np.ndarray
    return array.view(tensor.dtype)
