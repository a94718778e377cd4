"""The benches of truebridge: what conversions cost, compared with the frameworks' own functions.

Each module is one bench, with a ``main``. They measure over the subjects of the suite.
"""

from __future__ import annotations

import importlib

# Before any framework: it sets what they read when they are loaded.
import truebridge_conformance  # noqa: F401

__all__ = ["main"]

#: The options that choose a bench, each the name of its module. Without one, transfers are measured.
BENCHES = (
    *("copies", "files", "host-copies", "moves", "pages", "pieces", "processes", "ray-transports", "sessions"),
    *("soak", "store", "training", "updates", "ways"),
)


def main(argv: list[str]) -> int:
    """Run the bench that an option names. Return the exit code."""
    chosen = next((name for name in BENCHES if f"--{name}" in argv), "transfers")
    bench = importlib.import_module(f"benches.{chosen.replace('-', '_')}")
    return int(bench.main([option for option in argv if option != f"--{chosen}"]))
