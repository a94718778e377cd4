"""What every test here is held to: whatever it does, no view is left behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import tensor_bridge as tb


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    gc.collect()
    before = tb.stats()
    yield
    gc.collect()
    after = tb.stats()
    assert after["leased"] - before["leased"] == after["released"] - before["released"]
