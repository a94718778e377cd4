"""What is drawn: cases as plain data, by kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

Case = dict[str, Any]

#: The kept cases of each kind, by their names.
CORPORA = Path(__file__).parents[3] / "fixtures/fuzz/python.json"

EDGES = [0, 1, 2, 3, 7, 64, 65, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 47, 1 << 62, (1 << 63) - 1]
RAISED = ["BufferError", "TypeError", "ValueError", "KeyboardInterrupt", "SystemExit", "MemoryError", "RecursionError"]
NONSENSE = ["none", "text", "surrogate", "number", "list", "array", "tensor", "type", "wild capsule", "used capsule"]
# Code, bits: of DLPack.
DTYPES = [(1, 8), (0, 16), (2, 32), (2, 64), (5, 128), (6, 8)]
ODD_DTYPES = [(4, 16), (3, 64), (2, 0), (2, 12), (0, 4), (200, 8), (5, 32), (17, 4), (10, 8)]


DEVICES = ["missing", "(1,)", "(2, 0)", "(13, 0)", "(1 << 40, 0)"]
TYPESTRS = ["|b1", "<i8", ">f4", "|V4", "<M8[D]", "f4", "", "<f16", "long", None, 4]


@dataclass(frozen=True)
class Kind:
    """A kind of cases: the simplest one, and what is drawn in the place of its fields."""

    simplest: Case
    draw: Callable[[Random], Case]


def number(random: Random) -> int:
    """An integer of 64 bits at an edge, or a small one."""
    if random.random() < 0.6:
        return random.randrange(-3, 9)
    edge = random.choice(EDGES) + random.randrange(-1, 2)
    return max(-(1 << 63), min((1 << 63) - 1, edge * random.choice([1, -1])))


def layout(random: Random) -> Case:
    """Shape and strides, in elements: inside the memory half of the time."""
    shape = [random.choice([0, 1, 1, 2, 3, 4]) for _ in range(random.choice([0, 1, 1, 2, 2, 3, 4, 9]))]
    strides = [random.randrange(-4, 5) for _ in shape]
    if random.random() < 0.4:
        strides = [number(random) for _ in shape]
        shape = [random.choice([length, number(random)]) for length in shape]
    return {"shape": shape, "strides": strides if random.random() < 0.9 else None}


def rarely(random: Random, usual: Any, others: list[Any], chance: float = 0.12) -> Any:
    """``usual``, or now and then one of the others."""
    return random.choice(others) if random.random() < chance else usual


CAPSULE: Case = {
    "versioned": True,
    "major": 1,
    "minor": 1,
    "flags": 0,
    "ndim": None,
    "shape": [4],
    "strides": [1],
    "dtype": [2, 32],
    "lanes": 1,
    "offset": 0,
    "device": [1, 0],
    "pointers": "good",
    "skew": 0,
    "deleter": "counts",
    "capsule": "good",
}


def capsule(random: Random) -> Case:
    """A DLPack capsule."""
    return {
        **layout(random),
        "versioned": random.random() < 0.7,
        "major": rarely(random, 1, [0, 2, (1 << 32) - 1]),
        "minor": random.choice([0, 1, 2, 3]),
        "flags": rarely(random, 0, [1, 2, 3, (1 << 64) - 1], 0.3),
        "ndim": rarely(random, None, [-1, 65, 1 << 30, -(1 << 31), (1 << 31) - 1]),
        "dtype": list(rarely(random, random.choice(DTYPES), ODD_DTYPES)),
        "lanes": rarely(random, 1, [0, 2, 65535], 0.05),
        "offset": rarely(random, 0, [1, 4, 64, 1 << 62, 1 << 63, (1 << 64) - 1], 0.2),
        "device": rarely(random, [1, 0], [[2, 0], [2, 9], [3, 0], [13, 0], [10, 0], [0, 0], [99, 0], [1, -1], [1, 5]]),
        "pointers": rarely(random, "good", ["no data", "no shape", "no strides"]),
        "skew": rarely(random, 0, [1, 4], 0.05),
        "deleter": rarely(random, "counts", ["none", "leaves an error"], 0.2),
        "capsule": rarely(random, "good", ["used", "other name", "twice"]),
    }


PRODUCER: Case = {
    "device": "good",
    "dlpack": "good",
    "knows": ["stream", "max_version", "copy"],
    "depth": 0,
    "offset": 0,
    "step": 1,
}


def producer(random: Random) -> Case:
    """An object with ``__dlpack__``."""
    return {
        "device": rarely(
            random, "good", ["missing", "(1,)", "(2, 0)", "(13, 0)", "(1 << 40, 0)", *RAISED, *NONSENSE], 0.3
        ),
        "dlpack": rarely(random, "good", ["aliases", "same capsule", *RAISED, *NONSENSE], 0.6),
        "knows": [name for name in PRODUCER["knows"] if random.random() < 0.8],
        "depth": rarely(random, 0, [1, 2, 5, 30, 300, 1 << 40], 0.3),
        "offset": random.choice([0, 16, 64]),
        "step": random.choice([1, 1, -1, 2]),
    }


INTERFACE: Case = {
    "name": "__array_interface__",
    "shape": [4],
    "strides": [1],
    "typestr": "<f4",
    "data": "good",
    "fields": {},
    "raises": None,
}


def interface(random: Random) -> Case:
    """An object with an array interface."""
    fields: dict[str, list[Any]] = {
        "version": [0, 3, 4, None, "x"],
        "mask": [None, 1],
        "stream": [0, 1, 2, -1, None, "s"],
        "descr": [[], None, [["", "<f8"]]],
        "offset": [0, 1, -1, 1 << 62],
    }
    return {
        **layout(random),
        "name": random.choice(["__array_interface__", "__array_interface__", "__cuda_array_interface__"]),
        "typestr": rarely(random, "<f4", TYPESTRS, 0.3),
        "data": rarely(random, "good", ["read-only", "null", "bytes", "text", "none", "negative", "one"], 0.3),
        "fields": {name: random.choice(values) for name, values in fields.items() if random.random() < 0.15},
        "raises": rarely(random, None, [*RAISED, "is not a dict"]),
    }


SUBCLASS: Case = {"lies": [], "how": "lies", "dtype": "int16", "step": 1}
LIES = [
    "dtype",
    "shape",
    "strides",
    "nbytes",
    "__array_struct__",
    "__array_interface__",
    "ctypes",
    "view",
]


def subclass(random: Random) -> Case:
    """A subclass of ``numpy.ndarray`` with attributes of its own."""
    return {
        "lies": [name for name in LIES if random.random() < 0.4],
        "how": rarely(random, "lies", [*RAISED, *NONSENSE], 0.4),
        "dtype": random.choice(["int16", "float64", "bool", "complex64"]),
        "step": random.choice([1, -1, 2]),
    }


STRIDED: Case = {"shape": [4], "bytes": [1], "dtype": "uint8", "writeable": True}


def strided(random: Random) -> Case:
    """A view of NumPy's ``as_strided``, with strides in bytes."""
    shape = [max(0, min(number(random), 1 << 40)) for _ in range(random.randrange(4))]
    return {
        "shape": shape,
        "bytes": [number(random) for _ in shape],
        "dtype": random.choice(["uint8", "int16", "float32", "complex128"]),
        "writeable": random.random() < 0.8,
    }


ARGUMENTS: Case = {"call": "convert", "value": "text"}


def arguments(random: Random) -> Case:
    """Another argument than a tensor."""
    calls = [
        "convert",
        "plan",
        "profile",
        "device",
        "record_stream",
        "tensor",
        "order",
        "permute",
        "source",
        "out",
    ]
    return {"call": random.choice(calls), "value": random.choice([*NONSENSE, "long text", "unprintable"])}


COPY: Case = {
    "shape": [4],
    "strides": [1],
    "start": 0,
    "out_shape": [4],
    "out_strides": [1],
    "out_start": 32,
    "dtypes": ["float32", "float32"],
    "frameworks": ["numpy", "numpy"],
    "src": "good",
    "out": "good",
}


def copy(random: Random) -> Case:
    """A tensor, and another to copy it into: views of one memory, which may overlap."""
    shape = [random.choice([0, 1, 2, 2, 3, 4]) for _ in range(random.choice([0, 1, 1, 2, 2, 3]))]
    smaller = [random.choice([length, length, 1]) for length in shape]
    usual = smaller[random.choice([0, 0, 0, len(shape) // 2]) :]
    source = rarely(random, usual, [[5], [4, 1], [1, 1, 1, 1]])
    dtype = random.choice(["uint8", "int16", "float32", "float64", "complex128"])
    return {
        "shape": source,
        "strides": [random.randrange(-4, 5) for _ in source],
        "start": random.randrange(0, 64),
        "out_shape": shape,
        "out_strides": [random.choice([1, 2, 3, 4, 8, 16, -1, -2, -4, 0]) for _ in shape],
        "out_start": random.randrange(0, 64),
        "dtypes": [dtype, rarely(random, dtype, ["int16", "float32"], 0.05)],
        "frameworks": [random.choice(["numpy", "torch"]) for _ in range(2)],
        "src": rarely(random, "good", [*NONSENSE, "reversed producer"], 0.1),
        "out": rarely(random, "good", [*NONSENSE, "read-only", "requires grad", "capsule", "tensorflow"], 0.1),
    }


OPTIONS: Case = {"shape": [2, 3], "source": "numpy", "order": None, "permute": None, "device": None}


def options(random: Random) -> Case:
    """The keywords of a conversion."""
    shape = [random.choice([0, 1, 2, 3]) for _ in range(random.randrange(0, 5))]
    axes = random.sample(range(len(shape)), len(shape))
    odd_axes: list[Any] = [[0], [0, 0], [1, 2], [-1, 0], [1 << 62], [0, 1 << 63], "long list", "floats", "endless"]
    return {
        "shape": shape,
        "source": random.choice(["numpy", "torch"]),
        "order": rarely(random, random.choice([None, "C", "F"]), ["c", "A", "K", *NONSENSE], 0.15),
        "permute": rarely(random, random.choice([None, axes, axes]), [*odd_axes, *NONSENSE], 0.2),
        "device": rarely(
            random, None, ["cpu", "cpu", "cpu:1", "cuda:0", "cuda:99", "cuda:-1", *DEVICES[1:], *NONSENSE], 0.3
        ),
    }


TREE: Case = {"tree": ["list", "array"], "hostile": "none", "raises": "ValueError"}
CONTAINERS = ["dict", "list", "tuple", "named", "struct", "dataclass", "frozen", "registry"]
LEAVES = ["array", "tensor", "capsule", "producer", "number", "text", "none", "same"]
HOSTILE = [
    "cycle",
    "cycle of a dataclass",
    "deep",
    "very deep",
    "wide",
    "keys that raise",
    "keys that raise later",
    "keys that cannot be printed",
    "a dict that raises",
    "a list that raises",
    "a copy that raises",
    "a copy of another class",
    "a list that shrinks",
    "a dict that changes",
    "an init that raises",
    "a dataclass that takes no values",
    "fields that raise",
    "fields that are none",
    "a class that raises",
    "a named tuple that raises",
    "a named tuple of another class",
    "fewer names than elements",
    "names that are none",
    "a struct that raises",
    "a producer that raises",
    "a used capsule",
    "a capsule twice",
]


def tree(random: Random) -> Case:
    """A tree of containers, and now and then one in it that does not behave."""

    def node(depth: int) -> Any:
        if depth == 0 or random.random() < 0.3:
            return random.choice(LEAVES)
        return [random.choice(CONTAINERS), *(node(depth - 1) for _ in range(random.randrange(4)))]

    return {
        "tree": [random.choice(CONTAINERS), *(node(3) for _ in range(random.randrange(1, 4)))],
        "hostile": rarely(random, "none", HOSTILE, 0.5),
        "raises": random.choice(RAISED),
    }


FILE: Case = {
    "suffix": ".npz",
    "tree": ["leaf", "float32", [2], "numpy"],
    "compressed": False,
    "damage": [],
    "crafted": None,
    "number": 0,
}
KEYS: list[Any] = [
    "",
    ".",
    "a",
    "a.b",
    "a/b",
    "../c",
    "a.npy",
    "0",
    0,
    -1,
    True,
    None,
    "tensor",
    "tensor#1",
    "\n",
    "ü",
    "😀",
]
KEYS += ["k" * 300, "truebridge.tree", "truebridge.tree.json", "__proto__", "a" * 40 + "\\", 1 << 70]
VALUES: list[Any] = [None, True, 0, -1, 1 << 70, 1.5, -0.0, 1e308, "", "text", "ü😀", '"', "\ud800"]
NUMPYS = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]
NUMPYS += ["complex64"]
NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
DAMAGES = ["numbers", "record", "cut", "change", "insert", "length"]
IN_ARCHIVES = ["tree bomb", "bomb", "false bomb", "one place", "one name", "another method", "header"]
CRAFTED = {
    ".npz": ["deep", "deep text", "names", "tree", *IN_ARCHIVES],
    ".safetensors": ["deep", "names", "tree"],
    ".npy": [],
}


def file(random: Random) -> Case:
    """A file, whole in one case of three; otherwise damaged, or made by hand."""
    suffix = random.choice([".npz", ".npz", ".safetensors", ".safetensors", ".npy"])
    dtypes = [*NUMPYS, *(NARROW if suffix == ".safetensors" else ["complex128"])]

    def leaf() -> Any:
        shape = [random.choice([0, 1, 2, 3, 5]) for _ in range(random.choice([0, 1, 1, 2, 3]))]
        return ["leaf", random.choice(dtypes), shape, random.choice(["numpy", "torch", "transposed"])]

    def node(depth: int) -> Any:
        if depth == 0 or random.random() < 0.4:
            return leaf() if random.random() < 0.7 else ["value", random.choice(VALUES)]
        children = [node(depth - 1) for _ in range(random.randrange(4))]
        kind = random.choice(["list", "tuple", "dict", "dict"])
        keys = random.sample(KEYS, len(children))
        return [kind, *(map(list, zip(keys, children, strict=True)) if kind == "dict" else children)]

    damage: list[Any] = []
    crafted = None
    if random.random() < 0.65:
        damage = [
            [random.choice(DAMAGES), random.getrandbits(20), number(random)] for _ in range(random.choice([1, 1, 2, 4]))
        ]
        if CRAFTED[suffix] and random.random() < 0.3:
            crafted, damage = random.choice(CRAFTED[suffix]), random.choice([[], damage])
    return {
        "suffix": suffix,
        "tree": leaf() if suffix == ".npy" else node(random.choice([0, 1, 2, 4])),
        "compressed": random.random() < 0.3,
        "damage": damage,
        "crafted": crafted,
        "number": abs(number(random)) if random.random() < 0.5 else random.getrandbits(16),
    }


GRADIENTS: Case = {
    "inside": "torch",
    "graph": False,
    "inputs": 1,
    "parameters": 0,
    "calls": 1,
    "rounds": 1,
    "steps": [],
    "results": [0],
    "used": [True],
    "seed": 0,
}
STEPS = ["same", "square", "sine", "exponential", "root", "turned", "flat", "row", "total", "rows", "detached"]
STEPS += ["sum", "sum", "sum", "product", "product", "flat", "row", "turned"]


def gradients(random: Random) -> Case:
    """A program of one framework inside the other: most of its steps are views, and some results are not used."""
    results = [random.randrange(20) for _ in range(random.choice([1, 1, 2, 3]))]
    return {
        "inside": random.choice(["torch", "tensorflow"]),
        "graph": random.random() < 0.2,
        "inputs": random.choice([1, 1, 2]),
        "parameters": random.choice([0, 1, 2]),
        "calls": random.choice([1, 2, 3]),
        "rounds": random.choice([1, 2]),
        "steps": [
            [random.choice(STEPS), random.randrange(20), random.randrange(20)] for _ in range(random.randrange(9))
        ],
        "results": results,
        "used": [random.random() < 0.7 for _ in results],
        "seed": random.getrandbits(16),
    }


KINDS: dict[str, Kind] = {
    "capsule": Kind(CAPSULE, capsule),
    "producer": Kind(PRODUCER, producer),
    "interface": Kind(INTERFACE, interface),
    "subclass": Kind(SUBCLASS, subclass),
    "strided": Kind(STRIDED, strided),
    "arguments": Kind(ARGUMENTS, arguments),
    "copy": Kind(COPY, copy),
    "options": Kind(OPTIONS, options),
    "tree": Kind(TREE, tree),
    "file": Kind(FILE, file),
    "gradients": Kind(GRADIENTS, gradients),
}
#: How often a kind is drawn.
WEIGHTS = {
    "capsule": 8,
    "producer": 4,
    "interface": 3,
    "subclass": 2,
    "strided": 3,
    "arguments": 1,
    "copy": 4,
    "options": 3,
}
WEIGHTS |= {"tree": 4, "file": 3, "gradients": 1}


def settled(case: Case) -> Case:
    """The case with the simplest value for every field that it does not name."""
    return {"target": "numpy", "copy": None, **KINDS[case["kind"]].simplest, **case}


def corpus(kinds: list[str]) -> dict[str, Case]:
    """The kept cases of these kinds, by their names."""
    kept = json.loads(CORPORA.read_text())
    return {f"{kind}/{name}": settled({"kind": kind, **case}) for kind in kinds for name, case in kept[kind].items()}


def draw(seed: int, at: int, targets: list[str], kinds: list[str]) -> Case:
    """Case number ``at`` of a seed, of one of these kinds."""
    random = Random(f"{seed}:{at}")
    kind = random.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
    common = {"kind": kind, "target": random.choice(targets), "copy": random.choice([None, None, True, False])}
    return settled({**common, **KINDS[kind].draw(random)})
