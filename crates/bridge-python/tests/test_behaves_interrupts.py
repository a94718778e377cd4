"""Ctrl-C in the middle: ``KeyboardInterrupt`` arrives, and nothing is left of the call."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from memory import eventually, views
from truebridge import processes

torch: Any = pytest.importorskip("torch")


def interrupted(call: Callable[[], object], after: float = 0.05) -> float:
    """Send Ctrl-C to this thread during a call, expect the exception, and return the seconds that it took to arrive."""
    main, sent = threading.get_ident(), [0.0]

    def send() -> None:
        time.sleep(after)
        sent[0] = time.monotonic()
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sender = threading.Thread(target=send)
    try:
        # On a busy machine it may arrive before the call has begun: that is not a fault of the call.
        with pytest.raises(KeyboardInterrupt):
            sender.start()
            call()
            raise AssertionError("the call ended before it was interrupted")
        return time.monotonic() - sent[0]
    finally:
        sender.join()
        signal.signal(signal.SIGINT, before)


def for_ever(call: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        call()


ARRAY = np.zeros((1 << 10, 1 << 10))

CALLS: dict[str, Callable[[Path], Callable[[], object]]] = {
    "in place": lambda _: lambda: tb.to_torch(ARRAY),
    "a copy": lambda _: lambda: tb.to_torch(ARRAY, copy=True),
    "a transposed copy": lambda _: lambda: tb.to_torch(ARRAY, permute=(1, 0), order="C"),
    "a tree": lambda _: lambda: tb.to_torch({"a": [ARRAY] * 50}),
    "copy": lambda _: lambda: tb.copy(ARRAY, out=torch.empty(ARRAY.shape, dtype=torch.float64)),
    "save": lambda path: lambda: tb.save(path / "x.npy", ARRAY),
    "save safetensors": lambda path: lambda: tb.save(path / "x.safetensors", {"a": ARRAY}),
    "share": lambda _: lambda: tb.revoke(tb.share(ARRAY)),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    call = CALLS[name](tmp_path)
    before, shares = views(), processes.held()["shares"]
    for number in range(5):
        interrupted(lambda: for_ever(call), 0.02 + 0.013 * number)
    # A share of which no ticket was returned ends with its time: the interrupt may come between the two.
    assert processes.held()["shares"] <= shares + (5 if name == "share" else 0)
    processes._core.ipc_close()
    eventually(lambda: views() == before)
    # The file is whole or absent, and no part of one stays.
    left = [path for path in tmp_path.iterdir() if path.suffix not in (".npy", ".safetensors")]
    assert left == []
    for path in tmp_path.iterdir():
        loaded = tb.load(path, "numpy")
        assert (loaded if path.suffix == ".npy" else loaded["a"]).shape == ARRAY.shape
    assert tb.to_torch(ARRAY).shape == ARRAY.shape


def test_a_put_that_is_interrupted_is_listed_or_ended(tmp_path: Path) -> None:
    """What no name stands for is not shared, wherever the interrupt has come."""
    processes._core.ipc_close()
    with tb.serve(tmp_path / "names") as names:
        for number in range(20):
            interrupted(lambda: for_ever(lambda: names.put("x", ARRAY[:64])), 0.01 + 0.0013 * number)
        names.put("x", ARRAY[:1])
        eventually(lambda: processes.held()["shares"] == 1)
        assert names.get("x", "numpy").shape == (1, ARRAY.shape[1])
    # What was opened is given back by a message.
    eventually(lambda: processes.held()["shares"] == 0)


def test_load_is_interrupted(tmp_path: Path) -> None:
    tb.save(tmp_path / "x.npy", ARRAY)
    for copy in (None, True):
        before = views()
        interrupted(lambda: for_ever(lambda: tb.load(tmp_path / "x.npy", "torch", copy=copy)))  # noqa: B023
        eventually(lambda: views() == before)  # noqa: B023


def test_waiting_for_a_name_is_interrupted(tmp_path: Path) -> None:
    with tb.serve(tmp_path / "names") as names:
        assert interrupted(lambda: next(iter(names.watch("never")))) < 2
        names.put("x", np.ones(2))
        assert names.get("x", "numpy").tolist() == [1, 1]


@contextmanager
def silent(path: Path) -> Iterator[Path]:
    """A process that takes connections and answers nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen()
        yield path


def test_waiting_for_an_answer_is_interrupted(tmp_path: Path) -> None:
    """Of a process that hangs: it has five seconds to answer."""
    ticket = tb.share(np.ones(1))
    own = ticket.text.split('"socket":"')[1].split('"')[0]
    tb.revoke(ticket)
    with silent(tmp_path / "socket") as path:
        text = ticket.text.replace(own, str(path))
        assert interrupted(lambda: tb.open(text, "numpy")) < 2
        with ThreadPoolExecutor() as threads:
            other = threads.submit(tb.open, text, "numpy")
            assert interrupted(lambda: tb.open(text, "numpy"), 0.2) < 2
            assert isinstance(other.exception(), ConnectionError)
        assert interrupted(lambda: tb.connect(path)) < 2


class Handler:
    """A handler that is not a function."""

    def __call__(self, number: int, frame: object) -> None:
        raise TimeoutError("the program's own")


@pytest.mark.parametrize("is_object", [False, True])
@pytest.mark.parametrize("attribute", ["__dlpack__", "__dlpack_device__", "__array_interface__", "items"])
def test_what_a_signal_handler_raises_passes_as_it_is(attribute: str, is_object: bool) -> None:
    """The handler runs in whatever runs then, here in a producer or a container."""

    def alarmed(number: int, frame: object) -> None:
        raise TimeoutError("the program's own")

    class Producer:
        def __getattribute__(self, name: str) -> object:
            if name == attribute:
                signal.raise_signal(signal.SIGALRM)
            return object.__getattribute__(self, name)

        def __dlpack__(self, **keywords: object) -> object:
            return np.ones(3).__dlpack__()

        def __dlpack_device__(self) -> object:
            return 1, 0

    class Container(dict):  # type: ignore[type-arg]
        def items(self) -> object:  # type: ignore[override]
            signal.raise_signal(signal.SIGALRM)

    if attribute == "__array_interface__":
        del Producer.__dlpack__
    x: Any = Container(a=np.ones(3)) if attribute == "items" else Producer()
    out: Any = {"a": np.zeros(3)} if attribute == "items" else np.zeros(3)
    former = signal.signal(signal.SIGALRM, Handler() if is_object else alarmed)
    try:
        for call in (lambda: tb.to_numpy(x), lambda: tb.to_numpy([x]), lambda: tb.copy([x], out=[out])):
            with pytest.raises(TimeoutError, match="the program's own") as caught:
                call()
            assert type(caught.value) is TimeoutError
    finally:
        signal.signal(signal.SIGALRM, former)
    # The producer's own exception is told as one.
    with pytest.raises(tb.BridgeRuntimeError, match="ZeroDivisionError"):
        tb.to_numpy(Failing())


class Failing:
    @property
    def __dlpack__(self) -> object:
        raise ZeroDivisionError
