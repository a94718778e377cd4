"""What a call raises, as the tests compare it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import truebridge as tb


def kind_of(call: Callable[[], Any]) -> str | None:
    """Return the kind of the error of the package that a call raises; ``None`` if it raises none."""
    try:
        call()
    except tb.BridgeError as error:
        return error.kind
    return None
