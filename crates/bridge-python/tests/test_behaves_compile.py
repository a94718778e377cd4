"""``torch.compile``: the graph breaks where a function of the package is called, without a warning and at no cost."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")
dynamo: Any = pytest.importorskip("torch._dynamo")

#: What a program compiles, by the function that it calls.
CALLS: dict[str, Callable[[Any], Any]] = {
    "to_torch": lambda x: tb.to_torch(x * 2) + 1,
    "to_numpy": lambda x: torch.from_numpy(tb.to_numpy(x * 2)) + 1,
    "convert": lambda x: tb.convert({"a": x * 2}, "torch")["a"] + 1,
    "convert_pytorch_to_numpy": lambda x: torch.as_tensor(tb.convert_pytorch_to_numpy(x * 2)) + 1,
    "copy": lambda x: tb.copy(x * 2, out=torch.empty(3)) + 1,
    "plan": lambda x: x * 2 + tb.plan(x * 2, "numpy", copy=True).nbytes - 11,
    "stats": lambda x: x * 2 + (tb.stats()["leaked"] >= 0),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CALLS)
def test_the_graph_breaks_without_a_warning(name: str, backend: str) -> None:
    dynamo.reset()
    dynamo.utils.counters.clear()
    compiled = torch.compile(CALLS[name], backend=backend)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = [compiled(torch.full((3,), float(i))).tolist() for i in range(4)]
    assert found == [[2 * i + 1] * 3 for i in range(4)]
    assert [str(warning.message) for warning in heard if "truebridge" in str(warning.message)] == []
    breaks = list(dynamo.utils.counters["graph_break"])
    assert len(breaks) == 1 and "works on the memory of real tensors" in breaks[0], breaks


@pytest.mark.parametrize("name", CALLS)
def test_a_whole_graph_is_refused_by_pytorch(name: str) -> None:
    dynamo.reset()
    with pytest.raises(dynamo.exc.Unsupported, match="call it outside of the graph"):
        torch.compile(CALLS[name], backend="eager", fullgraph=True)(torch.ones(3))


def test_errors_come_out_of_compiled_code_as_they_are() -> None:
    dynamo.reset()
    compiled = torch.compile(CALLS["to_torch"], backend="eager")
    with pytest.raises(tb.BridgeBufferError) as caught:
        compiled(torch.ones(3, requires_grad=True))
    assert caught.value.kind == "requires_grad"


class Crossing(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return tb.to_torch(x * 2) + 1


@pytest.mark.parametrize("strict", [True, False])
def test_an_export_is_a_typed_error(strict: bool) -> None:
    dynamo.reset()
    with pytest.raises((tb.BridgeTypeError, dynamo.exc.Unsupported)) as caught:
        torch.export.export(Crossing(), (torch.ones(3),), strict=strict)
    assert ("call it outside of the graph" in str(caught.value)) == strict, caught.value


def test_fake_tensors_are_refused_and_real_ones_cross_beside_them() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = torch.ones(3)
    with FakeTensorMode():
        for call in (tb.to_numpy, tb.to_torch, lambda x: tb.plan(x, "numpy"), lambda x: tb.copy(real, out=x)):
            with pytest.raises(tb.BridgeTypeError, match="plain tensor"):
                call(torch.ones(3))
        assert tb.to_numpy(real).tolist() == [1, 1, 1]


@pytest.mark.parametrize("keywords", [{"order": "F"}, {"copy": True}])
def test_no_copies_of_torch_are_made_beside_fake_tensors(keywords: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = torch.ones(2, 3)
    with FakeTensorMode():
        with pytest.raises(tb.BridgeTypeError, match="leave the mode") as caught:
            tb.to_torch(real, **keywords)
        assert caught.value.kind == "not_a_tensor"
        assert tb.to_numpy(real, **keywords).tolist() == [[1] * 3] * 2
    assert tb.to_torch(real, **keywords).tolist() == [[1] * 3] * 2


def test_a_call_costs_what_it_did() -> None:
    assert isinstance(tb.to_torch, BuiltinFunctionType) and isinstance(tb.copy, BuiltinFunctionType)


@pytest.mark.parametrize("order", ["import torch._dynamo, truebridge as tb", "import truebridge as tb, torch"])
def test_any_order_of_imports_works(order: str) -> None:
    code = f"""
import sys
{order}
import torch._dynamo
assert not [finder for finder in sys.meta_path if "truebridge" in repr(finder)]
compiled = torch.compile(lambda x: tb.to_torch(x) + 1, backend="eager")
assert compiled(torch.ones(2)).tolist() == [2, 2]
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error::UserWarning:torch._dynamo", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_limits_are_those_of_the_page() -> None:
    """Those of ``docs/limits.md``: a sentence that is no longer true fails here."""
    from torch.autograd import forward_ad
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(lambda x: tb.to_torch(x) + 1)(torch.ones(2))
    assert traced(torch.zeros(2)).tolist() == [2, 2]
    with pytest.raises(tb.BridgeError, match="convert outside of what is traced") as caught:
        torch.jit.trace(lambda x: tb.to_torch(x, copy=True) + 1, torch.ones(2), check_trace=False)
    assert caught.value.kind == "refused"
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.full((2,), 5.0))
        assert tb.to_numpy(dual).tolist() == [1, 1]
        assert forward_ad.unpack_dual(tb.to_torch(dual)).tangent is None
