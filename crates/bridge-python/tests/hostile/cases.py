"""Cases as plain data: what Hypothesis draws of each kind, and the simplest value of each field.

Of several values the simplest comes first: Hypothesis shrinks towards it. A stored case omits fields that are simplest.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from hostile import subjects, trees
from hostile.files import ARCHIVES, DAMAGE, DESCRIBED, NARROW, TREE
from hostile.gradients import ONE, TWO
from hostile.subjects import Case

LAYOUT: Case = {"shape": [4], "strides": [1]}
Cases = st.SearchStrategy[Case]

#: The stored cases of each kind, by names that say what is hostile about them.
STORED = Path(__file__).parents[4] / "fixtures/fuzz/python.json"

EDGES = [0, 1, 2, 3, 7, 64, 65, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 47, 1 << 62, (1 << 63) - 1]
NUMBERS = (
    st.integers(-3, 8)
    | st.sampled_from([sign * edge for edge in EDGES for sign in (1, -1)])
    | st.integers(-(1 << 63), (1 << 63) - 1)
)
RAISED = ["BufferError", "TypeError", "ValueError", "KeyboardInterrupt", "SystemExit", "MemoryError", "RecursionError"]
NONSENSE = [word for word in subjects.NONSENSE if word not in ("long text", "unprintable")]
ODD_DTYPES = [[4, 16], [3, 64], [2, 0], [2, 12], [0, 4], [200, 8], [5, 32], [17, 4], [10, 8]]
DEVICES = ["(1,)", "(2, 0)", "(13, 0)", "(1 << 40, 0)"]
TYPESTRS = ["|b1", "<i8", ">f4", "|V4", "<M8[D]", "f4", "", "<f16", "long", None, 4]


class Field(NamedTuple):
    simplest: Any
    drawn: st.SearchStrategy[Any]


def among(*values: Any) -> Field:
    return Field(values[0], st.sampled_from(values))


def rarely(usual: Any, *others: Any, one_in: int = 8) -> Field:
    """Mostly draw ``usual``, otherwise one of the others. ``usual`` is a value, or a field itself."""
    usual = usual if isinstance(usual, Field) else among(usual)
    # `one_of` would draw from both equally often.
    chance = st.integers(1, one_in)
    return Field(usual.simplest, chance.flatmap(lambda at: st.sampled_from(others) if at == one_in else usual.drawn))


class Kind(NamedTuple):
    simplest: Case
    drawn: Cases


def kind(simplest: Case | None = None, together: Cases | None = None, **fields: Field) -> Kind:
    """Return a kind of fields, and of those that are drawn ``together``."""
    fields |= {"target": among("numpy", "torch"), "copy": among(None, True, False)}
    apart = st.fixed_dictionaries({name: field.drawn for name, field in fields.items()})
    return Kind(
        {**(simplest or {}), **{name: field.simplest for name, field in fields.items()}},
        apart if together is None else st.builds(lambda one, other: {**one, **other}, apart, together),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Case:
    """Draw shape and strides, in elements: inside the memory more often than not."""
    wild = draw(rarely(False, True, one_in=3).drawn)
    shape = draw(st.lists(st.integers(0, 4) | NUMBERS if wild else st.integers(0, 4), max_size=9))
    strides = [draw(NUMBERS if wild else st.integers(-4, 4)) for _ in shape]
    return {"shape": shape, "strides": draw(rarely(strides, None).drawn)}


@st.composite
def views(draw: st.DrawFn) -> Case:
    """Draw a shape, and strides in bytes."""
    shape = [max(0, min(length, 1 << 40)) for length in draw(st.lists(NUMBERS, max_size=3))]
    return {"shape": shape, "bytes": [draw(NUMBERS) for _ in shape]}


@st.composite
def copies(draw: st.DrawFn) -> Case:
    """Draw two views of one memory, which may overlap; the first can mostly be repeated to the shape of the second."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    same = shape[len(shape) // 2 if draw(rarely(False, True, one_in=4).drawn) else 0 :]
    usual = [draw(st.sampled_from([length, length, 1])) for length in same]
    source = draw(rarely(usual, [5], [4, 1], [1, 1, 1, 1]).drawn)
    dtype = draw(st.sampled_from(["float32", "uint8", "int16", "float64", "complex128"]))
    return {
        "shape": source,
        "strides": [draw(st.integers(-4, 4)) for _ in source],
        "out_shape": shape,
        "out_strides": [draw(st.sampled_from([1, 2, 3, 4, 8, 16, -1, -2, -4, 0])) for _ in shape],
        "dtypes": [dtype, draw(rarely(dtype, "int16", "float32", one_in=20).drawn)],
    }


@st.composite
def permutations(draw: st.DrawFn) -> Case:
    """Draw a shape, and mostly an order of its axes."""
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    axes = draw(st.permutations(range(len(shape))))
    odd: list[Any] = [[0], [0, 0], [1, 2], [-1, 0], [1 << 62], [0, 1 << 63], "long list", "floats", "endless"]
    return {"shape": shape, "permute": draw(rarely(among(None, [*axes]), *odd, *NONSENSE, one_in=5).drawn)}


def node(containers: list[str], children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw a container of a tree: a list of its name and its children."""
    inner = st.lists(children, max_size=3)
    return st.builds(lambda name, held: [name, *held], st.sampled_from(containers), inner)


KEYS = ["", ".", "a", "a.b", "a/b", "../c", "a.npy", "0", "tensor", "tensor#1", TREE, "truebridge.tree"]
#: Files made by hand that each format has.
CRAFTED = {".npz": [*DESCRIBED, *ARCHIVES], ".safetensors": ["deep", "names", "tree"], ".npy": []}
NUMPYS = "float32 bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float64 complex64".split()


@st.composite
def files(draw: st.DrawFn) -> Case:
    """Draw a file, whole in one case of three; otherwise damaged, or made by hand."""
    suffix = draw(st.sampled_from(list(CRAFTED)))
    dtypes = [*NUMPYS, *(NARROW if suffix == ".safetensors" else ["complex128"])]
    shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=3)
    leaves = st.tuples(
        st.just("leaf"), st.sampled_from(dtypes), shapes, st.sampled_from(["numpy", "torch", "transposed"])
    ).map(list)
    values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just("\ud800")
    keys = st.sampled_from(KEYS) | st.text(max_size=300) | st.integers() | st.booleans() | st.none()
    nodes = st.recursive(
        leaves | values.map(lambda value: ["value", value]),
        lambda children: (
            node(["list", "tuple"], children)
            | st.lists(st.tuples(keys, children), max_size=3, unique_by=lambda pair: pair[0]).map(
                lambda x: ["dict", *x]
            )
        ),
        max_leaves=12,
    )
    state = draw(st.sampled_from(["whole", "damaged", *(["crafted", "both"] if CRAFTED[suffix] else [])]))
    damage = st.tuples(st.sampled_from(list(DAMAGE)), st.integers(0, 1 << 20), NUMBERS).map(list)
    return {
        "suffix": suffix,
        "tree": draw(leaves if suffix == ".npy" else nodes),
        "damage": draw(st.lists(damage, min_size=1, max_size=4)) if state in ("damaged", "both") else [],
        "crafted": draw(st.sampled_from(CRAFTED[suffix])) if state in ("crafted", "both") else None,
    }


#: Views more often than computations.
STEPS = [*ONE, *TWO, "sum", "sum", "product", "flat", "row", "turned"]
PLACES = st.integers(0, 19)
FIELDS = {
    "version": st.sampled_from([0, 3, 4, None, "x"]),
    "mask": st.sampled_from([None, 1]),
    "stream": st.sampled_from([0, 1, 2, -1, None, "s"]),
    "descr": st.sampled_from([[], None, [["", "<f8"]]]),
    "offset": st.sampled_from([0, 1, -1, 1 << 62]),
}
LIES = ["dtype", "shape", "strides", "nbytes", "__array_struct__", "__array_interface__", "ctypes", "view"]
KNOWN = ["stream", "max_version", "copy"]

KINDS: dict[str, Kind] = {
    # A DLPack capsule.
    "capsule": kind(
        LAYOUT,
        layouts(),
        versioned=among(True, False),
        major=rarely(1, 0, 2, (1 << 32) - 1),
        minor=among(1, 0, 2, 3),
        flags=rarely(0, 1, 2, 3, (1 << 64) - 1, one_in=3),
        ndim=rarely(None, -1, 65, 1 << 30, -(1 << 31), (1 << 31) - 1),
        dtype=rarely(among(*map(list, subjects.DTYPES)), *ODD_DTYPES),
        lanes=rarely(1, 0, 2, 65535, one_in=20),
        offset=rarely(0, 1, 4, 64, 1 << 62, 1 << 63, (1 << 64) - 1, one_in=5),
        device=rarely([1, 0], [2, 0], [2, 9], [3, 0], [13, 0], [10, 0], [0, 0], [99, 0], [1, -1], [1, 5]),
        pointers=rarely("good", "no data", "no shape", "no strides"),
        skew=rarely(0, 1, 4, one_in=20),
        deleter=rarely("counts", "none", "leaves an error", one_in=5),
        capsule=rarely("good", "used", "other name", "twice"),
    ),
    # An object with ``__dlpack__``.
    "producer": kind(
        device=rarely("good", "missing", *DEVICES, *RAISED, *NONSENSE, one_in=3),
        dlpack=rarely("good", "aliases", "same capsule", *RAISED, *NONSENSE, one_in=2),
        knows=Field(KNOWN, st.just(KNOWN) | st.lists(st.sampled_from(KNOWN), unique=True)),
        depth=rarely(0, 1, 2, 5, 30, 300, 1 << 40, one_in=3),
        offset=among(0, 16, 64),
        step=among(1, -1, 2),
    ),
    # An object with an array interface.
    "interface": kind(
        LAYOUT,
        layouts(),
        name=among("__array_interface__", "__array_interface__", "__cuda_array_interface__"),
        typestr=rarely("<f4", *TYPESTRS, one_in=3),
        data=rarely("good", "read-only", "null", "bytes", "text", "none", "negative", "one", one_in=3),
        fields=Field({}, st.just({}) | st.fixed_dictionaries({}, optional=FIELDS)),
        raises=rarely(None, *RAISED, "is not a dict"),
    ),
    # A subclass of ``numpy.ndarray`` whose attributes describe another array.
    "subclass": kind(
        lies=Field([], st.lists(st.sampled_from(LIES), unique=True)),
        how=rarely("lies", *RAISED, *NONSENSE, one_in=3),
        dtype=among("int16", "float64", "bool", "complex64"),
        step=among(1, -1, 2),
    ),
    # A view of NumPy's ``as_strided``.
    "strided": kind(
        {"shape": [4], "bytes": [1]},
        views(),
        dtype=among("uint8", "int16", "float32", "complex128"),
        writeable=rarely(True, False, one_in=5),
    ),
    # Any object as an argument.
    "arguments": kind(
        call=among(
            "convert", "plan", "profile", "device", "record_stream", "tensor", "order", "permute", "source", "out"
        ),
        value=among("text", *subjects.NONSENSE),
    ),
    # A tensor, and another to copy it into.
    "copy": kind(
        {**LAYOUT, "out_shape": [4], "out_strides": [1], "dtypes": ["float32", "float32"]},
        copies(),
        start=Field(0, st.integers(0, 63)),
        out_start=Field(32, st.integers(0, 63)),
        frameworks=among(["numpy", "numpy"], ["numpy", "torch"], ["torch", "numpy"], ["torch", "torch"]),
        src=rarely("good", *NONSENSE, "reversed producer"),
        out=rarely("good", *NONSENSE, "read-only", "requires grad", "capsule", "tensorflow"),
    ),
    # The keywords of a conversion.
    "options": kind(
        {"shape": [2, 3], "permute": None},
        permutations(),
        source=among("numpy", "torch"),
        order=rarely(among(None, "C", "F"), "c", "A", "K", *NONSENSE),
        device=rarely(None, "cpu", "cpu", "cpu:1", "cuda:0", "cuda:99", "cuda:-1", *DEVICES, *NONSENSE, one_in=3),
    ),
    # A tree of containers, and sometimes one in it that does not behave.
    "tree": kind(
        tree=Field(
            ["list", "array"],
            node(
                list(trees.CONTAINERS),
                st.recursive(
                    st.sampled_from([*trees.LEAVES, "same"]),
                    functools.partial(node, list(trees.CONTAINERS)),
                    max_leaves=12,
                ),
            ),
        ),
        hostile=rarely("none", *trees.HOSTILE, one_in=2),
        raises=among("ValueError", *RAISED),
    ),
    "file": kind(
        {"suffix": ".npz", "tree": ["leaf", "float32", [2], "numpy"], "damage": [], "crafted": None},
        files(),
        compressed=rarely(False, True, one_in=3),
        number=Field(0, st.integers(0, 1 << 16) | NUMBERS.map(abs)),
    ),
    # A program of one framework inside the other: most of its steps are views, and some results are not used.
    "gradients": kind(
        inside=among("torch", "tensorflow"),
        graph=rarely(False, True, one_in=5),
        inputs=among(1, 1, 2),
        parameters=among(0, 1, 2),
        calls=among(1, 2, 3),
        rounds=among(1, 2),
        steps=Field([], st.lists(st.tuples(st.sampled_from(STEPS), PLACES, PLACES).map(list), max_size=8)),
        results=Field([0], st.lists(PLACES, min_size=1, max_size=3)),
        used=Field([True] * 3, st.lists(rarely(True, False, one_in=3).drawn, min_size=3, max_size=3)),
        seed=Field(0, st.integers(0, 1 << 16)),
    ),
}


def stored(name: str) -> list[Case]:
    """Return the stored cases of a kind."""
    return [{**KINDS[name].simplest, **case} for case in json.loads(STORED.read_text()).get(name, {}).values()]
