"""No output that is not asked for: at exit whatever is alive, and no warning from any public call."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from programs import Warm

#: What a program leaves behind when it ends.
ENDINGS = {
    "views": "keep = [tb.to_torch(array), tb.to_numpy(tensor), tb.to_torch({'a': [array]})]; sys.keep = keep",
    "views in a cycle": "cycle = [tb.to_torch(array)]; cycle.append(cycle); del cycle",
    "shares": "ticket = tb.share(array); sys.keep = ticket",
    "shares that are open": "ticket = tb.share(array); view = tb.open(ticket, 'torch'); sys.keep = view",
    "names": "names = tb.serve(folder + '/names'); names.put('x', array); sys.keep = names",
    "a thread that waits for a name": """
        names = tb.serve(folder + '/names')
        threading.Thread(target=lambda: next(iter(names.watch('never'))), daemon=True).start()
    """,
    "threads that convert": """
        def work():
            for _ in range(200):
                tb.to_numpy(tb.to_torch({'a': array}, copy=True))
        for _ in range(4):
            threading.Thread(target=work).start()
    """,
    "a memory map": "tb.save(folder + '/x.npy', array); sys.keep = tb.load(folder + '/x.npy', 'torch')",
    "a callback": "weakref.finalize(array, lambda: None); sys.keep = tb.to_torch(array); del array",
    "a conversion at exit": "atexit.register(lambda: tb.to_torch(tb.to_numpy(tensor)).sum())",
    "a conversion after the last hook": """
        class Late:
            def __del__(self):
                # Modules cannot be imported any more, so this may fail, but not end the process.
                with self.suppress(Exception):
                    self.tb.to_numpy(self.tensor)
        late = Late(); late.tb, late.tensor, late.suppress = tb, tensor, contextlib.suppress
    """,
    "an open trace": "trace = tb.trace(); trace.__enter__(); tb.to_torch(array)",
    "an exit in the middle": "view = tb.to_torch(array); raise SystemExit(0)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends_without_a_word(ending: str, tmp_path: object, beside_torch: Warm) -> None:
    setup = "import atexit, contextlib, sys, threading, time, weakref, numpy as np, torch, truebridge as tb\n"
    setup += f"folder, array, tensor = {str(tmp_path)!r}, np.ones(64), torch.ones(64)\n"
    done = beside_torch.run(setup + textwrap.dedent(ENDINGS[ending]))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


CALLS = """
import asyncio, contextlib, io, pickle, sys, warnings
import numpy as np
# What the frameworks warn of when they are imported is theirs.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    {frameworks}
import truebridge as tb
from truebridge import autograd, errors, files, names, pairs, processes, tracing

array, tensor = np.arange(6.0, dtype=np.float32).reshape(2, 3), torch.ones(2, 3)
keywords = {{"copy": True, "device": "cpu", "order": "F", "permute": (1, 0), "detach": True}}
keywords["via"] = "host"
for x in (array, tensor, array[:, ::-1], tensor.T, {{"a": [array, tensor]}}, tensor.to(torch.bfloat16)):
    for target in ("torch", "numpy"):
        tb.convert(x, target)
        for name, value in keywords.items():
            tb.convert(x, target, **{{name: value}})
            tb.plan(x, target, **{{name: value}})
tb.to_torch(tensor.__dlpack__())
for name in tb.__all__:
    if name.startswith("convert_") and not name.endswith(("cupy", "tf")):
        getattr(tb, name)(array)
tb.copy(array, out=torch.empty(2, 3))
tb.to_numpy(torch.ones(2, requires_grad=True), detach=True)
for target in ("torch", "numpy"):
    tb.profile(target)
tb.stats()
tb.record_stream(tb.to_numpy(tensor), 1)
for path in ("x.npy", "x.npz", "x.safetensors"):
    tb.save(f"{folder}/{{path}}", array if path == "x.npy" else {{"a": array, "b": tensor}})
    tb.load(f"{folder}/{{path}}", "torch")
ticket = tb.share({{"a": array}})
assert tb.open(pickle.loads(pickle.dumps(ticket)), "torch")["a"].shape == (2, 3)
processes.road(array), processes.held(), tb.revoke(ticket)
with tb.serve("{folder}/names") as served, tb.connect("{folder}/names") as client:
    client.put("x", array)
    client.get("x", "torch"), client.list(), next(iter(client.watch("x"))), client.remove("x")
with contextlib.redirect_stdout(io.StringIO()), tb.trace() as trace:
    tb.to_torch(array)
    print(trace)
    trace.save("{folder}/trace.json")
for bad in (3, "x", [1], np.array(["a"]), torch.eye(2).to_sparse()):
    for call in (tb.to_torch, tb.to_numpy, tb.share, lambda x: tb.plan(x, "torch"), lambda x: tb.copy(x, out=tensor)):
        try:
            call(bad)
        except tb.BridgeError:
            pass
{more}
"""

TENSORFLOW = """
constant = tf.ones((2, 3))
for x in (constant, tf.Variable(constant)):
    tb.to_torch(x, read_only=True), tb.to_numpy(x), tb.to_tensorflow(x), tb.plan(x, "torch")
tb.to_tensorflow(array), tb.to_tensorflow(tensor, copy=True), tb.profile("tensorflow")
square = autograd.torch_function(tf.square)
x = torch.ones(3, requires_grad=True)
square(x).sum().backward()
assert x.grad.tolist() == [2, 2, 2]
back = autograd.tf_function(lambda x: x * x)
with tf.GradientTape() as tape:
    tape.watch(constant)
    y = back(constant)
assert tape.gradient(y, constant).shape == (2, 3)
"""

#: Processes of its own look at the frameworks, whichever the program has imported. Two are enough for what it says.
MATRIX = """
from truebridge import _doctor
_doctor.ALL = {name: _doctor.ALL[name] for name in ("numpy", "torch")}
matrix = tb.matrix()
assert {pair.way for pair in matrix.pairs if pair.device == "cpu"} == {"in place"}, str(matrix)
str(matrix)
"""


@pytest.mark.parametrize("frameworks", ["torch", "torch and tensorflow"])
def test_no_public_call_warns(frameworks: str, tmp_path: object) -> None:
    more = ("import tensorflow as tf", TENSORFLOW) if "tensorflow" in frameworks else ("", MATRIX)
    if more[0]:
        pytest.importorskip("tensorflow")
    code = CALLS.format(frameworks=more[0], more=more[1], folder=tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    # A warning is an error there. TensorFlow writes a log.
    assert (done.returncode, "Warning" in done.stderr) == (0, False), done.stderr


def test_first_conversions_leave_the_filters_of_warnings(beside_torch: Warm) -> None:
    """The filters are those of all threads: two that set and restore them at once leave the wrong ones."""
    done = beside_torch.run("""
        import threading, time, warnings
        import numpy as np, torch, truebridge as tb
        warnings.simplefilter("error")
        filters, empty = list(warnings.filters), torch.empty
        def slow(*args, **keywords):
            time.sleep(0.001)
            return empty(*args, **keywords)
        torch.empty = slow
        threads = [threading.Thread(target=tb.to_torch, args=(np.zeros(1),)) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert warnings.filters == filters
        half = torch.zeros(4, dtype=torch.float16).view(torch.complex32)  # PyTorch warns of a new one
        assert torch.from_dlpack(tb.lend(half)).data_ptr() == half.data_ptr()
    """)
    assert (done.returncode, done.stderr) == (0, "")
