"""The subjects make what a case says, at the address that it names."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import pytest

from truebridge_conformance.subjects import Spec, Subject
from truebridge_conformance.subjects.common import GRAIN
from truebridge_conformance.subjects.streams import ManyStreams


def subject(framework: str) -> Subject:
    if framework == "cupy" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("no CUDA device")
    module = importlib.import_module(f"truebridge_conformance.subjects.{framework}")
    made: Subject = module.subject("cuda:0" if framework == "cupy" else "cpu")
    return made


@pytest.mark.parametrize("align", [0, 4, 16, 32, 64])
@pytest.mark.parametrize("framework", ["torch", "numpy", "cupy"])
def test_a_base_buffer_lies_where_the_case_says(framework: str, align: int) -> None:
    made = subject(framework)
    data = bytes(range(16))
    # Many, because one may lie there by chance.
    for _ in range(20):
        tensor = made.create(Spec("float32", [2], [2], 1, 4, align), data)
        assert made.observe(tensor).address % GRAIN == align + 4
        assert made.read(tensor) == data[4:8] + data[12:16]


def test_a_single_stream_cannot_be_switched() -> None:
    made = subject("numpy")
    assert made.streams() == [] and made.fresh(False) is None
    with pytest.raises(RuntimeError, match="single stream"):
        made.use(1)


class Handles(ManyStreams):
    """A framework whose streams are their handles."""

    known: ClassVar[dict[int, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.next, self.now = 0x10, 0
        self.keep_streams()

    def handle(self, stream: Any) -> int:
        return int(stream)

    def current(self) -> Any:
        return self.now

    def enter(self, stream: Any) -> None:
        self.now = stream

    def made(self) -> Any:
        self.next += 0x10
        return self.next

    def wrapped(self, handle: int) -> Any:
        return handle


def test_streams_of_a_case_are_dropped_and_those_of_the_process_stay() -> None:
    framework = Handles()
    kept = framework.streams()
    assert len(kept) == 2 and Handles().streams() == kept
    fresh = framework.fresh(external=False)
    assert fresh is not None and fresh not in kept
    assert framework.use(fresh) == 0 and framework.use(kept[0]) == fresh
    framework.end(fresh)
    framework.end(kept[0])
    assert list(framework.known) == kept
