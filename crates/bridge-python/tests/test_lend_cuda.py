"""Loans on a CUDA device: what a library's stream waits for, and how long memory is kept. The library is PyTorch."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

N = 1 << 20
ROUNDS = 10

#: Cycles of a GPU: some tens of milliseconds, in which everything that does not wait is too early.
LONG = 100_000_000


def full(value: float) -> Any:
    return torch.full((N,), float(value), device="cuda")


def overwrite() -> None:
    """Write to memory that PyTorch reuses."""
    for _ in range(4):
        full(-1)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_library_reads_after_the_stream_that_writes(is_named: bool) -> None:
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    for i in range(ROUNDS):
        with torch.cuda.stream(writer):
            x = torch.zeros(N, device="cuda")
            torch.cuda._sleep(LONG)
            x.fill_(i)
            loan = tb.lend(x, stream=reader if is_named else None)
        with torch.cuda.stream(reader):
            copy = torch.from_dlpack(loan).clone()
        torch.cuda.synchronize()
        assert (copy == i).all()


@pytest.mark.parametrize("is_named", [True, False])
def test_memory_is_kept_until_a_dropped_view_was_read(is_named: bool) -> None:
    reader = torch.cuda.Stream()
    for i in range(ROUNDS):
        x = full(i)
        with tb.lend(x, stream=reader if is_named else None) as loan, torch.cuda.stream(reader):
            view = torch.from_dlpack(loan)
            torch.cuda._sleep(LONG)
            copy = view.clone()
            del view
        del x, loan
        overwrite()
        torch.cuda.synchronize()
        assert (copy == i).all()


def test_memory_is_kept_until_a_view_was_read_that_outlives_the_block() -> None:
    reader = torch.cuda.Stream()
    for i in range(ROUNDS):
        x = full(i)
        with tb.lend(x) as loan:
            view = torch.from_dlpack(loan)
        del x, loan
        torch.cuda.synchronize()
        with torch.cuda.stream(reader):
            torch.cuda._sleep(LONG)
            copy = view.clone()
        del view
        overwrite()
        torch.cuda.synchronize()
        assert (copy == i).all()


@pytest.mark.parametrize("is_named", [True, False])
def test_the_framework_waits_at_the_end_of_the_block_for_what_a_library_writes(is_named: bool) -> None:
    writer = torch.cuda.Stream()
    for i in range(ROUNDS):
        x = full(-1)
        with tb.lend(x, stream=writer if is_named else None) as loan:
            with torch.cuda.stream(writer):
                torch.cuda._sleep(LONG)
                torch.from_dlpack(loan).fill_(i)
        assert (x == i).all()


def test_a_view_by_the_cuda_array_interface_keeps_the_memory_after_the_block() -> None:
    for i in range(ROUNDS):
        x = full(i)
        address = x.data_ptr()
        with tb.lend(x, stream=torch.cuda.current_stream()) as loan:
            view = torch.as_tensor(loan, device="cuda")
        assert view.data_ptr() == address and repr(loan) == "<Loan: closed>"
        del x, loan
        gc.collect()
        overwrite()
        torch.cuda.synchronize()
        assert (view == i).all()


def test_a_call_puts_tensors_of_two_streams_into_one() -> None:
    first, second, library = (torch.cuda.Stream() for _ in range(3))

    def add(a: Any, b: Any, out: Any) -> None:
        with torch.cuda.stream(library):
            torch.add(torch.from_dlpack(a), torch.from_dlpack(b), out=torch.from_dlpack(out))

    for i in range(ROUNDS):
        out = full(-1)
        made = []
        for stream in (first, second):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LONG)
                made.append(full(i))
            # The call sees one current stream, that of the caller, which has to be after both.
            torch.cuda.current_stream().wait_stream(stream)
        tb.call(add, *made, out, stream=library)
        assert (out == 2 * i).all()
