"""A connection to the process that serves names."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, Final

from .. import _core
from ..errors import of_kind
from .allocations import empty, pool
from .publications import Publication, Subscription
from .tickets import open
from .trees import shareable
from .twins import twin, watchers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from types import TracebackType

    import torch

    from .._core import CastTo, Device, Target
    from .tickets import Writing

#: Seconds that a wait takes at most before Python looks for signals.
_SLICE = 0.2


class Client:
    """A connection to the process that serves names, as ``connect`` returns it.

    Tensors that it has put are removed when it is closed, which the end of a ``with`` block does. Those that a store
    has stay.

    Each method but ``subscribe`` and ``close`` has a twin for asyncio, whose name ends in ``_async``: it takes the same
    arguments, is awaited, and does not block the event loop. A cancelled ``put_async``, ``publish_async`` or
    ``remove_async`` ends only when the call has returned, so that it cannot follow a later one.

    Parameters
    ----------
    path : str or path
        Where the names are served.

    Raises
    ------
    BridgeConnectionError
        If no process serves names there, or it does not answer within five seconds.
    BridgePermissionError
        If that process runs as another user, and ``processes.configure`` does not accept it.

    Examples
    --------
    >>> import numpy as np
    >>> import truebridge as tb
    >>> with tb.serve("names") as names, tb.connect("names") as client:
    ...     version = names.put("weights", {"bias": np.zeros(3)})
    ...     client.get("weights", "numpy", version=version)
    {'bias': array([0., 0., 0.])}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Connect to the process that serves names at ``path``."""
        self._client = _core.Client(path)
        self._path = os.fsdecode(path)
        self._closed = False

    def __repr__(self) -> str:
        """Return the path, and whether the connection is closed."""
        return f"<{type(self).__name__} at {self._path}{', closed' if self._closed else ''}>"

    def put(self, name: str, x: Any, *, keep: int = 1, writing: Writing | None = None) -> int:
        """Share a tensor or a tree under a name.

        A store gets a copy, and the call returns when the device has finished it. Tensors in memory of ``empty``, and
        on a device in memory of a store, are handed over as they are.

        Parameters
        ----------
        name : str
            The name.
        x : tensor or tree
            As ``share`` takes it.
        keep : int, optional
            The number of versions of the name that can be opened. An older version stays valid in processes that have
            it open; its memory is released after that, also if another process has put the newer ones.
        writing : {None, "private", "never", "shared"}
            As for ``share``.

        Returns
        -------
        int
            The version, which is higher than all before.

        Raises
        ------
        BridgeValueError
            If ``name`` is empty, has control characters or more than 128 bytes, or ``keep`` is less than 1.
        BridgeError
            As for ``share``, and ``gone`` if the process that serves names has ended. After ``busy``, that process may
            still store the version.
        """
        # Before anything is copied.
        _core.ipc_check_name(name, keep)
        return self._client.put(name, *shareable(x), keep, writing)

    def get(
        self,
        name: str,
        target: Target,
        *,
        version: int | None = None,
        copy: bool | None = None,
        read_only: bool = False,
    ) -> Any:
        """Open what stands under a name.

        Parameters
        ----------
        name : str
            The name.
        target : Target
            The name of a framework.
        version : int, optional
            The version. The default is the newest.
        copy, read_only
            As for ``convert``.

        Returns
        -------
        tensor or tree
            What was put.

        Raises
        ------
        BridgeConnectionError
            If there is no such name or version, or the process that serves names has ended.
        BridgeError
            As for ``open``.
        """
        return self.get_versioned(name, target, version=version, copy=copy, read_only=read_only)[1]

    def get_versioned(
        self,
        name: str,
        target: Target,
        *,
        version: int | None = None,
        copy: bool | None = None,
        read_only: bool = False,
    ) -> tuple[int, Any]:
        """Open what stands under a name, and return its version with it.

        Parameters
        ----------
        name, target, version, copy, read_only
            As for ``get``.

        Returns
        -------
        tuple of int and (tensor or tree)
            The version, and what was put.

        Raises
        ------
        BridgeError
            As for ``get``.
        """
        found, ticket = self._client.get(name, version)
        while True:
            try:
                return found, open(ticket, target, copy=copy, read_only=read_only)
            except ConnectionError:
                # A newer version, or the next store, may have taken its place meanwhile.
                missed = found, ticket
                found, ticket = self._client.get(name, version)
                if (found, ticket) == missed:
                    raise

    def empty(self, like: Any, target: Target, *, device: Device = "cpu") -> Any:
        """Make tensors in memory that ``put`` hands to a store as it is, without a copy.

        A model that is built in such tensors, or read into them, needs its memory once.

        Parameters
        ----------
        like : tensor or tree
            Anything with ``shape`` and ``dtype`` at the places of the tensors, such as PyTorch's tensors on ``"meta"``,
            JAX's ``ShapeDtypeStruct``, or tensors. Their elements are not read.
        target : Target
            The name of a framework.
        device : str or device, optional
            Where the tensors lie: the host, or a CUDA device.

        Returns
        -------
        tensor or tree
            Compact tensors. Their elements are zeros on the host, and anything on a device.

        Raises
        ------
        BridgeError
            ``out_of_memory``, ``dtype``, and what ``open`` raises.

        Notes
        -----
        After ``put``, other processes see what this one writes to them. Write before. On the host, ``put`` with a
        ``writing=`` other than ``"private"`` makes a copy. A name keeps all tensors that one call has made, also if
        only some are put under it.

        Examples
        --------
        >>> import numpy as np
        >>> import truebridge as tb
        >>> with tb.serve("names", persistent=True) as names:
        ...     weights = names.empty({"bias": np.ones(3)}, "numpy")
        ...     weights["bias"][:] = 7
        ...     version = names.put("weights", weights)
        ...     names.get("weights", "numpy")
        {'bias': array([7., 7., 7.])}
        """
        return empty(like, target, device)

    def pool(self) -> torch.cuda.MemPool:
        """Return a pool of PyTorch for memory that ``put`` hands to a store as it is, without a copy.

        A model that is built with the pool needs its memory once. Use it as PyTorch's other pools, with
        ``torch.cuda.use_mem_pool``.

        Returns
        -------
        torch.cuda.MemPool
            The pool. It lives as long as this process.

        Raises
        ------
        BridgeError
            ``missing`` if PyTorch has no such pools.

        Notes
        -----
        After ``put``, other processes see what this one writes to the tensors. The memory of a tensor is used again
        when the tensor is dropped here, its version is displaced or removed, and no process has it open any more; it is
        not used again after a store was killed that had it.

        Each block of the pool takes a descriptor, and a ``put`` has at most 1012. ``empty`` takes one for all tensors.
        """
        return pool()

    def publish(self, name: str, tree: Any, *, slots: int = 2) -> Publication:
        """Publish tensors that change, such as the weights of a model in training.

        Each version is a copy in its own memory, which is used again when no process has the version open any more.
        Any process can ``get`` a version or ``subscribe`` to the newest. With a store, the newest outlives this
        process.

        Parameters
        ----------
        name : str
            The name.
        tree : tensor or tree
            As ``share`` takes it. It is the first version, and what each ``update`` copies.
        slots : int, optional
            How many versions there is memory for, each as large as the tensors: one to read, the others to write. With
            2 an ``update`` waits while the device has yet to finish the one before.

        Returns
        -------
        Publication
            Its ``update`` publishes the next version.

        Raises
        ------
        BridgeValueError
            If ``name`` is not a name, or ``slots`` is less than 2.
        BridgeError
            As for ``share``, and ``gone`` if the process that serves names has ended.
        """
        if not isinstance(name, str):
            text = f"a name must be a str, not {type(name).__name__}: the name comes first, publish(name, tree)"
            raise of_kind("argument", text)
        return Publication(self._client, name, tree, slots)

    def subscribe(self, name: str, *, out: Any, dtype: CastTo | None = None) -> Subscription:
        """Receive the newest version of a name in tensors that exist, such as the weights of a model that serves.

        Parameters
        ----------
        name : str
            The name, which need not exist yet. A process publishes it, or puts tensors under it.
        out : tensor or tree
            Tensors as ``copy`` takes them for its ``out``, in a tree with the structure of what is published.
        dtype : str or dtype, optional
            As for ``copy``: the dtype to which elements are cast on their way, such as ``"bfloat16"`` for an engine
            whose trainer has float32.

        Returns
        -------
        Subscription
            Its ``refresh`` copies the newest version.

        Raises
        ------
        BridgeValueError
            If ``name`` is not a name.
        BridgeError
            As for ``copy``.
        """
        return Subscription(self._client, self.watch, name, out, dtype)

    def list(self) -> dict[str, tuple[int, str]]:
        """Return all names.

        Returns
        -------
        dict of str to (int, str)
            The newest version of each name, and what that is, in words.
        """
        return {name: (version, about) for name, version, about in self._client.list()}

    def stored(self) -> tuple[int, int] | None:
        """Return how many bytes a store keeps.

        Returns
        -------
        tuple of int and int, or None
            The bytes of all versions, on the host and on devices, and the most that it keeps (2^64 - 1 without a
            limit); ``None`` if the process that serves names is not a store. Memory under two names counts once. A
            version that was removed counts until no process has it open.

        Raises
        ------
        BridgeConnectionError
            If the process that serves names has ended.
        """
        keeps, nbytes, limit = self._client.about()
        return (nbytes, limit) if keeps else None

    def remove(self, name: str) -> None:
        """Remove a name. The processes that have put tensors under it stop sharing them.

        Parameters
        ----------
        name : str
            The name.

        Raises
        ------
        BridgeConnectionError
            If there is no such name, or the process that serves names has ended.
        """
        self._client.remove(name)

    def watch(self, name: str, *, after: int = 0, timeout: float | None = None) -> Iterator[int]:
        """Wait for the versions of a name.

        Parameters
        ----------
        name : str
            The name, which need not exist yet.
        after : int, optional
            The version after which to begin.
        timeout : float, optional
            Seconds without a new version after which to stop. The default is to wait for ever.

        Yields
        ------
        int
            The newest version, whenever there is one after the last one.

        Raises
        ------
        BridgeConnectionError
            If the process that serves names has ended, or the connection was closed.
        """
        for version in self._versions(name, after, timeout):
            if version is not None:
                yield version

    def _versions(self, name: str, after: int, timeout: float | None) -> Iterator[int | None]:
        """Yield versions, and ``None`` whenever there was none for a while."""
        seconds = None if timeout is None else _core.ipc_seconds(timeout)
        while True:
            watch = self._client.watch(name, after)
            left = seconds
            while (found := watch.wait(_SLICE if left is None else min(_SLICE, left))) is None:
                if left is not None:
                    left -= min(_SLICE, left)
                    if left <= 0:
                        return
                if self._closed:
                    raise of_kind("gone", "the connection is closed: connect again")
                yield None
            after = found[0]
            yield after

    put_async: Final = twin(put, is_whole=True)
    get_async: Final = twin(get)
    get_versioned_async: Final = twin(get_versioned)
    empty_async: Final = twin(empty)
    pool_async: Final = twin(pool)
    publish_async: Final = twin(publish, is_whole=True)
    list_async: Final = twin(list)
    stored_async: Final = twin(stored)
    remove_async: Final = twin(remove, is_whole=True)

    async def watch_async(self, name: str, *, after: int = 0, timeout: float | None = None) -> AsyncIterator[int]:
        """Wait for the versions of a name, without blocking the event loop.

        Parameters
        ----------
        name, after, timeout
            As for ``watch``.

        Yields
        ------
        int
            The newest version, whenever there is one after the last one.

        Raises
        ------
        BridgeConnectionError
            If the process that serves names has ended, or the connection was closed.
        """
        import asyncio

        versions = self._versions(name, after, timeout)
        wait = functools.partial(asyncio.get_running_loop().run_in_executor, watchers(os.getpid()), next, versions, 0)
        while (version := await wait()) != 0:
            if version is not None:
                yield version

    def close(self) -> None:
        """Close the connection, and end what was put."""
        self._closed = True
        self._client.close()

    def __enter__(self) -> Client:
        """Return the connection."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.close()
