"""TensorFlow ↔ PyTorch and NumPy on the host: in place in both directions, refused with advice, and kept alive."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from memory import counts, eventually

torch: Any = pytest.importorskip("torch")
tf: Any = pytest.importorskip("tensorflow")

DTYPES = tb.profile("tensorflow")["dtypes"]


def aligned(values: Any) -> np.ndarray:
    """A copy at an address that TensorFlow takes; NumPy's own are multiples of 16."""
    values = np.asarray(values)
    memory = np.empty(values.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    array[...] = values
    return array


def bits(x: Any) -> bytes:
    """What the framework itself says is in a tensor."""
    if isinstance(x, torch.Tensor):
        return bytes(torch.empty(x.shape, dtype=x.dtype).copy_(x).reshape(-1).view(torch.uint8).numpy())
    return bytes(np.asarray(x.numpy() if isinstance(x, tf.Tensor) else x).tobytes())


def address(tensor: Any) -> int:
    """TensorFlow's own word on where a float tensor is."""
    return np.frombuffer(memoryview(tensor), np.uint8).ctypes.data


def in_bytes(name: str) -> np.ndarray:
    """192 bytes that are a good tensor of any dtype."""
    return aligned(np.arange(192) % (2 if name == "bool" else 251)).astype(np.uint8)


# --- in place


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_converts_from_numpy_and_back_in_place(name: str) -> None:
    array = aligned(in_bytes(name)).view(tf.as_dtype(name).as_numpy_dtype)
    tensor = tb.to_tensorflow(array, copy=False)
    assert tensor.dtype.name == name
    assert bits(tensor) == bits(array)
    back = tb.to_numpy(tensor, copy=False)
    assert (back.ctypes.data, back.dtype) == (array.ctypes.data, array.dtype)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_converts_from_torch_and_back_in_place_or_is_refused_by_name(name: str) -> None:
    if name not in tb.profile("torch")["dtypes"]:
        with pytest.raises(tb.BridgeTypeError, match=name):
            tb.to_torch(tf.constant(in_bytes(name).view(tf.as_dtype(name).as_numpy_dtype)))
        return
    source = torch.from_numpy(in_bytes(name)).clone().view(getattr(torch, name))
    tensor = tb.to_tensorflow(source, copy=False)
    assert tensor.dtype.name == name
    assert bits(tensor) == bits(source)
    back = tb.to_torch(tensor, copy=False)
    assert (back.data_ptr(), back.dtype) == (source.data_ptr(), source.dtype)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_that_tensorflow_made_converts_in_place(name: str) -> None:
    tensor = tf.constant(in_bytes(name).view(tf.as_dtype(name).as_numpy_dtype))
    for target in ("numpy", "torch"):
        if name in tb.profile(target)["dtypes"]:
            view = tb.convert(tensor, target, copy=False)
            assert bits(view) == bits(tensor)
            if target == "numpy":
                assert not view.flags.writeable
            else:
                view[:] = view[:1].clone()
            assert bits(view) == bits(tensor)


def test_tensorflow_lacks_what_it_has_no_name_for() -> None:
    missing = set(tb.profile("torch")["dtypes"]) - set(DTYPES)
    assert missing
    for name in missing:
        assert not hasattr(tf, name)
        with pytest.raises(tb.BridgeTypeError, match=name):
            tb.to_tensorflow(torch.zeros(64, dtype=torch.uint8).view(getattr(torch, name)))


def test_the_address_is_the_one_that_tensorflow_knows() -> None:
    tensor = tf.range(1000.0)
    assert tb.to_torch(tensor).data_ptr() == tb.to_numpy(tensor).ctypes.data == address(tensor)
    source = torch.arange(1000.0)
    assert address(tb.to_tensorflow(source)) == source.data_ptr()


def test_writes_are_seen_on_all_sides() -> None:
    source = torch.zeros(16)
    tensor = tb.to_tensorflow(source)
    array, view = tb.to_numpy(tensor), tb.to_torch(tensor)
    source[1], view[2] = 5, 7
    assert tensor.numpy().tolist() == array.tolist() == source.tolist() == [0, 5, 7] + 13 * [0]


def test_gradients_flow_from_a_view() -> None:
    view = tb.to_tensorflow(torch.arange(4.0))
    with tf.GradientTape() as tape:
        tape.watch(view)
        loss = tf.reduce_sum(view * view)
    assert tape.gradient(loss, view).numpy().tolist() == [0, 2, 4, 6]


WHOLE = {
    "whole": lambda x: x,
    "0-d": lambda x: x[0, 0, 0, ...],
    "zero-size": lambda x: x[:, 1:1],
    "zero-size at an odd address": lambda x: x[1:1, 1:, 1:],
    "offset": lambda x: x[1:],
    "size-1": lambda x: x[1:2, :1, 0:5:9],
}
COPIED = {
    "transposed": (lambda x: x.T if isinstance(x, np.ndarray) else x.permute(2, 1, 0), "strides that are not compact"),
    "steps": (lambda x: x[::2, :, ::3], "strides that are not compact"),
    "broadcast": (
        lambda x: np.broadcast_to(x[0, 0], (4, 16)) if isinstance(x, np.ndarray) else x[0, 0].expand(4, 16),
        "strides that are not compact",
    ),
    "one element on": (lambda x: x[0, 0, 1:], "an unaligned address"),
}


def whole(framework: str) -> Any:
    array = aligned(np.arange(3 * 4 * 16, dtype=np.float32).reshape(3, 4, 16))
    return array if framework == "numpy" else torch.from_numpy(array.copy()).clone()


def pointer(x: Any) -> int:
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr())


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("view", WHOLE)
def test_compact_views_convert_in_place(view: str, framework: str) -> None:
    x = WHOLE[view](whole(framework))
    assert tb.plan(x, "tensorflow").zero_copy
    tensor = tb.to_tensorflow(x, copy=False)
    assert tuple(tensor.shape) == tuple(x.shape)
    assert bits(tensor) == bits(x)
    back = tb.convert(tensor, framework, copy=False)
    assert tuple(back.shape) == tuple(x.shape)
    if bits(x):
        assert pointer(back) == pointer(x)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("view", COPIED)
def test_other_views_are_copied_and_the_plan_says_why(view: str, framework: str) -> None:
    take, reason = COPIED[view]
    x = take(whole(framework))
    plan = tb.plan(x, "tensorflow")
    assert (plan.zero_copy, plan.reason, plan.nbytes) == (False, reason, len(bits(x)))
    with pytest.raises(tb.BridgeBufferError, match=reason) as caught:
        tb.to_tensorflow(x, copy=False)
    assert caught.value.kind == "copy_needed"
    tensor = tb.to_tensorflow(x)
    assert bits(tensor) == bits(x)
    assert address(tensor) != pointer(x)


def test_negative_strides_are_copied() -> None:
    array = aligned(np.arange(64.0))[::-1]
    assert tb.plan(array, "tensorflow").reason == "negative strides"
    assert tb.to_tensorflow(array).numpy().tolist() == array.tolist()


def test_strides_of_dimensions_of_length_1_do_not_matter() -> None:
    tensor = torch.arange(16.0).as_strided((1, 16, 1), (3, 1, 5))
    assert address(tb.to_tensorflow(tensor, copy=False)) == tensor.data_ptr()


@pytest.mark.parametrize("target", ["torch", "numpy", "tensorflow"])
def test_tensors_of_tensorflow_are_copied_if_asked(target: str) -> None:
    tensor = tf.range(100.0)
    copy = tb.convert(tensor, target, copy=True)
    assert bits(copy) == bits(tensor)
    before = bits(tensor)
    tb.to_torch(copy)[:] = -1
    assert bits(tensor) == before


@pytest.mark.parametrize("value", [tf.constant(True), tf.zeros((0, 3)), tf.zeros((), tf.complex128)])
def test_odd_shapes_are_copied_if_asked(value: Any) -> None:
    copy = tb.to_numpy(value, copy=True)
    assert (copy.shape, bits(copy)) == (tuple(value.shape), bits(value))


def test_numpy_is_copied_if_asked() -> None:
    array = aligned(np.arange(100.0))
    tensor = tb.to_tensorflow(array, copy=True)
    array[:] = -1
    assert tensor.numpy().tolist() == list(range(100))


def test_to_the_same_framework() -> None:
    tensor = tf.range(10.0)
    assert address(tb.to_tensorflow(tensor, copy=False)) == address(tensor)


def test_the_plan_of_a_tensor_of_tensorflow() -> None:
    for target in ("torch", "numpy", "tensorflow"):
        plan = tb.plan(tf.ones(3), target)
        assert (plan.zero_copy, plan.reason, plan.nbytes, plan.device) == (True, None, 0, "cpu")
    with pytest.raises(tb.BridgeValueError, match="not on cuda:0") as caught:
        tb.to_numpy(tf.ones(3), device="cuda:0")
    assert caught.value.kind == "device"


# --- read-only memory


def test_read_only_goes_through_tensorflow() -> None:
    array = aligned(np.arange(16.0))
    array.flags.writeable = False
    tensor = tb.to_tensorflow(array, copy=False)
    back = tb.to_numpy(tensor)
    assert back.ctypes.data == array.ctypes.data
    assert not back.flags.writeable
    # Tensors that share the memory are read-only as well.
    assert not tb.to_numpy(tf.reshape(tensor, (4, 4))).flags.writeable
    with pytest.raises(tb.BridgeBufferError, match="read-only.*copy=True") as caught:
        tb.to_torch(tensor)
    assert caught.value.kind == "read_only"
    copy = tb.to_torch(tensor, copy=True)
    copy[0] = 9
    assert array[0] == 0


def test_memory_is_read_only_as_long_as_the_view_of_it() -> None:
    array = aligned(np.arange(16.0))
    array.flags.writeable = False
    tensor = tb.to_tensorflow(array)
    del tensor
    array.flags.writeable = True
    assert tb.to_torch(tb.to_tensorflow(array)).data_ptr() == array.ctypes.data


# --- variables


def test_a_variable_exports_its_current_value() -> None:
    variable = tf.Variable([1.0, 2.0])
    array = tb.to_numpy(variable)
    assert array.tolist() == [1, 2]
    variable.assign_add([1.0, 1.0])
    assert array.tolist() == [1, 2]
    assert tb.to_torch(variable).tolist() == variable.numpy().tolist() == [2, 3]


def test_writes_reach_a_variable_until_its_next_assignment() -> None:
    variable = tf.Variable([1.0, 2.0])
    view = tb.to_torch(variable)
    view[0] = 50
    assert variable.numpy().tolist() == [50, 2]
    variable.assign_add([1.0, 1.0])
    view[0] = 70
    assert variable.numpy().tolist() == [51, 3]


UPDATES = {
    "assign_add": lambda variable: variable.assign_add([1.0, 1.0]),
    "scatter": lambda variable: variable.scatter_nd_update([[0]], [9.0]),
    "slice": lambda variable: variable[0:1].assign([9.0]),
    "optimizer": lambda variable: tf.keras.optimizers.SGD(0.1).apply_gradients([(tf.ones(2), variable)]),
    "raw": lambda variable: tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=1.0, delta=[1.0, 1.0]),
    "function": lambda variable: tf.function(lambda: variable.assign_add([1.0, 1.0]))(),
}


@pytest.mark.parametrize("update", UPDATES)
def test_a_variable_that_starts_as_a_view_never_writes_to_it(update: str) -> None:
    source = torch.tensor([1.0, 2.0])
    variable = tf.Variable(tb.to_tensorflow(source, copy=False))
    UPDATES[update](variable)
    assert variable.numpy()[0] != 1
    assert source.tolist() == [1, 2]


def without_value() -> Any:
    """Return a variable that TensorFlow reads as an empty tensor."""
    from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

    return UninitializedVariable(dtype=tf.float32, shape=[2])


def unreadable() -> Any:
    """Return a variable that TensorFlow fails to read, as one whose initialiser has not run."""
    variable: Any = tf.Variable([1.0, 2.0])

    def value() -> Any:
        raise tf.errors.FailedPreconditionError(None, None, "Could not find variable")

    variable.value, variable.is_initialized = value, lambda: tf.constant(False)
    return variable


@pytest.mark.parametrize("make", [without_value, unreadable])
def test_a_variable_without_a_value_is_refused(make: Any) -> None:
    variable = make()
    for call in (tb.to_numpy, tb.to_torch, tb.lend, tb.share, lambda x: tb.plan(x, "numpy")):
        with pytest.raises(tb.BridgeTypeError, match="has no value yet: assign one") as caught:
            call(variable)
        assert caught.value.kind == "not_a_tensor"
    if make is without_value:
        variable.assign([3.0, 4.0])
        assert tb.to_torch(variable).tolist() == [3, 4]
    assert tb.to_torch(tf.Variable(tf.zeros([0, 3]))).shape == (0, 3)


# --- what is refused


def traced(make: Callable[[Any], Any]) -> Any:
    """Raises what a conversion inside a traced function raises."""
    caught = []

    @tf.function
    def function(x: Any) -> Any:
        try:
            tb.to_numpy(make(x))
        except tb.BridgeError as error:
            caught.append(error)
        return x

    function(tf.ones(3))
    raise caught[0]


def variable_in_a_graph() -> Any:
    variable = tf.Variable([1.0, 2.0])
    return traced(lambda _: variable)


def placeholder() -> Any:
    with tf.Graph().as_default():
        return tb.to_numpy(tf.compat.v1.placeholder(tf.float32))


def tensor_list() -> Any:
    return tf.raw_ops.EmptyTensorList(element_shape=[1], max_num_elements=3, element_dtype=tf.float32)


REFUSED: dict[str, tuple[Callable[[], object], str, str]] = {
    "string": (lambda: tf.constant("text"), "dtype", "decode_raw"),
    "resource": (lambda: tf.Variable([1.0]).handle, "dtype", "read its value"),
    "variant": (tensor_list, "dtype", "take the tensor out"),
    "int4": (lambda: tf.zeros(3, "int4"), "dtype", r"tf\.cast\(x, tf\.int8\)"),
    "uint4": (lambda: tf.zeros(3, "uint4"), "dtype", r"tf\.cast\(x, tf\.uint8\)"),
    "quantised": (lambda: tf.zeros(3, tf.qint8), "dtype", r"tf\.cast"),
    "ragged": (lambda: tf.ragged.constant([[1], [2, 3]]), "not_a_tensor", r"to_tensor\(\)"),
    "sparse": (lambda: tf.sparse.eye(3), "not_a_tensor", "to_dense"),
    "slices": (
        lambda: tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([3, 2])),
        "not_a_tensor",
        "convert_to_tensor",
    ),
    "array": (lambda: tf.TensorArray(tf.float32, 2), "not_a_tensor", r"stack\(\)"),
    "symbolic": (lambda: traced(lambda x: x), "not_a_tensor", "return it from the tf.function"),
    "variable in a graph": (variable_in_a_graph, "not_a_tensor", "return it from the tf.function"),
    "placeholder": (placeholder, "not_a_tensor", "until its graph runs"),
    "no tensor": (lambda: tf.TensorSpec([1]), "not_a_tensor", "not a tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_leave_tensorflow_is_refused_with_advice(case: str) -> None:
    make, kind, words = REFUSED[case]
    for call in (tb.convert, tb.plan):
        for target in ("torch", "numpy", "tensorflow"):
            with pytest.raises(tb.BridgeTypeError, match=words) as caught:
                call(make(), target)
            assert caught.value.kind == kind


def test_a_conversion_in_a_graph_makes_a_constant() -> None:
    source = torch.ones(4)
    traced = tf.function(lambda: tb.to_tensorflow(source) + 1)
    assert traced().numpy().tolist() == [2, 2, 2, 2]
    with tf.Graph().as_default():
        assert tb.to_tensorflow(source).numpy().tolist() == [1, 1, 1, 1]


# --- functions


BODIES: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: x * 2 + 1,
    "unary": lambda x: tf.exp(-tf.sqrt(tf.abs(x))),
    "scatter": lambda x: tf.tensor_scatter_nd_update(x, [[0]], [99.0]),
    "activation": lambda x: tf.nn.relu(tf.nn.bias_add(tf.reshape(x, (1, -1)), tf.ones_like(x))),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_kernels_do_not_reuse_the_memory_of_a_view(body: str, traced: bool) -> None:
    function = tf.function(BODIES[body]) if traced else BODIES[body]
    source = torch.arange(1.0, 1025.0)
    expected = BODIES[body](tf.constant(source.numpy()))
    for _ in range(2):
        # Only the kernel holds the view.
        result = function(tb.to_tensorflow(source, copy=False))
        assert np.allclose(result.numpy(), expected.numpy())
        assert source.equal(torch.arange(1.0, 1025.0))


def test_functions_do_not_trace_again_for_views() -> None:
    traces = []

    @tf.function
    def function(x: Any) -> Any:
        traces.append(x)
        return tf.reduce_sum(x)

    function(tf.zeros(16))
    for value in range(20):
        assert function(tb.to_tensorflow(torch.full((16,), float(value)))).numpy() == 16 * value
    assert len(traces) == 1


# --- life


def test_a_view_in_tensorflow_outlives_its_source() -> None:
    array = aligned(np.arange(1000.0))
    alive = weakref.ref(array)
    tensor = tb.to_tensorflow(array)
    other = tf.reshape(tensor, (10, 100))
    del array, tensor
    gc.collect()
    assert alive() is not None
    assert tf.reduce_sum(other).numpy() == 499500
    del other
    assert alive() is None


@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_a_view_outlives_its_tensor_of_tensorflow(target: str) -> None:
    view = tb.convert(tf.range(100000.0) * 1, target)[10:]
    gc.collect()
    junk = [tf.fill(100000, -1.0) for _ in range(8)]
    assert view[0] == 10
    assert view[-1] == 99999
    del junk


def test_the_memory_of_tensorflow_is_given_back() -> None:
    """Its allocator hands the same block out again once nothing holds it any more."""
    tensor = tf.zeros(1 << 22)
    at = address(tensor)
    view = tb.to_torch(tensor)
    del tensor
    others = [tf.zeros(1 << 22) for _ in range(4)]
    assert at not in [address(other) for other in others]
    before = counts()["released"]
    del view, others
    eventually(lambda: tb.stats()["released"] == before + 1)


def test_cycles_are_collected() -> None:
    array = aligned(np.arange(64.0))
    alive = weakref.ref(array)
    cycle: list[Any] = [tb.to_tensorflow(array)]
    cycle.append(cycle)
    del array, cycle
    gc.collect()
    assert alive() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_goes_on() -> None:
    source = torch.arange(4.0)
    view = tb.to_tensorflow(source)
    child = os.fork()
    if child == 0:
        os._exit(0 if tb.to_torch(view).data_ptr() == source.data_ptr() else 1)
    assert os.waitpid(child, 0)[1] == 0
