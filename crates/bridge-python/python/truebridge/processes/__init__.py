"""Tensors of other processes.

One process shares tensors and sends a ticket, by any channel. Another opens the ticket::

    ticket = tb.share({"weights": weights, "step": 7})  # in one process
    send(ticket.text)

    model = tb.open(text, "tensorflow")  # in another: the same memory

The first process keeps the memory until the ticket has expired and every process that opened it has dropped the
tensors, or has ended. Long-running programs share under names: see ``serve`` and ``connect``.
"""

from typing import TYPE_CHECKING

from .tickets import Ticket, configure, held, open, revoke, share, transport

if TYPE_CHECKING:
    from .client import Client
    from .names import Names, connect, serve
    from .publications import Publication, Subscription

__all__ = [
    "Client",
    "Names",
    "Publication",
    "Subscription",
    "Ticket",
    "configure",
    "connect",
    "held",
    "open",
    "revoke",
    "serve",
    "share",
    "transport",
]

if not TYPE_CHECKING:
    #: Imported at first use, to keep the first ticket short.
    _LAZY = {
        "Client": "client",
        **dict.fromkeys(("Names", "connect", "serve"), "names"),
        **dict.fromkeys(("Publication", "Subscription"), "publications"),
    }

    def __getattr__(name: str) -> object:
        from .. import _imported

        if name in ("client", "names", "publications", "store"):
            return _imported(f"processes.{name}")
        if name in _LAZY:
            return getattr(_imported(f"processes.{_LAZY[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)

    def __dir__() -> list[str]:
        return [*__all__]
