"""Subjects that are copied into another tensor, or elsewhere, or in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import truebridge as tb
from hostile.subjects import NONSENSE, Case, Subject, answer, memory_of


def torch_view(memory: np.ndarray, shape: list[int], strides: list[int], start: int) -> Any:
    """A view of PyTorch; ``None`` where it makes none."""
    import torch

    try:
        return torch.as_strided(torch.from_numpy(memory), shape, strides, start)
    except RuntimeError:
        return None


def view(memory: np.ndarray, shape: list[int], strides: list[int], start: int) -> Any:
    """A view by strides in elements; ``None`` where it leaves the memory."""
    size = memory.itemsize
    try:
        return np.ndarray(shape, memory.dtype, memory, start * size, [stride * size for stride in strides])
    except (ValueError, TypeError):
        return None


def nested(shape: list[int], strides: list[int]) -> bool:
    """Whether each stride is longer than all that is below it, as in slices of compact tensors."""
    reach = 0
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True)):
        if length > 1 and stride <= reach:
            return False
        reach += stride * (length - 1)
    return True


def odd_source(word: str, array: np.ndarray) -> Any:
    if word != "reversed producer":
        return NONSENSE[word]()

    class Reversed:
        def __dlpack__(self, **_: Any) -> Any:
            return array[::-1].__dlpack__() if array.ndim else array.__dlpack__()

        def __dlpack_device__(self) -> Any:
            return (1, 0)

    return Reversed()


def odd_target(word: str, array: np.ndarray) -> Any:
    if word == "read-only":
        array = array[...]
        array.flags.writeable = False
        return array
    if word == "requires grad":
        import torch

        return torch.zeros(array.shape, requires_grad=True)
    if word == "capsule":
        return np.zeros(array.shape, array.dtype).__dlpack__()
    if word == "tensorflow":
        return type("Imitation", (), {"__module__": "tensorflow", "__array__": lambda self: array})()
    return NONSENSE[word]()


def copy(case: Case) -> Subject:
    """A view that is copied into another view of the same memory."""
    dtypes = [np.dtype(name) for name in case["dtypes"]]
    _, memory = memory_of(dtypes[0].itemsize, dtypes[0].kind)
    other = memory if dtypes[0] == dtypes[1] else np.zeros(64, dtypes[1])
    shape, out_shape = case["shape"], case["out_shape"]
    places = np.arange(64)
    source = view(memory, shape, case["strides"], case["start"])
    target = view(other, out_shape, case["out_strides"], case["out_start"])
    if source is None or target is None:
        return Subject(lambda *_: None)
    read = set(view(places, shape, case["strides"], case["start"]).ravel().tolist())
    written = view(places, out_shape, case["out_strides"], case["out_start"])
    # What the copy must not accept.
    same = dtypes[0] == dtypes[1]
    twice = len(set(written.ravel().tolist())) < written.size
    shared = same and bool(read & set(written.ravel().tolist()))
    before = other.copy()
    after = before.copy()
    # As in `numpy.copyto`, leading dimensions of length 1 that the target lacks are dropped.
    surplus = max(source.ndim - target.ndim, 0)
    dropped = source.reshape(source.shape[surplus:]) if set(source.shape[:surplus]) <= {1} else source
    try:
        repeated = np.broadcast_to(dropped, target.shape).copy()
    except ValueError:
        repeated = None
    fits = same and repeated is not None
    if fits:
        after[written] = repeated
    good = case["src"] == "good" and case["out"] == "good"
    if case["frameworks"][0] == "torch":
        found = torch_view(memory, shape, case["strides"], case["start"])
        source = source if found is None else found
    if case["frameworks"][1] == "torch":
        found = torch_view(other, out_shape, case["out_strides"], case["out_start"])
        target = target if found is None else found
    source = source if case["src"] == "good" else odd_source(case["src"], np.asarray(source))
    target = target if case["out"] == "good" else odd_target(case["out"], np.asarray(target))
    wrong: list[str] = []

    def act(*_: object) -> Any:
        try:
            result = tb.copy(source, out=target)
        except BaseException:
            if other.tobytes() != before.tobytes():
                wrong.append("an error after a write")
            raise
        if result is not target:
            wrong.append("another result than the target")
        elif good and (twice or shared or not fits) and target.ndim and 0 not in out_shape:
            wrong.append(f"accepted: twice={twice}, shared={shared}, fits={fits}")
        elif good and fits and other.tobytes() != after.tobytes():
            wrong.append("wrong bytes")
        elif case["out"] != "good" and case["out"] not in ("array", "tensor"):
            wrong.append("accepted as a target")
        return None

    must = good and fits and not twice and not shared and nested(out_shape, case["out_strides"])
    return Subject(act, must_convert=must, wrong_after=lambda: "; ".join(wrong))


class Endless:
    """A sequence without an end."""

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, _: int) -> int:
        return 0

    def __iter__(self) -> Iterator[int]:
        raise OverflowError("no '\"\\")


AXES: dict[str, Callable[[], Any]] = {
    "long list": lambda: [0] * 100_000,
    "floats": lambda: [0.0, 1.0],
    "endless": Endless,
}


def keyword(word: Any) -> Any:
    if word in AXES:
        return AXES[word]()
    return answer(word) if word in NONSENSE or word.startswith("(") else word


def options(case: Case) -> Subject:
    array = np.arange(np.prod(case["shape"], dtype=int), dtype=np.int32).reshape(case["shape"])
    ndim, permute, order = array.ndim, case["permute"], case["order"]
    good = {
        "order": order in (None, "C", "F", "none"),
        "permute": permute in (None, "none") or (isinstance(permute, list) and sorted(permute) == list(range(ndim))),
        "device": case["device"] in (None, "cpu", "none"),
    }
    # Other spellings may be taken: negative axes, sequences, devices that the host has.
    open_end = {
        "permute": permute in ("list", "array", "tensor", "floats"),
        "device": True,
        "order": False,
    }
    refused = [name for name, sound in good.items() if not sound and not open_end[name]]
    refused = [name for name in refused if name != "permute" or not isinstance(permute, list) or min(permute) >= 0]
    expected = None
    if all(good.values()):
        expected = np.transpose(array, permute if isinstance(permute, list) else None).tolist()
        expected = array.tolist() if permute in (None, "none") else expected
    keywords = {
        name: keyword(case[name]) if isinstance(case[name], str) else case[name]
        for name in ("order", "permute", "device")
        if case[name] is not None
    }
    made = array
    if case["source"] == "torch":
        import torch

        made = torch.from_numpy(array)
    accepted: list[str] = []

    def act(target: str, copy: bool | None) -> Any:
        try:
            tb.plan(made, target, copy=copy, **keywords)
        except tb.BridgeError:
            pass
        result = tb.convert(made, target, copy=copy, **keywords)
        if refused:
            accepted.append(f"accepted: {', '.join(refused)}")
        return result

    must = expected is not None and case["copy"] is not False
    return Subject(act, expected, must_convert=must, wrong_after=lambda: "; ".join(accepted))
