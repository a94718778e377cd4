"""Functions of TensorFlow as nodes of PyTorch's autograd. Imports both frameworks.

One call of the function is recorded by one persistent ``tf.GradientTape``. A node of autograd keeps it, and asks it for
the gradients. Where the gradients shall be differentiable themselves (``create_graph=True``), the same tape records how
they are computed, and a second node keeps it: the function runs once, whatever the order of the derivative.

Arguments and parameters are converted in place. Results and gradients are copied: TensorFlow takes its tensors as
constant and shares their memory, and PyTorch writes to its tensors.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import _core
from ..errors import of_kind
from ._draws import Draws
from ._in_tensorflow import anchor
from ._in_torch import Node, Writes, check_devices, check_forward_mode, check_writes, copied
from ._leaves import filled, results_at, tensors_at
from ._of_tensorflow import Recorded, converted, on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Record(NamedTuple):
    """A node of TensorFlow's in PyTorch's autograd."""

    run: Recorded
    #: Writes to the tensors whose memory the tape has.
    writes: tuple[Writes, ...]

    @property
    def targets(self) -> list[Any]:
        """Tensors, one for each output of the node."""
        return self.run.targets

    def differentiated(
        self, tensors: Any, wanted: list[int], given: list[int], known: list[Any]
    ) -> tuple[list[int], Any]:
        """Return the inputs that have a gradient, and these gradients."""
        why = (
            "TensorFlow's tape has the memory and no copy, whatever hooks such as those of torch.utils.checkpoint save"
        )
        check_writes(any(self.writes), why)
        again = torch.is_grad_enabled()
        at: list[int] = []

        def step() -> Record:
            run = self.run.derived(wanted, given, known, again)
            places = [k for k, gradient in enumerate(run.targets) if gradient is not None]
            at.extend(wanted[k] for k in places)
            return Record(
                run._replace(targets=[run.targets[k] for k in places]), (*self.writes, Writes(known if again else ()))
            )

        if again:
            return at, Node.apply(step, *tensors, *known)
        return at, copied(step().targets)


def wrapped(function: Callable[..., Any], variables: Iterable[Any] | None) -> Any:
    """Return the module of PyTorch that runs this function of TensorFlow."""
    return TensorFlowFunction(function, () if variables is None else variables)


class TensorFlowFunction(torch.nn.Module):  # type: ignore[misc]
    """A function of TensorFlow. Its parameters are the variables of the function, in place."""

    def __init__(self, function: Callable[..., Any], variables: Iterable[Any]) -> None:
        super().__init__()
        self.function = function
        self._sources = _variables(variables)
        self.variables = torch.nn.ParameterList([_parameter(source) for source in self._sources])

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            text = "assign=True would replace the parameters, which are variables of TensorFlow: load without it"
            raise of_kind("argument", text)
        self.unshare()
        super()._load_from_state_dict(state, prefix, metadata, *args)
        _order(self.variables)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled or copied: the parameters would no longer be the variables."""
        text = "this module cannot be pickled or copied, because its parameters are variables of TensorFlow: save its "
        raise of_kind("argument", text + "state_dict(), and load that into a module that you make from the function")

    def unshare(self) -> None:
        """Give each variable memory that no other tensor of TensorFlow has.

        TensorFlow shares memory where a variable is assigned to another or read by ``tf.identity``, and a write of
        PyTorch would reach both. Optimizers of PyTorch and ``load_state_dict`` call this before they write. Call it
        before you write a parameter yourself, if TensorFlow has read its variable since the last call; on a GPU call it
        afterwards too, so that what TensorFlow reads next waits for the write. A call of the module waits by itself.
        """
        for parameter in self.variables:
            _in_place(parameter)
            _unshare(parameter)

    # Dynamo cannot look into TensorFlow: it compiles what is before and what is after.
    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        if not tf.executing_eagerly():
            raise of_kind("argument", "this runs eagerly: call it outside of tf.function and of graphs")
        leaves = tf.nest.flatten((args, kwargs))
        own = (tf.Tensor, tf.Variable)
        at = tensors_at(leaves, torch.Tensor, own, "PyTorch", "truebridge.to_torch")
        tensors = [*(leaves[i] for i in at), *self._parameters_in_place()]
        check_devices(tensors)
        check_forward_mode(tensors, "TensorFlow")
        records = torch.is_grad_enabled()
        differentiable = records and any(tensor.requires_grad for tensor in tensors)
        tape: Any = tf.GradientTape(persistent=differentiable) if records else contextlib.nullcontext()
        results: Any = None
        where: list[int] = []
        draws = Draws()

        def step() -> Record:
            nonlocal results
            views = converted(tensors[: len(at)])
            sources = [*views, *self._sources]
            device = next((source.device for source in sources), None)
            with on(device), tape:
                if differentiable:
                    tape.watch([x for x, tensor in zip(sources, tensors, strict=True) if tensor.requires_grad])
                    # Each gets its own gradient: TensorFlow leaks a tensor that is the gradient of two inputs.
                    views = [tf.reshape(view, view.shape) for view in views]
                inputs, keywords = tf.nest.pack_sequence_as((args, kwargs), filled(leaves, at, views))
                with draws:
                    results = self.function(*inputs, **keywords)
            flat = tf.nest.flatten(results)
            where.extend(results_at(flat, own, "TensorFlow"))
            anchors = self._checked(tape.watched_variables(), differentiable) if records else []
            with tape:
                targets = [tf.convert_to_tensor(flat[i]) for i in where]
            return Record(Recorded(tape, device, sources, targets, anchors), (Writes(tensors),))

        if differentiable:
            outputs = Node.apply(step, *tensors)
        else:
            outputs = copied(step().targets)
        draws.check()
        return tf.nest.pack_sequence_as(results, filled([None] * len(tf.nest.flatten(results)), where, outputs))

    def _parameters_in_place(self) -> list[Any]:
        """Return the parameters, each over the memory that its variable has now."""
        for parameter in self.variables:
            _in_place(parameter)
        return list(self.variables)

    def _checked(self, watched: Iterable[Any], differentiable: bool) -> list[Any]:
        """Return the anchors among the variables that the tape has watched. The others are sources."""
        anchors = [variable for variable in watched if variable is anchor()]
        if anchors and not differentiable:
            text = (
                "the function uses parameters of PyTorch, which would get no gradient: pass an argument that requires "
                "grad, or call it under torch.no_grad()"
            )
            raise of_kind("argument", text)
        named = {variable.ref() for variable in (*self._sources, *anchors)}
        missing = [variable.name for variable in watched if variable.ref() not in named]
        if missing:
            text = (
                f"the function reads the trainable variable {missing[0]:.100}, which would get no gradient: pass "
                "variables=, such as layer.trainable_variables of a layer that is built; freeze a parameter with "
                "requires_grad_(False)"
            )
            raise of_kind("argument", text)
        return anchors


def _variables(variables: Any) -> list[Any]:
    kind = type(variables).__name__
    if hasattr(variables, "trainable_variables"):
        raise of_kind("argument", f"variables= is a {kind}: pass its .trainable_variables")
    if isinstance(variables, dict | str) or not isinstance(variables, Iterable):
        text = f"variables= is a {kind}; expected a list of tf.Variable (parameters of JAX need of='jax')"
        raise of_kind("argument", text)
    return [_variable(index, variable) for index, variable in enumerate(variables)]


def _variable(index: int, variable: Any) -> Any:
    # A variable of Keras holds one of TensorFlow.
    found = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)
    if not isinstance(found, tf.Variable):
        text = (
            f"variables[{index}] is a {type(variable).__name__}; expected tf.Variable (an array of JAX needs of='jax')"
        )
        raise of_kind("not_a_tensor", text)
    if not (found.dtype.is_floating or found.dtype.is_complex):
        raise of_kind(
            "dtype", f"the variable {found.name:.100} is {found.dtype.name} and has no gradient: leave it out"
        )
    return found


class _Place:
    """Where a parameter is: an attribute of it."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.lock = threading.RLock()
        #: The address that the variable had when it was last looked at.
        self.address = 0
        #: No rows of the variable: their numbers, and their elements.
        self.rows = None
        if source.shape.rank:
            self.rows = tf.zeros([0], tf.int32), tf.zeros([0, *source.shape[1:]], source.dtype)


#: The parameters over variables. Modules over one variable have one parameter, so that a write through one is seen by
#: the other, and an optimizer steps it once.
_PARAMETERS: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


def _parameter(source: Any) -> Any:
    """Return the parameter over the memory of a variable, which nothing else in TensorFlow has."""
    parameter = _PARAMETERS.get(source.ref())
    if parameter is not None:
        _in_place(parameter)
        return parameter
    _watch_steps()
    parameter = torch.nn.Parameter(_core.convert_inside(source, "torch"))
    parameter._truebridge = _Place(source)
    _PARAMETERS[source.ref()] = parameter
    _unshare(parameter)
    return parameter


def _alone(move: Callable[[Any], None]) -> Callable[[Any], None]:
    """Let one thread at a time move a parameter: another would find no memory in it."""

    @functools.wraps(move)
    def moved(parameter: Any) -> None:
        if not hasattr(parameter, "_truebridge"):
            text = "a parameter was replaced by one that is not over a variable: write to it in place, with "
            raise of_kind("argument", text + "parameter.copy_")
        with parameter._truebridge.lock:
            move(parameter)

    return moved


@_alone
def _in_place(parameter: Any) -> None:
    """Put a parameter over the memory that its variable has now."""
    place = parameter._truebridge
    source, view = place.source, _core.convert_inside(place.source, "torch")
    if parameter.data_ptr() == view.data_ptr():
        return
    if parameter.device != view.device or parameter.dtype != view.dtype:
        text = (
            f"a parameter is {parameter.dtype} on {parameter.device}, and its variable {source.name:.100} is "
            f"{view.dtype} on {view.device}: make the variable with the dtype and on the device that you want"
        )
        raise of_kind("device" if parameter.device != view.device else "dtype", text)
    if view.data_ptr() == place.address:
        text = f"the parameter of {source.name:.100} has other memory than its variable: write to it in place, with "
        raise of_kind("argument", text + "parameter.copy_")
    # TensorFlow has assigned to the variable, which then has the memory of what was assigned.
    parameter.data = view
    del view
    _unshare(parameter)


@_alone
def _unshare(parameter: Any) -> None:
    """Give the variable memory that no other tensor of TensorFlow has, unless it has already, and move its parameter.

    TensorFlow does so itself before it writes rows of a variable, also where there are none. It takes the parameter for
    another tensor, so the memory is returned meanwhile.
    """
    place = parameter._truebridge
    _order([parameter])
    parameter.data = parameter.data.new_empty(0)
    try:
        with tf.device(place.source.device):
            if place.rows is not None:
                indices, rows = place.rows
                tf.raw_ops.ResourceScatterUpdate(resource=place.source.handle, indices=indices, updates=rows)
                tf.raw_ops.DisableCopyOnRead(resource=place.source.handle)
                return
    except (tf.errors.OpError, TypeError, ValueError):
        # A dtype of which TensorFlow writes no rows, as it writes none of a scalar.
        place.rows = None
    finally:
        if place.rows is None:
            place.source.assign(_core.convert_inside(place.source, "tensorflow", copy=True))
        parameter.data = _core.convert_inside(place.source, "torch")
        place.address = parameter.data_ptr()


@functools.cache
def _watch_steps() -> None:
    """Let every optimizer of PyTorch unshare the parameters before it writes them, and order its writes."""
    register_optimizer_step_pre_hook(_before_a_step)
    register_optimizer_step_post_hook(lambda optimizer, *_: _order(_stepped(optimizer)))


def _stepped(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and hasattr(parameter, "_truebridge"):
                yield parameter


def _before_a_step(optimizer: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Unshare the parameters, and again after the closure, which makes gradients and may share a variable.

    ``args`` begin with the optimizer.
    """
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    if not any(hasattr(parameter, "_truebridge") for parameter in parameters):
        return None
    _unshare_stepped(optimizer)

    def watched(argument: Any) -> Any:
        if not callable(argument):
            return argument

        @functools.wraps(argument)
        def closure() -> Any:
            loss = argument()
            _unshare_stepped(optimizer)
            return loss

        return closure

    return (*args[:1], *map(watched, args[1:])), {name: watched(value) for name, value in keywords.items()}


def _unshare_stepped(optimizer: Any) -> None:
    for parameter in _stepped(optimizer):
        _in_place(parameter)
        _unshare(parameter)


def _order(parameters: Iterable[Any]) -> None:
    """Let what TensorFlow reads from now on wait for what PyTorch has still to write, once for each device."""
    for parameter in {parameter.device: parameter for parameter in parameters if parameter.is_cuda}.values():
        _core.convert_inside(parameter.detach(), "tensorflow")
