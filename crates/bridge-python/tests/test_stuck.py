"""Where new users got stuck: each error says what to do next, and docs/troubleshooting.md has it."""

from __future__ import annotations

import array
import builtins
import ctypes
import html
import importlib.util
import mmap
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import truebridge as tb
from truebridge import __main__
from truebridge.diagnostics import doctor, findings
from truebridge.diagnostics.bench import Bench
from truebridge.diagnostics.report import Matrix, Pair, Report

torch: Any = pytest.importorskip("torch")

PAGE = Path(__file__).resolve().parents[3] / "docs/troubleshooting.md"
ONES: Any = np.ones((2, 3), np.float32)
RECORDS: Any = np.zeros(3, [("flag", "i1"), ("value", "f4")])


def like(module: str, name: str) -> Any:
    """Return an instance of a class of a package that need not be installed."""
    return type(name, (), {"__module__": module})()


class Field:
    __cuda_array_interface__ = {"version": 3, "typestr": "<f4", "shape": (3,), "strides": (5,), "data": (16, False)}


class WithoutDType:
    """As an array of JAX of int4 that is known only by DLPack."""

    def __dlpack__(self, **_: object) -> object:
        raise RuntimeError("UNIMPLEMENTED: XLA type S4 has no DLPack equivalent")


def arrow(text: str) -> Callable[[], Any]:
    """Convert what is as an array of Arrow that says this instead of exporting its elements."""

    class Array:
        def __dlpack__(self, **_: object) -> object:
            raise TypeError(text)

    return lambda: tb.to_torch(Array())


#: How errors of Arrow about a data type begin.
SPEC = "DataType is not compatible with DLPack spec: "


def narrow() -> None:
    header = b'{"x":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error", tb.BridgeWarning)
        path = Path(folder, "x.safetensors")
        path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
        tb.load(path, "numpy")


def doubled() -> Any:
    tree = ONES
    for _ in range(40):
        tree = [tree, tree]
    return tree


def beside_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.ones(2, 3)
    with FakeTensorMode():
        tb.to_torch(x, order="F")


def read_only() -> Any:
    locked = np.ones(3)
    locked.flags.writeable = False
    return locked


def cycle() -> list[Any]:
    tree: list[Any] = [ONES]
    tree.append(tree)
    return tree


def wheel() -> Any:
    path = Path(__file__)
    return tb.tensorflow.v1.open(path)


def consumed() -> Any:
    capsule = torch.ones(3).__dlpack__()
    tb.to_numpy(capsule)
    return tb.to_numpy(capsule)


def overwritten() -> Any:
    tensor = torch.ones(3)
    torch._C._set_storage_access_error_msg(tensor, "clone the tensor outside of torch.compile()")
    return tb.to_numpy(tensor)


def deleted() -> Any:
    array = jax.numpy.ones(3)
    array.delete()
    return tb.to_torch(array)


def closed() -> Any:
    with tb.lend(ONES) as loan:
        pass
    return np.from_dlpack(loan)


def written() -> None:
    tb.to_numpy(read_only(), read_only=True)[0] = 1


def revoked() -> Any:
    ticket = tb.share(ONES)
    tb.revoke(ticket)
    return tb.open(ticket, "numpy")


def expired() -> Any:
    ticket = tb.share(ONES, expires=0.001)
    time.sleep(0.05)
    return tb.open(ticket, "numpy")


def saved(name: str, x: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tb.save(f"{folder}/{name}", x)


def copied(dtype: str = "float32", shape: tuple[int, ...] = (2, 3)) -> Any:
    return tb.copy(ONES, out=np.zeros(shape, dtype))


def parameter() -> Any:
    return torch.nn.Parameter(torch.zeros(2, 3))


def masked() -> Any:
    return tb.to_numpy(torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])))


def vmapped() -> Any:
    return torch.vmap(tb.to_numpy)(torch.ones(3, 2))


ASSIGN = "call variable.assign(truebridge.to_tensorflow(source))"

#: A mistake: what the user writes, the kind of its error, and words of what to do next. Python's own have no kind.
MISTAKES: dict[str, tuple[Callable[[], Any], str | None, str]] = {
    "a list of lists": (lambda: tb.to_torch([[1, 2], [3, 4]]), "not_a_tensor", "pass numpy.asarray(x)"),
    "a number": (lambda: tb.to_torch(1.5), "not_a_tensor", "pass numpy.asarray(x)"),
    "a memoryview": (lambda: tb.to_torch(memoryview(b"abc")), "not_a_tensor", "pass numpy.asarray(x)"),
    "an array.array": (lambda: tb.to_torch(array.array("f", [1])), "not_a_tensor", "pass numpy.asarray(x)"),
    "bytes": (lambda: tb.to_torch(b"abc"), "not_a_tensor", "numpy.frombuffer(x, dtype)"),
    "a path": (lambda: tb.to_torch("weights.npy"), "not_a_tensor", "truebridge.load(path, target)"),
    "None": (lambda: tb.to_torch(None), "not_a_tensor", "without a result returns None"),
    "pandas": (lambda: tb.to_torch(like("pandas.core.frame", "DataFrame")), "not_a_tensor", "x.to_numpy()"),
    "polars": (lambda: tb.to_torch(like("polars.series.series", "Series")), "not_a_tensor", "x.to_numpy()"),
    "xarray": (lambda: tb.to_torch(like("xarray.core.dataarray", "DataArray")), "not_a_tensor", "x.to_numpy()"),
    "h5py": (lambda: tb.to_torch(like("h5py._hl.dataset", "Dataset")), "not_a_tensor", "dataset[...]"),
    "a module": (lambda: tb.to_numpy(torch.nn.Linear(2, 2)), "not_a_tensor", "module.state_dict()"),
    "a Keras variable": (lambda: tb.to_torch(like("keras.src", "Variable")), "not_a_tensor", "variable.value"),
    "a symbolic tensor": (lambda: tb.to_torch(like("keras.src", "KerasTensor")), "not_a_tensor", "when it is called"),
    "a class": (lambda: tb.to_torch(np.ndarray), "not_a_tensor", "pass an instance"),
    "an object": (lambda: tb.to_torch(object()), "not_a_tensor", "pass a tensor of torch, cupy, numpy"),
    "a sparse tensor": (lambda: tb.to_numpy(torch.eye(3).to_sparse()), "not_a_tensor", ".to_dense()"),
    "a masked array": (lambda: tb.to_torch(np.ma.array([1.0])), "not_a_tensor", ".filled(value)"),
    "copy='never'": (lambda: tb.to_torch(ONES, copy="never"), "argument", "pass True, False, or None"),
    "detach='yes'": (lambda: tb.to_torch(ONES, detach="yes"), "argument", "pass True or False"),
    "read_only=None": (lambda: tb.to_torch(ONES, read_only=None), "argument", "pass True or False"),
    "share(copy='never')": (lambda: tb.share(ONES, copy="never"), "argument", "pass True, False, or None"),
    "another target": (lambda: tb.convert(ONES, "mxnet"), "argument", "choose one of torch, cupy, numpy, jax"),
    "another device": (lambda: tb.to_torch(ONES, device="mps"), "argument", "others are not supported"),
    "a device of any number": (lambda: tb.to_torch(ONES, device="gpu"), "argument", 'pass "cuda"'),
    "a device of TensorFlow": (lambda: tb.to_torch(ONES, device="/GPU:0"), "argument", 'pass "cuda:0"'),
    "a copy that does not copy": (lambda: tb.to_torch(ONES, via="host", copy=False), "argument", "remove copy=False"),
    "arguments of convert swapped": (lambda: tb.convert("numpy", ONES), "argument", "pass the tensor first"),
    "arguments of load swapped": (lambda: tb.load("torch", "x.npy"), "argument", "the path comes first"),
    "a file of PyTorch": (lambda: tb.load("x.pt", "numpy"), "argument", "torch.load(path, weights_only=True)"),
    "an empty path": (lambda: tb.load("", "numpy"), "argument", "the path comes first"),
    "a plan as a condition": (lambda: bool(tb.plan(ONES, "torch")), None, "read plan.zero_copy"),
    "cuda without a GPU": (lambda: tb.to_torch(ONES, device="cuda"), "device", "python -m truebridge doctor"),
    "a parameter": (lambda: tb.to_numpy(torch.ones(2, requires_grad=True)), "requires_grad", "detach=True"),
    "read-only memory": (lambda: tb.to_torch(read_only()), "read_only", "read_only=True"),
    "no copy of a reversed array": (lambda: tb.to_torch(ONES[::-1], copy=False), "copy_needed", "copy=None"),
    "a capsule twice": (consumed, "consumed", "ask its producer for a new one"),
    "a plan of a capsule": (lambda: tb.plan(torch.ones(3).__dlpack__(), "numpy"), "argument", "the original tensor"),
    "a field of records in place": (lambda: tb.to_torch(RECORDS["value"], copy=False), "copy_needed", "copy=None"),
    "a field of records of another library": (lambda: tb.to_torch(Field()), "layout", "cupy.ascontiguousarray"),
    "a dtype that only NumPy has": (lambda: tb.to_torch(np.ones(2, np.longdouble)), "dtype", "cast the array"),
    "a ticket of a list in lists": (lambda: tb.share(doubled()), "argument", "share it in parts"),
    "a file of a list in lists": (lambda: tb.save("x.npz", doubled()), "argument", "save it in parts"),
    "a tree in itself": (lambda: tb.to_torch(cycle()), "argument", "without cycles"),
    "share('x')": (lambda: tb.share("x"), "not_a_tensor", "share a tensor"),
    "share([])": (lambda: tb.share([]), "not_a_tensor", "share a tensor"),
    "not a ticket": (lambda: tb.open("x", "numpy"), "argument", "ticket.text"),
    "arguments of save swapped": (lambda: tb.save(ONES, "x.npy"), "argument", "the path comes first, save(path, x)"),
    "a suffix of no format": (lambda: tb.save("x.txt", ONES), "argument", "it must end with .npy"),
    "the wheel of TensorFlow 1.15": (wheel, "missing", "python -m zipfile -e"),
    "a dict of numbers": (lambda: tb.to_torch({"a": [1]}), "not_a_tensor", "made of its values with numpy.asarray"),
    "parameters()": (lambda: tb.to_numpy(torch.nn.Linear(2, 2).parameters()), "not_a_tensor", "or as a list"),
    "SciPy": (lambda: tb.to_torch(like("scipy.sparse", "spmatrix")), "not_a_tensor", "x.toarray()"),
    "a model of Keras": (lambda: tb.to_torch(like("keras.src", "Layer")), "not_a_tensor", "model.get_weights()"),
    "a set": (lambda: tb.to_torch({1.0, 2.0}), "not_a_tensor", "numpy.asarray(list(x))"),
    "a path of pathlib": (lambda: tb.to_torch(Path("x.npy")), "not_a_tensor", "truebridge.load(path, target)"),
    "an optimizer": (
        lambda: tb.to_numpy(torch.optim.SGD(torch.nn.Linear(2, 2).parameters())),
        "not_a_tensor",
        "optimizer.state_dict()",
    ),
    "an array of records": (lambda: tb.to_torch(np.zeros(2, "f4,i2")), "dtype", "convert each by itself, x[name]"),
    "a meta tensor": (lambda: tb.to_numpy(torch.ones(3, device="meta")), "not_a_tensor", "module.to_empty"),
    "a masked tensor of PyTorch": (masked, "not_a_tensor", ".get_data()"),
    "vmap": (vmapped, "not_a_tensor", "convert outside of the transform"),
    "a quantised tensor": (
        lambda: tb.to_numpy(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
        "dtype",
        ".dequantize() or .int_repr()",
    ),
    "complex32 in a file": (
        lambda: tb.save("x.npz", {"a": torch.zeros(2, dtype=torch.float16).view(torch.complex32)}),
        "dtype",
        "convert it first",
    ),
    "another byte order": (lambda: tb.to_torch(np.ones(3, ">f4")), "dtype", ".newbyteorder("),
    "another module as the target": (lambda: tb.convert(ONES, html), "argument", "choose one of"),
    "a number as the device": (lambda: tb.to_torch(ONES, device=0), "argument", '"cuda:0"'),
    "order='K'": (lambda: tb.to_torch(ONES, order="K"), "argument", 'pass "C" (row-major) or "F"'),
    "permute=(0,)": (lambda: tb.to_torch(ONES, permute=(0,)), "argument", "pass 2 different axes"),
    "a name as the stream": (lambda: tb.record_stream(ONES, "main"), "argument", "not a CUDA stream"),
    "dtype=": (lambda: tb.to_torch(ONES, dtype=torch.half), None, "'dtype': a conversion keeps the dtype"),
    "readonly=": (lambda: tb.convert(ONES, "torch", readonly=True), None, "did you mean read_only?"),
    "copy without out=": (lambda: tb.copy(ONES), "not_a_tensor", "copy(src, out=target)"),
    "the target by position": (lambda: tb.copier(ONES, ONES), None, "copier(src, out=target)"),
    "a function of another name": (lambda: tb.to_pytorch(ONES), None, "did you mean to_torch?"),
    "a pair of another name": (lambda: tb.torch_to_tf(ONES), None, "did you mean to_tensorflow?"),
    "a tree as .npy": (lambda: saved("x.npy", [ONES, ONES]), "argument", "as .npz or .safetensors"),
    "bfloat16 as .npz": (
        lambda: saved("x.npz", {"a": torch.ones(2, dtype=torch.bfloat16)}),
        "dtype",
        "save it as .safetensors",
    ),
    "a copy of another shape": (lambda: copied(shape=(3, 2)), "layout", "reshape or slice one side first"),
    "a copy of another dtype": (lambda: copied("float64"), "dtype", "pass the target's dtype as dtype="),
    "a cast to integers": (
        lambda: tb.copy(ONES, out=np.zeros((2, 3), "int32"), dtype="int32"),
        "argument",
        'pass one of "float16"',
    ),
    "a copy into a parameter": (lambda: tb.copy(ONES, out=parameter()), "requires_grad", "pass its .detach()"),
    "a copy over itself": (lambda: tb.copy(ONES[::-1], out=ONES), "layout", "copy the source first"),
    "a copy of another tree": (
        lambda: tb.copy({"a": ONES}, out={"b": np.zeros_like(ONES)}),
        "argument",
        "pass trees of the same structure",
    ),
    "an output of a CUDA graph": (overwritten, "framework", "clone the tensor outside of torch.compile()"),
    "a set of tensors in a tree": (
        lambda: tb.to_numpy({"rows": {torch.ones(2)}}),
        "not_a_tensor",
        "pass a dict of its tensors",
    ),
    "a loan after its block": (closed, None, "or lend again"),
    "a write to a constant": (written, None, "read-only"),
    "a revoked ticket": (revoked, "gone", "Ask for a new one"),
    "an expired ticket": (expired, "gone", "share with a longer time"),
    "a path as a ticket": (lambda: tb.open(Path("x.npy"), "numpy"), "argument", "truebridge.load(path, target)"),
    "a file as a ticket": (lambda: tb.open("x.npy", "numpy"), "argument", "truebridge.load(path, target)"),
    "a number as a ticket": (lambda: tb.open(3, "numpy"), "argument", "which share returns, must be a str"),
    "a text as seconds": (lambda: tb.share(ONES, expires="60"), "argument", "must be a number, not '60'"),
    "seconds below zero": (lambda: tb.share(ONES, expires=-1), "argument", "seconds must be ≥ 0"),
    "names in a missing folder": (lambda: tb.serve("/no/folder/names"), "argument", "make its folder first"),
    "a module as the target of a copy": (
        lambda: tb.copy(torch.nn.Linear(2, 2), out=torch.nn.Linear(2, 2)),
        "not_a_tensor",
        "pass module.state_dict() as out",
    ),
    "an array of pandas": (
        lambda: tb.to_torch(like("pandas.core.arrays.base", "ExtensionArray")),
        "not_a_tensor",
        "na_value=",
    ),
    "an array of ctypes": (lambda: tb.to_torch((ctypes.c_int * 3)()), "not_a_tensor", "numpy.ctypeslib.as_array(x)"),
    "a mapping of memory": (lambda: tb.to_torch(mmap.mmap(-1, 8)), "not_a_tensor", "numpy.frombuffer(x, dtype)"),
    "a storage": (lambda: tb.to_numpy(torch.ones(2).untyped_storage()), "not_a_tensor", ".set_(storage)"),
    "a list of tables": (
        lambda: tb.to_torch([like("pandas.core.frame", "DataFrame")]),
        "not_a_tensor",
        "DataFrame is not a tensor: pass x.to_numpy()",
    ),
    "nulls of Arrow": (arrow("Can only use DLPack on arrays with no nulls."), "not_a_tensor", "x.fill_null(value)"),
    "bools of Arrow": (arrow("Bit-packed boolean data type not supported by DLPack."), "dtype", 'x.cast("uint8")'),
    "lists of Arrow": (arrow(f"{SPEC}fixed_size_list<item: float>[2]"), "dtype", "pass x.values"),
    "dates of Arrow": (arrow(f"{SPEC}date32[day]"), "dtype", 'x.cast("int32")'),
    "texts of Arrow": (arrow(f"{SPEC}string, try converting"), "dtype", "x.dictionary_encode().indices"),
    "lists of several lengths of Arrow": (
        arrow(f"{SPEC}list<item: int64>, try converting"),
        "dtype",
        "pass x.values and x.offsets",
    ),
    "times of Arrow": (
        arrow(f"{SPEC}timestamp[s], try converting"),
        "dtype",
        'timestamp[s] of Arrow has no counterpart: call x.cast("int64")',
    ),
    "no server": (lambda: tb.connect("/tmp/no-socket-is-here"), "gone", "name the right path"),
    "no saved model": (
        lambda: tb.tensorflow.v1.Session.of_saved_model("/no/folder"),
        "argument",
        "name the folder of a saved model",
    ),
    "no folder of TensorFlow": (
        lambda: tb.tensorflow.v1.open("/no/folder"),
        "missing",
        "site-packages/tensorflow_core",
    ),
}
MISTAKES["a dtype that a producer does not export"] = (lambda: tb.to_torch(WithoutDType()), "dtype", "cast the tensor")
MISTAKES["with fake tensors"] = (beside_fake_tensors, "not_a_tensor", "leave the mode")
if importlib.util.find_spec("safetensors") is not None:
    MISTAKES["half bytes in a file"] = (narrow, None, "loaded as their bytes, uint8: x (F4)")
if hasattr(torch, "float4_e2m1fn_x2"):
    MISTAKES["two numbers in a byte"] = (
        lambda: tb.to_numpy(torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)),
        "dtype",
        "pass .view(torch.uint8)",
    )
if importlib.util.find_spec("cupy") is None:
    MISTAKES["CuPy is not installed"] = (lambda: tb.to_cupy(ONES), "missing", "pip install cupy")
if importlib.util.find_spec("tensorflow") is not None:
    import tensorflow as tf

    def symbolic() -> Any:
        with tf.Graph().as_default():
            return tb.to_torch(tf.ones(3))

    def written_before_the_backward() -> None:
        x = torch.ones(2, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
            y = tb.autograd.torch_function(tf.square)(x)
        x.detach().zero_()
        y.sum().backward()

    def dropped_in_a_checkpoint() -> None:
        dropout = tb.autograd.torch_function(lambda x: tf.nn.dropout(x, 0.5))
        x = torch.ones(2, requires_grad=True)
        torch.utils.checkpoint.checkpoint(dropout, x, use_reentrant=True).sum().backward()

    def layer() -> Any:
        made = tf.keras.layers.Dense(2)
        made.build((None, 2))
        return made

    def trained(function: Any, **keywords: Any) -> Any:
        return tb.autograd.torch_function(function, **keywords)

    MISTAKES |= {
        "a module as a function of TensorFlow": (
            lambda: trained(torch.nn.Linear(2, 2)),
            "argument",
            "is of PyTorch, not of TensorFlow: call it directly",
        ),
        "a layer as variables": (lambda: trained(tf.square, variables=layer()), "argument", ".trainable_variables"),
        "a dict as variables": (lambda: trained(tf.square, variables={"w": ONES}), "argument", "of='jax'"),
        "a text among variables": (
            lambda: trained(tf.square, variables=["w"]),
            "not_a_tensor",
            "variables[0] is a str; expected tf.Variable",
        ),
        "a variable as the target of a copy": (lambda: tb.copy(ONES, out=tf.Variable(ONES)), "read_only", ASSIGN),
        "a variable of Keras as the target of a copy": (
            lambda: tb.copy(ONES, out=layer().kernel),
            "not_a_tensor",
            ASSIGN,
        ),
        "variables of Keras": (
            lambda: tb.to_torch(layer().weights),
            "not_a_tensor",
            "pass variable.value",
        ),
        "variables of Keras as targets": (
            lambda: tb.copy([ONES, ONES[0]], out=layer().weights),
            "not_a_tensor",
            ASSIGN,
        ),
    }
    MISTAKES["dropout in a checkpoint"] = (dropped_in_a_checkpoint, "argument", "draw them from a seed")
    MISTAKES["a write before the backward"] = (written_before_the_backward, "argument", "write after the backward")

    def without_value() -> Any:
        from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

        return tb.to_torch(UninitializedVariable(dtype=tf.float32, shape=[2]))

    MISTAKES["a variable without a value"] = (without_value, "not_a_tensor", "assign one first")
    MISTAKES["a symbolic tensor of a graph"] = (symbolic, "not_a_tensor", "convert the result")
    MISTAKES["strings"] = (lambda: tb.to_torch(tf.constant(["a"])), "dtype", "decode them in TensorFlow")
    MISTAKES["a ragged tensor"] = (lambda: tb.to_torch(tf.ragged.constant([[1], []])), "not_a_tensor", ".to_tensor()")
    MISTAKES["a copy into TensorFlow"] = (
        lambda: tb.copy(ONES, out=tf.zeros((2, 3))),
        "read_only",
        "convert the source to tensorflow",
    )
    MISTAKES["a dtype that TensorFlow lacks"] = (
        lambda: tb.to_tensorflow(torch.zeros(2, dtype=torch.float8_e8m0fnu)),
        "dtype",
        "cast the tensor, or view its bytes as uint8",
    )
if importlib.util.find_spec("jax") is not None:
    import jax

    MISTAKES["a function of jit"] = (
        lambda: jax.jit(tb.to_torch)(jax.numpy.ones(3)),
        "not_a_tensor",
        "jax.pure_callback",
    )
    MISTAKES["a function of JAX"] = (
        lambda: tb.autograd.torch_function(jax.nn.relu, variables={"w": jax.numpy.ones(3)}),
        "argument",
        "pass of='jax'",
    )
    MISTAKES["keys of JAX"] = (lambda: tb.to_torch(jax.random.key(0)), "not_a_tensor", "jax.random.key_data(keys)")
    MISTAKES["a deleted array"] = (deleted, "consumed", "pass one that is alive")
if torch.cuda.is_available():
    del MISTAKES["cuda without a GPU"]

#: Rows of the page that this machine cannot check.
UNCHECKED = {
    "TRUEBRIDGE_TRACE cannot be written",
    # Once for each pair in a process: test_immutable.py checks it.
    "the memory of this tensor of … must not change",
    "torch has written to memory that must not change",
    # Another test of the process may have opened one.
    "no TensorFlow 1.x is open",
    "a symbolic tensor has no memory until its graph runs",
    "strings have no memory of a fixed size",
    "a … tensor has no single memory",
    "tensors of … cannot be overwritten",
    "a … is not written to in place",
    "an object of type … is of …, not of",
    "variables= is a …",
    "variables[…] is a …; expected tf.Variable",
    "keys of jax.random are not numbers",
    "cupy cannot be imported",
    "… has no dtype",
    "the variable has no value yet",
    "…: elements of less than a byte are loaded as their bytes",
    "the array is being traced",
    "strides … are negative, and a consumer of the CUDA array interface",
    "the array was deleted, or donated",
    "the array is on a device of another process",
    "the array lies on … devices of JAX",
    "… is a device of process …",
    "the tensor is on cpu, not on cuda:0, and … has only cpu in this process",
}


def rows() -> dict[str, re.Pattern[str]]:
    """Return the messages of the page, with what they match: `…` stands for any text."""
    found = re.findall(r"^\| `` (.+?) `` \|", PAGE.read_text(), re.M)
    return {text: re.compile(".*".join(map(re.escape, text.split("…"))), re.S) for text in found}


def message(mistake: Callable[[], Any], kind: str | None) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        mistake()
    assert getattr(caught.value, "kind", None) == kind
    assert isinstance(caught.value, tb.BridgeError) == (kind is not None)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_what_to_do_next(name: str) -> None:
    mistake, kind, advice = MISTAKES[name]
    text = message(mistake, kind)
    assert advice in text
    assert any(row.match(text) for row in rows().values()), f"docs/troubleshooting.md lacks: {text}"


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_the_page_has_no_message_that_does_not_exist() -> None:
    texts = [message(mistake, kind) for mistake, kind, _ in MISTAKES.values()]
    stale = {text for text, row in rows().items() if not any(map(row.match, texts))}
    assert stale <= UNCHECKED


@pytest.mark.parametrize(
    ("alias", "name"), [("pytorch", "torch"), ("PyTorch", "torch"), ("np", "numpy"), ("NumPy", "numpy"), ("JAX", "jax")]
)
def test_names_that_people_use_are_targets(alias: str, name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    assert type(tb.convert(ONES, alias)) is type(tb.convert(ONES, name))
    assert tb.profile(alias) == tb.profile(name)


def test_a_module_is_a_target() -> None:
    assert tb.convert(ONES, torch).shape == (2, 3)
    assert tb.plan(ONES, np.linalg).zero_copy


def test_tf_is_a_target() -> None:
    pytest.importorskip("tensorflow")
    assert type(tb.convert(ONES, "tf")) is type(tb.to_tensorflow(ONES))


def test_a_trace_names_no_source_for_an_object_that_is_not_a_tensor() -> None:
    with tb.trace() as trace, pytest.raises(tb.BridgeTypeError):
        tb.to_torch("x")
    assert [(event.source, event.target) for event in trace.events] == [(None, "torch")]


def test_scalars_of_numpy_are_values() -> None:
    assert tb.to_torch(np.float32(1.5)).item() == 1.5


def test_a_file_in_a_missing_folder_is_named_as_the_user_named_it(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "x.npy"
    with pytest.raises(FileNotFoundError, match=r"missing: make it first") as caught:
        tb.save(path, ONES)
    assert (caught.value.filename, caught.value.filename2) == (str(path), None)
    with tb.trace() as trace:
        tb.to_torch(ONES)
    with pytest.raises(FileNotFoundError, match=r"missing: make it first") as caught:
        trace.save(path)
    assert caught.value.filename == str(path) and "part" not in str(caught.value)


def test_another_failure_of_save_names_one_path(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 300 + ".npy")
    with pytest.raises(OSError, match="too long") as caught:
        tb.save(long, ONES)
    assert "None" not in str(caught.value)


def test_an_import_of_everything_keeps_the_built_ins() -> None:
    names: dict[str, Any] = {}
    exec("from truebridge import *", names)
    assert not set(tb.__all__) & set(dir(builtins))
    assert "open" not in names and names["to_torch"] is tb.to_torch
    assert tb.open is tb.processes.open


def test_a_name_that_people_try_is_answered_with_those_that_exist() -> None:
    for name, meant in {"to_tf": "tensorflow", "torch2np": "numpy", "as_np": "numpy"}.items():
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}': did you mean to_{meant}\?$"):
            getattr(tb, name)
    for name in ("to", "to_mxnet", "from_torch", "convert_torch_to_mxnet", "as_tensor"):
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}': call convert\(x, target\), or to_torch"):
            getattr(tb, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'transfer': dir\(truebridge\)") as caught:
        tb.transfer  # noqa: B018
    # With these Python itself suggests a name.
    assert (caught.value.name, caught.value.obj) == ("transfer", tb)


def test_completion_shows_the_interface_alone() -> None:
    code = "import truebridge; print(*(name for name in dir(truebridge) if not name.startswith('_')))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not {"os", "importlib", "TYPE_CHECKING", "Literal"} & set(shown.stdout.split())
    assert {"to_torch", "open", "processes", "errors", "doctor"} <= set(shown.stdout.split())


def test_doctor_finds_that_there_is_no_framework(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        doctor, "_probed", lambda _: {"driver": {}, **dict.fromkeys(findings.ALL, {"installed": False})}
    )
    (finding,) = tb.doctor().findings
    assert finding.kind == "missing" and "pip install" in finding.advice and sys.executable in finding.text
    assert __main__.main(["doctor"]) == 1
    assert "No problem" not in capsys.readouterr().out


@pytest.mark.parametrize("x", ["text", [], {"a": None}], ids=repr)
def test_a_name_does_not_stand_for_what_holds_no_tensor(x: Any, tmp_path: Path) -> None:
    with tb.serve(tmp_path / "names") as names:
        with pytest.raises(tb.BridgeTypeError, match="holds no tensor: share a tensor"):
            names.put("weights", x)
        assert names.list() == {}


def test_gradients_are_named_where_a_tensor_requires_grad() -> None:
    with pytest.raises(tb.BridgeBufferError, match=r"detach=True.*truebridge\.autograd"):
        tb.to_numpy(torch.ones(2, requires_grad=True))


def shown() -> dict[str, Any]:
    plan = tb.plan(ONES[::-1], "torch")
    with tb.trace() as trace:
        tb.to_torch(ONES)
    matrix = Matrix((Pair("torch", "numpy", "cpu", "copy", "a < b"),))
    report = Report("1", "3", "python", None, None, (), (), ("torch",), matrix, ())
    bench = Bench("1", "3", "today", "Linux", "a <CPU>", 2, None, (), {}, {}, (), ())
    return {"plan": plan, "trace": trace, "matrix": matrix, "doctor": report, "bench": bench, "ticket": tb.share(ONES)}


@pytest.mark.parametrize("name", ["plan", "trace", "matrix", "doctor", "bench", "ticket"])
def test_a_notebook_shows_the_text(name: str) -> None:
    thing = shown()[name]
    assert repr(thing) == (f"<Ticket: {thing}>" if name == "ticket" else str(thing))
    page = ElementTree.fromstring(thing._repr_html_().replace("&nbsp;", ""))
    assert page.tag == ("code" if name in ("plan", "ticket") else "div")
    # A table has the cells of the text, whose columns an export keeps.
    text = [word for part in page.itertext() for word in part.split()]
    rules = r"(?m)^[- ]+$"
    assert text == re.sub(rules, "", repr(thing)).split()
    assert (name in ("trace", "matrix", "doctor")) == (page.find(".//table/tbody/tr/td") is not None)
