"""The fast paths of CuPy and PyTorch on a CUDA device are in use, and what is known of memory is true.

Each fast path has a slower one with the same results, so no other test notices which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import truebridge as tb
from programs import Warm

torch: Any = pytest.importorskip("torch")
cupy: Any = pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from devices import settled, spin  # noqa: E402


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Return a function that has the use of these attributes of an object noted in the list that it returns."""
    names: list[str] = []

    def watch(owner: Any, *attributes: str) -> list[str]:
        for name in attributes:
            found = getattr(owner, name)

            def noted(*arguments: Any, name: str = name, found: Any = found, **keywords: Any) -> Any:
                names.append(name)
                return found(*arguments, **keywords)

            def read(self: Any, name: str = name, found: Any = found) -> Any:
                names.append(name)
                return found.__get__(self)

            monkeypatch.setattr(owner, name, noted if callable(found) else property(read))
        return names

    yield watch
    monkeypatch.undo()


# --- CuPy


def test_the_fields_of_an_array_of_cupy_are_read_without_python(asked: Callable[..., list[str]]) -> None:
    arrays = [cupy.arange(24, dtype="int16").reshape(2, 3, 4)[:, ::2], cupy.arange(3.0), cupy.zeros(())]
    expected = [array.get().tolist() for array in arrays]
    tb.to_torch(arrays[0])  # looks the fields up
    names = asked(cupy.ndarray, "data", "shape", "strides", "dtype", "_c_contiguous")
    views = [tb.to_torch(array) for array in arrays]
    assert names == []
    assert arrays[0].shape == (2, 2, 4) and names == ["shape"], "the test notices nothing"
    assert [view.tolist() for view in views] == expected


def test_an_array_of_cupy_is_made_without_its_constructor(asked: Callable[..., list[str]]) -> None:
    tensor = torch.arange(12.0, device="cuda").reshape(3, 4)
    names = asked(cupy.ndarray, "__init__")
    for view in (tb.to_cupy(tensor), tb.to_cupy(tensor.t())):
        assert view.shape in ((3, 4), (4, 3)) and names == []


def test_the_current_stream_of_cupy_is_read_without_python(beside_torch: Warm) -> None:
    ran = beside_torch.run("""
import cupy, torch

def noted(*device, found=cupy.cuda.get_current_stream):
    asked.append(device)
    return found(*device)

asked, cupy.cuda.get_current_stream = [], noted
import truebridge as tb

view = tb.to_torch(cupy.arange(4.0))
assert tb.to_cupy(view).tolist() == view.tolist() == [0, 1, 2, 3]
del view
assert not asked, asked
""")
    assert ran.returncode == 0, ran.stderr


class Pointer(cupy.cuda.MemoryPointer):  # type: ignore[misc]
    """A pointer of a class of the user's."""


def by_attributes(x: Any) -> Any:
    """Return the same array, read by its attributes: it has a pointer of another class."""
    return cupy.ndarray(x.shape, x.dtype, Pointer(x.data.mem, x.data.ptr - x.data.mem.ptr), x.strides)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 3, 4), (48, 16, 4)),
        ((3, 4), (32, 8)),
        ((4, 3), (4, 16)),
        ((2, 3), (0, 4)),
        ((1, 3), (800, 4)),
        ((3, 1), (4, 800)),
        ((1, 1), (800, 400)),
        ((), ()),
        ((0, 3), (12, 4)),
    ],
)
def test_arrays_of_cupy_are_the_same_by_their_attributes(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    array = cupy.ndarray(shape, "int32", cupy.arange(256, dtype="int32").data, strides)
    fast, slow = tb.to_torch(array), tb.to_torch(by_attributes(array))
    assert slow.data_ptr() == fast.data_ptr() and slow.stride() == fast.stride()
    assert slow.shape == fast.shape == shape and slow.tolist() == fast.tolist()


class Array(cupy.ndarray):  # type: ignore[misc]
    """An array of a class of the user's."""

    def __dlpack__(self, **_: Any) -> object:
        raise AssertionError("it is read as that of a framework that is not known")


def test_arrays_of_a_class_that_extends_cupys_are_cupys() -> None:
    assert tb.to_torch(cupy.arange(4.0).view(Array)).tolist() == [0, 1, 2, 3]


def test_a_copier_notices_that_an_array_of_cupy_was_reshaped() -> None:
    source, target = cupy.arange(12.0).reshape(3, 4), cupy.zeros((3, 4))
    update = tb.copier([source], out=[target])
    update()
    assert bool((source == target).all())
    source.shape = (4, 3)
    with pytest.raises(tb.BridgeError, match=r"tree\[0\]"):
        update()


# --- PyTorch


class Tensor(torch.Tensor):  # type: ignore[misc]
    """A tensor of a class of the user's."""


@pytest.mark.parametrize("side", [False, True])
def test_a_stream_is_recorded_without_python(side: bool, asked: Callable[..., list[str]]) -> None:
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        tensor = torch.arange(4.0, device="cuda")
        tb.to_cupy(tensor)  # looks up what the allocator's memory is known by
        names = asked(torch.Tensor, "record_stream")
        asked(torch._C, "_has_Standard_Deleter")
        view = tb.to_cupy(tensor)
    assert names == []
    assert view.get().tolist() == [0, 1, 2, 3]


def test_the_first_conversion_starts_cuda_in_pytorch(beside_torch: Warm) -> None:
    for first in ("tb.to_torch(cupy.arange(4.0))", "tb.to_torch(numpy.arange(4.0), device='cuda')"):
        ran = beside_torch.run(f"""
import cupy, numpy, torch
import truebridge as tb

tb.to_torch(numpy.arange(4.0))
assert not torch.cuda.is_initialized(), "memory of the host needs no device"
view = {first}
assert torch.cuda.is_initialized()
assert view.tolist() == [0, 1, 2, 3]
""")
        assert ran.returncode == 0, ran.stderr


# --- when memory is reused


def kept(owner: Any, convert: Callable[[], Any]) -> int:
    """Return for how many views the package waits itself that are dropped while the owner's stream is busy.

    Where the host was so slow that the stream had ended when it looked, it does so once more.
    """
    convert()  # looks up what the memory is known by
    is_busy = False
    while not is_busy:
        assert settled()["pending"] == 0
        view = [convert()]
        spin(owner, 50_000_000)
        view.clear()
        waiting = int(tb.stats()["pending"])
        is_busy = not owner.done
    assert settled()["pending"] == 0
    return waiting


@pytest.mark.parametrize("seen", [lambda x: x, by_attributes, lambda x: x.view(Array)], ids=["", "slow", "subclass"])
def test_memory_of_cupys_pools_is_reused_in_the_order_of_its_own_stream(seen: Callable[[Any], Any]) -> None:
    default, side = cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)

    def waiting(made: Any, exported: Any) -> int:
        with made:
            array = cupy.zeros(1 << 12)
        with exported:
            return kept(exported, lambda: tb.to_torch(seen(array)))

    for _ in range(2):
        for allocate in (None, cupy.cuda.MemoryPool().malloc, cupy.cuda.MemoryPool().malloc):
            with cupy.cuda.using_allocator(allocate or cupy.get_default_memory_pool().malloc):
                assert [waiting(default, default), waiting(side, side)] == [0, 0]
                assert [waiting(default, side), waiting(side, default)] == [1, 1]
    with cupy.cuda.using_allocator(cupy.cuda.memory.malloc_managed):
        assert waiting(default, default) == 1, "no pool"
    view = tb.to_cupy(torch.zeros(1 << 12, device="cuda"))
    assert kept(default, lambda: tb.to_torch(view)) == 0, "the view returns its memory in order"


@pytest.mark.parametrize("kind", [torch.Tensor, Tensor])
def test_memory_of_pytorchs_allocator_is_reused_in_the_order_of_any_stream(kind: type) -> None:
    default, side = torch.cuda.default_stream(), torch.cuda.Stream()

    def waiting(make: Callable[[], Any], made: Any, exported: Any) -> int:
        with torch.cuda.stream(made):
            tensor = make()
        with torch.cuda.stream(exported):
            return kept(cupy.cuda.ExternalStream(exported.cuda_stream), lambda: tb.to_cupy(tensor.as_subclass(kind)))

    def own() -> Any:
        return torch.zeros(1 << 12, device="cuda")

    def external() -> Any:
        return torch.from_dlpack(cupy.zeros(1 << 12))

    for _ in range(2):
        paths = [(default, default), (side, side), (default, side), (side, default)]
        assert [waiting(own, *streams) for streams in paths] == [0, 0, 0, 0]
        assert [waiting(external, default, stream) for stream in (default, side)] == [1, 1]
