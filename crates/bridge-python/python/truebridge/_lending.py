"""What a carrier lends to another host: the tensors of a ticket, in memory that NIXL reads.

Memory that another process has allocated on a GPU cannot be registered for UCX's cuda_ipc. So the tensors on a GPU are
packed into a block of this process. Memory of the host is registered where it lies.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _core
from ._agents import current, registered
from .errors import BridgeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ._agents import Agents
    from ._channel import Channel
    from ._core import Ticket

    #: The name of a dtype, and a shape.
    Spec = tuple[str, list[int]]

__all__ = ["Group", "lend", "place_of", "spec_of", "views"]

#: Where tensors of the host do not lie side by side, these are packed: tensors of fewer bytes, and strided ones.
_SMALL = 1 << 20

#: The offset of a packed tensor is a multiple of this many bytes.
_APART = 256

#: Seconds for which the memory is kept after the other process was lost: what it had requested may still be sent. Its
#: connections end together, unless the network is lost.
_LINGER, _LINGER_LOST = 5.0, 120.0


@dataclass
class Group:
    """Tensors on one device, in pieces of memory."""

    device: tuple[str, int]
    #: The address and the bytes of each piece.
    pieces: list[tuple[int, int]]
    #: Of each tensor with elements: its number, its piece, and its offset there in bytes.
    tensors: list[tuple[int, int, int]]


def lend(agents: Agents, channel: Channel, ticket: Ticket) -> None:
    """Describe the tensors of a ticket to another process, and hold their memory until it is done."""
    specs, groups, tree, kept = _ready(ticket)
    with contextlib.ExitStack() as held:
        described = []
        for group in groups:
            agent = agents.lender(group.device)
            with current(group.device):
                memory = registered(agent, group.device, group.pieces)
                held.callback(agent.deregister_memory, memory)
                # It describes this memory alone, and not what others read at the same time.
                about = base64.b64encode(agent.get_partial_agent_metadata(memory, True, ["UCX"])).decode()
            described.append({**vars(group), "agent": about})
        channel.send({"is": "opened", "tensors": specs, "tree": tree, "groups": described})
        try:
            channel.receive(None)
        except BridgeError:
            time.sleep(_LINGER_LOST if channel.is_cut else _LINGER)
    # The memory lived until here.
    del kept


def _ready(ticket: Ticket) -> tuple[list[Spec], list[Group], str | None, Any]:
    """Open a ticket of this host, gather its tensors, and wait until the work on them has run."""
    import torch

    opened, tree = _core.ipc_open(ticket, "torch", None, None, None, None, False)
    places: dict[tuple[str, int], dict[int, torch.Tensor]] = {}
    for number, tensor in enumerate(opened):
        if tensor.nbytes:
            places.setdefault(place_of(tensor), {})[number] = tensor
    groups, kept = [], []
    for place, tensors in places.items():
        group, memory = _of_the_host(tensors) if place[0] == "cpu" else _packed(place, tensors)
        if place[0] == "cuda":
            torch.cuda.current_stream(place[1]).synchronize()
        groups.append(group)
        kept.append(memory)
    return [spec_of(tensor) for tensor in opened], groups, tree, kept


def _of_the_host(tensors: dict[int, torch.Tensor]) -> tuple[Group, Any]:
    """Describe tensors where they lie. Pack the small ones if they do not lie side by side."""
    place = ("cpu", 0)
    if (dense := _side_by_side(tensors)) is not None:
        start, nbytes, offsets = dense
        return Group(place, [(start, nbytes)], [(*one, offset) for one, offset in offsets]), tensors
    small = {
        number: tensor for number, tensor in tensors.items() if tensor.nbytes < _SMALL or not tensor.is_contiguous()
    }
    alone = {number: tensor for number, tensor in tensors.items() if number not in small}
    group, block = _packed(place, small) if small else (Group(place, [], []), None)
    for number, tensor in alone.items():
        group.tensors.append((number, len(group.pieces), 0))
        group.pieces.append((tensor.data_ptr(), tensor.nbytes))
    return group, (alone, block)


def _side_by_side(tensors: dict[int, torch.Tensor]) -> tuple[int, int, list[tuple[tuple[int, int], int]]] | None:
    """Return where tensors of the host lie, the bytes, and their offsets, if there is little else between them.

    Memory of the host is shared as a copy: between the tensors is nothing of the program's.
    """
    start = min(tensor.data_ptr() for tensor in tensors.values())
    end = max(tensor.data_ptr() + tensor.nbytes for tensor in tensors.values())
    compact = all(tensor.is_contiguous() for tensor in tensors.values())
    dense = end - start <= 2 * sum(tensor.nbytes for tensor in tensors.values()) + _APART
    if not compact or not dense:
        return None
    return start, end - start, [((number, 0), tensor.data_ptr() - start) for number, tensor in tensors.items()]


def _packed(place: tuple[str, int], tensors: dict[int, torch.Tensor]) -> tuple[Group, torch.Tensor]:
    """Copy tensors into a block of this process, by one call of ``copy``."""
    import torch

    import truebridge

    offsets, total = [], 0
    for tensor in tensors.values():
        offsets.append(total)
        total += -(-tensor.nbytes // _APART) * _APART
    device = "cpu" if place[0] == "cpu" else f"{place[0]}:{place[1]}"
    block = torch.empty(total, dtype=torch.uint8, device=device)
    truebridge.copy(list(tensors.values()), out=views(block, [spec_of(one) for one in tensors.values()], offsets))
    numbers = [(number, 0, offset) for number, offset in zip(tensors, offsets, strict=True)]
    return Group(place, [(block.data_ptr(), total)], numbers), block


def place_of(tensor: torch.Tensor) -> tuple[str, int]:
    """Return the kind of the device, and its number."""
    return tensor.device.type, tensor.device.index or 0


def spec_of(tensor: torch.Tensor) -> Spec:
    """Return the name of the dtype, and the shape."""
    return _name_of(tensor.dtype), list(tensor.shape)


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def views(block: torch.Tensor, specs: Sequence[Spec], offsets: Sequence[int]) -> list[torch.Tensor]:
    """Return compact tensors that lie in a block of bytes, whose length and offsets are multiples of all item sizes."""
    import torch

    typed: dict[str, torch.Tensor] = {}
    found = []
    for (name, shape), offset in zip(specs, offsets, strict=True):
        if (whole := typed.get(name)) is None:
            whole = typed[name] = block.view(getattr(torch, name))
        strides, stride = [0] * len(shape), 1
        for axis in reversed(range(len(shape))):
            strides[axis], stride = stride, stride * shape[axis]
        found.append(whole.as_strided(shape, strides, offset // whole.dtype.itemsize))
    return found
