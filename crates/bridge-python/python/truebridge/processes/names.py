"""Names for shared tensors, for long-running programs.

One process serves names, any process puts tensors under them, and any process finds them::

    names = tb.serve("/run/user/1000/names")  # in one process
    names.put("weights", model.state_dict())

    client = tb.connect("/run/user/1000/names")  # in another
    for version in client.watch("weights"):
        weights = client.get("weights", "tensorflow")

The server passes on tickets, not memory: a tensor belongs to the process that has put it, and ends with that process.
A *store* is a server that takes the memory over: ``python -m truebridge store PATH``. What is put there outlives the
process that has put it, and the store as well: the processes that have it hand it to the next store at that path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _core
from ..errors import of_kind
from .client import Client

if TYPE_CHECKING:
    import os


class Names(Client):
    """Names that this process serves, and a connection to them, as ``serve`` returns it.

    Parameters
    ----------
    path : str or path
        Where to serve them.
    persistent : bool
        As for ``serve``.
    max_bytes : int or None
        As for ``serve``.

    Raises
    ------
    BridgeError
        As for ``serve``.

    Examples
    --------
    >>> import truebridge as tb
    >>> with tb.serve("names") as names:
    ...     names.list()
    {}
    """

    def __init__(self, path: str | os.PathLike[str], persistent: bool = False, max_bytes: int | None = None) -> None:
        """Serve names at ``path``."""
        if type(persistent) is not bool:
            raise of_kind("argument", f"persistent is {persistent!r:.80}: pass True or False")
        if max_bytes is not None and not persistent:
            raise of_kind("argument", "max_bytes limits a store: pass persistent=True as well, or leave max_bytes out")
        self._names = _core.Names(path, persistent, max_bytes)
        super().__init__(path)

    def close(self) -> None:
        """Close the connection, and end the service."""
        super().close()
        self._names.close()

    def __enter__(self) -> Names:
        """Return the service."""
        return self


def serve(path: str | os.PathLike[str], *, persistent: bool = False, max_bytes: int | None = None) -> Names:
    """Serve names at a path, for processes of this user and of those that ``processes.configure`` accepts.

    Parameters
    ----------
    path : str or path
        Where to make the socket.
    persistent : bool, optional
        Whether the memory of what is put belongs to this process: a store. ``python -m truebridge store`` is one in
        a separate process, which outlives the processes that put.
    max_bytes : int, optional
        The most bytes that a store keeps, on the host and on devices together. The default is no limit.

    Returns
    -------
    Names
        The service, until it is closed or this process ends, and a connection to it.

    Raises
    ------
    BridgeConnectionError
        If names are served there already.
    BridgeValueError
        If the system allows no socket there.

    See Also
    --------
    connect : for the other processes.

    Examples
    --------
    >>> import torch
    >>> import truebridge as tb
    >>> names = tb.serve("names")
    >>> version = names.put("weights", torch.zeros(3))
    >>> names.list()["weights"] == (version, "torch float32 [3] on cpu")
    True
    >>> names.close()
    """
    return Names(path, persistent, max_bytes)


def connect(path: str | os.PathLike[str]) -> Client:
    """Connect to the process that serves names at a path.

    Parameters
    ----------
    path : str or path
        The path that the other process has passed to ``serve``.

    Returns
    -------
    Client
        The connection.

    Raises
    ------
    BridgeConnectionError
        If no process serves names there, or it does not answer within five seconds.
    BridgePermissionError
        If that process runs as another user, and ``processes.configure`` does not accept it.

    Examples
    --------
    >>> import torch
    >>> import truebridge as tb
    >>> with tb.serve("names") as names, tb.connect("names") as client:
    ...     version = names.put("weights", torch.zeros(3))
    ...     for newest in client.watch("weights", timeout=0.1):
    ...         print(newest == version, client.get("weights", "numpy"))
    True [0. 0. 0.]
    """
    return Client(path)
