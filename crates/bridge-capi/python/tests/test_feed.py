"""What can be fed: in place where TensorFlow can take it so, as a copy, or not at all."""

import ctypes
import gc
import weakref
from typing import Any, Callable, Dict, Tuple

import numpy as np
import pytest

import truebridge_tf1 as tb
from capsules import CUDA, Producer, is_valid, new_capsule
from conftest import aligned, wait_until
from truebridge_tf1 import _library, _sources
from truebridge_tf1._library import Info, library


class Graph:
    """A graph that returns its input."""

    def __init__(self, tf: Any, session: Any, dtype: Any) -> None:
        self.session = session
        self.x = tb.external_input(dtype, None)
        self.y = tb.external_output(self.x)

    def __call__(self, fed: Any) -> Any:
        return tb.take(self.session.run(self.y, {tb.handle_of(self.x): fed})).numpy()


@pytest.fixture
def through(tf: Any, session: Any) -> Any:
    return Graph(tf, session, tf.float32)


def info(fed: Any) -> Info:
    """Describe the tensor that is fed."""
    described = Info()
    library().external_info(fed._kept, ctypes.byref(described))
    return described


VIEWS: Dict[str, Callable[[Any], Any]] = {
    "reversed": lambda a: a[::-1],
    "every second": lambda a: a[::2],
    "transposed": lambda a: a.T,
    "columns": lambda a: a[:, 1:3],
    "unaligned": lambda a: a.reshape(-1)[1:],
    "broadcast": lambda a: np.broadcast_to(a[0], (5, 6)),
    "in both directions": lambda a: a[::-2, ::-1],
    "one element": lambda a: a[3:4, 2:3],
    "Fortran": lambda a: np.asfortranarray(a),
}


@pytest.mark.parametrize("view", VIEWS)
def test_arrays_that_tensorflow_cannot_take_are_copied_or_refused(through: Any, view: str) -> None:
    array = aligned((4, 6))
    array[:] = np.arange(24).reshape(4, 6)
    array = VIEWS[view](array)
    result = through(tb.feed(array))
    assert (result.shape, result.tolist()) == (array.shape, array.tolist())
    assert result.ctypes.data != array.ctypes.data
    with pytest.raises(tb.BridgeBufferError, match="because of") as caught:
        tb.feed(array, copy=False)
    assert caught.value.kind == "copy_needed"


def test_copy_says_what_is_done(through: Any) -> None:
    array = aligned(8)
    for copy, in_place in [(None, True), (False, True), (True, False)]:
        fed = tb.feed(array, copy=copy)
        assert (info(fed).data == array.ctypes.data) is in_place
        assert through(fed).tolist() == array.tolist()
    for wrong in ("yes", 2, []):
        with pytest.raises(tb.BridgeValueError, match="copy is"):
            tb.feed(array, copy=wrong)  # type: ignore[arg-type]


def test_views_of_torch_are_copied_or_refused(through: Any) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(24.0).reshape(4, 6)
    for view in (tensor.t(), tensor[:, 1:], tensor.view(-1)[1:], tensor[0].expand(5, 6)):
        assert through(tb.feed(view)).tolist() == view.tolist()
        with pytest.raises(tb.BridgeBufferError, match="because of"):
            tb.feed(view, copy=False)


def test_what_torch_has_put_off_is_done(tf: Any, session: Any, through: Any) -> None:
    torch = pytest.importorskip("torch")
    z = torch.tensor([1 + 2j, 3 - 4j])
    negated = z.conj().imag
    assert negated.is_neg()
    assert through(tb.feed(negated)).tolist() == [-2, 4]
    assert Graph(tf, session, tf.complex64)(tb.feed(z.conj())).tolist() == [1 - 2j, 3 + 4j]
    for pending in (negated, z.conj()):
        with pytest.raises(tb.BridgeBufferError, match="deferred") as caught:
            tb.feed(pending, copy=False)
        assert caught.value.kind == "copy_needed"


def test_tensors_of_torch_that_cannot_be_exported(tf: Any) -> None:
    torch = pytest.importorskip("torch")
    for tensor, kind, words in [
        (torch.ones(2, requires_grad=True), "requires_grad", "detach"),
        (torch.ones(2, 2).to_sparse(), "not_a_tensor", "to_dense"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "not_a_tensor", "dequantize"),
    ]:
        with pytest.raises(tb.BridgeError, match=words) as caught:
            tb.feed(tensor)
        assert caught.value.kind == kind


def test_arrays_that_cannot_be_exported(tf: Any) -> None:
    pairs = np.zeros(4, [("a", np.float32), ("b", np.int16)])
    for array, error, kind in [
        (np.ma.masked_array([1.0], [True]), tb.BridgeTypeError, "not_a_tensor"),
        (np.array(["text"]), tb.BridgeTypeError, "dtype"),
        (np.array([None]), tb.BridgeTypeError, "dtype"),
        (np.array([1.0], ">f4"), tb.BridgeTypeError, "dtype"),
        (np.array([1.0], np.longdouble), tb.BridgeTypeError, "dtype"),
        (np.array(["2020-01-01"], "M8[D]"), tb.BridgeTypeError, "dtype"),
        (pairs, tb.BridgeTypeError, "dtype"),
        (pairs["a"], tb.BridgeValueError, "layout"),
    ]:
        with pytest.raises(error) as caught:
            tb.feed(array)
        assert caught.value.kind == kind
    for other in (None, 3, [1.0, 2.0], "text", object(), np.float32(1), tf.constant(1.0)):
        with pytest.raises(tb.BridgeTypeError, match="not a tensor") as caught:
            tb.feed(other)
        assert caught.value.kind == "not_a_tensor"


def test_the_memory_lives_as_long_as_somebody_needs_it(through: Any) -> None:
    array = aligned(1000)
    array[:] = 5
    alive = weakref.ref(array)
    fed = tb.feed(array, copy=False)
    del array
    gc.collect()
    part = through(fed)[10:]
    assert alive() is not None
    del fed
    wait_until(lambda: alive() is None)
    # A result does not need it.
    assert part.sum() == 5 * 990


def test_what_is_refused_is_not_kept(tf: Any) -> None:
    array = aligned(10)
    alive = weakref.ref(array)
    with pytest.raises(tb.BridgeError):
        tb.feed(array[::-1], copy=False)
    fed = tb.feed(array[::-1])
    del array
    wait_until(lambda: alive() is None)
    del fed


def test_an_unused_feed_gives_its_memory_back_at_once(tf: Any) -> None:
    array = aligned(10)
    alive = weakref.ref(array)
    fed = tb.feed(array, copy=False)
    del array
    assert alive() is not None
    del fed
    assert alive() is None


LAYOUTS = [True, False]


@pytest.mark.parametrize("legacy", LAYOUTS)
def test_a_capsule_converts_in_place_and_is_deleted_once(through: Any, legacy: bool) -> None:
    producer = Producer(legacy=legacy)
    capsule = producer.capsule()
    fed = tb.feed(capsule, copy=False)
    assert is_valid(capsule, b"used_" + producer.name)
    result = through(fed)
    assert (info(fed).data, producer.deleted) == (producer.address, 0)
    del fed, capsule
    gc.collect()
    wait_until(lambda: producer.deleted > 0)
    assert producer.deleted == 1
    assert result.tolist() == list(range(8))


@pytest.mark.parametrize("legacy", LAYOUTS)
def test_a_capsule_is_used_up_once(tf: Any, legacy: bool) -> None:
    producer = Producer(legacy=legacy)
    capsule = producer.capsule()
    fed = tb.feed(capsule)
    with pytest.raises(tb.BridgeBufferError, match="consumed before") as caught:
        tb.feed(capsule)
    assert (caught.value.kind, producer.deleted) == ("consumed", 0)
    del fed
    assert producer.deleted == 1


def test_a_capsule_is_copied_where_it_must_be(through: Any) -> None:
    for spoil in (lambda p: setattr(p.tensor, "byte_offset", 4), lambda p: p.strides.__setitem__(0, 2)):
        producer = Producer(legacy=True)
        spoil(producer)
        result = through(tb.feed(producer.capsule()))
        wait_until(lambda: producer.deleted == 1)  # noqa: B023
        assert result.tolist() in ([1, 2, 3, 4, 5, 6, 7, 8], [0, 2, 4, 6, 8, 10, 12, 14])


def test_capsules_without_deleter_or_strides(through: Any) -> None:
    producer = Producer(legacy=True, deleter=False)
    producer.tensor.strides = None
    assert through(tb.feed(producer.capsule())).sum() == 28
    assert producer.deleted == 0


def test_a_read_only_capsule_stays_so(through: Any) -> None:
    producer = Producer(legacy=False)
    producer.managed.flags = 1
    fed = tb.feed(producer.capsule())
    assert (info(fed).data, info(fed).read_only) == (producer.address, 1)
    # A result is a copy.
    assert through(fed).flags.writeable


def test_our_own_capsules_are_given_back_if_nobody_takes_them(tf: Any, session: Any) -> None:
    taken = tb.take(session.run(tb.external_output(tf.ones([2]))))
    gc.collect()
    before = tb.stats()
    for version in (None, (1, 0)):
        capsule = taken.__dlpack__(max_version=version)
        assert is_valid(capsule, b"dltensor_versioned" if version else b"dltensor")
        del capsule
    after = tb.stats()
    assert after["leased"] - before["leased"] == after["released"] - before["released"] == 2
    capsule = taken.__dlpack__()
    fed = tb.feed(capsule)
    del capsule
    assert tb.stats()["released"] == after["released"]
    del fed


Spoil = Callable[[Producer], object]

HOSTILE: Dict[str, Tuple[Spoil, str, str]] = {
    "null shape": (lambda p: setattr(p.tensor, "shape", None), "protocol", "shape"),
    "null data": (lambda p: setattr(p.tensor, "data", None), "protocol", "null"),
    "negative ndim": (lambda p: setattr(p.tensor, "ndim", -1), "protocol", "ndim"),
    "wild ndim": (lambda p: setattr(p.tensor, "ndim", 1 << 30), "protocol", "dimensions"),
    "negative length": (lambda p: p.shape.__setitem__(0, -8), "protocol", "negative"),
    "overflowing bytes": (lambda p: p.shape.__setitem__(0, 1 << 62), "", "overflow"),
    "overflowing strides": (lambda p: p.strides.__setitem__(0, 1 << 62), "layout", "strides"),
    "strides below address 0": (lambda p: p.strides.__setitem__(0, -(1 << 57)), "protocol", "address space"),
    "byte offset beyond the address space": (
        lambda p: setattr(p.tensor, "byte_offset", (1 << 64) - 1),
        "protocol",
        "byte_offset",
    ),
    "no bits": (lambda p: setattr(p.tensor, "bits", 0), "protocol", "bit"),
    "vector elements": (lambda p: setattr(p.tensor, "lanes", 4), "dtype", "lanes"),
    "packed elements": (lambda p: setattr(p.tensor, "bits", 4), "dtype", "whole bytes"),
    "unknown dtype": (lambda p: setattr(p.tensor, "code", 200), "dtype", "dtype"),
    "unknown device": (lambda p: setattr(p.tensor, "device_type", 99), "device", "does not have"),
    "negative device number": (
        lambda p: (setattr(p.tensor, "device_type", 2), setattr(p.tensor, "device_id", -3)),
        "protocol",
        "negative",
    ),
}


@pytest.mark.parametrize("legacy", LAYOUTS)
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_capsules_are_refused_and_given_back(tf: Any, case: str, legacy: bool) -> None:
    spoil, kind, words = HOSTILE[case]
    producer = Producer(legacy=legacy)
    spoil(producer)
    with pytest.raises(tb.BridgeError, match=words) as caught:
        tb.feed(producer.capsule())
    assert kind in ("", caught.value.kind)
    wait_until(lambda: producer.deleted > 0)
    assert producer.deleted == 1


def test_a_capsule_of_a_later_dlpack_is_given_back_unread(tf: Any) -> None:
    producer = Producer(legacy=False)
    producer.managed.major = 2
    producer.tensor.shape = None
    with pytest.raises(tb.BridgeBufferError, match="version"):
        tb.feed(producer.capsule())
    assert producer.deleted == 1


def test_a_capsule_that_lies_about_a_cuda_device(tf: Any) -> None:
    """Host memory is said to be on a GPU: without a driver that is missing, and with one it knows better."""
    producer = Producer(legacy=True)
    producer.tensor.device_type = CUDA
    with pytest.raises((tb.BridgeImportError, tb.BridgeBufferError)) as caught:
        tb.feed(producer.capsule())
    assert caught.value.kind in ("missing", "protocol")
    assert producer.deleted == 1


def test_other_capsules_are_no_tensors(tf: Any) -> None:
    with pytest.raises(tb.BridgeTypeError, match="not a DLPack capsule"):
        tb.feed(new_capsule(1, b"something", None))


class Interface:
    """Something that says it is on a CUDA device."""

    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = {
            **{"shape": (2,), "typestr": "<f4", "data": (4096, False), "version": 3, "strides": None, "stream": None},
            **interface,
        }


@pytest.mark.parametrize(
    "interface, kind",
    [
        ({"shape": None}, "protocol"),
        ({"shape": ("two",)}, "protocol"),
        ({"typestr": "nonsense"}, "protocol"),
        ({"typestr": "<U3"}, "dtype"),
        ({"typestr": ">f4"}, "dtype"),
        ({"data": None}, "protocol"),
        ({"data": (0, False)}, "argument"),
        ({"strides": (4, 4)}, "protocol"),
        ({"strides": (3,)}, "layout"),
        ({"shape": (-2,)}, "layout"),
        ({"shape": (1 << 62,)}, "layout"),
        ({"strides": (-(1 << 60),)}, "layout"),
        ({"stream": 0}, "protocol"),
        ({"stream": -1}, "protocol"),
        ({"stream": "legacy"}, "protocol"),
        ({"mask": object()}, "not_a_tensor"),
    ],
)
def test_hostile_interfaces_are_refused(tf: Any, interface: Any, kind: str) -> None:
    with pytest.raises(tb.BridgeError) as caught:
        tb.feed(Interface(**interface))
    assert caught.value.kind == kind


def test_an_interface_that_lies_is_refused_and_let_go(tf: Any) -> None:
    host = np.zeros(2, np.float32)
    liar = Interface(data=(host.ctypes.data, False))
    alive = weakref.ref(liar)
    with pytest.raises(tb.BridgeError) as caught:
        tb.feed(liar)
    assert caught.value.kind in ("missing", "protocol")
    del liar, caught
    wait_until(lambda: alive() is None)


class ProtocolObject:
    """A producer of an unknown kind."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer

    def __dlpack_device__(self) -> Tuple[int, int]:
        return (1, 0)

    def __dlpack__(self) -> Any:
        return self.producer.capsule()


def test_any_producer_can_export(through: Any) -> None:
    producer = Producer(legacy=True)
    fed = tb.feed(ProtocolObject(producer))
    assert info(fed).data == producer.address
    assert through(fed).tolist() == list(range(8))
    del fed
    wait_until(lambda: producer.deleted == 1)


def test_what_a_producer_raises_is_told(tf: Any) -> None:
    class Broken(ProtocolObject):
        def __dlpack_device__(self) -> Tuple[int, int]:
            raise LookupError("lost")

    with pytest.raises(tb.BridgeRuntimeError, match="lost") as caught:
        tb.feed(Broken(Producer(legacy=True)))
    assert isinstance(caught.value.__cause__, LookupError)
    assert caught.value.kind == "framework"


# The library by itself, for Pythons that have no TensorFlow 1.15: memory and capsules are imported and exported.


@pytest.mark.parametrize("legacy", [True, False])
def test_a_capsule_is_used_up_and_its_tensor_given_back_once(legacy: bool) -> None:
    producer = Producer(legacy=legacy)
    capsule = producer.capsule()
    tensor = _sources.exported(capsule)
    assert is_valid(capsule, b"used_" + producer.name)
    with pytest.raises(tb.BridgeBufferError, match="consumed before"):
        _sources.exported(capsule)
    del capsule
    gc.collect()
    assert producer.deleted == 0
    del tensor
    assert producer.deleted == 1


@pytest.mark.parametrize("case", sorted(set(HOSTILE) - {"unknown dtype", "unknown device"}))
def test_hostile_capsules_are_given_back(case: str) -> None:
    spoil, kind, words = HOSTILE[case]
    producer = Producer(legacy=True)
    spoil(producer)
    with pytest.raises(tb.BridgeError, match=words):
        _sources.exported(producer.capsule())
    assert producer.deleted == 1


def test_producers_export() -> None:
    producer = Producer(legacy=True)
    tensor = _sources.exported(ProtocolObject(producer))
    assert producer.deleted == 0
    del tensor
    assert producer.deleted == 1


@pytest.mark.parametrize("times", [1, 100])
def test_arrays_are_kept_and_let_go(times: int) -> None:
    array = np.arange(10.0)
    alive = weakref.ref(array)
    tensors = [_sources.exported(array) for _ in range(times)]
    del array
    gc.collect()
    assert alive() is not None
    tensors.clear()
    assert alive() is None


def test_what_is_refused_is_let_go() -> None:
    array = np.zeros(4, ">f4")
    alive = weakref.ref(array)
    with pytest.raises(tb.BridgeTypeError):
        _sources.exported(array)
    del array
    wait_until(lambda: alive() is None)


def test_pointers_are_looked_at() -> None:
    library: Any = _library.library()
    for call in (
        lambda: library.external_info(None, None),
        lambda: library.external_handle(None, None),
        lambda: library.stats(None),
        lambda: library.feed(None, None, 0, None),
        lambda: library.view_used(None, 1),
        lambda: library.runtime_loaded(1, None),
        lambda: library.runtime_loaded(3, None),
    ):
        with pytest.raises(tb.BridgeValueError) as caught:
            call()
        assert caught.value.kind == "argument"
    library.tensor_drop(None)
    library.external_drop(None)
    library.view_drop(None)
