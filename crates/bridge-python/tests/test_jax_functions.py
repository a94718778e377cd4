"""Tensors of other frameworks in functions that JAX has compiled: what a call reads and fills, keeps, and refuses."""

from __future__ import annotations

import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import truebridge as tb

np: Any = pytest.importorskip("numpy")
jax: Any = pytest.importorskip("jax")

jnp = jax.numpy

#: What a call raises: the first where it runs at once, the second where it runs later.
FAILED = (ValueError, jax.errors.JaxRuntimeError)


def arrays(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def called(function: Any, *args: Any) -> Any:
    """Call a function and wait for what it does."""
    return jax.block_until_ready(function(*args))


def outstanding() -> int:
    gc.collect()
    stats = tb.stats()
    return int(stats["leased"] - stats["released"])


def test_every_call_reads_the_tensor_as_it_is_then() -> None:
    source = arrays(4, 3)
    fed = tb.jax.feed(source.T)
    function = jax.jit(lambda x: tb.jax.external_input(fed) * x)
    for step in range(5):
        source += step
        assert (called(function, 2.0) == 2 * source.T).all()
    assert (tb.jax.external_input(fed) == source.T).all(), "also outside jit"


def test_every_call_fills_the_tensor_and_nothing_beside_it() -> None:
    whole = np.full((6, 8), -1, np.float32)
    fed = tb.jax.feed(whole[1:5:2, ::2].T)
    function = jax.jit(lambda x: (x + 1, tb.jax.external_output(2 * x, fed)))
    for step in range(5):
        x = arrays(4, 2) + step
        y, receipt = called(function, x)
        assert (y == x + 1).all() and receipt.shape == (0,)
        assert (whole[1:5:2, ::2].T == 2 * x).all()
        assert (whole == -1).sum() == whole.size - x.size


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_tensors_of_other_frameworks_are_read(framework: str) -> None:
    pytest.importorskip(framework)
    tensor = tb.convert(arrays(3, 2), framework, copy=True)
    fed = tb.jax.feed(tensor)
    assert (fed.dtype, fed.shape, fed.device) == ("float32", (3, 2), "cpu")
    assert repr(fed) == "<Feed: float32 [3, 2] on cpu>"
    assert (called(jax.jit(lambda: tb.jax.external_input(fed))) == arrays(3, 2)).all()


def test_autograd_notices_a_write() -> None:
    torch: Any = pytest.importorskip("torch")
    w, saved = torch.ones(3, requires_grad=True), torch.ones(3)
    loss = (w * saved).sum()
    fed = tb.jax.feed(saved)
    called(jax.jit(lambda x: tb.jax.external_output(x, fed)), jnp.zeros(3))
    assert saved.tolist() == [0, 0, 0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(tb.BridgeBufferError, match="detach") as caught:
        tb.jax.feed(w)
    assert caught.value.kind == "requires_grad"


@pytest.mark.parametrize("dtype", sorted(tb.profile("jax")["dtypes"]))
def test_each_dtype_is_read_and_filled(dtype: str) -> None:
    source = np.arange(1, 5).astype(jnp.dtype(dtype))
    target = np.zeros_like(source)
    fed, filled = tb.jax.feed(source), tb.jax.feed(target)
    called(jax.jit(lambda: tb.jax.external_output(tb.jax.external_input(fed), filled)))
    assert target.tobytes() == source.tobytes()


def test_shapes_without_dimensions_and_without_elements() -> None:
    for shape in [(), (0,), (3, 0), (1, 1, 1)]:
        source, target = np.ones(shape, np.float32), np.zeros(shape, np.float32)
        fed, filled = tb.jax.feed(source), tb.jax.feed(target)
        copied = called(jax.jit(lambda fed=fed: tb.jax.external_input(fed)))
        assert copied.shape == shape and (copied == 1).all()
        called(jax.jit(lambda x, filled=filled: tb.jax.external_output(x, filled)), copied)
        assert (target == 1).all()


def test_control_flow_reads_and_fills() -> None:
    source, out = np.ones(3, np.float32), np.zeros(3, np.float32)
    fed, filled = tb.jax.feed(source), tb.jax.feed(out)

    def step(carry: Any, _: Any) -> tuple[Any, Any]:
        return carry + 1, tb.jax.external_output(carry * tb.jax.external_input(fed), filled)

    called(jax.jit(lambda: jax.lax.scan(step, 1.0, None, 5)))
    assert out.tolist() == [5, 5, 5]
    branch = jax.jit(lambda p: jax.lax.cond(p, lambda: tb.jax.external_output(jnp.zeros(3), filled).size, lambda: 0))
    called(branch, False)
    assert out.tolist() == [5, 5, 5]
    called(branch, True)
    assert out.tolist() == [0, 0, 0]


def test_gradients_pass_by() -> None:
    source, out = np.full(3, 2, np.float32), np.zeros(3, np.float32)
    fed, filled = tb.jax.feed(source), tb.jax.feed(out)

    def loss(x: Any) -> Any:
        y = x * tb.jax.external_input(fed)
        tb.jax.external_output(y, filled)
        return (y * y).sum()

    for transformed in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.jit(jax.grad(jax.jit(loss)))):
        out[...] = 0
        assert called(transformed, jnp.ones(3)).tolist() == [8, 8, 8] and out.tolist() == [2, 2, 2]
    remat = jax.grad(jax.checkpoint(lambda x: (x * tb.jax.external_input(fed)).sum()))
    assert called(remat, jnp.ones(3)).tolist() == [2, 2, 2]
    of_the_tensor = jax.jit(lambda: jax.grad(lambda w: (w * w).sum())(tb.jax.external_input(fed)))
    assert called(of_the_tensor).tolist() == [4, 4, 4]


def test_the_gradient_of_a_loop_fills_in_each_step() -> None:
    fed, out = tb.jax.feed(np.full(3, 2, np.float32)), np.zeros(3, np.float32)
    filled = tb.jax.feed(out)

    def step(x: Any, _: Any) -> Any:
        x = x * tb.jax.external_input(fed)
        tb.jax.external_output(x, filled)
        return x, None

    loss = lambda x: jax.lax.scan(step, x, None, length=3)[0].sum()  # noqa: E731
    # JAX 0.10 leaves the effects of a loop out when it takes the gradient: docs/jax.md says so.
    last = 0 if jax.__version_info__ < (0, 11) else 8
    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        out[...] = 0
        assert called(gradient, jnp.ones(3)).tolist() == [8] * 3 and out.tolist() == [last] * 3


@pytest.mark.parametrize("compile", [jax.jit, lambda function: function])
def test_a_checkpoint_reads_the_tensor_again(compile: Any) -> None:
    source = arrays(3) + 1
    fed = tb.jax.feed(source)
    function = jax.checkpoint(lambda x: jnp.sin(x * tb.jax.external_input(fed)).sum())
    gradient = called(compile(jax.grad(function)), jnp.ones(3))
    np.testing.assert_allclose(gradient, np.cos(source) * source, rtol=1e-6)
    source += 1
    gradient = called(compile(jax.grad(function)), jnp.ones(3))
    np.testing.assert_allclose(gradient, np.cos(source) * source, rtol=1e-6)


def test_functions_that_read_or_fill_are_not_exported() -> None:
    exported: Any = pytest.importorskip("jax.export")
    read, filled = tb.jax.feed(arrays(3)), tb.jax.feed(arrays(3))
    for function in (lambda x: x + tb.jax.external_input(read), lambda x: tb.jax.external_output(x, filled)):
        with pytest.raises(ValueError, match="custom calls whose targets have no compatibility guarantees"):
            exported.export(jax.jit(function))(jnp.ones(3))


def test_under_vmap_a_tensor_is_read_once_and_filling_is_refused() -> None:
    fed = tb.jax.feed(np.ones(3, np.float32))
    read = jax.vmap(lambda x: x * tb.jax.external_input(fed))
    assert called(jax.jit(read), jnp.arange(2.0)).tolist() == [[0, 0, 0], [1, 1, 1]]
    fill = lambda x: tb.jax.external_output(x, fed)  # noqa: E731
    for function in (jax.vmap(fill), jax.jit(jax.vmap(fill)), jax.vmap(jax.jit(fill))):
        with pytest.raises(tb.BridgeValueError, match="call it on the result of vmap"):
            function(jnp.ones((2, 3)))


def test_what_does_not_fit_is_refused_when_the_function_is_traced() -> None:
    fed = tb.jax.feed(np.ones(3, np.float32))
    frozen = np.ones(3, np.float32)
    frozen.flags.writeable = False
    cases = [
        (jnp.ones(4), fed, "layout", "reshape"),
        (jnp.ones(3, jnp.int32), fed, "dtype", "astype"),
        (jnp.ones(3), tb.jax.feed(frozen), "read_only", "feed a writable one"),
        (jnp.ones(3), tb.jax.feed(jnp.ones(3)), "read_only", "feed a writable one"),
        (jnp.ones(3), frozen, "not_a_tensor", "truebridge.jax.feed"),
    ]
    for y, target, kind, advice in cases:
        with pytest.raises(tb.BridgeError, match=advice) as raised:
            jax.jit(lambda y, target=target: tb.jax.external_output(y, target))(y)
        assert raised.value.kind == kind
    readable = tb.jax.feed(frozen)
    assert readable.read_only and called(jax.jit(lambda: tb.jax.external_input(readable))).tolist() == [1, 1, 1]
    with pytest.raises(tb.BridgeTypeError, match=r"truebridge\.jax\.feed"):
        tb.jax.external_input(frozen)
    with pytest.raises((tb.BridgeTypeError, TypeError), match="static argument|not a valid JAX type"):
        jax.jit(tb.jax.external_input)(fed)
    with pytest.raises(tb.BridgeDTypeError):
        tb.jax.feed(np.ones(3))
    with pytest.raises(TypeError, match="valid in its process only"):
        pickle.dumps(fed)


def test_doubles_need_the_mode_with_64_bits() -> None:
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        fed = tb.jax.feed(np.ones(3))
        assert called(jax.jit(lambda: tb.jax.external_input(fed))).dtype == np.float64
    with pytest.raises(tb.BridgeDTypeError, match="jax_enable_x64"):
        tb.jax.external_input(fed)


def test_a_call_after_the_feed_was_destroyed_fails_and_the_next_works() -> None:
    fed = tb.jax.feed(np.ones(3, np.float32))
    held = [fed]
    function = jax.jit(lambda: tb.jax.external_input(held[0]))
    called(function)
    del fed, held[:]
    gc.collect()
    for _ in range(3):
        with pytest.raises(FAILED, match="truebridge: no tensor is fed"):
            called(function)
    other = tb.jax.feed(np.full(3, 7, np.float32))
    assert called(jax.jit(lambda: tb.jax.external_input(other))).tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("shape", "dtype", "attributes", "text"),
    [
        ((4,), "float32", True, "the tensor has shape"),
        ((3,), "int32", True, "the tensor is float32"),
        ((3,), "float32", False, "the call has no handle"),
        ((3,), "float32", -1, "no tensor is fed"),
    ],
)
def test_calls_that_did_not_come_from_here_are_refused(shape: Any, dtype: str, attributes: Any, text: str) -> None:
    fed = tb.jax.feed(np.ones(3, np.float32))
    called(jax.jit(lambda: tb.jax.external_input(fed)))
    handle = {"handle": np.int64(fed.handle if attributes is True else attributes)} if attributes else {}
    result = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    with pytest.raises(FAILED, match=f"truebridge: {text}"):
        called(jax.jit(lambda: jax.ffi.ffi_call("truebridge_input", result)(**handle)))


def test_a_handle_is_a_static_argument() -> None:
    function = jax.jit(lambda fed, x: tb.jax.external_input(fed) * x, static_argnums=0)
    handles = [tb.jax.feed(np.full(3, number, np.float32)) for number in (1, 2)]
    for _ in range(2):
        assert [called(function, fed, 2.0).tolist() for fed in handles] == [[2] * 3, [4] * 3]
    del handles
    # JAX keeps static arguments.
    function.clear_cache()
    jax.clear_caches()


def test_the_memory_is_returned_once() -> None:
    jax.clear_caches()
    before = outstanding()
    source = arrays(64, 64)
    for _ in range(20):
        fed = tb.jax.feed(source)
        called(jax.jit(lambda fed=fed: tb.jax.external_input(fed)))
        assert outstanding() == before + 1
        del fed
        jax.clear_caches()
        assert outstanding() == before


def test_threads_call_at_once_while_others_feed() -> None:
    sources = [np.full((128, 128), number, np.float32) for number in range(4)]

    def work(source: Any) -> None:
        for step in range(10):
            out = np.zeros_like(source)
            fed, filled = tb.jax.feed(source), tb.jax.feed(out)
            fill = lambda x: tb.jax.external_output(x * tb.jax.external_input(fed), filled)  # noqa: B023, E731
            called(jax.jit(fill), jnp.float32(step))
            assert (out == step * source).all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, sources))
