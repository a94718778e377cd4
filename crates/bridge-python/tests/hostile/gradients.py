"""Gradients: random programs of one framework inside the other, compared with the program in its own framework.

A value has six elements, and most steps are views, so that results, gradients and parameters tend to share memory. Zero
and ``None`` are told apart. Afterwards everything that PyTorch may write is overwritten, and nothing else may change.
Where both frameworks see a GPU, what is converted is there, and the program that stays in PyTorch is on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import truebridge as tb
from hostile.files import Wrong
from hostile.subjects import Case, Subject

Function = Callable[..., list[Any]]

#: Steps over one value, then over two: in PyTorch and in TensorFlow.
ONE: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "same": (lambda x: x, lambda tf, x: tf.identity(x)),
    "square": (lambda x: x * x, lambda tf, x: x * x),
    "sine": (lambda x: x.sin(), lambda tf, x: tf.sin(x)),
    "exponential": (lambda x: (x * 0.1).exp(), lambda tf, x: tf.exp(x * 0.1)),
    "root": (lambda x: x.abs().sqrt(), lambda tf, x: tf.sqrt(tf.abs(x))),
    "turned": (lambda x: x.reshape(2, 3).t(), lambda tf, x: tf.transpose(tf.reshape(x, [2, 3]))),
    "flat": (lambda x: x.reshape(6), lambda tf, x: tf.reshape(x, [6])),
    "row": (lambda x: x.reshape(6).unsqueeze(0), lambda tf, x: tf.expand_dims(tf.reshape(x, [6]), 0)),
    "total": (lambda x: x.sum().expand(6), lambda tf, x: tf.broadcast_to(tf.reduce_sum(x), [6])),
    "rows": (
        lambda x: x.reshape(3, 2)[[0, 2, 2]],
        lambda tf, x: tf.gather(tf.reshape(x, [3, 2]), [0, 2, 2]),
    ),
    "detached": (lambda x: x.detach(), lambda tf, x: tf.stop_gradient(x)),
}
TWO: dict[str, Callable[[Any, Any], Any]] = {"sum": lambda a, b: a + b, "product": lambda a, b: a * b}


def program(case: Case, steps: dict[str, Callable[[Any], Any]], reshaped: Callable[[Any, Any], Any]) -> Function:
    """The function of inputs and parameters that a case describes."""

    def function(*values: Any) -> list[Any]:
        made = list(values)
        for name, i, j in case["steps"]:
            x, y = made[i % len(made)], made[j % len(made)]
            made.append(steps[name](x) if name in steps else TWO[name](x, reshaped(y, x.shape)))
        return [made[i % len(made)] for i in case["results"]]

    return function


def loss(results: list[list[Any]], case: Case, total: Callable[[Any], Any]) -> Any:
    """The sum of what is used of the results of each call."""
    used = [result for call in results for result, use in zip(call, case["used"], strict=False) if use]
    terms = [total(result * (number + 1)) for number, result in enumerate(used)]
    return functools.reduce(lambda a, b: a + b, terms) if terms else None


def same(found: Any, expected: Any) -> bool:
    """Whether two gradients are equal, and both or neither are ``None``."""
    if found is None or expected is None:
        return found is expected
    found, expected = (np.asarray(x, dtype=np.float64) for x in (found, expected))
    return bool(np.allclose(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True))


def compare(what: str, found: list[Any], expected: list[Any]) -> None:
    """Refuse gradients that differ."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not same(one, other):
            raise Wrong(f"{what} {number}: {one} instead of {other}")


def numbers(case: Case, count: int, salt: int) -> list[Any]:
    """Arrays of small numbers, some of them zero."""
    rng = np.random.default_rng([case["seed"], salt])
    return [rng.integers(-2, 3, (2, 3)).astype(np.float32) / 2 for _ in range(count)]


def host(tensor: Any) -> Any:
    """A copy on the host, or ``None``."""
    return None if tensor is None else np.array(tb.to_numpy(tensor, detach=True, device="cpu"), copy=True)


def known(graph: bool, like: list[Any], *gradients: Any) -> list[list[Any]]:
    """Copies of gradients on the host. A graph has no ``None``: it is zero there."""
    return [
        [np.zeros_like(y) if x is None and graph else host(x) for x, y in zip(made, like, strict=True)]
        for made in gradients
    ]


@functools.cache
def device() -> str:
    """Where PyTorch's tensors are made: TensorFlow puts its own on a GPU that it sees."""
    import tensorflow as tf
    import torch

    return "cuda" if torch.cuda.is_available() and tf.config.list_physical_devices("GPU") else "cpu"


def torch_steps() -> dict[str, Callable[[Any], Any]]:
    return {name: step for name, (step, _) in ONE.items()}


def tensorflow_steps() -> dict[str, Callable[[Any], Any]]:
    import tensorflow as tf

    return {name: functools.partial(step, tf) for name, (_, step) in ONE.items()}


def in_tensorflow(case: Case) -> None:
    """A program of PyTorch under a tape of TensorFlow, compared with PyTorch by itself."""
    import tensorflow as tf
    import torch

    function = program(case, torch_steps(), lambda y, shape: y.reshape(shape))
    inputs, weights = numbers(case, case["inputs"], 0), numbers(case, case["parameters"], 1)
    ours, alone = (
        [torch.nn.Parameter(torch.tensor(weight, device=where)) for weight in weights] for where in (device(), "cpu")
    )
    graph = case["graph"]
    # TensorFlow passes zeros for results of a graph that are not used.
    case = {**case, "used": [use or graph for use in case["used"]]}
    shapes = [y.shape for y in function(*(torch.tensor(x) for x in inputs), *alone)] if graph else []
    outputs = [tf.TensorSpec(shape, tf.float32) for shape in shapes] if graph else None
    wrapped = tb.autograd.tf_function(lambda *x: function(*x, *ours), outputs=outputs)
    wrapped = tf.function(wrapped) if graph else wrapped
    for _ in range(case["rounds"]):
        variables, own = [tf.Variable(x) for x in inputs], [torch.tensor(x, requires_grad=True) for x in inputs]
        with tf.GradientTape() as tape:
            results = [wrapped(*variables) for _ in range(case["calls"])]
            value = loss(results, case, tf.reduce_sum)
        value_alone = loss([function(*own, *alone) for _ in range(case["calls"])], case, torch.sum)
        if value is None or not value_alone.requires_grad:
            return
        # A call that has no part in the loss: in a graph, a gradient belongs to its run.
        wrapped(*(variable + 1 for variable in variables))
        found = tape.gradient(value, variables)
        expected = torch.autograd.grad(value_alone, own, allow_unused=True, retain_graph=True) if own else []
        added = torch.autograd.grad(value_alone, alone, allow_unused=True) if alone else []
        compare("the gradient of input", *known(graph, inputs, found, expected))
        compare("the gradient of parameter", *known(graph, weights, [p.grad for p in ours], added))
        kept = [*(x for x in found if x is not None), *(x for call in results for x in call), *variables]
        before = [host(x) for x in kept]
        for one, other, gradient in zip(ours, alone, added, strict=True):
            if gradient is not None:
                one.grad.fill_(7)
                one.grad = None
                with torch.no_grad():
                    one.add_(gradient.to(one.device), alpha=0.1)
                    other.add_(gradient, alpha=0.1)
        compare("after a write, tensor", [host(x) for x in kept], before)


def in_torch(case: Case) -> None:
    """A program of TensorFlow in the autograd of PyTorch, compared with TensorFlow by itself."""
    import tensorflow as tf
    import torch

    function = program(case, tensorflow_steps(), tf.reshape)
    traced = tf.function if case["graph"] else lambda body: body
    inputs, weights = numbers(case, case["inputs"], 0), numbers(case, case["parameters"], 1)
    ours, alone = ([tf.Variable(weight) for weight in weights] for _ in range(2))
    body, body_alone = (
        traced(tf.autograph.experimental.do_not_convert(lambda *x, own=own: function(*x, *own)))
        for own in (ours, alone)
    )
    module = tb.autograd.torch_function(body, variables=ours)
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1) if parameters else None
    for _ in range(case["rounds"]):
        tensors = [torch.tensor(x, device=device(), requires_grad=True) for x in inputs]
        own = [tf.Variable(x) for x in inputs]
        shared = [tf.identity(variable) for variable in ours]
        before = [host(x) for x in shared]
        results = [module(*tensors) for _ in range(case["calls"])]
        value = loss(results, case, torch.sum)
        with tf.GradientTape() as tape:
            made = [body_alone(*own) for _ in range(case["calls"])]
            value_alone = loss([[tf.convert_to_tensor(x) for x in call] for call in made], case, tf.reduce_sum)
        if value is None or not value.requires_grad:
            return
        value.backward()
        expected = tape.gradient(value_alone, [*own, *alone])
        expected = [None if x is None else host(tf.convert_to_tensor(x)) for x in expected]
        compare("the gradient of input", [host(x.grad) for x in tensors], expected[: len(own)])
        compare("the gradient of parameter", [host(p.grad) for p in parameters], expected[len(own) :])
        for variable, gradient in zip(alone, expected[len(own) :], strict=True):
            if gradient is not None:
                variable.assign_sub(0.1 * gradient)
        if optimizer is not None:
            optimizer.step()
        compare("the variable", [host(x) for x in ours], [host(x) for x in alone])
        values = [host(x) for x in ours]
        for x in (*tensors, *parameters):
            if x.grad is not None:
                x.grad.fill_(7)
                x.grad = None
        for call in results:
            for x in call:
                x.detach().fill_(7)
        compare("after a write, tensor", [host(x) for x in shared], before)
        compare("after a write, variable", [host(x) for x in ours], values)


def gradients(case: Case) -> Subject:
    """A program, run in both directions."""

    def act(target: str, copy: bool | None) -> Any:
        (in_tensorflow if case["inside"] == "tensorflow" else in_torch)(case)

    return Subject(act, safe_to_read=False, must_convert=True)
