"""A store in a separate process, and processes that put into it and read, which are killed at random."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import killed
import truebridge as tb

#: Puts a tree of equal numbers under one of three names, hands over memory in place, or publishes. What is put twice
#: under one version would differ: the number is the time.
WRITER = """
import itertools, sys, time
import numpy as np
import truebridge as tb
{imports}
random = __import__("random").Random(float(sys.argv[2]))
client = None
print("up", flush=True)
for step in itertools.count():
    value = float(time.monotonic_ns() // 1000 % (1 << 24))
    try:
        client = client or tb.connect(sys.argv[1])
        name = random.choice("abc")
        tree = [{full} for shape in ((4096,), (33, 7), ())]
        if random.random() < 0.3:
            made = client.empty(tree, {target!r}, device={device!r})
            tb.copy(tree, out=made)
            tree = made
        client.put(name, tree, keep=random.choice((1, 2)))
        if random.random() < 0.1:
            client.remove(name)
    except (ConnectionError, tb.BridgeError) as error:
        if getattr(error, "kind", "") not in ("gone", "busy", "denied"):
            raise
        time.sleep(0.005)
"""

#: Publishes versions of a tree of equal numbers, in memory that is used again.
PUBLISHER = """
import itertools, sys, time
import numpy as np
import truebridge as tb
{imports}
client = publication = None
print("up", flush=True)
for step in itertools.count():
    value = float(time.monotonic_ns() // 1000 % (1 << 24))
    try:
        client = client or tb.connect(sys.argv[1])
        tree = [{full} for shape in ((4096,), (33, 7), ())]
        publication = publication or client.publish("p", tree, slots=3)
        publication.update(tree, timeout=1)
        time.sleep(0.002)
    except (ConnectionError, tb.BridgeError) as error:
        if getattr(error, "kind", "") not in ("gone", "busy", "denied"):
            raise
        time.sleep(0.005)
"""

#: Reads what stands under the names, keeps some of it open, and checks all of that again and again.
READER = """
import sys, time
import numpy as np
import truebridge as tb
{imports}
random = __import__("random").Random(float(sys.argv[2]))
client, held = None, []

def number(tree):
    values = np.concatenate([{read}.ravel() for x in tree])
    assert (values == values[0]).all(), values
    return values[0]

print("up", flush=True)
while True:
    try:
        client = client or tb.connect(sys.argv[1])
        tree = client.get(random.choice("abcp"), {target!r})
        held.append((number(tree), tree))
    except (ConnectionError, tb.BridgeError) as error:
        if getattr(error, "kind", "") not in ("gone", "busy", "denied"):
            raise
        time.sleep(0.002)
    for first, tree in held:
        assert number(tree) == first, (first, number(tree))
    while len(held) > 8:
        held.pop(random.randrange(len(held)))
"""


def started(path: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a store, and return it when it serves names."""
    command = [sys.executable, "-m", "truebridge", "store", path, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("stores names at"), process.wait()
    return process


def ended(process: subprocess.Popen[Any], how: signal.Signals = signal.SIGKILL) -> None:
    """End a process that this one has started."""
    process.send_signal(how)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextlib.contextmanager
def store(path: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a store, which is killed at the end."""
    process = started(path, *arguments)
    try:
        yield process
    finally:
        ended(process)


def at_random(path: str, words: dict[str, str]) -> None:
    """End a store, writers and readers one after the other, and start each again. At the end, nothing is left.

    Each ends by SIGKILL or SIGTERM.
    """
    kinds = {"writer": WRITER, "publisher": PUBLISHER, "reader": READER}
    random, codes = Random(killed.SEED), {name: code.format(**words) for name, code in kinds.items()}
    sides: dict[str, subprocess.Popen[Any]] = {"store": started(path)}
    try:
        for number, name in enumerate(("writer", "writer", "publisher", "reader", "reader")):
            sides[f"{name} {number}"] = killed.started(codes[name], path, str(number))
        for kill in range(killed.KILLS):
            time.sleep(random.uniform(0.02, 0.3))
            for name, process in sides.items():
                assert process.poll() is None, f"the {name} has stopped"
            victim = random.choice(list(sides))
            ended(sides[victim], random.choice((signal.SIGKILL, signal.SIGTERM)))
            sides[victim] = (
                started(path) if victim == "store" else killed.started(codes[victim.split()[0]], path, str(10 + kill))
            )
        time.sleep(0.3)
        for name, process in sides.items():
            assert process.poll() is None, f"the {name} has stopped"
            if name != "store":
                ended(process)
        with tb.connect(path) as client:
            for name in client.list():
                client.remove(name)
            until = time.monotonic() + 20
            while (kept := client.stored()) != (0, kept and kept[1]):
                assert time.monotonic() < until, kept
                time.sleep(0.01)
    finally:
        for process in sides.values():
            ended(process)
