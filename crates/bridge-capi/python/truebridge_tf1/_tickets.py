"""Tensors of other processes: tickets."""

import ctypes
from typing import Any, Optional

import numpy as np

from . import _dtypes, _sources
from ._common.trees import shareable, tree_of
from ._library import Memory, Owned, library
from .errors import of_kind

#: Values of ``writing``, with the library's numbers (``tb_writing``).
_WRITING = {None: 0, "private": 1, "never": 2, "shared": 3}

#: Bytes of a ticket with the 0 at its end (``TB_TICKET_BYTES``).
_BYTES = 513


def share(x: Any, *, expires: float = 60.0, writing: Optional[str] = None) -> str:
    """Share a tensor with other processes of this user.

    Parameters
    ----------
    x : tensor or tree
        What ``feed`` takes, or a dict, a list or a tuple of such, of numbers, strings and ``None``.
    expires : float, optional
        Seconds for which the ticket can be opened.
    writing : {None, "private", "never", "shared"}
        What a process that opens the ticket may do. With ``"private"`` it may write, and sees only its own writes (the
        default on the host); with ``"never"`` no process may write; with ``"shared"`` all may, and see each other's
        writes (the default on a device).

    Returns
    -------
    str
        The text of a ticket. It can be opened any number of times, by ``truebridge.open`` and by ``open`` of this
        module.

    Raises
    ------
    BridgeTypeError
        If something in ``x`` can be neither shared nor described.
    BridgeValueError
        If an argument has no such value.
    BridgeError
        If the memory cannot leave the process.

    Notes
    -----
    Memory of the host is copied once; that of a CUDA device is shared in place, where its allocator allows that. It is
    kept until the ticket has expired and every process that opened it has dropped the tensors or has ended.

    Examples
    --------
    >>> import numpy as np
    >>> import truebridge_tf1 as tb
    >>> ticket = tb.share({"weights": np.ones(3), "step": 7})
    >>> tb.open(ticket)
    {'weights': array([1., 1., 1.]), 'step': 7}
    >>> tb.revoke(ticket)
    """
    leaves, tree = shareable(x)
    tensors = [_sources.exported(_sources.resolved(leaf, None)) for leaf in leaves]
    number = _WRITING.get(writing) if writing is None or isinstance(writing, str) else None
    if number is None:
        raise of_kind("argument", f"writing is {writing!r:.80}: it must be private, never or shared")
    pointers = (ctypes.c_void_p * len(tensors))(*[tensor._as_parameter_ for tensor in tensors])
    ticket = ctypes.create_string_buffer(_BYTES)
    text = None if tree is None else tree.encode()
    library().share(pointers, len(tensors), text, _seconds(expires), number, ticket)
    return ticket.value.decode()


def open(ticket: Any) -> Any:
    """Open what another process has shared, in place.

    Parameters
    ----------
    ticket : str, bytes or ticket
        The text of a ticket, or a ticket of ``truebridge``.

    Returns
    -------
    tensor or tree
        What was shared: NumPy arrays over its memory, or ``Shared`` tensors on a CUDA device. Both can be fed to graphs
        in place. When the last view of them is dropped, the memory is returned to the process that shares it.

    Raises
    ------
    BridgeConnectionError
        If the ticket has expired or was revoked, or its process has ended.
    BridgePermissionError
        If that process runs as another user.
    BridgeValueError
        If ``ticket`` is not a ticket.

    Examples
    --------
    >>> import numpy as np
    >>> import truebridge_tf1 as tb
    >>> ticket = tb.share(np.ones(3))
    >>> tb.open(ticket)
    array([1., 1., 1.])
    >>> tb.revoke(ticket)
    """
    opened = Owned("opened_drop")
    library().open(_text(ticket), opened.out)
    tree = library().opened_tree(opened)
    tensors = [_opened(opened, index) for index in range(library().opened_count(opened))]
    return tree_of(None if tree is None else tree.decode(), tensors)


def revoke(ticket: Any, leases: bool = True) -> None:
    """End a share of this process now: no process can open the ticket any more.

    Parameters
    ----------
    ticket : str, bytes or ticket
        The text of a ticket, or a ticket of ``truebridge``. One that was revoked already is not an error.
    leases : bool, optional
        Whether to revoke what processes have opened, too. They keep the memory until they drop the tensors, and are
        told. With ``False`` the ticket only expires early, and a process that has it open can continue to use it.

    Raises
    ------
    BridgeValueError
        If ``ticket`` is not a ticket, or if this process has shared nothing.

    Examples
    --------
    >>> import numpy as np
    >>> import truebridge_tf1 as tb
    >>> ticket = tb.share(np.ones(3))
    >>> weights = tb.open(ticket)
    >>> tb.revoke(ticket, leases=False)
    >>> weights
    array([1., 1., 1.])
    """
    end = library().revoke if leases else library().share_end
    end(_text(ticket))


def _text(ticket: Any) -> bytes:
    text = getattr(ticket, "text", ticket)
    # The library refuses text that is not a ticket: characters that UTF-8 lacks become "?".
    text = text.encode(errors="replace") if isinstance(text, str) else text
    if not isinstance(text, bytes):
        raise of_kind("argument", f"a ticket is its text, not {type(ticket).__name__}")
    return text.replace(b"\0", b"?")


def _seconds(expires: Any) -> float:
    try:
        return float(expires)
    except (TypeError, ValueError, OverflowError):
        raise of_kind("argument", f"expires is {expires!r:.80}: pass a number of seconds") from None


class Shared:
    """A tensor of another process, on a CUDA device, as ``open`` returns it. ``feed`` and ``share`` take it.

    Reads wait for the pending work of that process on it. Its memory is returned after the work of this process.

    Attributes
    ----------
    dtype : str
        Such as ``"float32"``.
    shape : tuple of int
        Lengths, in elements.
    device : str
        Such as ``"cuda:0"``.
    """

    def __init__(self, opened: Owned, index: int) -> None:
        """Only ``open`` makes one."""
        self._opened, self._index = opened, index
        # What the interface below points to.
        self._tensor = self.exported()
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

    def exported(self) -> Owned:
        """Return the tensor, for the library.

        Returns
        -------
        Owned
            A tensor of the library.
        """
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
