"""Names for what processes share, between programs that run for long.

One process serves names, any process puts tensors under them, and any process finds them::

    names = tb.serve("/run/user/1000/names")  # in one process
    names.put("weights", model.state_dict())

    client = tb.connect("/run/user/1000/names")  # in another
    for version in client.watch("weights"):
        weights = client.get("weights", "tensorflow")

Names are passed on, memory is not: what a process has put stays its own, and goes with it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from . import _core
from .processes import end, open, share

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from types import TracebackType

    from ._core import Target
    from .processes import Ticket, Writing

__all__ = ["Client", "Names", "connect", "serve"]

#: Seconds that a wait takes at most before Python looks for signals.
_SLICE = 0.2

#: Seconds that tickets under names can be opened for: the process that shares ends them.
_LONG = 10.0 * 365 * 24 * 3600


class Client:
    """A connection to the process that serves names: see ``connect``. What it has put is removed when it is closed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Connect to the process that serves names at ``path``."""
        self._client = _core.Client(os.fspath(path))
        self._own: dict[str, list[Ticket]] = {}

    def put(self, name: str, x: Any, *, keep: int = 1, writing: Writing | None = None) -> int:
        """Share a tensor or a tree under a name, and return its version, which is higher than all before.

        ``keep`` versions of the name can be opened; older ones stay where they are open.
        """
        ticket = share(x, expires=_LONG, writing=writing)
        try:
            version = self._client.put(name, ticket, keep)
        except BaseException:
            end(ticket)
            raise
        tickets = self._own.setdefault(name, [])
        tickets.append(ticket)
        while len(tickets) > max(keep, 1):
            end(tickets.pop(0))
        return version

    def get(self, name: str, target: Target, *, version: int | None = None, copy: bool | None = None) -> Any:
        """Open what stands under a name: the newest version, or this one."""
        return self.get_versioned(name, target, version=version, copy=copy)[1]

    def get_versioned(
        self, name: str, target: Target, *, version: int | None = None, copy: bool | None = None
    ) -> tuple[int, Any]:
        """Open what stands under a name, and return its version with it."""
        found, ticket = self._client.get(name, version)
        while True:
            try:
                return found, open(ticket, target, copy=copy)
            except ConnectionError:
                # A newer version may have taken its place meanwhile.
                newer, ticket = self._client.get(name, version)
                if newer == found:
                    raise
                found = newer

    def list(self) -> dict[str, tuple[int, str]]:
        """Return all names, each with its newest version and what that is."""
        return {name: (version, about) for name, version, about in self._client.list()}

    def remove(self, name: str) -> None:
        """Forget a name."""
        self._client.remove(name)
        for ticket in self._own.pop(name, ()):
            end(ticket)

    def watch(self, name: str, *, after: int = 0, timeout: float | None = None) -> Iterator[int]:
        """Yield the newest version of a name whenever there is one after ``after`` and after the last one yielded.

        Stops when ``timeout`` seconds pass without one.
        """
        while True:
            watch = self._client.watch(name, after)
            left = timeout
            while (found := watch.wait(_SLICE if left is None else min(_SLICE, left))) is None:
                if left is not None:
                    left -= min(_SLICE, left)
                    if left <= 0:
                        return
            after = found[0]
            yield after

    async def put_async(self, name: str, x: Any, *, keep: int = 1, writing: Writing | None = None) -> int:
        """As ``put``, on another thread."""
        import asyncio

        return await asyncio.to_thread(self.put, name, x, keep=keep, writing=writing)

    async def get_async(
        self, name: str, target: Target, *, version: int | None = None, copy: bool | None = None
    ) -> Any:
        """As ``get``, on another thread."""
        import asyncio

        return await asyncio.to_thread(self.get, name, target, version=version, copy=copy)

    async def watch_async(self, name: str, *, after: int = 0) -> AsyncIterator[int]:
        """As ``watch``, on another thread."""
        import asyncio

        while True:
            watch = await asyncio.to_thread(self._client.watch, name, after)
            while (found := await asyncio.to_thread(watch.wait, _SLICE)) is None:
                pass
            after = found[0]
            yield after

    def close(self) -> None:
        """Close the connection, and end what was put."""
        self._client.close()
        for tickets in self._own.values():
            for ticket in tickets:
                end(ticket)
        self._own.clear()

    def __enter__(self) -> Client:
        """Return the connection."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.close()


class Names(Client):
    """Names that this process serves, and a connection to them: see ``serve``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Serve names at ``path``."""
        self._names = _core.Names(os.fspath(path))
        super().__init__(path)

    def close(self) -> None:
        """Close the connection, and end the service."""
        super().close()
        self._names.close()

    def __enter__(self) -> Names:
        """Return the service."""
        return self


def serve(path: str | os.PathLike[str]) -> Names:
    """Serve names at a path, for processes of this user, until the result is closed or this process ends."""
    return Names(path)


def connect(path: str | os.PathLike[str]) -> Client:
    """Connect to the process that serves names at a path."""
    return Client(path)
