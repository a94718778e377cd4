"""Tensors that change: versions under a name, for processes that work on while newer ones arrive.

A trainer publishes its weights, and an inference server subscribes to them::

    names = tb.serve("/run/user/1000/names")  # in any process
    publication = names.publish("weights", model.state_dict())
    ...
    publication.update()  # after each step: the model may change at once

    client = tb.connect("/run/user/1000/names")  # in the server
    subscription = client.subscribe("weights", out=engine.state_dict())
    ...
    subscription.refresh()  # between two batches: copies the newest version, if there is one

Each version is written into memory that no process reads, and announced when the device has finished it. So a reader
gets a whole version, also if the trainer is killed in the middle of the next one. No device waits for another process.
"""

from __future__ import annotations

import marshal
from typing import TYPE_CHECKING, Any

from .. import _core
from ..errors import of_kind
from .trees import described, paths, shareable, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from .._core import CastTo

__all__ = ["Publication", "Subscription"]

#: Seconds that a wait takes at most before Python looks for signals.
_SLICE = 0.2


def _key(description: Any) -> bytes | None:
    """Return what tells the description of a tree from others, faster than its text; ``None`` if nothing does."""
    try:
        # Version 2 has no references to earlier objects, which would depend on more than the values.
        return marshal.dumps(description, 2)
    except ValueError:
        return None


def _matched(mine: list[str], theirs: list[str], sides: tuple[str, str]) -> list[int]:
    """Return where each of my paths is among theirs. ``sides`` complete the errors for a path that one side lacks."""
    # A tensor by itself has no path.
    if not mine and not theirs:
        return [0]
    found = {path: index for index, path in enumerate(theirs)}
    for one, other, side in ((mine, found, sides[0]), (theirs, set(mine), sides[1])):
        for path in one:
            if path not in other:
                raise of_kind("argument", f"{path} is not {side}: pass trees of the same structure")
    if not (mine and theirs):
        raise of_kind("argument", "one of the two is a tensor by itself: pass trees of the same structure")
    return [found[path] for path in mine]


def _numbered(description: Any, order: list[int]) -> Any:
    """Return the description of a tree whose tensors are put into another order."""
    numbers = {index: number for number, index in enumerate(order)}

    def renumbered(tree: Any) -> Any:
        kind, value = tree
        if kind == "x":
            return [kind, numbers[value]]
        if kind in ("l", "t"):
            return [kind, [renumbered(item) for item in value]]
        if kind == "d":
            return [kind, [[key, renumbered(item)] for key, item in value]]
        return tree

    return renumbered(description)


class Publication:
    """Versions of tensors under a name, as ``Client.publish`` returns it.

    ``close``, or the end of a ``with`` block, ends it. Its newest version stays until the client is closed, or until
    the name is removed.

    Parameters
    ----------
    client : object
        The connection to the names, as ``Client`` has it.
    name : str
        The name.
    tree : tensor or tree
        As for ``Client.publish``.
    slots : int
        As for ``Client.publish``.

    Raises
    ------
    BridgeError
        As for ``Client.publish``.

    Examples
    --------
    >>> import numpy as np
    >>> import truebridge as tb
    >>> weights = np.zeros(3)
    >>> with tb.serve("names") as names:
    ...     publication = names.publish("weights", weights)
    ...     weights += 1
    ...     publication.update()
    ...     newest = publication.wait()
    ...     names.get("weights", "numpy", version=newest)
    array([1., 1., 1.])
    """

    def __init__(self, client: _core.Client, name: str, tree: Any, slots: int) -> None:
        """Allocate memory for the versions, and publish the first."""
        tensors, text = shareable(tree)
        # It ends with its connection.
        self._client, self._name, self._tree, self._paths = client, name, tree, paths(text)
        #: What tells the last tree from others, its text, and its tensors in the order of the first tree.
        self._seen: tuple[bytes | None, str | None, list[int]] = None, text, []
        self._publication: _core.Publication | None = _core.Publication(client, name, tensors, self._paths, slots)
        self._publication.update(tensors, text, 0.0)

    def __repr__(self) -> str:
        """Return the name, and whether the publication is over."""
        return f"<Publication of {self._name!r:.80}{'' if self._publication else ', closed'}>"

    def update(self, tree: Any = None, *, timeout: float = 10.0) -> None:
        """Publish a version: copy the tensors as they are in their streams now, and announce them once that is done.

        The host does not wait for the copy. Work that is enqueued later may change the tensors at once: their streams
        wait for it.

        Parameters
        ----------
        tree : tensor or tree, optional
            What to copy: a tree with the structure, the shapes and the dtypes of the first one. Numbers and texts
            next to the tensors may be others. The default is the first one itself, whose tensors have changed in place.
        timeout : float, optional
            Seconds to wait for memory that no process reads.

        Raises
        ------
        BridgeError
            ``busy`` if no memory became free in that time: other processes have old versions open, or the device has
            yet to finish earlier ones. Also if the process that serves names does not answer in 5 seconds: the version
            may be listed all the same, and ``version`` does not count it before the next update. As for ``copy``, with
            the path to the tensor. ``gone`` if the process that serves names has ended, which may have been noticed
            after an earlier call.
        """
        publication = self._open()
        tensors, description = described(self._tree if tree is None else tree)
        # A tensor by itself has no path that could be missing.
        if not tensors and not self._paths:
            raise of_kind("not_a_tensor", f"{type(tree).__name__} holds no tensor: pass one, as was published")
        key = _key(description)
        # One look: another thread may replace it.
        seen, text, order = self._seen
        if key is None or key != seen:
            order = _matched(self._paths, paths(text_of(description)), ("in the tree", "published"))
            text = text_of(_numbered(description, order))
            self._seen = key, text, order
        publication.update([tensors[index] for index in order], text, timeout)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until every version is announced, and return the newest.

        Parameters
        ----------
        timeout : float, optional
            Seconds after which to give up. The default is to wait for ever.

        Returns
        -------
        int
            The version, as ``Client.get`` and ``Client.watch`` count them.

        Raises
        ------
        BridgeError
            ``busy`` if the device was not done in that time. If an earlier version was not announced, as for
            ``update``.
        """
        publication = self._open()
        left = None if timeout is None else _core.ipc_seconds(timeout)
        while (version := publication.settled(_SLICE if left is None else min(_SLICE, left))) is None:
            if left is not None:
                left -= min(_SLICE, left)
                if left <= 0:
                    raise of_kind("busy", "the device has not finished a version yet: wait longer")
        return version

    @property
    def version(self) -> int:
        """The newest version that was announced; 0 before the first."""
        return self._open().version

    def close(self) -> None:
        """End the publication. What the device has yet to finish is not announced."""
        if self._publication is not None:
            self._publication.close()
        self._publication = None
        self._tree = None

    def _open(self) -> _core.Publication:
        if self._publication is None:
            raise of_kind("gone", "the publication is closed: publish again")
        return self._publication

    def __enter__(self) -> Publication:
        """Return the publication."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the publication."""
        self.close()


class Subscription:
    """Tensors that receive the newest version of a name, as ``Client.subscribe`` returns it.

    Parameters
    ----------
    client : object
        The connection to the names, as ``Client`` has it.
    watch : function
        ``Client.watch``.
    name : str
        The name.
    out : tensor or tree
        As for ``Client.subscribe``.
    dtype : str, dtype or None
        As for ``Client.subscribe``.

    Raises
    ------
    BridgeError
        As for ``Client.subscribe``.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> import truebridge as tb
    >>> served = {"bias": torch.zeros(3)}
    >>> with tb.serve("names") as names:
    ...     publication = names.publish("weights", {"bias": np.ones(3, np.float32)})
    ...     subscription = names.subscribe("weights", out=served)
    ...     subscription.refresh() == publication.version
    True
    >>> served["bias"]
    tensor([1., 1., 1.])
    """

    def __init__(
        self, client: _core.Client, watch: Callable[..., Iterator[int]], name: str, out: Any, dtype: CastTo | None
    ) -> None:
        """Keep the tensors that receive versions. Nothing is copied yet."""
        tensors, tree = shareable(out)
        mine = paths(tree)

        def matched(text: str | None) -> list[int]:
            return _matched(mine, paths(text), ("published", "to be received"))

        self._watch, self._name = watch, name
        self._subscription = _core.Subscription(client, name, tensors, tree, mine, matched, dtype)

    def refresh(self) -> int | None:
        """Copy the newest version into the tensors, if there is one that was not copied yet.

        The copy runs in the streams that are current then, and the host does not wait for it. Later work in these
        streams sees the whole version. The addresses of the tensors do not change, so CUDA graphs stay valid.

        Returns
        -------
        int or None
            The version; ``None`` if nothing was copied: there is no newer one, or the process that has published it has
            ended.

        Raises
        ------
        BridgeError
            As for ``copy`` of trees, with the path to the tensor; and ``gone`` if the process that serves names has
            ended.
        """
        return self._subscription.refresh()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for a newer version, and copy it as ``refresh`` does.

        Parameters
        ----------
        timeout : float, optional
            Seconds without a new version after which to give up. The default is to wait for ever.

        Returns
        -------
        int or None
            The version; ``None`` after that time.

        Raises
        ------
        BridgeError
            As for ``refresh``.
        """
        for _ in self._watch(self._name, after=self.version, timeout=timeout):
            if (version := self.refresh()) is not None:
                return version
        return None

    @property
    def version(self) -> int:
        """The version that was copied last; 0 before the first."""
        return self._subscription.version

    def __repr__(self) -> str:
        """Return the name and the version."""
        return f"<Subscription to {self._name!r:.80}, version {self.version}>"
