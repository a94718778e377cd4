"""Faults in adapters are compiled into the suite alone, and only where it is built for that."""

from __future__ import annotations

import re
from pathlib import Path

import truebridge._core

ROOT = Path(__file__).parents[3]

#: A fault in an adapter, as the code asks for it.
PLANTED = re.compile(r'is_(?:planted|left_behind)\("(\w+)"\)')


def test_the_package_has_no_fault() -> None:
    sources = [path.read_text() for path in ROOT.glob("crates/bridge-*/src/**/*.rs")]
    names = {name for source in sources for name in PLANTED.findall(source)}
    assert len(names) >= 12, names
    library = Path(truebridge._core.__file__).read_bytes()
    assert [name for name in sorted(names) if name.encode() in library] == []


def test_every_fault_in_an_adapter_has_a_row_or_a_test() -> None:
    sources = [path.read_text() for path in ROOT.glob("crates/bridge-*/src/**/*.rs")]
    rows = (ROOT / "conformance/src/fault/real.rs").read_text()
    tests = ("planted", "core_planted", "tch_planted")
    rows += "".join((ROOT / f"conformance/tests/{name}.rs").read_text() for name in tests)
    missing = [name for source in sources for name in PLANTED.findall(source) if f'"{name}"' not in rows]
    assert missing == []
