"""What sessions of TensorFlow 1.15 refuse, with an error that names it, and go on."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import truebridge as tb
from graphs import FLOATS, aligned, line, on_host, placeholder, saved, tf, v1
from memory import counts, eventually

torch: Any = pytest.importorskip("torch")


@pytest.fixture
def session() -> Iterator[tb.tensorflow.v1.Session]:
    with on_host(line(), {"x:0": FLOATS}, ["y:0"]) as session:
        yield session
        assert session.run({"x:0": torch.ones(2)}, "torch")[0].tolist() == [3, 3]


X = {"x:0": FLOATS}


def refused(call: Callable[[], object], words: str, kind: str) -> None:
    before = counts()["unclaimed"]
    with pytest.raises(tb.BridgeError, match=words) as caught:
        call()
    assert caught.value.kind == kind
    eventually(lambda: tb.stats()["unclaimed"] == before)


ONES = torch.ones(2)

#: What a session with the input x:0, any number of float32, is fed wrongly; what the error says, and its kind.
FEEDS: dict[str, tuple[Callable[[], dict[Any, Any]], str, str]] = {
    "nothing": (lambda: {}, "the input x:0 is not fed", "argument"),
    "one input twice": (lambda: {"x:0": ONES, "x": ONES}, "the input x is fed twice", "argument"),
    "an unknown input": (lambda: {"x:0": ONES, "z": ONES}, "no input z: it has x:0", "argument"),
    "another output of it": (lambda: {"x:1": ONES}, "no input x:1", "argument"),
    "no name": (lambda: {"": ONES}, "names no tensor", "argument"),
    "a wrong dtype": (lambda: {"x": ONES.double()}, "input x is float32, .* is float64", "argument"),
    "a wrong shape": (lambda: {"x": torch.ones(2, 3)}, r"input x has the shape \[\?\], .* has \[2, 3\]", "argument"),
    "no dimension": (lambda: {"x": torch.tensor(1.0)}, r"\[\?\], .* has \[\]", "argument"),
    "a dtype of others": (lambda: {"x": ONES.to(torch.float8_e5m2)}, "tensorflow1 has no dtype float8_e5m2", "dtype"),
    "what requires grad": (lambda: {"x": torch.ones(2, requires_grad=True)}, "detach", "requires_grad"),
    "no tensor": (lambda: {"x": 3}, "int is not a tensor", "not_a_tensor"),
    "a list": (lambda: {"x": [1.0, 2.0]}, "list is not a tensor", "not_a_tensor"),
    "a list of tensors": (lambda: {"x": [ONES]}, "input x is fed a container of type list", "not_a_tensor"),
    "a dict of tensors": (lambda: {"x": {"x": ONES}}, "one tensor by each name", "not_a_tensor"),
    "half a letter": (lambda: {"\ud800": ONES}, "feeds is .*pass a dict by names", "argument"),
    "a sparse tensor": (lambda: {"x": torch.eye(2).to_sparse()}, "to_dense", "not_a_tensor"),
    "a meta tensor": (lambda: {"x": torch.ones(2, device="meta")}, "meta", "not_a_tensor"),
    "strings": (lambda: {"x": np.array(["a"])}, "counterpart", "dtype"),
}


@pytest.mark.parametrize("case", FEEDS)
def test_what_is_fed_wrongly_is_named(session: Any, case: str) -> None:
    feeds, words, kind = FEEDS[case]
    refused(lambda: session.run(feeds()), words, kind)


#: What is not an argument at all, and what the error says.
ARGUMENTS: dict[str, tuple[Callable[[], object], str]] = {
    "a dtype": (lambda: opened(inputs={"x:0": 3}), '"3" is not a dtype'),
    "too many items": (lambda: opened(inputs={"x:0": ("float32", [None], None, 1)}), "4 items"),
    "no item": (lambda: opened(inputs={"x:0": ()}), "0 items"),
    "a number as a shape": (lambda: opened(inputs={"x:0": ("float32", 3)}), "shape of the input x:0 is 3"),
    "letters as a shape": (lambda: opened(inputs={"x:0": ("float32", ["a"])}), "pass lengths"),
    "a negative length": (lambda: opened(inputs={"x:0": ("float32", [-2])}), "pass lengths"),
    "a length of 64 bits": (lambda: opened(inputs={"x:0": ("float32", [1 << 63])}), "pass lengths"),
    "half a letter as a device": (lambda: opened(inputs={"x:0": ("float32", None, "\ud800")}), "device of the input"),
    "half a letter as an output": (lambda: opened(outputs="\ud800"), "outputs is"),
    "a number as a device": (lambda: opened(inputs={"x:0": ("float32", None, 7)}), "device of the input x:0 is 7"),
    "a list as inputs": (lambda: opened(inputs=["x:0"]), "inputs is .*pass a dict"),
    "a number as a name": (lambda: opened(inputs={3: "float32"}), "inputs is .*pass a dict"),
    "a number as outputs": (lambda: opened(outputs=3), "outputs is 3"),
    "numbers as outputs": (lambda: opened(outputs=[3]), r"outputs is \[3\]"),
    "a negative GPU": (lambda: opened(visible_devices=[-1]), r"visible_devices is \[-1\]"),
    "a GPU beyond all": (lambda: opened(visible_devices=[1 << 40]), "visible_devices is"),
    "a GPU twice": (lambda: opened(visible_devices=[0, 0]), "distinct numbers"),
    "half a GPU": (lambda: opened(visible_devices=[0.5]), "visible_devices is"),
    "a number of a GPU": (lambda: opened(visible_devices=0), "visible_devices is 0"),
    "a fraction in letters": (lambda: opened(memory_fraction="half"), "memory_fraction is 'half'"),
    "no fraction": (lambda: opened(memory_fraction=0), "memory_fraction is 0"),
    "more than all": (lambda: opened(memory_fraction=1.5), "memory_fraction is 1.5"),
    "a fraction that is not a number": (lambda: opened(memory_fraction=float("nan")), "memory_fraction is NaN"),
    "a growth of 3": (lambda: opened(memory_growth=3), "memory_growth is 3"),
    "a number as tags": (lambda: tb.tensorflow.v1.Session.of_saved_model("m", tags=[3]), r"tags is \[3\]"),  # type: ignore[list-item]
}


def opened(inputs: Any = X, outputs: Any = "y:0", **options: Any) -> tb.tensorflow.v1.Session:
    return tb.tensorflow.v1.Session(line(), inputs, outputs, **options)


@pytest.mark.parametrize("case", ARGUMENTS)
def test_what_is_no_argument_is_named(case: str) -> None:
    call, words = ARGUMENTS[case]
    refused(call, words, "argument")


@pytest.mark.parametrize("feeds", [[ONES], {3: ONES}, None])
def test_feeds_are_a_dict_by_name(session: Any, feeds: Any) -> None:
    refused(lambda: session.run(feeds), "feeds is .*pass a dict", "argument")


@pytest.mark.parametrize("dtype", [torch.float32, tf.float32, np.float32, np.dtype("float32"), "float32"])
def test_a_dtype_alone_declares_an_input(dtype: Any) -> None:
    with on_host(line(), {"x:0": dtype}, ["y:0"]) as session:
        assert session.run({"x": ONES}, "torch")[0].tolist() == [3, 3]


class Lengths(list[Any]):
    """A ``TensorShape`` as it is after ``disable_v2_behavior``: one of ``Dimension``."""

    rank = 1

    def as_list(self) -> list[int | None]:
        return [None]


@pytest.mark.parametrize(
    "shape", [tf.TensorShape([None]), tf.TensorShape([2]), tf.TensorShape(None), Lengths([object()])]
)
def test_a_shape_of_tensorflow_declares_an_input(shape: Any) -> None:
    with on_host(line(), {"x:0": ("float32", shape)}, ["y:0"]) as session:
        assert session.run({"x": ONES}, "torch")[0].tolist() == [3, 3]


def test_nothing_runs_for_a_target_that_does_not_exist(tmp_path: Path) -> None:
    with tf.Graph().as_default(), v1.Session() as own:
        count = v1.get_variable("count", initializer=0, use_resource=False)
        more = placeholder("int32", [], "more")
        signature = v1.saved_model.predict_signature_def({"more": more}, {"count": v1.assign_add(count, more)})
        own.run(v1.global_variables_initializer())
        builder = v1.saved_model.Builder(str(tmp_path / "model"))
        builder.add_meta_graph_and_variables(own, ["serve"], {"serving_default": signature}, strip_default_attrs=True)
        builder.save()
    one = torch.ones((), dtype=torch.int32)
    with tb.tensorflow.v1.Session.of_saved_model(tmp_path / "model") as session:
        refused(lambda: session.run({"more": one}, "caffe"), "choose one of", "argument")
        assert session.run({"more": one}, "torch")[0].item() == 1


def test_signatures_that_cannot_be_run_say_what_to_save(tmp_path: Path) -> None:
    with tf.Graph().as_default(), v1.Session() as own:
        a, text = placeholder(name="a"), placeholder("string", name="text")
        sparse = v1.sparse_placeholder(tf.float32)
        info, define = v1.saved_model.build_tensor_info, v1.saved_model.build_signature_def
        y = info(2 * a)
        signatures = {
            "twice": define({"p": info(a), "q": info(a)}, {"y": y}, "any"),
            "of strings": define({"text": info(text)}, {"y": y}, "any"),
            "to strings": define({"a": info(a)}, {"text": info(tf.as_string(a))}, "any"),
            "of sparse": define({"sparse": info(sparse)}, {"y": y}, "any"),
            "to sparse": define({"a": info(a)}, {"sparse": info(sparse)}, "any"),
        }
        builder = v1.saved_model.Builder(str(tmp_path / "model"))
        builder.add_meta_graph_and_variables(own, ["serve"], signatures, strip_default_attrs=True)
        builder.save()
    for name, words, kind in [
        ("twice", "inputs p and q of the signature are one tensor, a:0.*names it once", "argument"),
        ("of strings", "input text of the signature.*save the model", "dtype"),
        ("to strings", "output text of the signature.*save the model", "dtype"),
        ("of sparse", "input sparse of the signature.*to_dense", "argument"),
        ("to sparse", "output sparse of the signature.*to_dense", "argument"),
    ]:
        refused(lambda: tb.tensorflow.v1.Session.of_saved_model(tmp_path / "model", name), words, kind)  # noqa: B023


#: What a session is opened with wrongly: inputs, outputs and options; what the error says, and its kind.
SESSIONS: dict[str, tuple[dict[str, Any], list[str], dict[str, Any], str, str]] = {
    "an unknown input": ({"q:0": FLOATS}, ["y"], {}, "no input q:0: its placeholders are", "argument"),
    "another output of an input": ({"x:1": FLOATS}, ["y"], {}, "x:1", "argument"),
    "an input twice": ({"x:0": FLOATS, "x": FLOATS}, ["y"], {}, "x:0 is named twice", "argument"),
    "no name of an input": ({"x:y": FLOATS}, ["y"], {}, "names no tensor", "argument"),
    "an unknown output": (X, ["q:0"], {}, "no tensor q:0", "argument"),
    "another output": (X, ["y:1"], {}, "no tensor y:1", "argument"),
    "no output": (X, [], {}, "at least one output", "argument"),
    "no name of an output": (X, ["y:-1"], {}, "names no tensor", "argument"),
    "a dtype that is none": ({"x:0": ("float", [None])}, ["y"], {}, '"float" is not a dtype', "argument"),
    "a dtype that 1.15 lacks": ({"x:0": ("float8_e4m3fn", [None])}, ["y"], {}, "float8_e4m3fn", "dtype"),
    "a dtype that the graph does not take": (
        {"x:0": ("int32", [None])},
        ["y"],
        {},
        "x_0:0 .*expected float",
        "framework",
    ),
    "a device that is none": ({"x:0": ("float32", [None], "nowhere")}, ["y"], {}, "nowhere", "framework"),
    "a null character": ({"x:0": ("float32", [None], "/device:\0")}, ["y"], {}, "null character", "argument"),
}


@pytest.mark.parametrize("case", SESSIONS)
def test_what_is_declared_wrongly_is_named(case: str) -> None:
    inputs, outputs, options, words, kind = SESSIONS[case]
    refused(lambda: on_host(line(), inputs, outputs, **options).run({"x": ONES}), words, kind)


#: What is not a graph, and what the error says.
GRAPHS: dict[str, tuple[Any, str]] = {
    "garbage": (b"no graph", "not a serialised GraphDef"),
    "half a graph": (line()[:-1], "GraphDef"),
    "a path": ("model.pb", "'model.pb' is not a message: pass the bytes"),
    "nothing": (None, "None is not a message"),
    "an unknown operation": (
        v1.GraphDef(node=[v1.NodeDef(name="y", op="NoSuchThing")]).SerializeToString(),
        "NoSuchThing",
    ),
    "no graph": (b"", "no tensor y:0"),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_what_is_no_graph_is_refused(case: str) -> None:
    graph, words = GRAPHS[case]
    with pytest.raises(tb.BridgeError, match=words) as caught:
        on_host(graph, {}, ["y:0"])
    assert caught.value.kind in ("framework", "argument")


def test_what_is_no_configuration_is_refused() -> None:
    for wrong, words in [
        (b"garbage", "not a serialised ConfigProto"),
        ("0,1", "'0,1' is not a message"),
        (listing("x"), 'visible_device_list "x": it must be distinct numbers'),
        (listing("0,-1"), '"0,-1"'),
        (listing("1,1"), '"1,1"'),
    ]:
        refused(lambda: tb.tensorflow.v1.Session(line(), X, ["y"], config=wrong), words, "argument")  # noqa: B023


def listing(devices: str) -> Any:
    """A configuration that TensorFlow 1.x ends the process for, where it is wrong."""
    return v1.ConfigProto(gpu_options=v1.GPUOptions(visible_device_list=devices))


def test_a_closed_session_runs_no_more() -> None:
    session = on_host(line(), X, ["y"])
    assert any(name.endswith("/device:CPU:0") for name in session.devices)
    session.close()
    for use in (lambda: session.run({"x": ONES}), lambda: session.devices):
        refused(use, "session is closed: open another", "argument")


def test_an_unknown_target_is_refused(session: Any) -> None:
    refused(lambda: session.run({"x": ONES}, "caffe"), "choose one of .*tensorflow1", "argument")


def test_the_place_is_checked() -> None:
    refused(lambda: tb.convert(ONES, "tensorflow1", device="cuda:0"), "is on cpu, not on cuda:0", "device")


def test_a_tensor_stays_in_its_process() -> None:
    tensor = tb.convert(ONES, "tensorflow1")
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(tensor)
    with pytest.raises(TypeError, match="cannot create"):
        type(tensor)()


# --- what goes wrong in a run


def test_what_has_no_memory_is_no_output() -> None:
    text = saved(lambda: tf.constant("text", name="y"))
    refused(lambda: on_host(text, {}, ["y"]), "y:0 cannot be taken: strings have no memory", "dtype")


@pytest.mark.parametrize("resource", [True, False])
def test_a_graph_that_is_not_frozen_is_refused(resource: bool) -> None:
    def build() -> None:
        weights = v1.get_variable("weights", [2], use_resource=resource)
        tf.add(placeholder(shape=[None]), weights, name="y")

    refused(lambda: on_host(saved(build), X, ["y"]), "variable weights: freeze it", "argument")


def test_an_operation_that_fails_is_named() -> None:
    graph = saved(lambda: tf.reshape(placeholder(shape=[None]), [3], name="three"))
    with on_host(graph, X, ["three"]) as session:
        refused(lambda: session.run({"x": ONES}), "(?s)2 values, but the requested shape has 3.*three", "framework")
        assert session.run({"x": torch.ones(3)}, "torch")[0].tolist() == [1, 1, 1]


def test_a_full_memory_is_named() -> None:
    """128 TiB, for which TensorFlow finds no memory."""
    graph = saved(lambda: tf.fill(placeholder("int64", [1]), 1.0, name="y"))
    with on_host(graph, {"x": ("int64", [1])}, ["y"]) as session:
        with pytest.raises(MemoryError):
            session.run({"x": torch.tensor([1 << 45])})
        refused(lambda: session.run({"x": torch.tensor([1 << 45])}), "OOM", "out_of_memory")
        assert session.run({"x": torch.tensor([3])}, "torch")[0].tolist() == [1, 1, 1]


def test_an_output_in_a_branch_that_is_not_taken_is_named() -> None:
    def build() -> None:
        x, taken = placeholder(shape=[None]), placeholder("bool", [], "taken")
        without, with_ = tf.raw_ops.Switch(data=x, pred=taken)
        tf.negative(with_, name="y")
        tf.identity(without, name="z")

    before = counts()["unclaimed"]
    with on_host(saved(build), {"x": FLOATS, "taken": ("bool", [])}, ["y", "x"]) as session:
        assert session.run({"x": ONES, "taken": torch.tensor(True)}, "torch")[0].tolist() == [-1, -1]
        refused(lambda: session.run({"x": ONES, "taken": torch.tensor(False)}), "y:0 was not computed", "framework")
    eventually(lambda: tb.stats()["unclaimed"] == before)


def test_a_failed_run_keeps_nothing() -> None:
    """What the other outputs have given cannot be taken by anybody."""

    def build() -> None:
        x = placeholder(shape=[None])
        checked = tf.reshape(x, [3], name="three")
        with tf.control_dependencies([tf.identity(x, name="same")]):
            tf.identity(checked, name="after")

    before = counts()
    with on_host(saved(build), X, ["same", "x", "three", "after"]) as session:
        for _ in range(20):
            array = aligned(np.zeros(4, np.float32))
            alive = weakref.ref(array)
            with pytest.raises(tb.BridgeRuntimeError, match="three"):
                session.run({"x": array})
            del array
            gc.collect()
            assert alive() is None
            assert tb.stats()["unclaimed"] == before["unclaimed"]
    assert tb.stats()["leased"] == before["leased"] + 20
    eventually(lambda: tb.stats()["released"] == before["released"] + 20)


# --- unclaimed results


def given_out() -> bytes:
    """A graph of 1.x that has an `external_output` inside, as one of TensorFlow 2: docs/tensorflow.md, Graphs."""
    return saved(lambda: tb.tensorflow.external_output(placeholder(shape=[None]) + 1, name="y"))


def test_what_nobody_takes_goes_with_its_session() -> None:
    before = counts()
    session, other = (on_host(given_out(), X, ["y:0"]) for _ in range(2))
    handles = [session.run({"x": torch.ones(4)}, "numpy")[0] for _ in range(10)]
    (kept,) = other.run({"x": torch.ones(4)}, "numpy")
    assert (handles[0].dtype, handles[0].shape) == (np.int32, (2,))
    assert tb.stats()["unclaimed"] - before["unclaimed"] == 11
    # TensorFlow 2 has the same operations, but not these tensors. They go on waiting.
    refused(lambda: tb.tensorflow.take(handles[0], "torch"), "is one of TensorFlow 1.15", "argument")
    session.close()
    after = tb.stats()
    assert (after["unclaimed"] - before["unclaimed"], after["reclaimed"] - before["reclaimed"]) == (1, 10)
    refused(lambda: tb.tensorflow.take(handles[0], "torch"), "its session is closed", "consumed")
    assert kept.shape == (2,)
    other.close()
    after = tb.stats()
    assert (after["unclaimed"] - before["unclaimed"], after["reclaimed"] - before["reclaimed"]) == (0, 11)


def test_what_is_released_too_early_is_named() -> None:
    """A graph that is fed a handle by itself, whose tensor is dropped before the run."""

    def build() -> None:
        handle = placeholder("int32", [2], "handle")
        tf.add(tb.tensorflow.external_input("float32", [None], handle, name="weights"), 1, name="y")

    with on_host(saved(build), {"handle:0": ("int32", [2])}, ["y:0"]) as session:
        fed = tb.convert(torch.ones(2), "tensorflow1")
        handle = torch.tensor(fed.handle, dtype=torch.int32)
        assert session.run({"handle": handle}, "torch")[0].tolist() == [2, 2]
        del fed
        of_two = tb.tensorflow.feed(torch.ones(2))
        wrong = tb.convert(torch.ones(2, dtype=torch.float64), "tensorflow1")
        for numbers, words in [
            (handle, "keep what feed returned"),
            (of_two, "fed to another TensorFlow"),
            (wrong.handle, "is float64, but float32 was declared"),
        ]:
            handle = torch.tensor(np.asarray(numbers), dtype=torch.int32)
            refused(lambda: session.run({"handle": handle}), f"(?s){words}.*weights", "framework")  # noqa: B023
