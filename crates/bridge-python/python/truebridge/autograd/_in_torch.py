"""Computations of other frameworks as nodes of PyTorch's autograd. Imports PyTorch.

A node keeps what its framework has recorded of the computation. Where the gradients shall be differentiable themselves
(``create_graph=True``), they are a node as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from .. import _core
from ..errors import of_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Recorded(Protocol):
    """A computation that its framework has recorded."""

    @property
    def targets(self) -> list[Any]:
        """Tensors, one for each output of the node."""

    def differentiated(
        self, tensors: Any, wanted: list[int], given: list[int], known: list[Any]
    ) -> tuple[list[int], Any]:
        """Return the inputs that have a gradient, and these gradients.

        ``tensors`` are the inputs as PyTorch has saved them, and ``wanted`` those whose gradients are needed. ``known``
        are the gradients of the outputs ``given``. All are tensors of PyTorch.
        """


class Node(torch.autograd.Function):  # type: ignore[misc]
    """A computation: ``step`` runs it, and the tensors are what it depends on."""

    @staticmethod
    def forward(ctx: Any, step: Callable[[], Recorded], *tensors: Any) -> tuple[Any, ...]:
        record = step()
        outputs = copied(record.targets)
        ctx.mark_non_differentiable(*(y for y in outputs if not _has_gradient(y)))
        ctx.set_materialize_grads(False)
        # PyTorch refuses to go back once a program has written to them. Hooks on saved tensors, such as those of
        # torch.utils.checkpoint, save copies and end that check: then a record computes from the copies, or checks.
        ctx.save_for_backward(*tensors)
        ctx.record = record
        return tuple(outputs)

    # Compiled autograd would have Dynamo look into the backward, and so into the other framework.
    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        given = [i for i, gradient in enumerate(gradients) if gradient is not None]
        found: list[Any] = [None] * (1 + len(tensors))
        if wanted and given:
            at, made = ctx.record.differentiated(tensors, wanted, given, [gradients[i] for i in given])
            for i, gradient in zip(at, made, strict=True):
                found[1 + i] = gradient.to(tensors[i].device)
        if not _kept():
            ctx.record = None
        return tuple(found)


class Writes:
    """Counts the writes to tensors from now on, for where hooks end PyTorch's own check. Has none of their memory."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        # PyTorch counts none to a tensor of inference mode, and saves no such tensor.
        self.counted = [(_counter(x), x._version, x.data_ptr()) for x in tensors if not x.is_inference()]

    def __bool__(self) -> bool:
        """Return whether PyTorch has written to a tensor."""
        return any(counter._version != before for counter, before, _ in self.counted)

    def reach(self, saved: Sequence[Any]) -> bool:
        """Return whether a write has changed what was saved: a hook has saved the tensor itself."""
        return any(
            counter._version != before and x._version == counter._version and x.data_ptr() == address
            for x, (counter, before, address) in zip(saved, self.counted, strict=True)
        )


def check_writes(reached: bool, why: str) -> None:
    """Refuse a backward after a write that has ``reached`` the tensors that it needs."""
    if reached:
        text = (
            "PyTorch wrote to an argument, a parameter or a gradient of this function after its call, and before the "
            f"backward: {why}. Pass a .clone(), or write after the backward"
        )
        raise of_kind("argument", text)


def _counter(tensor: Any) -> Any:
    """Return an empty tensor with the counter of writes of this one."""
    counter = tensor.detach()
    counter.data = tensor.data.new_empty(0)
    return counter


def copied(tensors: list[Any]) -> list[Any]:
    """Return tensors of another framework in memory that only PyTorch uses."""
    views: list[Any] = _core.convert_inside(tensors, "torch", copy=True)
    return views


def check_forward_mode(tensors: list[Any], name: str) -> None:
    """Refuse tensors with a tangent: no framework that ``name`` names would take it."""
    forward = torch.autograd.forward_ad
    if forward._current_level >= 0 and any(forward.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise of_kind("argument", f"forward-mode derivatives do not go through {name}: use backward")


def check_devices(tensors: list[Any]) -> None:
    """Refuse tensors of several devices."""
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise of_kind("device", f"tensors are on {' and '.join(devices)}: move them to one device first")


def _has_gradient(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _kept() -> bool:
    """Return whether the running ``backward`` keeps the graph. PyTorch drops saved tensors by itself, but no record."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps is None or bool(keeps())
