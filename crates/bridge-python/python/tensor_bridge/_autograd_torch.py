"""Functions of TensorFlow as nodes of PyTorch's autograd. Imports both frameworks.

One call of the function is recorded by one persistent ``tf.GradientTape``. A node of autograd keeps it, and asks it for
the gradients. Where the gradients shall be differentiable themselves (``create_graph=True``), the same tape records how
they are computed, and a second node keeps it: the function runs once, whatever the order of the derivative.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
import torch

from . import _core
from ._spans import apart
from .autograd import filled, results_at, tensors_at
from .errors import of_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Step = Callable[[], "Record"]


#: TensorFlow keeps tensors of zeros of up to so many elements, for all gradients of the process, and PyTorch writes to
#: gradients when it adds others to them. So small ones are copied. (Source: ``_EagerTensorCache`` of TensorFlow's
#: eager context.)
_CACHED = 10_000


class Record(NamedTuple):
    """What TensorFlow knows of one node."""

    tape: Any
    #: Where the computation runs.
    device: str | None
    #: Tensors and variables, one for each input of the node.
    sources: list[Any]
    #: Tensors, one for each output of the node.
    targets: list[Any]


class _Node(torch.autograd.Function):  # type: ignore[misc]
    """A computation of TensorFlow: ``step`` runs it, and the tensors are what it depends on."""

    @staticmethod
    def forward(ctx: Any, step: Step, *tensors: Any) -> tuple[Any, ...]:
        record = step()
        outputs = apart(_core.to_torch(record.targets), tensors)
        ctx.mark_non_differentiable(*(y for y in outputs if not _has_gradient(y)))
        ctx.set_materialize_grads(False)
        # The tape reads the memory of both later: PyTorch refuses to go back once a program has written to it.
        ctx.save_for_backward(*tensors, *outputs)
        ctx.record = record
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors[: len(ctx.needs_input_grad) - 1]
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        given = [i for i, gradient in enumerate(gradients) if gradient is not None]
        found: list[Any] = [None] * (1 + len(tensors))
        if wanted and given:
            known = [gradients[i] for i in given]
            at, made = _differentiated(ctx.record, tensors, wanted, given, known)
            for i, gradient in zip(at, made, strict=True):
                gradient = gradient.to(tensors[i].device)
                found[1 + i] = gradient.clone() if gradient.numel() <= _CACHED else gradient
        if not _kept():
            ctx.record = None
        return tuple(found)


def _differentiated(
    record: Record, tensors: Any, wanted: list[int], given: list[int], known: list[Any]
) -> tuple[list[int], Any]:
    """Return the inputs that have a gradient, and these gradients.

    ``known`` are the gradients of the outputs ``given``, and ``wanted`` the inputs whose gradients are needed.
    """
    again = torch.is_grad_enabled()
    at: list[int] = []

    def step() -> Record:
        views = _crossed(known)
        with _on(record.device), _recording(record.tape) if again else contextlib.nullcontext():
            if again:
                record.tape.watch(views)
            targets = [record.targets[i] for i in given]
            made = record.tape.gradient(targets, [record.sources[i] for i in wanted], output_gradients=views)
            at.extend(i for i, gradient in zip(wanted, made, strict=True) if gradient is not None)
            # Of the rows of a table that were read, TensorFlow makes slices.
            made = [tf.convert_to_tensor(gradient) for gradient in made if gradient is not None]
        return Record(record.tape, record.device, [*record.sources, *views], made)

    if again:
        return at, _Node.apply(step, *tensors, *known)
    return at, apart(_core.to_torch(step().targets), [*tensors, *known])


class TensorFlowFunction(torch.nn.Module):  # type: ignore[misc]
    """A function of TensorFlow. Its parameters are the variables of the function, in place."""

    def __init__(self, function: Callable[..., Any], variables: Iterable[Any]) -> None:
        super().__init__()
        self.function = function
        self._sources = [_variable(variable) for variable in variables]
        views = _core.to_torch(self._sources)
        self._addresses = [view.data_ptr() for view in views]
        self.variables = torch.nn.ParameterList([torch.nn.Parameter(view) for view in views])

    # Dynamo cannot look into TensorFlow: it compiles what is before and what is after.
    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        if not tf.executing_eagerly():
            raise of_kind("argument", "this runs eagerly: call it outside of tf.function and of graphs")
        leaves = tf.nest.flatten((args, kwargs))
        own = (tf.Tensor, tf.Variable)
        at = tensors_at(leaves, torch.Tensor, own, "PyTorch", "tensor_bridge.to_torch")
        tensors = [*(leaves[i] for i in at), *self._parameters_in_place()]
        _check_devices(tensors)
        differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        tape: Any = tf.GradientTape(persistent=True) if differentiable else contextlib.nullcontext()
        results: Any = None
        where: list[int] = []

        def step() -> Record:
            nonlocal results
            views = _crossed(tensors[: len(at)])
            sources = [*views, *self._sources]
            device = next((source.device for source in sources), None)
            with _on(device), tape:
                if differentiable:
                    tape.watch([x for x, tensor in zip(sources, tensors, strict=True) if tensor.requires_grad])
                    # Each gets a gradient of its own: TensorFlow leaks a tensor that is the gradient of two inputs.
                    views = [tf.reshape(view, view.shape) for view in views]
                inputs, keywords = tf.nest.pack_sequence_as((args, kwargs), filled(leaves, at, views))
                results = self.function(*inputs, **keywords)
            flat = tf.nest.flatten(results)
            where.extend(results_at(flat, own, "TensorFlow"))
            if differentiable:
                self._check_variables(tape.watched_variables())
            with tape:
                targets = [tf.convert_to_tensor(flat[i]) for i in where]
            return Record(tape, device, sources, targets)

        if differentiable:
            outputs = _Node.apply(step, *tensors)
        else:
            outputs = apart(_core.to_torch(step().targets), tensors)
        return tf.nest.pack_sequence_as(results, filled([None] * len(tf.nest.flatten(results)), where, outputs))

    def _parameters_in_place(self) -> list[Any]:
        """Return the parameters, each over the memory that its variable has now."""
        views = _core.to_torch(self._sources)
        for i, (parameter, view) in enumerate(zip(self.variables, views, strict=True)):
            if parameter.data_ptr() == view.data_ptr():
                continue
            if parameter.device != view.device or parameter.dtype != view.dtype:
                text = (
                    f"parameter {i} is {parameter.dtype} on {parameter.device}, and its variable is {view.dtype} on "
                    f"{view.device}: make the variable with the dtype and on the device that it shall have"
                )
                raise of_kind("device" if parameter.device != view.device else "dtype", text)
            if view.data_ptr() == self._addresses[i]:
                text = f"parameter {i} has other memory than its variable: write to it in place, with parameter.copy_"
                raise of_kind("argument", text)
            # TensorFlow has assigned to the variable, which gives it other memory.
            parameter.data = view
            self._addresses[i] = view.data_ptr()
        return list(self.variables)

    def _check_variables(self, watched: Iterable[Any]) -> None:
        named = {source.ref() for source in self._sources}
        missing = [variable.name for variable in watched if variable.ref() not in named]
        if missing:
            text = (
                f"the function reads the trainable variable {missing[0]:.100}, which would get no gradient: pass "
                "variables=, such as layer.trainable_variables of a layer that is built; freeze a parameter with "
                "requires_grad_(False)"
            )
            raise of_kind("argument", text)


def _variable(variable: Any) -> Any:
    # A variable of Keras holds one of TensorFlow.
    found = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)
    if not isinstance(found, tf.Variable):
        raise of_kind("not_a_tensor", f"an object of type {type(variable).__name__} is no variable of TensorFlow")
    if not (found.dtype.is_floating or found.dtype.is_complex):
        raise of_kind(
            "dtype", f"the variable {found.name:.100} is {found.dtype.name} and has no gradient: leave it out"
        )
    return found


def _check_devices(tensors: list[Any]) -> None:
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise of_kind("device", f"tensors are on {' and '.join(devices)}: move them to one device first")


def _crossed(tensors: list[Any]) -> list[Any]:
    # Each is an object of its own, so that a tensor that is passed twice has a gradient for each time.
    views: list[Any] = _core.to_tensorflow([tensor.detach() for tensor in tensors])
    return views


def _on(device: str | None) -> Any:
    return contextlib.nullcontext() if device is None else tf.device(device)


@contextlib.contextmanager
def _recording(tape: Any) -> Iterator[None]:
    """Let the tape go on recording. TensorFlow warns of what it costs; here the caller has asked for it."""
    logger = tf.get_logger()
    quiet = _Quiet()
    logger.addFilter(quiet)
    try:
        with tape:
            yield
    finally:
        logger.removeFilter(quiet)


class _Quiet(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "GradientTape.gradient on a persistent tape" not in str(record.msg)


def _has_gradient(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _kept() -> bool:
    """Return whether the running ``backward`` keeps the graph. PyTorch drops saved tensors by itself, but no tape."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps is None or bool(keeps())
