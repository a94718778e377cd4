"""Conversions as users of the package make them: every way to call it, single tensors and trees."""

from __future__ import annotations

from typing import Any

import truebridge

#: The built-in exceptions that the error of a kind is, as the package documents it.
CLASSES: dict[str, tuple[type[BaseException], ...]] = {
    **dict.fromkeys(("not_a_tensor",), (TypeError,)),
    **dict.fromkeys(("dtype",), (TypeError, BufferError)),
    **dict.fromkeys(("argument", "device"), (ValueError,)),
    **dict.fromkeys(("layout",), (ValueError, BufferError)),
    **dict.fromkeys(("read_only", "copy_needed", "requires_grad", "refused", "consumed"), (BufferError,)),
    **dict.fromkeys(("missing",), (ImportError,)),
    **dict.fromkeys(("out_of_memory",), (MemoryError,)),
}


def within(x: Any, target: Any, keywords: dict[str, Any]) -> Any:
    """Convert a tree of the tensor, twice, and other objects, which pass through."""
    other = object()
    tree = truebridge.convert({"first": [x, "text", None], "second": (other, x)}, target, **keywords)
    kept = tree["first"][1:] == ["text", None] and tree["second"][0] is other
    if not kept or list(tree) != ["first", "second"] or tuple(tree["second"][1].shape) != tuple(x.shape):
        raise AssertionError(f"the tree became {tree!r}")
    return tree["first"][0]


#: The calls, each of which gives the same.
CALLS = (
    lambda x, target, keywords: truebridge.convert(x, target, **keywords),
    lambda x, target, keywords: getattr(truebridge, f"to_{target}")(x, **keywords),
    lambda x, target, keywords: truebridge.convert([x], target, **keywords)[0],
    within,
    lambda x, target, keywords: truebridge.convert(x, target, detach=True, **keywords),
    lambda x, target, keywords: truebridge.convert(x, target, permute=range(len(x.shape)), **keywords),
    lambda x, target, keywords: truebridge.convert(x, target, device=None, order=None, via=None, **keywords),
)


def convert(x: Any, target: Any, copy: bool | None) -> tuple[Any, str | None, int, str]:
    """Return the tensor, why it is a copy, its bytes and who copies; or the kind of the error and its text."""
    keywords: dict[str, Any] = {} if copy is None else {"copy": copy}
    try:
        plan = truebridge.plan(x, target, **keywords)
        # The tensor chooses the call, so that a case that is kept calls it the same way.
        shape = tuple(x.shape)
        call = CALLS[(sum(shape) + len(shape)) % len(CALLS)]
        return call(x, target, keywords), plan.reason, plan.nbytes, plan.copied_by or ""
    except truebridge.BridgeError as error:
        classes = CLASSES.get(error.kind, ())
        if not all(isinstance(error, builtin) for builtin in classes):
            raise AssertionError(f"an error of the kind {error.kind} is a {type(error).__name__}") from error
        if error.kind == "requires_grad" and truebridge.convert(x, target, detach=True).shape != x.shape:
            raise AssertionError("detached, the tensor has another shape") from error
        return None, error.kind, 0, str(error)


def record_stream(view: Any, stream: int) -> None:
    """Record a use of a view of the package, and nothing of another tensor."""
    try:
        truebridge.record_stream(view, stream)
    except truebridge.BridgeError as error:
        if error.kind != "argument":
            raise
