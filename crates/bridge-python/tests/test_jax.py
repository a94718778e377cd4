"""JAX on the host: what waits, what is released when, devices, donation, and what is refused.

The suite judges what is in place or copied, layouts, and arrays that are deleted, donated or computed later.
"""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import truebridge as tb
from programs import Warm

np: Any = pytest.importorskip("numpy")
jax: Any = pytest.importorskip("jax")

jnp = jax.numpy


def aligned(array: Any) -> Any:
    """Return a copy of an array at an address that JAX takes in place."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@jax.jit
def long(x: Any) -> Any:
    """Compute for some tens of milliseconds."""
    for _ in range(8):
        x = x @ x * 1e-3
    return x


def settle() -> None:
    """Wait until what JAX has computed from is dropped, which it does on its own threads."""
    gc.collect()
    jnp.ones(1).block_until_ready()


def outstanding() -> int:
    stats = tb.stats()
    return int(stats["leased"] - stats["released"])


def test_an_array_that_is_sharded_over_one_device_converts() -> None:
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:1], "i")
    x = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))
    view = tb.to_numpy(x, copy=False)
    assert view.ctypes.data == x.unsafe_buffer_pointer() and view.tolist() == list(range(8))


def test_a_conversion_runs_hardly_any_python() -> None:
    x, memory = jnp.ones(8), aligned(np.ones(16, np.float32))
    for convert in (lambda: tb.to_numpy(x), lambda: tb.to_jax(memory)):
        convert()
        frames: list[str] = []

        def look(frame: Any, event: str, _: Any, frames: list[str] = frames) -> None:
            if event == "call":
                frames.append(frame.f_code.co_name)

        sys.setprofile(look)
        try:
            convert()
        finally:
            sys.setprofile(None)
        # Beside `convert`, what JAX has in Python: its mode, and an array's sharding.
        assert len(frames) <= 3, frames


def test_a_computation_that_calls_python_is_waited_for_without_the_gil() -> None:
    def slowly(a: Any) -> Any:
        time.sleep(0.05)
        return np.asarray(a) + 1

    compute = jax.jit(lambda x: jax.pure_callback(slowly, jax.ShapeDtypeStruct((4,), "float32"), x))
    assert tb.to_numpy(compute(jnp.zeros(4))).tolist() == [1, 1, 1, 1]


def test_a_view_that_is_dropped_lives_until_it_was_read() -> None:
    before = outstanding()
    source = aligned(np.full((700, 700), 0.5, np.float32))
    expected = np.asarray(long(jnp.array(source)))
    for _ in range(5):
        result = long(tb.to_jax(source, copy=False))
        assert bool((np.asarray(result) == expected).all())
        del result
    for _ in range(100):
        settle()
        if outstanding() == before:
            break
        time.sleep(0.01)
    assert outstanding() == before


DONATING = jax.jit(lambda a: a * 0 - 1, donate_argnums=0)


def test_a_view_is_not_donated() -> None:
    source = aligned(np.arange(64, dtype=np.float32))
    view = tb.to_jax(source, copy=False)
    for other in (view, view.addressable_data(0)):
        # On the host JAX copies, and the view stays; on a GPU it refuses the call.
        assert DONATING(other).tolist() == [-1] * 64
        assert not view.is_deleted() and source.tolist() == view.tolist() == list(range(64))


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_a_copy_is_donated() -> None:
    copy = tb.to_jax(np.arange(64, dtype=np.float32), copy=True)
    assert DONATING(copy).tolist() == [-1] * 64 and copy.is_deleted()


@pytest.mark.parametrize("end", ["drop", "delete"])
def test_a_view_that_is_not_donated_is_dropped_at_once(end: str) -> None:
    memory = aligned(np.arange(64, dtype=np.float32))
    alive = weakref.ref(memory)
    view = tb.to_jax(memory, copy=False)
    del memory
    assert alive() is not None
    if end == "delete":
        view.delete()
    del view
    # Neither JAX nor the garbage collector runs in between.
    assert alive() is None


def test_numpy_reads_the_same_memory() -> None:
    # JAX copies an array with odd strides for NumPy, and keeps the copy.
    source = np.lib.stride_tricks.as_strided(aligned(np.zeros(1, np.float32)), (1, 1), (4, 8))
    made = tb.to_jax(source, copy=False)
    assert np.asarray(made).item() == 0.0
    source[...] = 1.0
    assert np.asarray(made).item() == 1.0


def donated(function: Callable[[Any], Any]) -> Any:
    x = jnp.ones(64)
    jax.jit(function, donate_argnums=0)(x)
    return x


def deleted() -> Any:
    x = jnp.ones(3)
    x.delete()
    return x


def traced(transform: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> None:
    transform(lambda x: tb.to_numpy(x).sum())(jnp.ones((2, 2)))


REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "deleted": (lambda: tb.to_numpy(deleted()), "consumed", "pass one that is alive"),
    "donated": (lambda: tb.to_numpy(donated(lambda x: x + 1)), "consumed", "donated to a function of jit"),
    "traced by jit": (lambda: traced(jax.jit), "not_a_tensor", "before the transformed function"),
    "traced by vmap": (lambda: traced(jax.vmap), "not_a_tensor", "before the transformed function"),
    "traced by grad": (lambda: traced(jax.grad), "not_a_tensor", "before the transformed function"),
    "keys": (lambda: tb.to_numpy(jax.random.key(0)), "not_a_tensor", "key_data"),
    "a scan": (lambda: jax.lax.scan(lambda c, a: (c, tb.to_numpy(a)), 0, jnp.ones(3)), "not_a_tensor", "before"),
    "a plan while traced": (lambda: jax.jit(lambda a: tb.plan(a, "numpy"))(jnp.ones(3)), "not_a_tensor", "before"),
    "a tree while traced": (lambda: jax.jit(lambda a: tb.to_numpy([a]))(jnp.ones(3)), "not_a_tensor", r"tree\[0\]"),
    "into a tensor while traced": (
        lambda: jax.jit(lambda a: tb.copy(a, out=np.ones(3, np.float32)))(jnp.ones(3)),
        "not_a_tensor",
        "external_output",
    ),
    "a key": (lambda: tb.to_jax(jax.random.key(0)), "not_a_tensor", "wrap_key_data"),
    "a reference": (lambda: tb.to_numpy(jax.new_ref(jnp.ones(3))), "not_a_tensor", r"pass ref\[\.\.\.\]"),
    "a shape": (lambda: tb.to_jax(jax.ShapeDtypeStruct((3,), jnp.float32)), "not_a_tensor", "it has no values"),
    "None": (lambda: tb.to_jax(None), "not_a_tensor", "a function without a result"),
    "a list": (lambda: tb.to_jax([1.0, 2.0]), "not_a_tensor", "numpy.asarray"),
    "another device": (lambda: tb.to_jax(np.ones(3, np.float32), device="cuda:7"), "device", "device="),
    "a platform": (lambda: tb.to_jax(np.ones(3, np.float32), device=7), "argument", "jax.Device"),
    "overwritten": (lambda: tb.copy(np.ones(3, np.float32), out=jnp.ones(3)), "read_only", "convert the source to jax"),
    "gradients of integers": (
        lambda: tb.to_numpy(jax.grad(lambda x: jnp.float32(1), allow_int=True)(jnp.arange(3))),
        "dtype",
        "leave the array out",
    ),
    "zeros of float0": (lambda: tb.to_jax(np.zeros(3, jax.dtypes.float0)), "dtype", "leave the array out"),
}

NARROW = [name for name in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn") if hasattr(jnp, name)]
REFUSED |= {
    name: (lambda name=name: tb.to_numpy(jnp.zeros(4, name)), "dtype", "astype|unpack it first") for name in NARROW
}
REFUSED |= {
    f"{name} without x64": (
        lambda name=name: tb.to_jax(np.ones(3, name)),
        "dtype",
        r'config.update\("jax_enable_x64", True\)',
    )
    for name in ("float64", "int64", "uint64", "complex128")
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_converted_is_refused_with_advice(what: str) -> None:
    call, kind, advice = REFUSED[what]
    with pytest.raises(tb.BridgeError, match=advice) as caught:
        call()
    assert caught.value.kind == kind


@pytest.fixture(scope="module")
def beside_jax() -> Iterator[Warm]:
    """Runs programs where NumPy and JAX are imported, and JAX has started no device."""
    warm = Warm("numpy", "jax")
    yield warm
    warm.close()


def told(warm: Warm, text: str, **environment: str) -> list[str]:
    """Return the lines that a program prints."""
    done = warm.run(text, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


@pytest.mark.parametrize("module", ["jax.ffi", "jax.scipy"])
def test_an_import_that_was_interrupted_ends_nothing(module: str) -> None:
    """The next import leaves JAX without some of its modules as attributes, and it works."""
    program = f"""
import sys, numpy as np, truebridge as tb
class Interrupts:
    asked = 0
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            self.asked += 1
            if self.asked == 1:
                raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
try:
    tb.to_jax(np.ones(3))
except KeyboardInterrupt:
    print("interrupted")
print(tb.to_jax(np.ones(3, np.float32)).shape)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[:2] == ["interrupted", "(3,)"]


def test_the_profile_is_that_of_the_mode(beside_jax: Warm) -> None:
    assert "float64" not in tb.profile("jax")["dtypes"]
    lines = told(
        beside_jax,
        """
        import jax, numpy as np, truebridge as tb
        jax.config.update("jax_enable_x64", True)
        x = tb.to_jax(np.arange(8))
        print(x.dtype, "complex128" in tb.profile("jax")["dtypes"], tb.to_numpy(x).dtype)
        """,
    )
    assert lines == ["int64 True int64"]


@pytest.mark.parametrize("make", [jnp.ones, lambda n: jnp.asarray(1.0), lambda n: jax.random.PRNGKey(n), np.float32])
def test_arrays_that_are_committed_to_no_device_convert(make: Callable[[int], Any]) -> None:
    assert not getattr(make(3), "committed", False)
    assert tb.to_numpy(make(3)).tolist() == np.asarray(make(3)).tolist()
    assert tb.to_jax(make(3)).tolist() == np.asarray(make(3)).tolist()


def test_a_device_of_jax_is_a_device() -> None:
    device = jax.local_devices(backend="cpu")[0]
    source = aligned(np.ones(16, np.float32))
    assert tb.to_jax(source, device=device, copy=False).devices() == {device}
    assert tb.to_numpy(jnp.ones(3), device=device).tolist() == [1, 1, 1]


def test_an_array_on_several_devices_is_refused_and_its_pieces_convert(beside_jax: Warm) -> None:
    lines = told(
        beside_jax,
        """
        import jax, numpy as np, truebridge as tb
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        mesh = Mesh(np.array(jax.devices()), ("x",))
        for spec in (PartitionSpec("x"), PartitionSpec()):
            x = jax.device_put(jax.numpy.arange(8.0), NamedSharding(mesh, spec))
            try:
                tb.to_numpy(x)
            except tb.BridgeError as error:
                print(error.kind, "addressable_shards" in str(error))
            print([tb.to_numpy(shard.data).tolist() for shard in x.addressable_shards][1])
        """,
        **TWO_DEVICES,
    )
    whole = str([float(i) for i in range(8)])
    assert lines == ["not_a_tensor True", "[4.0, 5.0, 6.0, 7.0]", "not_a_tensor True", whole]


def test_arrays_of_several_devices_are_refused_where_they_are_made(beside_jax: Warm) -> None:
    lines = told(
        beside_jax,
        """
        import jax, numpy as np, truebridge as tb
        from jax.sharding import Mesh, PartitionSpec as P
        from jax.experimental.shard_map import shard_map
        x = jax.numpy.arange(8.0).reshape(2, 4)
        mesh = Mesh(np.array(jax.devices()), ("x",))
        shard = lambda f: shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        for transform in (jax.pmap, shard):
            inside = lambda: transform(tb.to_numpy)(x)
            outside = lambda: tb.to_numpy(transform(lambda a: a + 1)(x))
            for call in (inside, outside):
                try:
                    call()
                except tb.BridgeError as error:
                    print(error.kind, "shard_map" in str(error), "addressable_shards" in str(error))
        second = jax.device_put(x[0], jax.devices()[1])
        print(tb.to_numpy(second).tolist(), tb.to_jax(second).devices() == second.devices())
        """,
        **TWO_DEVICES,
    )
    refused = ["not_a_tensor True False", "not_a_tensor False True"]
    assert lines == [*refused * 2, "[0.0, 1.0, 2.0, 3.0] False"]


def test_several_devices_of_the_host_are_one_here(beside_jax: Warm) -> None:
    lines = told(
        beside_jax,
        """
        import jax, numpy as np, truebridge as tb
        first, second = jax.devices()
        x = jax.device_put(jax.numpy.ones(16), second)
        print(tb.to_jax(x).devices() == tb.to_jax(x, device=second).devices() == {first})
        print(tb.to_jax(x, copy=False).unsafe_buffer_pointer() == x.unsafe_buffer_pointer())
        print(jax.device_put(tb.to_jax(np.ones(16, np.float32)), second).devices() == {second})
        """,
        **TWO_DEVICES,
    )
    assert lines == ["True"] * 3


def test_arrays_and_devices_of_other_processes_are_refused() -> None:
    text = """
        import sys
        import jax, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
        rank, port = map(int, sys.argv[1:])
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
        import truebridge as tb
        other = jax.devices()[1 - rank]
        across = NamedSharding(Mesh(np.array(jax.devices()), "x"), P("x"))
        whole = jax.make_array_from_callback((4,), across, lambda _: np.full(2, 7, np.float32))
        make = jax.make_array_from_single_device_arrays
        elsewhere = make((4,), SingleDeviceSharding(other), [], dtype=np.float32)
        calls = {
            "process_allgather": lambda: tb.to_numpy(whole),
            "convert it there": lambda: tb.to_numpy(elsewhere),
            "there, and send a ticket": lambda: tb.plan(elsewhere, "numpy"),
            "jax.local_devices()": lambda: tb.to_jax(np.ones(3, np.float32), device=other),
        }
        for advice, call in calls.items():
            try:
                call()
            except tb.BridgeError as error:
                print(error.kind, advice in str(error))
        print(tb.to_numpy(whole.addressable_shards[0].data).tolist())
        """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", textwrap.dedent(text)]
    both = [
        subprocess.Popen([*command, str(rank), port], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    expected = ["not_a_tensor True", "device True", "device True", "device True", "[7.0, 7.0]"]
    for process in both:
        said, complaints = process.communicate(timeout=300)
        assert (process.returncode, said.splitlines()) == (0, expected), complaints


def test_a_file_and_a_ticket_hold_arrays(tmp_path: Any) -> None:
    tree = {"w": jnp.arange(6.0).reshape(2, 3)}
    tb.save(tmp_path / "x.npz", tree)
    loaded = tb.load(tmp_path / "x.npz", "jax")
    assert isinstance(loaded["w"], jax.Array) and loaded["w"].tolist() == tree["w"].tolist()
    ticket = tb.share(tree)
    opened = tb.open(ticket, "jax")
    assert isinstance(opened["w"], jax.Array) and opened["w"].tolist() == tree["w"].tolist()
    tb.revoke(ticket)


def test_a_trace_and_debug_see_transfers() -> None:
    with tb.trace() as trace, tb.debug() as debug:
        view = tb.to_numpy(jnp.ones(64))
        del view
    assert [(event.source, event.target) for event in trace.events] == [("jax", "numpy")]
    assert not debug.findings
