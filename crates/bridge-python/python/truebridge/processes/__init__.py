"""Tensors of other processes.

One process shares tensors and sends a ticket, by any channel. Another opens the ticket::

    ticket = tb.share({"weights": weights, "step": 7})  # in one process
    send(ticket.text)

    model = tb.open(text, "tensorflow")  # in another: the same memory

The first process keeps the memory until the ticket has expired and every process that opened it has dropped the
tensors, or has ended. Long-running programs share under names: see ``serve`` and ``connect``.
"""

from .client import Client
from .names import Names, connect, serve
from .publications import Publication, Subscription
from .tickets import Ticket, configure, held, open, revoke, share, transport

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
