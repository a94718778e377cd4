"""The functions that name a pair of frameworks."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")

SHORT = {"pytorch": "torch", "tf": "tensorflow", "cupy": "cupy", "numpy": "numpy"}
PAIRS = list(itertools.permutations(SHORT, 2))


def named(source: str, target: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(tb, f"convert_{source}_to_{target}")
    return function


def tensor(framework: str) -> Any:
    if framework == "tensorflow":
        return pytest.importorskip("tensorflow").reshape(pytest.importorskip("tensorflow").range(6.0), (2, 3))
    return {"torch": torch, "numpy": np}[framework].arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_pair_has_a_function_that_can_be_read(source: str, target: str) -> None:
    function = named(source, target)
    assert function.__name__ in tb.__all__
    keywords = inspect.signature(tb.convert).parameters.keys() - {"target"}
    assert inspect.signature(function).parameters.keys() == keywords
    text = inspect.getdoc(function) or ""
    for section in ("Parameters", "Returns", "Raises", "Examples"):
        assert f"{section}\n{'-' * len(section)}" in text
    assert "{" not in re.sub(r"\{None, [^{}]*\}", "", text)


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if "cupy" not in pair])
def test_the_named_function_does_what_convert_does(source: str, target: str) -> None:
    x, function = tensor(SHORT[source]), named(source, target)
    there = tb.to_numpy(x)
    y = function(x)
    assert type(y) is type(tb.convert(x, SHORT[target]))  # type: ignore[call-overload]
    assert tb.to_numpy(y).tolist() == [[0, 1, 2], [3, 4, 5]]
    if tb.plan(x, SHORT[target]).zero_copy:  # type: ignore[call-overload]
        assert np.shares_memory(tb.to_numpy(y), there)
    assert tb.to_numpy(function(x, permute=(1, 0), order="C")).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert not np.shares_memory(tb.to_numpy(function(x, copy=True)), there)
    assert function({"x": x, "n": 3})["n"] == 3


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_nonsense_is_refused(source: str, target: str) -> None:
    with pytest.raises(tb.BridgeError):
        named(source, target)(object())
    with pytest.raises(TypeError):
        named(source, target)(np.zeros(3), to="cuda")


def test_a_tensor_of_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    pytest.importorskip("cupy")
    t = torch.arange(6.0, device="cuda")
    c = tb.convert_pytorch_to_cupy(t, copy=False)
    assert c.data.ptr == t.data_ptr()
    assert tb.convert_cupy_to_pytorch(c, copy=False).data_ptr() == t.data_ptr()
    assert tb.convert_cupy_to_numpy(c, device="cpu").tolist() == [0, 1, 2, 3, 4, 5]


def test_the_page_names_every_pair_and_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "python.md").read_text()
    (section,) = re.findall(r"\n## Pairs\n(.*?)\n## ", page, re.S)
    assert set(re.findall(r"`(convert_\w+)`", section)) == {named(*pair).__name__ for pair in PAIRS}
    (block,) = re.findall(r"```python\n(.*?)```", section, re.S)
    exec(compile(block, "python.md", "exec"), {})
