"""PaddlePaddle on the host: in place in both directions, what keeps memory, what releases it, what is refused."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest

import truebridge as tb

np: Any = pytest.importorskip("numpy")
paddle: Any = pytest.importorskip("paddle")


def outstanding() -> int:
    gc.collect()
    stats = tb.stats()
    return int(stats["leased"] - stats["released"])


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh process: Paddle has threads, so that it cannot be forked."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)


def test_a_tensor_converts_in_place_in_both_directions() -> None:
    x = paddle.arange(12, dtype="float32").reshape([3, 4])
    view = tb.to_numpy(x, copy=False)
    assert view.ctypes.data == x.data_ptr() and view.tolist() == x.tolist()
    view[0, 0] = 7
    assert x[0, 0] == 7
    made = tb.to_paddle(view.T[::-1], copy=False)
    assert isinstance(made, paddle.Tensor) and made.stop_gradient and made.tolist() == view.T[::-1].tolist()
    assert made.strides == [-1, 4] and made.data_ptr() == x[0, 3].data_ptr()
    assert tb.convert(made, "paddle").data_ptr() == made.data_ptr()


@pytest.mark.parametrize("name", tb.profile("paddle")["dtypes"])
def test_every_dtype_returns(name: str) -> None:
    bits = paddle.to_tensor(np.arange(1, 33, dtype=np.uint8) if name != "bool" else np.ones(32, np.uint8))
    x = bits.view(getattr(paddle, name))
    back = tb.to_paddle(tb.to_paddle(x, copy=False), copy=True)
    assert back.dtype == x.dtype and back.view("uint8").tolist() == bits.tolist()


def test_unsigned_integers_without_kernels_are_refused() -> None:
    for name in ("uint16", "uint32", "uint64"):
        with pytest.raises(tb.BridgeTypeError, match=name) as caught:
            tb.to_paddle(np.ones(3, name))
        assert caught.value.kind == "dtype"


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,) * 9])
def test_shapes_at_the_edge_convert(shape: tuple[int, ...]) -> None:
    made = tb.to_paddle(np.ones(shape, np.float32))
    assert tuple(made.shape) == shape and made.numpy().shape == shape
    assert tb.to_numpy(made).shape == shape


def test_ten_dimensions_are_refused() -> None:
    with pytest.raises(tb.BridgeValueError, match="10 dimensions") as caught:
        tb.to_paddle(np.ones((1,) * 10, np.float32))
    assert caught.value.kind == "layout"


def test_tensors_at_one_address_release_each_its_own_memory() -> None:
    """Paddle's own import confuses the two: see docs/upstream."""
    before = outstanding()
    source = np.arange(6, dtype=np.float32)
    first, second = tb.to_paddle(source, copy=False), tb.to_paddle(source[:3], copy=False)
    assert first.data_ptr() == second.data_ptr() and outstanding() == before + 2
    del first
    assert outstanding() == before + 1 and second.tolist() == [0, 1, 2]
    del second
    assert outstanding() == before


def test_a_tensor_that_keeps_another_one_is_dropped() -> None:
    """Paddle's own import hangs in this: see docs/upstream."""
    before = outstanding()
    x = paddle.arange(8, dtype="float32")
    for _ in range(4):
        x = tb.to_paddle(tb.to_numpy(x, copy=False)[1:], copy=False)
    assert x.tolist() == [4, 5, 6, 7]
    thread = threading.Thread(target=lambda tensors: tensors.clear(), args=([x],))
    del x
    thread.start()
    thread.join()
    assert outstanding() == before


def test_a_view_keeps_the_memory_that_a_tensor_gives_up() -> None:
    for name in ("contiguous", "_clear", "_clear_data"):
        x = paddle.arange(4000, dtype="float32").reshape([1000, 4]).T
        expected, view = x.numpy(), tb.to_numpy(x, copy=False)
        getattr(x, name)()
        paddle.full([1000, 4], -1.0)
        assert (view == expected).all()


def test_a_copy_into_a_tensor_is_seen_by_autograd() -> None:
    x = paddle.zeros([3])
    version = x.inplace_version
    tb.copy(np.ones(3, np.float32), out=x)
    assert x.tolist() == [1, 1, 1] and x.inplace_version == version + 1


def test_no_conversion_leaves_objects() -> None:
    source = np.zeros(4, np.float32)

    def blocks() -> int:
        for _ in range(200):
            tb.to_numpy(tb.to_paddle(source))
        gc.collect()
        return sys.getallocatedblocks()

    blocks()
    before = blocks()
    assert blocks() - before < 100


def static() -> Any:
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            return paddle.static.data("x", [2, 3])
    finally:
        paddle.disable_static()


def selected() -> Any:
    layer = paddle.nn.Embedding(4, 2, sparse=True)
    layer(paddle.to_tensor([0, 1])).sum().backward()
    return layer.weight.grad


def distributed() -> Any:
    from paddle import distributed

    mesh = distributed.ProcessMesh([0], dim_names=["x"])
    return distributed.shard_tensor(paddle.ones([2, 3]), mesh, [distributed.Replicate()])


def cleared() -> Any:
    x = paddle.ones([2, 3])
    x._clear()
    return x


def tracked() -> Any:
    return paddle.to_tensor([1.0], stop_gradient=False)


REFUSED: dict[str, tuple[Callable[[], object], str, str]] = {
    "requires grad": (tracked, "requires_grad", "detach"),
    "sparse": (lambda: paddle.ones([2, 2]).to_sparse_coo(2), "not_a_tensor", "to_dense"),
    "selected rows": (selected, "not_a_tensor", "sparse=False"),
    "distributed": (distributed, "not_a_tensor", "_local_value"),
    "static": (static, "not_a_tensor", "Executor.run"),
    "cleared": (cleared, "consumed", "cleared"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused(case: str) -> None:
    make, kind, words = REFUSED[case]
    with pytest.raises(tb.BridgeError, match=words) as caught:
        tb.to_numpy(make())
    assert caught.value.kind == kind


def test_a_tracked_tensor_is_detached_on_request() -> None:
    x = tracked()
    assert tb.to_numpy(x, detach=True).ctypes.data == x.data_ptr()


def test_modes_in_which_paddle_makes_no_views_are_refused() -> None:
    paddle.enable_static()
    try:
        with pytest.raises(tb.BridgeError, match=r"paddle.disable_static\(\)"):
            tb.to_paddle(np.ones(3, np.float32))
    finally:
        paddle.disable_static()
    paddle.set_flags({"FLAGS_use_stride_kernel": False})
    try:
        with pytest.raises(tb.BridgeError, match="set_flags"):
            tb.to_paddle(np.ones(3, np.float32))
    finally:
        paddle.set_flags({"FLAGS_use_stride_kernel": True})
    assert tb.to_paddle(np.ones(3, np.float32)).tolist() == [1, 1, 1]


def test_an_import_after_tensorflow_is_refused_and_does_not_crash() -> None:
    # The module that opens TensorFlow's libraries for the whole process stands for all of TensorFlow.
    done = run(
        """
        import sys, types
        sys.modules["tensorflow.python.pywrap_dlopen_global_flags"] = types.ModuleType("flags")
        import numpy, truebridge as tb
        try:
            tb.to_paddle(numpy.ones(3, "float32"))
        except tb.BridgeImportError as error:
            print(error)
        """
    )
    assert "import paddle before tensorflow" in done.stdout, done.stderr


def test_a_process_ends_while_tensors_live() -> None:
    done = run(
        """
        import numpy, paddle, truebridge as tb
        x = tb.to_paddle(numpy.ones(3, "float32"))
        paddle.kept = [x, tb.to_numpy(paddle.ones([3]))]
        print(x.tolist())
        """
    )
    assert (done.returncode, done.stdout) == (0, "[1.0, 1.0, 1.0]\n"), done.stderr
