"""Tensors of other processes."""

import gc
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

import truebridge_tf1 as tb

#: Another process, which opens a ticket, writes to its tensors, and shares them back.
OTHER = """
import sys
import numpy as np
import truebridge_tf1 as tb
tree = tb.open(sys.argv[1])
assert not tree["x"].flags.owndata
tree["x"][0] += 1
print(tb.share({"x": tree["x"], "sum": float(tree["x"].sum())}), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True, scope="module")
def _folder(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("ipc")
    folder.chmod(0o700)
    os.environ["TRUEBRIDGE_IPC"] = str(folder)
    yield
    del os.environ["TRUEBRIDGE_IPC"]


def test_a_tree_goes_to_another_process_and_back() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    ticket = tb.share({"x": x, "name": "weights"}, expires=600)
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, ticket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    assert process.stdout is not None
    answer = process.stdout.readline().strip()
    assert answer, process.communicate()
    back = tb.open(answer)
    assert back["x"].tolist() == [[1, 2, 3], [3, 4, 5]] and back["sum"] == 18
    # Its writes were its own.
    assert tb.open(ticket)["x"].tolist() == x.tolist()
    process.kill()
    process.communicate()
    assert back["x"].tolist() == [[1, 2, 3], [3, 4, 5]]
    deadline = time.time() + 20
    while True:
        try:
            tb.open(answer)
        except tb.BridgeConnectionError as error:
            assert error.kind == "gone"
            break
        assert time.time() < deadline
    tb.revoke(ticket)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float64", "complex64"])
def test_every_dtype_and_shape_is_seen_as_it_is(dtype: str) -> None:
    for array in (np.zeros((), dtype), np.ones((0, 3), dtype), np.arange(6).reshape(2, 3).astype(dtype)):
        seen = tb.open(tb.share(array))
        assert seen.dtype == array.dtype and seen.shape == array.shape
        assert np.array_equal(seen, array)


def test_writing_is_as_the_share_says() -> None:
    for writing, writable, left in [("private", True, 0), ("never", False, 0), ("shared", True, 7)]:
        ticket = tb.share(np.zeros(2), writing=writing)
        one, other = tb.open(ticket), tb.open(ticket)
        assert one.flags.writeable is writable
        if writable:
            one[0] = 7
        assert other[0] == left


def test_views_keep_the_memory() -> None:
    ticket = tb.share(np.arange(1000))
    view = tb.open(ticket)[500:]
    tb.revoke(ticket)
    gc.collect()
    assert view.tolist() == list(range(500, 1000))


def test_what_is_open_is_shared_again_after_the_end_of_its_ticket_and_not_after_a_revocation() -> None:
    for leases in (False, True):
        ticket = tb.share(np.arange(6))
        view = tb.open(ticket)
        tb.revoke(ticket, leases=leases)
        with pytest.raises(tb.BridgeConnectionError):
            tb.open(ticket)
        if not leases:
            again = tb.share(view)
            assert tb.open(again).tolist() == list(range(6))
            tb.revoke(again)
            continue
        deadline = time.time() + 20
        with pytest.raises(tb.BridgeConnectionError) as error:
            while time.time() < deadline:
                tb.revoke(tb.share(view))
        assert error.value.kind == "gone"


def test_nonsense_is_a_typed_error() -> None:
    ticket = tb.share(np.zeros(1))
    forged = ticket.replace(json.loads(ticket)["token"], "0" * 32)
    cases = [
        (lambda: tb.open("ticket"), "argument"),
        (lambda: tb.open(7), "argument"),
        (lambda: tb.open("a\0b"), "argument"),
        (lambda: tb.open("\ud800"), "argument"),
        (lambda: tb.revoke(7, leases=False), "argument"),
        (lambda: tb.share(np.zeros(1), expires="x"), "argument"),  # type: ignore[arg-type]
        (lambda: tb.share(np.zeros(1), expires=10**400), "argument"),
        (lambda: tb.open(forged), "gone"),
        (lambda: tb.share(np.zeros(1), writing="yes"), "argument"),
        (lambda: tb.share(np.zeros(1), writing=[]), "argument"),  # type: ignore[arg-type]
        (lambda: tb.share(np.zeros(1), expires=-1), "argument"),
        (lambda: tb.share(np.zeros(1), expires=float("nan")), "argument"),
        (lambda: tb.share(object()), "not_a_tensor"),
        (lambda: tb.share({(1, 2): np.zeros(1)}), "argument"),
        (lambda: tb.revoke("ticket"), "argument"),
    ]
    for call, kind in cases:
        with pytest.raises(tb.BridgeError) as caught:
            call()
        assert caught.value.kind == kind
