"""What a carrier lends to another host: the tensors of a ticket, in blocks of memory that NIXL reads."""

from __future__ import annotations

import base64
import contextlib
import time
from typing import TYPE_CHECKING

from . import _core
from ._agents import registered
from ._channel import refusal
from .errors import BridgeError

if TYPE_CHECKING:
    from ._agents import Agents
    from ._channel import Channel
    from ._core import Ticket

__all__ = ["lend"]

#: Seconds for which the memory is kept after the other process was lost: what it had requested may still be sent. Its
#: connections end together, unless the network is lost.
_LINGER, _LINGER_LOST = 5.0, 120.0


def lend(agents: Agents, channel: Channel, ticket: Ticket) -> bool:
    """Describe the tensors of a ticket to another process, and hold their memory until it is done.

    Return whether it has said so: then the connection serves the next request.
    """
    outgoing = _core.Outgoing(ticket)
    with contextlib.ExitStack() as held:
        blocks = []
        for kind, index, address, nbytes in outgoing.blocks:
            about = b""
            if nbytes:
                device = kind, index
                agent = agents.lender(device)
                memory = registered(agent, device, address, nbytes)
                held.callback(agent.deregister_memory, memory)
                # It describes this memory alone, and not what others read at the same time.
                about = agent.get_partial_agent_metadata(memory, True, ["UCX"])
            agent_text = base64.b64encode(about).decode()
            blocks.append({"device": (kind, index), "address": address, "nbytes": nbytes, "agent": agent_text})
        channel.send({"is": "opened", "tensors": outgoing.tensors, "tree": outgoing.tree, "blocks": blocks})
        try:
            try:
                # The other end prepares the transfer meanwhile.
                outgoing.wait()
                channel.send({"is": "filled"})
            except BridgeError as error:
                channel.send(refusal(error))
            said = channel.receive(None)
        except BridgeError:
            said = {}
            time.sleep(_LINGER_LOST if channel.is_cut else _LINGER)
    # The memory lived until here.
    del outgoing
    return said == {"do": "done"}
