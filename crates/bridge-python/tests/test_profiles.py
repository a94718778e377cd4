"""What the frameworks accept and emit is kept as data: a change shows in ``fixtures/profiles``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import truebridge as tb

PROFILES = Path(__file__).parents[3] / "fixtures" / "profiles"


@pytest.mark.parametrize("name", sorted(path.stem for path in PROFILES.glob("*.json")))
def test_profiles_are_as_written_down(name: str) -> None:
    written = json.loads((PROFILES / f"{name}.json").read_text())
    try:
        profile = dict(tb.profile(name))
    except tb.BridgeImportError as error:
        pytest.skip(str(error))
    # A machine without a GPU has fewer devices.
    assert set(profile.pop("devices")) <= set(written.pop("devices"))
    assert profile == written
