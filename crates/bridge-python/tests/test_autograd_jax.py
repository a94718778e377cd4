"""Gradients between JAX and PyTorch or TensorFlow: compared with differences, and with those of a single framework."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import memory
import truebridge as tb

jax: Any = pytest.importorskip("jax")
torch: Any = pytest.importorskip("torch")
tf: Any = pytest.importorskip("tensorflow")
from jax.test_util import check_grads  # noqa: E402

from truebridge.autograd import jax_function, tf_function, torch_function  # noqa: E402

jnp = jax.numpy
DOUBLE = {"dtype": torch.float64, "requires_grad": True}


def in_torch(function: Callable[..., Any], **keywords: Any) -> Any:
    return torch_function(function, of="jax", **keywords)


def in_tf(function: Callable[..., Any], **keywords: Any) -> Any:
    return tf_function(function, of="jax", **keywords)


def kind(call: Callable[[], Any]) -> str:
    with pytest.raises(tb.BridgeError) as error:
        call()
    return error.value.kind


# --- JAX in PyTorch

FUNCTIONS = {
    "one": (lambda x, y: jnp.sin(x) * y, 2),
    "two results": (lambda x, y: (jnp.exp(x) * y, jnp.sum(y * y)), 2),
    "an unused input": (lambda x, y: jnp.tanh(x) * x, 2),
    "a cube": (lambda x: x**3, 1),
    "compiled": (jax.jit(lambda x, y: (jax.nn.sigmoid(x @ y.T), y)), 2),
    "a scan": (lambda x: jax.lax.scan(lambda c, a: (c * jnp.sin(a), c), jnp.ones(3, x.dtype), x), 1),
    "a checkpoint": (jax.checkpoint(lambda x, y: jnp.sin(jnp.sin(x) * y)), 2),
    "a branch": (lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_both_orders_are_those_of_differences(name: str) -> None:
    function, count = FUNCTIONS[name]
    with jax.enable_x64(True):
        inputs = tuple(torch.randn(2, 3, **DOUBLE) for _ in range(count))
        assert torch.autograd.gradcheck(in_torch(function), inputs)
        assert torch.autograd.gradgradcheck(in_torch(function), inputs)


def test_a_third_derivative() -> None:
    x = torch.tensor([2.0, -1.0], requires_grad=True)
    y = in_torch(lambda x: x**4)(x).sum()
    for expected in (4 * x**3, 12 * x**2, 24 * x):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert torch.allclose(y, expected)


def test_complex_gradients_are_those_of_pytorch() -> None:
    z = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    (found,) = torch.autograd.grad(in_torch(lambda z: z * z * jnp.conj(z))(z).real.sum(), z, create_graph=True)
    (expected,) = torch.autograd.grad((z * z * z.conj()).real.sum(), z, create_graph=True)
    assert torch.allclose(found, expected)
    again = [torch.autograd.grad(slope.abs().sum(), z)[0] for slope in (found, expected)]
    assert torch.allclose(*again, rtol=1e-4)


def test_a_rule_of_its_own_is_used() -> None:
    @jax.custom_vjp
    def function(x: Any) -> Any:
        return jnp.sin(x)

    function.defvjp(lambda x: (jnp.sin(x), x), lambda x, given: (10 * given * jnp.cos(x),))
    x = torch.ones(2, requires_grad=True)
    in_torch(lambda x: 2 * function(x))(x).sum().backward()
    assert torch.allclose(x.grad, 20 * torch.cos(torch.ones(2)))


def test_results_that_are_not_used_count_for_nothing() -> None:
    x, y = torch.tensor([0.0, 4.0], requires_grad=True), torch.ones(2, requires_grad=True)
    twice, root, other = in_torch(lambda x, y: (x * 2, jnp.sqrt(x), jax.jit(lambda y: y * 3)(y)))(x, y)

    def found(result: Any, **keywords: Any) -> Any:
        return torch.autograd.grad(result.sum(), [x, y], retain_graph=True, allow_unused=True, **keywords)

    for again in (False, True):
        assert found(twice, create_graph=again)[0].tolist() == [2, 2]
        assert found(twice, create_graph=again)[1] is None and found(other, create_graph=again)[0] is None
        assert found(root, create_graph=again)[0].tolist() == [np.inf, 0.25]


def test_a_tensor_that_is_passed_twice_has_both_gradients() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    in_torch(lambda a, b: a * a * b)(x, x).backward()
    assert x.grad.item() == 27
    y = jnp.float32(3)
    for of, function in (("torch", lambda a, b: a * a * b), ("tensorflow", lambda a, b: a * a * b)):
        both = jax_function(function, of=of)  # type: ignore[arg-type]
        assert float(jax.grad(lambda y, both=both: both(y, y))(y)) == 27
    z = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        found = in_tf(lambda a, b: a * a * b)(z, z)
    assert float(tape.gradient(found, z)) == 27


def test_constants_are_told_apart() -> None:
    seen: list[Any] = []
    module = in_torch(lambda x, flag: (seen.append(flag), x * 2)[1])
    x = torch.ones(2)
    for flag in (1, 1.0, True, 0.0, -0.0, None, "text", 1, True):
        module(x, flag)
    assert list(map(repr, seen)) == ["1", "1.0", "True", "0.0", "-0.0", "None", "'text'"], "each is compiled once"
    assert kind(lambda: module(x, {1, 2})) == "argument"


def test_containers_keywords_and_integers() -> None:
    def function(pair: Any, *, scale: Any, extra: Any) -> Any:
        assert pair["name"] == "n" and extra is None
        rows = pair["a"][pair["i"]]
        return {"sum": [rows + pair["b"][0]], "none": None, "where": jnp.argmax(pair["a"]), "x": scale * pair["a"]}

    a, b = torch.tensor([1.0, 4.0], requires_grad=True), torch.tensor([2.0, 2.0], requires_grad=True)
    index = torch.tensor([0, 0], dtype=torch.int32)
    out = in_torch(function)({"a": a, "b": (b,), "name": "n", "i": index}, scale=torch.tensor(3.0), extra=None)
    assert out["none"] is None and out["where"].item() == 1 and not out["where"].requires_grad
    (out["sum"][0].sum() + out["x"].sum()).backward()
    assert a.grad.tolist() == [5, 3] and b.grad.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_each_dtype_is_kept(dtype: Any) -> None:
    x = torch.ones(4, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = in_torch(lambda x: x * x)(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype and x.grad.tolist() == [2] * 4


def test_64_bits_without_x64_are_an_error() -> None:
    assert kind(lambda: in_torch(jnp.sin)(torch.ones(2, dtype=torch.float64))) == "dtype"
    assert kind(lambda: in_torch(lambda x, i: x)(torch.ones(2), torch.tensor(1))) == "dtype"
    assert kind(lambda: jax_function(lambda x: x.double())(jnp.ones(2))) == "dtype"
    assert kind(lambda: jax_function(lambda x: x.argmax())(jnp.ones(2))) == "dtype"
    assert kind(lambda: jax_function(lambda x: x)(np.ones(2))) == "dtype"
    assert kind(lambda: in_tf(jnp.sin)(tf.ones(2, tf.float64))) == "dtype"


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


def test_graphs_are_kept_and_dropped_as_in_pytorch() -> None:
    x = torch.ones(2, requires_grad=True)
    y = in_torch(jnp.exp)(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert torch.allclose(x.grad, 2 * x.exp())
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    with torch.no_grad():
        assert in_torch(jnp.exp)(x).grad_fn is None


def test_writes_between_forward_and_backward_are_noticed() -> None:
    x = torch.ones(2, requires_grad=True)
    inner = x * 2
    y = in_torch(lambda x: x * x)(inner)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()
    y = in_torch(jnp.exp)(x)
    expected = 2 * y.detach()
    y.mul_(2)  # A result has its own memory: the derivative of exp is computed from what JAX has.
    y.sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("count", [4, 20_000])
def test_what_pytorch_writes_reaches_nothing_of_jax(count: int) -> None:
    constant = jnp.ones(count)
    a, b = (torch.ones(count, requires_grad=True) for _ in range(2))
    results = in_torch(lambda a, b: (a, a + b, constant, jnp.reshape(a, (-1, 1))))(a, b)
    sent = torch.ones(count)
    torch.autograd.backward(results[:2], [sent, sent])
    spans = {t.data_ptr() for t in (a, b, sent, a.grad, b.grad, *results)}
    assert len(spans) == 9
    for written in (a.grad, b.grad, *(result.detach() for result in results)):
        written.fill_(7)
    assert float(constant.max()) == sent.max() == a.detach().max() == 1


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


def test_checkpoints_and_compiled_models() -> None:
    from torch.utils.checkpoint import checkpoint

    square = in_torch(jnp.square)
    x = torch.tensor([3.0], requires_grad=True)
    checkpoint(lambda x: square(x * 2), x, use_reentrant=False).backward()
    assert x.grad.item() == 24
    compiled = torch.compile(lambda x: (square(x * 2) + 1).sum(), backend="eager")
    (found,) = torch.autograd.grad(compiled(x), x)
    assert found.item() == 24


@pytest.mark.filterwarnings("error:.*Dynamo.*")
@pytest.mark.parametrize("of", ["jax", "tensorflow"])
def test_compiled_autograd_does_not_look_into_the_backward(of: str) -> None:
    square = torch_function({"jax": jnp.square, "tensorflow": tf.square}[of], of=of)

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator, unused-ignore]
    def loss(x: Any) -> Any:
        return (square(x * 2) + 1).sum()

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator, unused-ignore]
    def step(x: Any) -> None:
        loss(x).backward()

    x = torch.tensor([3.0], requires_grad=True)
    with torch._dynamo.config.patch(compiled_autograd=True):
        step(x)
        loss(x).backward()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        square(x * 2).sum().backward()
    assert x.grad.item() == 3 * 24


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


# --- JAX in TensorFlow


def test_tapes_of_any_order_go_through_a_function_of_jax() -> None:
    function = in_tf(lambda x, y: (x**4 * y, jnp.argmax(x)))
    x, y = tf.Variable([1.0, 2.0]), tf.Variable([3.0, -1.0])
    with tf.GradientTape() as third:
        with tf.GradientTape(persistent=True) as second:
            with tf.GradientTape() as first:
                value, where = function(x, y)
            slope = first.gradient(value, x)
        bend, mixed = second.gradient(slope, [x, y])
    assert np.allclose(slope, 4 * x**3 * y) and np.allclose(bend, 12 * x**2 * y) and np.allclose(mixed, 4 * x**3)
    assert np.allclose(third.gradient(bend, y), 12 * x**2) and int(where) == 1


def test_unused_results_and_inputs_in_tensorflow() -> None:
    function = in_tf(lambda x, y: {"b": (x * 2, None), "a": [jnp.sqrt(x), y * 3]})
    x, y = tf.Variable([0.0, 4.0]), tf.Variable([1.0, 1.0])
    with tf.GradientTape(persistent=True) as tape:
        made = function(x, y)
    assert made["b"][1] is None
    slope, other = tape.gradient(made["b"][0], [x, y])
    assert slope.numpy().tolist() == [2, 2] and other is None
    slope, other = tape.gradient(made["a"][1], [x, y])
    assert slope is None and other.numpy().tolist() == [3, 3]
    assert tape.gradient(made["a"][0], x).numpy().tolist() == [np.inf, 0.25]


def test_calls_under_one_tape_have_gradients_of_their_own() -> None:
    function = in_tf(lambda x: jnp.sin(x.squeeze(0)))
    inputs = [tf.Variable(tf.fill([1, 3], 1.2)) for _ in range(3)]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(function(x)) for x in inputs])
    found = tape.gradient(loss, inputs)
    assert all(np.allclose(gradient, np.cos(1.2)) for gradient in found)
    assert len({tb.to_numpy(gradient).ctypes.data for gradient in found}) == 3


def test_inside_a_tf_function_to_the_third_order() -> None:
    cube = in_tf(lambda x: x**3, outputs=tf.TensorSpec([], tf.float32))

    @tf.function  # type: ignore[untyped-decorator, unused-ignore]
    def orders(x: Any) -> Any:
        with tf.GradientTape() as third:
            third.watch(x)
            with tf.GradientTape() as second:
                second.watch(x)
                with tf.GradientTape() as first:
                    first.watch(x)
                    y = cube(x) + cube(2 * x)
                slope = first.gradient(y, x)
            bend = second.gradient(slope, x)
        return y, slope, bend, third.gradient(bend, x)

    assert [float(found) for found in orders(tf.constant(2.0))] == [72, 108, 108, 54]


def test_a_loop_of_a_graph_runs_jax_in_each_step() -> None:
    layer = in_tf(lambda x, w: jnp.tanh(x @ w), outputs=tf.TensorSpec([2, 2], tf.float32))
    w = tf.Variable([[0.5, -1.0], [1.0, 0.25]])

    @tf.function  # type: ignore[untyped-decorator, unused-ignore]
    def run(x: Any) -> Any:
        for _ in tf.range(3):
            x = layer(x, w)
        return x

    x = tf.constant([[1.0, 2.0], [0.0, -1.0]])
    with tf.GradientTape() as tape:
        y = run(x)
    with tf.GradientTape() as other:
        z = x
        for _ in range(3):
            z = tf.tanh(z @ w)
    assert np.allclose(y, z, atol=1e-6) and np.allclose(tape.gradient(y, w), other.gradient(z, w), atol=1e-5)


def test_complex_gradients_are_those_of_tensorflow() -> None:
    z = tf.Variable(tf.constant([1 + 1j, 2 - 1j], tf.complex64))
    function = in_tf(lambda z: z * z * jnp.conj(z))
    with tf.GradientTape(persistent=True) as tape:
        ours = tf.math.real(tf.reduce_sum(function(z)))
        theirs = tf.math.real(tf.reduce_sum(z * z * tf.math.conj(z)))
    assert np.allclose(tape.gradient(ours, z), tape.gradient(theirs, z))


# --- misuse


def test_misuse_is_refused_with_a_kind() -> None:
    x, t, a = torch.ones(2, requires_grad=True), tf.ones(2), jnp.ones(2)
    assert kind(lambda: jax_function(3)) == "argument"  # type: ignore[arg-type]
    for wrong in ("jax", "numpy", None, 3):
        assert kind(lambda wrong=wrong: jax_function(len, of=wrong)) == "argument"  # type: ignore[misc]
    assert kind(lambda: in_torch(jnp.exp)(a)) == "not_a_tensor"
    assert kind(lambda: in_torch(jnp.add)(x, np.ones(2, np.float32))) == "not_a_tensor"
    assert kind(lambda: in_torch(lambda x: "text")(x)) == "not_a_tensor"
    assert kind(lambda: in_torch(lambda x: 3.0)(x)) == "not_a_tensor"
    assert kind(lambda: in_torch(lambda v, x: x, variables=[x])) == "not_a_tensor"
    assert kind(lambda: in_torch(lambda v, x: x, variables=[jnp.arange(3)])) == "dtype"
    assert kind(lambda: in_torch(jnp.add)(x, torch.ones(2, device="meta"))) == "device"
    assert kind(lambda: jax_function(torch.exp)(x)) == kind(lambda: jax_function(torch.exp)(t)) == "not_a_tensor"
    assert kind(lambda: jax_function(lambda x: 3)(a)) == kind(lambda: jax_function(lambda x: a)(a)) == "not_a_tensor"
    assert kind(lambda: in_tf(jnp.exp)(a)) == kind(lambda: in_tf(lambda x: 3)(t)) == "not_a_tensor"
    assert kind(lambda: tf.function(in_tf(jnp.exp))(t)) == "argument"
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        assert kind(lambda: in_torch(jnp.exp)(forward.make_dual(torch.ones(1), torch.ones(1)))) == "argument"


def test_an_error_of_the_function_passes_through() -> None:
    def fails(x: Any) -> Any:
        raise KeyError("mine")

    for call in (
        lambda: in_torch(fails)(torch.ones(2, requires_grad=True)),
        lambda: in_tf(fails)(tf.ones(2)),
        lambda: jax_function(fails)(jnp.ones(2)),
        lambda: jax.grad(jax_function(fails, of="tensorflow"))(jnp.ones(2)),
    ):
        with pytest.raises(KeyError, match="mine"):
            call()


def test_the_example_runs() -> None:
    import doctest

    lines = inspect.getdoc(jax_function) or ""
    assert re.search(r"^Examples$", lines, re.MULTILINE)
    example = doctest.DocTestParser().get_doctest(lines, {}, "jax_function", None, None)
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0
