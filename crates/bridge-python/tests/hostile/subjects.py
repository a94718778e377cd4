"""Objects made from cases, and what may come of them."""

from __future__ import annotations

import builtins
import ctypes
import itertools
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import truebridge as tb
from capsules import Deleter, Legacy, Versioned, new_capsule

Case = dict[str, Any]
# Code, bits: of DLPack.
DTYPES = [(2, 32), (1, 8), (0, 16), (2, 64), (5, 128), (6, 8)]
LETTERS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
NAMES = {True: b"dltensor_versioned", False: b"dltensor"}

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass
class Subject:
    """What is handed to the package, and what is known of it."""

    act: Callable[[str, bool | None], Any]
    expected: Any = None
    """The elements, as ``tolist`` shows them, where the result may be read."""
    safe_to_read: bool = True
    """Whether the view stays inside the memory. A host address does not tell, so no copy is requested."""
    must_convert: bool = False
    may_raise: set[str] = field(default_factory=set)
    wrong_after: Callable[[], str] = lambda: ""
    keep: Any = None


class Guarded:
    """Bytes that end just before a page that cannot be touched."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        length = -(-size // page) * page
        self.map = mmap.mmap(-1, length + page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        if libc.mprotect(start + length, page, 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect failed")
        self.address = start + length - size

    def put(self, data: Any, at: int = 0) -> int:
        ctypes.memmove(self.address + at, ctypes.addressof(data), ctypes.sizeof(data))
        return self.address + at


def reuse_guarded(size: int, _kept: dict[int, Guarded] = {}) -> Guarded:  # noqa: B006
    """Memory for the elements, one per size: making pages takes longest."""
    return _kept.setdefault(size, Guarded(size))


def raise_named(name: str) -> Any:
    # Each `repr` of it doubles the backslashes.
    raise getattr(builtins, name)("no '\"\\")


def used_capsule() -> Any:
    capsule = np.ones(1).__dlpack__()
    tb.to_numpy(capsule)
    return capsule


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("x" * 100_000)


def tensor() -> Any:
    import torch

    return torch.ones(2)


NONSENSE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "text": lambda: "numpy'\"\\",
    "surrogate": lambda: "\ud800",
    "number": lambda: 1 << 70,
    "list": lambda: [1, 0],
    "array": lambda: np.ones(2),
    "tensor": tensor,
    "type": lambda: np.ndarray,
    "wild capsule": lambda: new_capsule(8, b"other", None),
    "used capsule": used_capsule,
    "long text": lambda: "é" * 100_000,
    "unprintable": Unprintable,
}


def answer(word: str) -> Any:
    """What a word of a case stands for: an exception that is raised, an expression, or an object."""
    if word in NONSENSE:
        return NONSENSE[word]()
    return eval(word) if word.startswith("(") else raise_named(word)


def elements(memory: np.ndarray, start: int, shape: list[int], strides: list[int]) -> Any:
    """The elements of a view, by the definition of strides, as ``tolist`` shows them; ``None`` if one is outside."""
    if any(length < 0 or length > 64 for length in shape) or math.prod(shape) > 1 << 12:
        return None
    if not shape:
        return memory[start].item() if 0 <= start < len(memory) else None
    if 0 in shape:
        return np.zeros(shape).tolist()
    indices = itertools.product(*map(range, shape))
    places = [start + sum(i * s for i, s in zip(index, strides, strict=True)) for index in indices]
    if min(places) < 0 or max(places) >= len(memory):
        return None
    flat: list[Any] = [memory[place].item() for place in places]
    for length in reversed(shape[1:]):
        flat = [flat[i : i + length] for i in range(0, len(flat), length)]
    return flat


def compact(shape: list[int]) -> list[int]:
    strides = [1]
    for length in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(length, 1))
    return strides[: len(shape)]


def memory_of(itemsize: int, kind: str) -> tuple[Guarded, np.ndarray]:
    """Sixty-four elements, with a page after them that cannot be touched."""
    guarded = reuse_guarded(64 * itemsize)
    view = (ctypes.c_uint8 * (64 * itemsize)).from_address(guarded.address)
    array = np.frombuffer(view, f"{kind}{itemsize}")
    array[:] = np.arange(64) % 2 if kind == "b" else np.arange(64)
    return guarded, array


def capsule(case: Case) -> Subject:
    """A DLPack capsule, its parts between pages that cannot be touched."""
    code, bits = case["dtype"]
    sound_dtype = (code, bits) in DTYPES
    itemsize = bits // 8 if sound_dtype else 1
    guarded, memory = memory_of(itemsize, LETTERS[code] if sound_dtype else "u")
    shape, ndim = case["shape"], len(case["shape"])
    strides = compact(shape) if case["strides"] is None else case["strides"]
    pages = [Guarded(8 * ndim + case["skew"]) for _ in range(2)]
    managed = Versioned() if case["versioned"] else Legacy()
    if case["versioned"]:
        managed.major, managed.minor, managed.flags = case["major"], case["minor"], case["flags"]
    counted: list[int] = []
    deleter = Deleter(lambda managed: counted.append(managed))
    functions = {"counts": deleter, "none": None, "leaves an error": ctypes.pythonapi.PyErr_NoMemory}
    managed.deleter = ctypes.cast(functions[case["deleter"]], ctypes.c_void_p) if functions[case["deleter"]] else None
    t = managed.tensor
    t.device_type, t.device_id = case["device"]
    t.ndim = ndim if case["ndim"] is None else case["ndim"]
    t.code, t.bits, t.lanes, t.byte_offset = code, bits, case["lanes"], case["offset"]
    middle = 32
    t.data = None if case["pointers"] == "no data" else guarded.address + middle * itemsize
    array = ctypes.c_int64 * ndim
    wrap = [value - (1 << 64) if value >= 1 << 63 else value for value in (*shape, *strides)]
    t.shape = ctypes.cast(pages[0].put(array(*wrap[:ndim])), ctypes.POINTER(ctypes.c_int64))
    t.strides = ctypes.cast(pages[1].put(array(*wrap[ndim:])), ctypes.POINTER(ctypes.c_int64))
    if case["pointers"] == "no shape":
        t.shape = None
    if case["pointers"] == "no strides" or case["strides"] is None:
        t.strides = None
        strides = compact(shape)
    place = Guarded(ctypes.sizeof(managed))
    address = place.put(managed)
    name = NAMES[case["versioned"]]
    name = {"used": b"used_" + name, "other name": b"other"}.get(case["capsule"], name)
    made = new_capsule(address, name, None)
    aligned = case["offset"] % itemsize == 0
    values = elements(memory, middle + case["offset"] // itemsize, shape, strides) if aligned and sound_dtype else None
    plain = case["device"][0] in (1, 3) and case["lanes"] == 1 and case["ndim"] is None
    honest = values is not None and plain and case["pointers"] != "no shape"
    taken = case["capsule"] in ("good", "twice")

    def act(target: str, copy: bool | None) -> Any:
        result = tb.convert(made, target, copy=copy)
        if case["capsule"] == "twice":
            try:
                tb.convert(made, target)
            except tb.BridgeBufferError as error:
                assert error.kind == "consumed", error.kind
        return result

    def deletions() -> str:
        expected = int(taken and case["deleter"] == "counts")
        return "" if counted == [address] * expected else f"the deleter ran {len(counted)} times, not {expected}"

    keep = (pages, place, deleter, made)
    return Subject(act, values if honest else None, honest, wrong_after=deletions, keep=keep)


def producer(case: Case) -> Subject:
    memory: Any = np.zeros(512, np.uint8)
    start = -memory.ctypes.data % 64 + case["offset"]
    array: Any = memory[start : start + 128].view(np.float32)
    array[:] = np.arange(32)
    view = array[:: case["step"]]
    kept: list[Any] = []
    raised = {case["device"], case["dlpack"]} & {"KeyboardInterrupt", "SystemExit", "MemoryError", "RecursionError"}

    class Producer:
        depth = case["depth"]

        def __dlpack__(self, **arguments: Any) -> Any:
            for name in arguments:
                if name not in case["knows"]:
                    raise TypeError(f"unexpected keyword argument {name!r}")
            if self.depth > 0:
                self.depth -= 1
                return tb.to_numpy(self).__dlpack__()
            if case["dlpack"] == "same capsule":
                kept[:] = kept or [view.__dlpack__()]
                return kept[0]
            if case["dlpack"] == "aliases":
                arguments.pop("copy", None)
            elif case["dlpack"] != "good":
                return answer(case["dlpack"])
            arguments.pop("stream", None)
            return view.__dlpack__(**arguments)

        if case["device"] != "missing":

            def __dlpack_device__(self) -> Any:
                return (1, 0) if case["device"] == "good" else answer(case["device"])

    good = case["device"] in ("good", "missing") and case["dlpack"] in ("good", "aliases")
    expected = view.tolist() if case["dlpack"] in ("good", "aliases", "same capsule") else None
    must = good and case["depth"] == 0
    subject = act_on(Producer())
    return Subject(subject, expected, must_convert=must and case["copy"] is None, may_raise=raised, keep=memory)


def act_on(made: Any) -> Callable[[str, bool | None], Any]:
    def act(target: str, copy: bool | None) -> Any:
        try:
            tb.plan(made, target, copy=copy)
        except tb.BridgeError:
            pass
        return tb.convert(made, target, copy=copy)

    return act


def interface(case: Case) -> Subject:
    itemsize = int(case["typestr"][2:]) if case["typestr"] in ("<f4", "|b1", "<i8") else 4
    guarded, memory = memory_of(itemsize, case["typestr"][1] if case["typestr"] in ("|b1", "<i8") else "f")
    address = guarded.address + 32 * itemsize
    data = {
        "good": (address, False),
        "read-only": (address, True),
        "null": (0, False),
        "bytes": bytes(16),
        "text": "text",
        "none": None,
        "negative": (-1, False),
        "one": (address,),
    }[case["data"]]
    shape, strides = case["shape"], case["strides"]
    fields = {
        "version": 3,
        "shape": tuple(shape),
        "strides": None if strides is None else tuple(stride * itemsize for stride in strides),
        "typestr": "x" * 5000 if case["typestr"] == "long" else case["typestr"],
        "data": data,
        **case["fields"],
    }
    if "descr" in fields and isinstance(fields["descr"], list):
        fields["descr"] = [tuple(item) for item in fields["descr"]]

    def read(_: object) -> Any:
        if case["raises"] == "is not a dict":
            return list(fields.items())
        return raise_named(case["raises"]) if case["raises"] else fields

    made = type("Interface", (), {case["name"]: property(read)})()
    values = None
    if case["data"] in ("good", "read-only") and case["typestr"] in ("<f4", "|b1", "<i8") and not case["fields"]:
        values = elements(memory, 32, shape, compact(shape) if strides is None else strides)
    raised = {case["raises"]} & {"KeyboardInterrupt", "SystemExit", "MemoryError", "RecursionError"}
    # NumPy refuses what takes more memory than there can be in this way.
    return Subject(act_on(made), values, values is not None, may_raise=raised | {"MemoryError"}, keep=fields)


def subclass(case: Case) -> Subject:
    """An array whose attributes describe another."""
    array: Any = np.arange(12).astype(case["dtype"])[:: case["step"]]
    other: Any = np.zeros(1 << 12, np.complex128)

    def attribute(name: str) -> Any:
        def read(_: object) -> Any:
            return getattr(other, name) if case["how"] == "lies" else answer(case["how"])

        return property(read)

    liar: Any = type("Liar", (np.ndarray,), {name: attribute(name) for name in case["lies"]})
    made = np.ndarray.view(array, liar)
    return Subject(act_on(made), array.tolist(), must_convert=case["copy"] is not False, keep=other)


def strided(case: Case) -> Subject:
    base = np.zeros(1 << 10, case["dtype"])
    try:
        made = np.lib.stride_tricks.as_strided(base, case["shape"], case["bytes"], writeable=case["writeable"])
    except (ValueError, MemoryError, OverflowError):
        return Subject(lambda *_: None)
    return Subject(act_on(made), None, safe_to_read=False, keep=base)


def arguments(case: Case) -> Subject:
    """Any object as a target, a device, a stream or a tensor."""
    value = NONSENSE[case["value"]]()
    view = tb.to_numpy(np.ones(2))
    calls: dict[str, Callable[[], Any]] = {
        "convert": lambda: tb.convert(view, value),
        "plan": lambda: tb.plan(view, value),
        "profile": lambda: tb.profile(value),
        "device": lambda: tb.to_numpy(view, device=value),
        "order": lambda: tb.to_numpy(view, order=value),
        "permute": lambda: tb.to_numpy(view, permute=value),
        "source": lambda: tb.copy(value, out=view),
        "out": lambda: tb.copy(view, out=value),
        "record_stream": lambda: tb.record_stream(view, value),
        "tensor": lambda: tb.to_numpy(value),
    }

    def act(*_: object) -> Any:
        nonlocal view, value
        try:
            calls[case["call"]]()
        finally:
            view = value = None

    return Subject(act)
