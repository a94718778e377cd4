"""The frameworks may be imported in any order, on machines with a GPU and without."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tensorflow")

CUDA = torch.cuda.is_available()
if CUDA:
    pytest.importorskip("cupy")
ORDERS = list(itertools.permutations(["torch", "tensorflow", "truebridge", *(["cupy"] if CUDA else [])]))

CODE = """
import sys
sys.modules["tensorflow.python.pywrap_dlopen_global_flags"] = None
import {order}
import truebridge as tb

def same(first, *targets):
    \"\"\"Sends a tensor round, and looks at its address and its values at each stop.\"\"\"
    x = first
    for target in targets:
        x = tb.convert(x, target, copy=False)
        assert tb.to_torch(x).data_ptr() == tb.to_torch(first).data_ptr(), (first, target)
        assert (tb.to_torch(x) * 2).tolist() == [0, 2, 4, 6], (first, target)

same(torch.arange(4.0), "tensorflow", "numpy", "tensorflow", "torch")
with tensorflow.device("CPU:0"):
    same(tensorflow.range(4.0), "torch", "numpy", "tensorflow")
"""
CODE_CUDA = """
with tensorflow.device("GPU:0"):
    same(tensorflow.range(4.0), "torch", "cupy", "tensorflow", "cupy", "torch")
    assert (tb.to_tensorflow(cupy.arange(4.0)) * 2).numpy().tolist() == [0, 2, 4, 6]
same(torch.arange(4.0, device="cuda"), "tensorflow", "cupy", "torch", "cupy", "tensorflow")
a = torch.ones(64, 64, device="cuda")
assert (a @ a).sum().item() == 64**3
b = tb.to_tensorflow(a)
assert tensorflow.reduce_sum(b * b).numpy() == 64**2
c = tb.to_cupy(b)
assert (c @ c).sum() == 64**3
"""


@pytest.mark.parametrize("order", ORDERS, ids=",".join)
def test_any_order_of_imports_works(order: tuple[str, ...]) -> None:
    code = CODE.format(order=", ".join(order)) + (CODE_CUDA if CUDA else "")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr


def test_a_tensorflow_that_the_package_imports_keeps_its_symbols_to_itself() -> None:
    code = """
import ctypes, sys
import numpy, truebridge as tb
assert tb.to_tensorflow(numpy.ones(3)).numpy().tolist() == [1, 1, 1]
assert not hasattr(ctypes.CDLL(None), "TF_Version"), "libraries that are loaded later take its stubs of CUDA"
assert "tensorflow.python.pywrap_dlopen_global_flags" not in sys.modules, "it was to be kept from one import"
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr
