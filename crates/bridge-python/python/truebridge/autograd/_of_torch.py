"""Functions of PyTorch whose runs are recorded, for nodes of other frameworks. Imports PyTorch."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch

from .. import _core
from ..errors import of_kind
from ._leaves import filled
from ._spans import overlaps, span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Recorded:
    """Inputs and outputs in PyTorch. The outputs know how they depend on the inputs.

    ``None`` stands for an input that is not differentiable, and for an output that depends on no input.
    """

    def __init__(self, inner: list[Any], outer: Sequence[Any], lock: Any = None) -> None:
        self.inner = inner
        self.outer = outer
        #: Gradients of the inner tensors pass through their ``.grad``, one at a time.
        self.lock = lock or threading.RLock()

    def reordered(self, inputs: Sequence[int | None], outputs: Sequence[int]) -> Recorded:
        """Return the same with these inputs and outputs. ``None`` stands for an input that has no gradient."""
        inner = [None if i is None else self.inner[i] for i in inputs]
        return Recorded(inner, [self.outer[i] for i in outputs], self.lock)

    def differentiated(
        self, given: Sequence[int], known: list[Any], *, adds: bool = True
    ) -> tuple[list[Any], Callable[[], Recorded]]:
        """Return the gradients of the inner tensors, or ``None``, and what differentiates them.

        ``known`` are the gradients of the outer tensors ``given``. Those of parameters are added to ``.grad``, if
        ``adds``.
        """
        at = self._depending(given)
        targets = [self.outer[given[k]] for k in at]
        with torch.inference_mode(False):
            found = (_backward if adds else _gradients)(self, targets, converted([known[k] for k in at]))

        @functools.cache
        def again() -> Recorded:
            with torch.inference_mode(False):
                sent = converted([known[k] for k in at])
                wanted = [i for i, x in enumerate(found) if x is not None]
                inner = [self.inner[i] for i in wanted]
                # PyTorch takes no empty list: no result depends on any input.
                made = torch.autograd.grad(targets, inner, sent, create_graph=True) if inner else []
            outer = filled([None] * len(self.inner), wanted, made)
            return Recorded([*self.inner, *filled([None] * len(known), at, sent)], outer, self.lock)

        return found, again

    def pulled(
        self, wanted: Sequence[int], given: Sequence[int], known: list[Any], records: bool
    ) -> tuple[list[Any], Recorded | None]:
        """Return the gradients of the inner tensors ``wanted``, or ``None``, and their record.

        ``known`` are the gradients of the outer tensors ``given``. The last inner tensor of the record is ``None``.
        """
        at = self._depending(given)
        found: list[Any] = [None] * len(wanted)
        places = [k for k, i in enumerate(wanted) if self.inner[i] is not None]
        with torch.inference_mode(False):
            sent = converted([known[k] for k in at])
            if at and places:
                targets, inner = [self.outer[given[k]] for k in at], [self.inner[wanted[k]] for k in places]
                options = {"retain_graph": True, "create_graph": records, "allow_unused": True}
                found = filled(found, places, torch.autograd.grad(targets, inner, sent, **options))
        inner = [*self.inner, *filled([None] * len(known), at, sent), None]
        return found, Recorded(inner, found) if records else None

    @staticmethod
    def memory_for(beside: Any) -> Any:
        """Return eight bytes of fresh memory on the device of a tensor."""
        return torch.zeros(8, dtype=torch.uint8, device=_core.convert_inside(beside, "torch").device)

    def _depending(self, given: Sequence[int]) -> list[int]:
        """Return which of the outer tensors ``given`` depend on an input."""
        outer = [self.outer[i] for i in given]
        return [k for k, y in enumerate(outer) if y is not None and y.requires_grad]


def _gradients(record: Recorded, targets: list[Any], gradients: list[Any]) -> list[Any]:
    """Return the gradients of the inner tensors, or ``None``."""
    at = [i for i, x in enumerate(record.inner) if x is not None and x.requires_grad]
    if not targets or not at:
        return [None] * len(record.inner)
    inner = [record.inner[i] for i in at]
    found = torch.autograd.grad(targets, inner, gradients, retain_graph=True, allow_unused=True)
    return filled([None] * len(record.inner), at, found)


def _backward(record: Recorded, targets: list[Any], gradients: list[Any]) -> list[Any]:
    """Return the gradients of the inner tensors, or ``None``. Those of parameters are added to ``.grad``."""
    if not targets:
        return [None] * len(record.inner)
    with record.lock:
        torch.autograd.backward(targets, gradients, retain_graph=True)
        found = [None if x is None else x.grad for x in record.inner]
        for x in record.inner:
            if x is not None:
                x.grad = None
    # PyTorch writes to ``.grad`` later, and may have made it of memory that it was handed or that another has.
    spans = [span(gradient) for gradient in gradients]
    for leaf in ends(targets):
        if leaf.grad is not None:
            if overlaps(leaf.grad, spans):
                leaf.grad = leaf.grad.clone()
            spans.append(span(leaf.grad))
    return found


def ends(targets: Sequence[Any]) -> Iterator[Any]:
    """Yield the tensors in whose ``.grad`` the gradients of these end."""
    waiting = [target.grad_fn for target in targets]
    yield from (target for target in targets if target.grad_fn is None and target.requires_grad)
    seen = set()
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        waiting.extend(after for after, _ in function.next_functions)
        if isinstance(leaf := getattr(function, "variable", None), torch.Tensor):
            yield leaf


def converted(tensors: Sequence[Any]) -> list[Any]:
    """Return tensors of another framework in PyTorch, each as the beginning of a graph."""
    return [view.requires_grad_() if view.is_floating_point() or view.is_complex() else view for view in plain(tensors)]


def plain(tensors: Sequence[Any]) -> list[Any]:
    """Return tensors of another framework in PyTorch."""
    # Each is its own object, so that a tensor that is passed twice has a gradient for each time.
    return [view.detach() for view in _core.convert_inside(list(tensors), "torch")]


def check_arguments(views: Sequence[Any], name: str) -> None:
    """Refuse a function that has written to its arguments, which are tensors of the framework ``name``."""
    if any(view._version for view in views):
        text = f"the function wrote to an argument, which {name} takes as constant: write to a .clone()"
        raise of_kind("argument", text)
