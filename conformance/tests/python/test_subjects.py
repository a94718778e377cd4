"""The subjects make what a case says, at the address that it names."""

from __future__ import annotations

import pytest

from tensor_bridge_conformance import subjects


def cuda() -> bool:
    torch = pytest.importorskip("torch")
    available: bool = torch.cuda.is_available()
    return available


@pytest.mark.parametrize("align", [0, 4, 16, 32, 64])
@pytest.mark.parametrize("name", ["Torch", "Numpy", "Cupy"])
def test_a_base_buffer_lies_where_the_case_says(name: str, align: int) -> None:
    if name == "Cupy" and not cuda():
        pytest.skip("no CUDA device")
    subject = getattr(subjects, name)("cuda:0" if name == "Cupy" else "cpu")
    data = bytes(range(16))
    # Many, because one may lie there by chance.
    for _ in range(20):
        tensor = subject.create("float32", [2], [2], 1, 4, align, False, None, data)
        assert subject.observe(tensor)[3] % subjects.GRAIN == align + 4
        assert subject.read(tensor) == data[4:8] + data[12:16]
