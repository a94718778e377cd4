"""``detach=True``: a tensor that requires grad crosses as its data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")


def tracked() -> Any:
    """A tensor in the middle of a graph."""
    return torch.arange(6.0).reshape(2, 3).requires_grad_() * 2


@pytest.mark.parametrize(
    "convert", [tb.to_numpy, tb.convert_pytorch_to_numpy, lambda x, **k: tb.convert(x, "numpy", **k)]
)
def test_a_tensor_that_requires_grad_crosses_in_place(convert: Any) -> None:
    x = tracked()
    for arguments in ({}, {"detach": False}):
        with pytest.raises(tb.BridgeError) as error:
            convert(x, **arguments)
        assert error.value.kind == "requires_grad"
    array = convert(x, detach=True)
    assert array.ctypes.data == x.data_ptr() and array.tolist() == x.tolist()
    assert x.requires_grad
    x.sum().backward()


def test_the_result_in_pytorch_is_no_part_of_the_graph() -> None:
    x = tracked()
    y = tb.to_torch(x, detach=True)
    assert y.data_ptr() == x.data_ptr() and not y.requires_grad and y.grad_fn is None


def test_each_tensor_of_a_tree_is_detached() -> None:
    x = tracked()
    tree = {"tracked": [x, x], "plain": torch.ones(2), "array": np.ones(2)}
    made = tb.to_numpy(tree, detach=True)
    assert made["tracked"][0].ctypes.data == x.data_ptr() and made["tracked"][0] is made["tracked"][1]
    with pytest.raises(tb.BridgeError, match=r"tree\['tracked'\]\[0\]: the tensor requires grad"):
        tb.to_numpy(tree)


def test_it_goes_with_the_other_keywords_and_plan_knows_it() -> None:
    x = tracked()
    assert tb.to_numpy(x, detach=True, permute=(1, 0)).shape == (3, 2)
    assert tb.to_numpy(x, detach=True, copy=True).ctypes.data != x.data_ptr()
    assert tb.plan(x, "numpy", detach=True).zero_copy
    with pytest.raises(tb.BridgeError):
        tb.plan(x, "numpy")


def test_tensorflow_takes_parameters() -> None:
    pytest.importorskip("tensorflow")
    weight = torch.nn.Linear(4, 4).weight
    assert (tb.to_tensorflow(weight, detach=True).numpy() == weight.detach().numpy()).all()


def test_an_error_of_a_tensor_passes_through() -> None:
    class Broken:
        @property
        def requires_grad(self) -> bool:
            raise KeyboardInterrupt

        def __dlpack__(self, **keywords: Any) -> Any:
            return torch.ones(1).__dlpack__(**keywords)

        def __dlpack_device__(self) -> Any:
            return (1, 0)

    with pytest.raises(KeyboardInterrupt):
        tb.to_numpy(Broken(), detach=True)
    with pytest.raises(tb.BridgeValueError, match="detach is yes: pass True or False"):
        tb.to_numpy(torch.ones(1), detach="yes")  # type: ignore[call-overload]
