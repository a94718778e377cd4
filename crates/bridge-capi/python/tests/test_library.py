"""The library by itself, for Pythons that have no TensorFlow 1.15: memory and capsules go in and come back."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import truebridge_tf1 as tb
from capsules import Producer, is_valid
from conftest import wait_until
from test_feed import HOSTILE, Foreign
from truebridge_tf1 import _library, _sources


@pytest.mark.parametrize("legacy", [True, False])
def test_a_capsule_is_used_up_and_its_tensor_given_back_once(legacy: bool) -> None:
    producer = Producer(legacy=legacy)
    capsule = producer.capsule()
    tensor = _sources.lent(capsule)
    assert is_valid(capsule, b"used_" + producer.name)
    with pytest.raises(tb.BridgeBufferError, match="consumed before"):
        _sources.lent(capsule)
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
        _sources.lent(producer.capsule())
    assert producer.deleted == 1


def test_producers_lend() -> None:
    producer = Producer(legacy=True)
    tensor = _sources.lent(Foreign(producer))
    assert producer.deleted == 0
    del tensor
    assert producer.deleted == 1


@pytest.mark.parametrize("times", [1, 100])
def test_arrays_are_kept_and_let_go(times: int) -> None:
    array = np.arange(10.0)
    alive = weakref.ref(array)
    tensors = [_sources.lent(array) for _ in range(times)]
    del array
    gc.collect()
    assert alive() is not None
    tensors.clear()
    assert alive() is None


def test_what_is_refused_is_let_go() -> None:
    array = np.zeros(4, ">f4")
    alive = weakref.ref(array)
    with pytest.raises(tb.BridgeTypeError):
        _sources.lent(array)
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
