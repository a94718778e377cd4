"""The types of the package, as a program sees them: a type checker reads this file, and nothing runs it."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import cupy
import tensorflow as tf
import torch
from numpy.typing import NDArray
from typing_extensions import assert_type

import truebridge as tb
from truebridge.errors import Kind
from truebridge.processes import Client, Names


def each_function_returns_a_tensor_of_its_framework(x: object) -> None:
    assert_type(tb.to_torch(x), torch.Tensor)
    assert_type(tb.to_cupy(x, device="cuda:0"), cupy.ndarray)
    assert_type(tb.to_numpy(x, copy=True), NDArray[Any])
    assert_type(tb.to_tensorflow(x, permute=(0, 2, 3, 1), order="C"), tf.Tensor)


def the_target_names_the_type(x: torch.Tensor) -> None:
    assert_type(tb.convert(x, "torch"), torch.Tensor)
    assert_type(tb.convert(x, "cupy", order="C"), cupy.ndarray)
    assert_type(tb.convert(x, "numpy", device="cpu"), NDArray[Any])
    assert_type(tb.convert(x, "tensorflow"), tf.Tensor)
    assert_type(tb.convert(x, "tensorflow1"), tb.tensorflow.v1.Tensor)
    assert_type(tb.plan(x, "torch"), tb.Plan)
    assert_type(tb.copy(x, out=x), torch.Tensor)
    assert_type(tb.copy(x, out=x, dtype="bfloat16"), torch.Tensor)


def a_tree_keeps_its_type(weights: dict[str, torch.Tensor], pair: tuple[torch.Tensor, int]) -> None:
    assert_type(tb.to_numpy(weights), dict[Any, Any])
    assert_type(tb.convert(pair, "cupy"), tuple[Any, ...])
    assert_type(tb.plan([pair], "cupy"), list[Any])


def a_pair_has_the_types_that_it_names(t: torch.Tensor, f: tf.Tensor, c: cupy.ndarray, n: NDArray[Any]) -> None:
    assert_type(tb.convert_pytorch_to_tf(t), tf.Tensor)
    assert_type(tb.convert_tf_to_pytorch(f, copy=True), torch.Tensor)
    assert_type(tb.convert_cupy_to_numpy(c, device="cpu"), NDArray[Any])
    assert_type(tb.convert_numpy_to_cupy(n, device="cuda"), cupy.ndarray)
    assert_type(tb.convert_cupy_to_tf([c]), list[Any])


def errors_have_a_kind(error: tb.BridgeError) -> None:
    assert_type(error.kind, Kind)
    assert error.kind == "copy_needed"


def reports_are_typed() -> None:
    report = tb.doctor(timeout=1.0)
    assert_type([finding.advice for finding in report.findings], list[str])
    assert_type(report.matrix.pairs[0].reason, str | None)


def files_are_typed(weights: dict[str, torch.Tensor]) -> None:
    tb.save("x.safetensors", weights)
    assert_type(tb.load("x.safetensors", "torch", device="cuda:0", max_nbytes=1 << 30), Any)


def other_processes_are_typed(x: torch.Tensor) -> None:
    ticket = tb.share([x], expires=5, writing="never")
    assert_type(ticket, tb.Ticket)
    assert_type(tb.open(ticket.text, "tensorflow", device="cuda"), Any)
    assert_type(tb.processes.transport(x), Literal["passed", "handle", "files", "pool", "copy"])
    assert_type(tb.serve("names"), Names)
    with tb.connect("names") as client:
        assert_type(client, Client)
        assert_type(client.put("weights", x), int)
        assert_type(client.watch("weights", timeout=1), Iterator[int])


def traces_are_typed() -> None:
    with tb.trace(limit=10) as trace:
        pass
    assert_type(trace.events[0].error, Kind | None)
    assert_type(trace.rows()[0].nbytes, int)


def gradients_are_typed(f: Callable[[tf.Tensor], tf.Tensor], g: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert_type(tb.autograd.torch_function(f), torch.nn.Module)
    assert_type(tb.autograd.torch_function(f, of="jax"), torch.nn.Module)
    assert_type(tb.autograd.tf_function(g), Callable[..., Any])
    assert_type(tb.autograd.jax_function(g, of="tensorflow"), Callable[..., Any])


def loans_are_typed(x: torch.Tensor, f: Callable[[object], int]) -> None:
    with tb.lend(x, read_only=True) as loan:
        assert_type(loan, tb.Loan)
        assert_type(loan.stream, int | None)
    assert_type(tb.lend({"x": x}, 7), dict[Any, Any])
    assert_type(tb.call(f, x, stream=7), int)


def graphs_are_typed(x: torch.Tensor) -> None:
    assert_type(tb.tensorflow.feed(x), tb.tensorflow.Feed)
    assert_type(tb.jax.feed(x).shape, tuple[int, ...])
    with tb.tensorflow.v1.Session(b"", {"x:0": "float32"}, "y:0") as session:
        assert_type(session, tb.tensorflow.v1.Session)
        assert_type(session.run({"x:0": x}, "torch"), list[Any])
    assert_type(tb.profile("torch")["alignment"], int)
    assert_type(tb.stats()["leased"], int)
