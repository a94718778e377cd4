"""Functions of PyTorch and TensorFlow in JAX, and what only JAX has in those two: ``test_autograd.py`` has the rest."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import memory
import truebridge as tb
from conftest import kind_of as kind

jax: Any = pytest.importorskip("jax")
torch: Any = pytest.importorskip("torch")
tf: Any = pytest.importorskip("tensorflow")
from jax.test_util import check_grads  # noqa: E402

from truebridge.autograd import jax_function, tf_function, torch_function  # noqa: E402

jnp = jax.numpy


def in_torch(function: Callable[..., Any], **keywords: Any) -> Any:
    return torch_function(function, of="jax", **keywords)


# --- JAX in PyTorch


def test_a_rule_of_its_own_is_used() -> None:
    @jax.custom_vjp
    def function(x: Any) -> Any:
        return jnp.sin(x)

    function.defvjp(lambda x: (jnp.sin(x), x), lambda x, given: (10 * given * jnp.cos(x),))
    x = torch.ones(2, requires_grad=True)
    in_torch(lambda x: 2 * function(x))(x).sum().backward()
    assert torch.allclose(x.grad, 20 * torch.cos(torch.ones(2)))


def test_constants_are_told_apart() -> None:
    seen: list[Any] = []
    module = in_torch(lambda x, flag: (seen.append(flag), x * 2)[1])
    x = torch.ones(2)
    for flag in (1, 1.0, True, 0.0, -0.0, None, "text", 1, True):
        module(x, flag)
    assert list(map(repr, seen)) == ["1", "1.0", "True", "0.0", "-0.0", "None", "'text'"], "each is compiled once"
    assert kind(lambda: module(x, {1, 2})) == "argument"


def test_64_bits_without_x64_are_an_error() -> None:
    assert kind(lambda: in_torch(jnp.sin)(torch.ones(2, dtype=torch.float64))) == "dtype"
    assert kind(lambda: in_torch(lambda x, i: x)(torch.ones(2), torch.tensor(1))) == "dtype"
    assert kind(lambda: jax_function(lambda x: x.double())(jnp.ones(2))) == "dtype"
    assert kind(lambda: jax_function(lambda x: x.argmax())(jnp.ones(2))) == "dtype"
    assert kind(lambda: jax_function(lambda x: x)(np.ones(2))) == "dtype"
    assert kind(lambda: tf_function(jnp.sin, of="jax")(tf.ones(2, tf.float64))) == "dtype"


def flax_like(params: Any, x: Any) -> Any:
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ params["head"]


def params(width: int = 5) -> Any:
    keys = iter(jax.random.split(jax.random.key(3), 9))
    layers = [
        {"kernel": jax.random.normal(next(keys), (n, width)) / 2, "bias": jax.random.normal(next(keys), (width,)) / 4}
        for n in (4, width)
    ]
    return {"layers": layers, "head": jax.random.normal(next(keys), (width, 2))}


def test_a_model_of_jax_is_trained_as_in_jax() -> None:
    start = params()
    module = in_torch(flax_like, variables=start)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    mine, batch = start, tb.to_jax(x.clone())
    step = jax.jit(jax.grad(lambda p, x: (flax_like(p, x) ** 2).mean()))
    for _ in range(10):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
        mine = jax.tree.map(lambda p, g: p - 0.1 * g, mine, step(mine, batch))
    for expected, parameter in zip(jax.tree.leaves(mine), module.variables, strict=True):
        assert np.allclose(expected, parameter.detach(), rtol=1e-4, atol=1e-6)
    # The arrays that it began with have not changed.
    assert all(map(np.array_equal, jax.tree.leaves(start), jax.tree.leaves(params())))


def test_a_module_is_saved_copied_and_loaded() -> None:
    module = in_torch(flax_like, variables=params())
    x = torch.ones(3, 4)
    expected = module(x)
    others = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), in_torch(flax_like, variables=params(5))]
    others[2].load_state_dict(module.state_dict())
    with torch.no_grad():
        next(iter(module.variables)).zero_()
    for other in others:
        assert torch.equal(other(x), expected) and not torch.equal(module(x), expected)
        other(x).sum().backward()
        assert all(parameter.grad is not None for parameter in other.parameters())


def test_frozen_parameters_have_no_gradient() -> None:
    module = in_torch(flax_like, variables=params()).requires_grad_(False)
    x = torch.ones(3, 4, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None and all(parameter.grad is None for parameter in module.parameters())


def test_arguments_convert_in_place() -> None:
    x = torch.ones(1 << 16, requires_grad=True)
    y = jnp.ones(1 << 16)
    seen: list[int] = []
    jax_function(lambda y: (seen.append(y.data_ptr()), y * 2)[1])(y)
    assert seen == [y.unsafe_buffer_pointer()]
    before = tb.stats()["leased"]
    views: list[Any] = []
    module = in_torch(lambda x: x * x)
    from truebridge.autograd import _of_jax as of_jax

    recorded = of_jax.Computation.recorded
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_jax.Computation, "recorded", lambda *a: (views.extend(a[1]), recorded(*a))[1])
        module(x).sum().backward()
    assert [view.unsafe_buffer_pointer() for view in views] == [x.data_ptr()] and tb.stats()["leased"] > before


def test_each_pass_is_compiled_once() -> None:
    traced: list[int] = []

    def function(x: Any, w: Any) -> Any:
        traced.append(1)
        return jnp.tanh(x @ w)

    module = in_torch(function)
    w = torch.ones(3, 3, requires_grad=True)
    for _ in range(4):
        module(torch.ones(2, 3), w).sum().backward()
    assert len(traced) == 1
    for _ in range(3):
        (slope,) = torch.autograd.grad(module(torch.ones(2, 3), w).sum(), w, create_graph=True)
        slope.square().sum().backward()
    assert len(traced) == 2, "the second order traces it once more"


# --- PyTorch and TensorFlow in JAX

BOTH: dict[str, Any] = {
    "torch": (torch, lambda x, y: (x @ y.T, torch.exp(x) * y), lambda x, y: (torch.sin(x) * 2, y)),
    "tensorflow": (tf, lambda x, y: (x @ tf.transpose(y), tf.exp(x) * y), lambda x, y: (tf.sin(x) * 2, y)),
}


@pytest.mark.parametrize("of", BOTH)
@pytest.mark.parametrize("which", [1, 2])
def test_jax_agrees_with_differences(of: Any, which: int) -> None:
    with jax.enable_x64(True):
        inputs = [np.linspace(-1, 1, 6).reshape(2, 3), np.linspace(0, 1, 6).reshape(2, 3)]
        check_grads(jax_function(BOTH[of][which], of=of), inputs, order=2, modes=["rev"])


@pytest.mark.parametrize("of", BOTH)
def test_derivatives_of_any_order_run_the_function_once(of: Any) -> None:
    runs: list[int] = []
    cube = jax_function(lambda x, y: (runs.append(1), x**3 * y)[1], of=of)
    x, y = jnp.array([1.0, 2.0]), jnp.array([3.0, -1.0])

    def slope(x: Any, y: Any) -> Any:
        return jax.grad(lambda x: cube(x, y).sum())(x)

    assert slope(x, y).tolist() == (3 * x**2 * y).tolist() and len(runs) == 1
    assert jax.grad(lambda y: slope(x, y).sum())(y).tolist() == [3, 12] and len(runs) == 2
    third = jax.grad(lambda y: jax.grad(lambda x: slope(x, y).sum())(x).sum())(y)
    assert third.tolist() == [6, 12] and len(runs) == 3
    assert jax.grad(lambda x: slope(x, x).sum())(x).tolist() == [9, 36]


@pytest.mark.parametrize("of", BOTH)
def test_unused_results_and_inputs_in_jax(of: Any) -> None:
    root = torch.sqrt if of == "torch" else tf.sqrt
    function = jax_function(lambda x, y: {"twice": x * 2, "root": root(x), "y": y * 3, "none": None}, of=of)
    x = jnp.array([0.0, 4.0])
    assert function(x, x)["none"] is None
    for name, slope, other in (("twice", [2, 2], [0, 0]), ("root", [np.inf, 0.25], [0, 0]), ("y", [0, 0], [3, 3])):
        found = jax.grad(lambda x, y, name=name: function(x, y)[name].sum(), argnums=(0, 1))(x, x)
        assert [gradient.tolist() for gradient in found] == [slope, other]


@pytest.mark.parametrize("of", BOTH)
def test_complex_gradients_are_those_of_jax(of: Any) -> None:
    conj = torch.conj if of == "torch" else tf.math.conj
    z = jnp.array([1 + 1j, 2 - 1j], jnp.complex64)
    function = jax_function(lambda z: z * z * conj(z), of=of)
    found, expected = (
        jax.grad(lambda z, f=f: jnp.real(f(z).sum()))(z) for f in (function, lambda z: z * z * jnp.conj(z))
    )
    assert np.allclose(found, expected)


def test_what_is_drawn_at_random_is_the_same_in_every_derivative() -> None:
    x = jnp.ones(1000)
    noisy = jax_function(lambda x: x**3 * torch.rand(1000).round())
    value, pull = jax.vjp(lambda x: jax.vjp(noisy, x), x)[0], None
    y, pull = value
    (slope,) = pull(jnp.ones(1000))
    assert np.array_equal(slope, 3 * y) and 0 < float(y.sum()) < 1000


def test_a_module_of_pytorch_with_its_parameters_as_arguments() -> None:
    linear = torch.nn.Linear(3, 2)
    start = tb.to_jax(dict(linear.named_parameters()), detach=True, copy=True)
    x = jnp.arange(12.0).reshape(4, 3)
    model = jax_function(lambda p, x: torch.func.functional_call(linear, p, (x,)))
    found = jax.grad(lambda p: (model(p, x) ** 2).sum())(start)
    linear(torch.tensor(np.asarray(x))).square().sum().backward()
    for name, parameter in linear.named_parameters():
        assert np.allclose(found[name], parameter.grad)


def test_parameters_that_would_not_be_trained_are_an_error() -> None:
    x = jnp.ones((1, 2))
    layer = jax_function(torch.nn.Linear(2, 2))
    assert kind(lambda: layer(x)) == kind(lambda: jax.grad(lambda x: layer(x).sum())(x)) == "argument"
    with torch.no_grad():
        assert layer(x).shape == (1, 2)
    frozen = jax_function(torch.nn.Linear(2, 2).requires_grad_(False))
    assert jax.grad(lambda x: frozen(x).sum())(x).shape == (1, 2)
    variable = tf.Variable([1.0, 2.0])
    scaled = jax_function(lambda x: x * variable, of="tensorflow")
    assert kind(lambda: scaled(x)) == kind(lambda: jax.grad(lambda x: scaled(x).sum())(x)) == "argument"


def test_writes_reach_nothing_of_jax() -> None:
    x = jnp.ones(4)
    assert kind(lambda: jax_function(lambda x: x.add_(1))(x)) == "argument"
    assert kind(lambda: jax.grad(lambda x: jax_function(lambda x: x.detach().add_(1) * x)(x).sum())(x)) == "argument"
    kept = torch.ones(4)
    y, z = jax_function(lambda x: (kept, x.view(2, 2)))(x)
    kept.add_(1)
    assert y.tolist() == [1] * 4 and z.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()


@pytest.mark.parametrize("of", BOTH)
def test_transforms_that_trace_say_what_to_do(of: Any) -> None:
    function = jax_function(lambda x: x * 2, of=of)
    x = jnp.ones(3)
    total = lambda x: function(x).sum()  # noqa: E731
    calls = [
        lambda: jax.jit(function)(x),
        lambda: jax.jit(jax.grad(total))(x),
        lambda: jax.vmap(function)(x),
        lambda: jax.vmap(jax.grad(total))(x[None]),
        lambda: jax.pmap(function)(x[None]),
        lambda: jax.jacrev(function)(x),
        lambda: jax.grad(jax.checkpoint(total))(x),
        lambda: jax.lax.scan(lambda c, a: (function(c), a), x, x),
        lambda: jax.make_jaxpr(function)(x),
    ]
    for call in calls:
        with pytest.raises(tb.BridgeValueError, match="outside of what JAX traces"):
            call()
    for call in (lambda: jax.jvp(function, (x,), (x,)), lambda: jax.jacfwd(function)(x)):
        with pytest.raises((TypeError, tb.BridgeValueError)):
            call()


def test_numbers_and_arrays_of_numpy_are_arrays_of_jax() -> None:
    square = jax_function(lambda x: x**2)
    assert float(jax.grad(square)(3.0)) == 6
    assert jax.grad(lambda x: square(x).sum())(np.float32([1, 2])).tolist() == [2, 4]


@pytest.mark.parametrize("of", BOTH)
def test_records_are_dropped(of: Any) -> None:
    from truebridge.autograd import _held as held

    function = jax_function(lambda x: x**3, of=of)
    x = jnp.ones(3)
    y, pull = jax.vjp(function, x)
    assert len(held._HELD) == 1
    assert pull(y)[0].tolist() == [3] * 3 == pull(y)[0].tolist()
    del pull

    def settled() -> bool:
        gc.collect()
        jnp.ones(1).block_until_ready()
        return not held._HELD

    memory.eventually(settled)
    jax.grad(lambda x: jax.grad(lambda x: function(x).sum())(x).sum())(x)
    memory.eventually(settled)


def test_misuse_is_refused_with_a_kind() -> None:
    a = jnp.ones(2)
    for wrong in ("jax", "numpy", None, 3):
        assert kind(lambda wrong=wrong: jax_function(len, of=wrong)) == "argument"  # type: ignore[misc]
    assert kind(lambda: jax_function(3)) == "argument"  # type: ignore[arg-type]
    for other in (torch.ones(2), tf.ones(2)):
        assert kind(lambda other=other: jax_function(torch.exp)(other)) == "not_a_tensor"  # type: ignore[misc]
    assert kind(lambda: jax_function(lambda x: 3)(a)) == kind(lambda: jax_function(lambda x: a)(a)) == "not_a_tensor"
