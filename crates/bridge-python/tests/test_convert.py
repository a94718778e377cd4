"""Conversions on the host: what plans and errors say, the functions of pairs, and the keywords.

The suite judges elements, layouts, dtypes, protected memory and what is in place, also through the package.
"""

from __future__ import annotations

import inspect
import itertools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memory
import truebridge as tb
from capsules import Wrapper

torch: Any = pytest.importorskip("torch")


def test_numpy_lacks_at_most_complex32_and_packed_float4() -> None:
    """Older versions of ml_dtypes, which brings the others, do not have it."""
    assert set(tb.profile("torch")["dtypes"]) - set(tb.profile("numpy")["dtypes"]) <= {"complex32", "float4_e2m1fn_x2"}


def protected() -> np.ndarray:
    array = np.arange(4.0)
    array.flags.writeable = False
    return array


#: What is not converted in place: the tensor, the target, ``copy``, and the kind and the words of the error.
IN_PLACE: dict[str, tuple[Any, str, bool | None, str, str]] = {
    "backwards": (np.arange(4.0)[::-1], "torch", False, "copy_needed", "negative strides.*copy=None"),
    "a pending conjugation": (torch.ones(2, dtype=torch.complex64).conj(), "numpy", False, "copy_needed", "pending"),
    "a pending negation": (torch.ones(2, dtype=torch.complex64).conj().imag, "numpy", False, "copy_needed", "pending"),
    "read-only": (protected(), "torch", None, "read_only", "read-only.*copy=True"),
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_a_refusal_says_which_copy_to_ask_for(case: str) -> None:
    x, target, copy, kind, words = IN_PLACE[case]
    with pytest.raises(tb.BridgeBufferError, match=words) as caught:
        tb.convert(x, target, copy=copy)  # type: ignore[call-overload]
    assert caught.value.kind == kind
    assert tb.convert(x, target, copy=True).tolist() == x.tolist()  # type: ignore[call-overload]


@pytest.mark.parametrize("target", ["numpy", "torch"])
@pytest.mark.parametrize("source", ["numpy", "torch", "backwards"])
def test_a_copy_is_memory_of_the_target(source: str, target: str) -> None:
    array = np.arange(300.0)
    x = {"numpy": array, "torch": torch.from_numpy(array), "backwards": array[::-1]}[source]
    before = memory.views()
    copy = tb.convert(x, target, copy=True)
    assert memory.views() == before, "the copy is a view of a copy"
    assert copy.tolist() == x.tolist()


def test_unaligned_arrays_are_copied() -> None:
    array = np.frombuffer(bytearray(41), np.uint8)[1:].view(np.float32)
    plan = tb.plan(array, "torch")
    assert plan.reason == "an unaligned address" and plan == pickle.loads(pickle.dumps(plan))
    assert (
        plan.advice
        == f'{array.ctypes.data:#x} is not a multiple of 4; convert(x, "numpy", copy=True) makes an aligned tensor'
    )
    assert repr(plan).endswith(f"because of an unaligned address: {plan.advice}>")
    made = tb.convert(array, "numpy", copy=True)
    assert made.ctypes.data % 64 == 0 and tb.plan(made, "torch").advice is None
    with pytest.raises(tb.BridgeBufferError, match=f"{array.ctypes.data:#x} is not a multiple of 4"):
        tb.to_torch(array, copy=False)
    assert tb.to_torch(array).shape == (10,)


def test_convert_and_plan_name_the_target() -> None:
    tensor = torch.ones(3)
    assert isinstance(tb.convert(tensor, "numpy"), np.ndarray)
    plan = tb.plan(tensor, "numpy")
    assert (plan.zero_copy, plan.reason, plan.nbytes, plan.device) == (True, None, 0, "cpu")
    assert plan.copied_by is None
    assert repr(plan) == "<Plan: zero copy on cpu>"
    plan = tb.plan(np.ones(3)[::-1], "torch")
    assert (plan.zero_copy, plan.reason, plan.nbytes) == (False, "negative strides", 24)
    assert plan.copied_by == "host"
    assert repr(plan) == "<Plan: copy of 24 bytes on cpu by host because of negative strides>"


# The functions that name a pair of frameworks.


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
    assert function.__name__ in dir(tb)
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


def test_the_page_names_every_framework_and_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "python.md").read_text()
    (section,) = re.findall(r"\n## Pairs\n(.*?)\n## ", page, re.S)
    shown = re.findall(r"`(convert_\w+)`", section)
    assert shown and set(shown) <= set(dir(tb))
    assert all(f"`{name}`" in section for name in SHORT)
    (block,) = re.findall(r"```python\n(.*?)```", section, re.S)
    exec(compile(block, "python.md", "exec"), {})


# ``detach=True``: a tensor that requires grad is converted as its data.


def tracked() -> Any:
    """A tensor in the middle of a graph."""
    return torch.arange(6.0).reshape(2, 3).requires_grad_() * 2


@pytest.mark.parametrize(
    "convert", [tb.to_numpy, tb.convert_pytorch_to_numpy, lambda x, **k: tb.convert(x, "numpy", **k)]
)
def test_a_tensor_that_requires_grad_converts_in_place(convert: Any) -> None:
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
    class Broken(Wrapper):
        @property
        def requires_grad(self) -> bool:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tb.to_numpy(Broken(torch.ones(1)), detach=True)
    with pytest.raises(tb.BridgeValueError, match="detach is 'yes': pass True or False"):
        tb.to_numpy(torch.ones(1), detach="yes")  # type: ignore[call-overload]


# The keyword ``device`` where nothing can be moved: in place on the host, and what is refused.


@pytest.mark.parametrize("device", ["cpu:3", (1, 3), torch.device("cpu", 3)])
def test_there_is_one_host_whatever_its_number(device: Any) -> None:
    array = np.arange(16.0)
    assert tb.to_torch(array, device=device, copy=False).data_ptr() == array.ctypes.data
    plan = tb.plan(array, "torch", device=device)
    assert (plan.zero_copy, plan.device) == (True, "cpu")


@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", (13, 0), (10, 0)])
def test_a_target_without_such_a_device_refuses_the_move(device: Any, copy: bool | None) -> None:
    for call in (tb.convert, tb.plan):
        with pytest.raises(tb.BridgeValueError, match="numpy has only cpu") as caught:
            call(torch.ones(3), "numpy", device=device, copy=copy)
        assert caught.value.kind == "device"


def test_tensors_of_the_host_convert_through_the_host_as_ever() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert tb.to_torch(array, via="host").data_ptr() == array.ctypes.data
    tree = tb.convert_numpy_to_pytorch({"x": array, "step": 7}, via="host", permute=(1, 0))
    assert tree["x"].data_ptr() == array.ctypes.data and tree["x"].shape == (3, 2) and tree["step"] == 7
    assert tb.plan(array, "torch", via="host") == tb.plan(array, "torch")
    with pytest.raises(tb.BridgeValueError, match="consumes it"):
        tb.to_torch(array.__dlpack__(), via="host")


# The order of elements and the permutation of dimensions, on the way from one framework into another.


ORDERS = {"C": "C_CONTIGUOUS", "F": "F_CONTIGUOUS"}


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("source", ["torch", "numpy"])
@pytest.mark.parametrize("target", ["torch", "numpy"])
def test_an_order_is_in_place_where_the_tensor_has_it(source: str, target: str, order: str) -> None:
    for array in (numbers(3, 4, 5), numbers(3, 4, 5).T, numbers(3, 4, 10)[:, :, ::2]):
        x = tb.convert(array, source)
        y = tb.convert(x, target, order=order)
        plan = tb.plan(x, target, order=order)
        seen = tb.to_numpy(y)
        assert seen.flags[ORDERS[order]]
        np.testing.assert_array_equal(seen, array)
        assert plan.zero_copy == array.flags[ORDERS[order]] == (seen.ctypes.data == array.ctypes.data)
        assert plan.zero_copy or plan.reason == "another order than the requested one"
        assert tb.plan(x, target, order=order, copy=True).nbytes == array.nbytes
        if not plan.zero_copy:
            with pytest.raises(tb.BridgeBufferError, match="copy=None"):
                tb.convert(x, target, order=order, copy=False)


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
def test_a_permutation_is_a_view_where_the_target_takes_it(axes: tuple[int, ...]) -> None:
    array = numbers(3, 4, 5)
    tensor = tb.to_torch(array, permute=axes, copy=False)
    assert tensor.data_ptr() == array.ctypes.data
    np.testing.assert_array_equal(tensor.numpy(), array.transpose(axes))
    back = tb.to_numpy(torch.from_numpy(array), permute=[axis - 3 for axis in axes], copy=False)
    np.testing.assert_array_equal(back, array.transpose(axes))
    assert back.ctypes.data == array.ctypes.data
    compact = tb.to_torch(array, permute=axes, order="C")
    assert compact.is_contiguous()
    np.testing.assert_array_equal(compact.numpy(), array.transpose(axes))


def test_a_permutation_and_a_deferred_operation_are_one_copy() -> None:
    z = torch.randn(2, 3, 4, dtype=torch.complex64)
    for pending in (z.conj(), z.conj().imag):
        array = tb.to_numpy(pending, permute=(2, 0, 1), order="C")
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, pending.resolve_conj().resolve_neg().permute(2, 0, 1).numpy())


def test_tensors_without_elements_and_without_dimensions() -> None:
    for order in ORDERS:
        assert tb.to_torch(np.float32(3) * np.ones(()), order=order, permute=()).item() == 3
        assert tb.to_torch(np.ones((2, 0, 3)), order=order, permute=(2, 0, 1)).shape == (3, 2, 0)


def test_tensorflow_takes_row_major_tensors_only() -> None:
    pytest.importorskip("tensorflow")
    nchw = torch.arange(120.0).reshape(2, 3, 4, 5)
    nhwc = tb.to_tensorflow(nchw, permute=(0, 2, 3, 1))
    np.testing.assert_array_equal(nhwc.numpy(), nchw.permute(0, 2, 3, 1).numpy())
    assert tb.plan(nchw, "tensorflow", permute=(0, 2, 3, 1)).nbytes == 480
    # A permuted view that is compact is converted in place.
    assert tb.plan(nchw.permute(0, 2, 3, 1), "tensorflow", permute=(0, 3, 1, 2)).zero_copy
    for call in (tb.convert, tb.plan):
        with pytest.raises(tb.BridgeValueError, match="row-major tensors only.*permute="):
            call(nchw, "tensorflow", order="F")
    assert tb.to_tensorflow(torch.ones(3), order="F").shape == (3,)
    back = tb.to_torch(nhwc, permute=(0, 3, 1, 2))
    assert torch.equal(back, nchw)
    assert back.data_ptr() == tb.to_numpy(nhwc).ctypes.data


class Long:
    """Axes that say that they take more memory than there is."""

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, index: int) -> int:
        return [0][index]


REFUSED = {
    "an order": ({"order": "A"}, "is not an order"),
    "an order that is not a str": ({"order": 1}, "an order must be a str"),
    "a way that is none": ({"via": "disk"}, 'pass "host"'),
    "a via that is not a str": ({"via": 1}, "via must be a str"),
    "a way of copies without copies": ({"via": "host", "copy": False}, "remove copy=False"),
    "too few axes": ({"permute": (0,)}, "pass 2 different axes"),
    "an axis twice": ({"permute": (0, -2)}, "pass 2 different axes"),
    "an axis too large": ({"permute": (0, 2)}, "pass 2 different axes"),
    "axes that no tensor has": ({"permute": (0, 2**62)}, "at most 64"),
    "axes that are not numbers": ({"permute": "01"}, "must be a sequence of axes"),
    "an axis that does not fit": ({"permute": (0, 2**70)}, "must be a sequence of axes"),
    "no tuple": ({"permute": 1}, "must be a sequence of axes"),
    "axes without an order": ({"permute": {0, 1}}, "must be a sequence of axes"),
    "axes by name": ({"permute": {0: 0, 1: 1}}, "must be a sequence of axes"),
    "very many axes": ({"permute": range(10**9)}, "and more names dimensions"),
    "a length that is a lie": ({"permute": Long()}, "pass 2 different axes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_order_and_no_permutation_is_refused(case: str) -> None:
    keywords, words = REFUSED[case]
    for call in (tb.convert, tb.plan):
        with pytest.raises(tb.BridgeValueError, match=words) as caught:
            call(np.ones((2, 3)), "torch", **keywords)  # type: ignore[operator]
        assert caught.value.kind == "argument"
