"""Judges from outside: the interchange tests of the frameworks themselves, with the package in the frameworks' place.

A suite is a checkout of the user's. Nothing of it is in this repository: ``suites`` names its test files, and the
functions in whose place the package is called.
"""

from __future__ import annotations

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Let a suite judge the package. Return the exit code."""
    from truebridge_conformance.judge import command

    return command.main(argv)
