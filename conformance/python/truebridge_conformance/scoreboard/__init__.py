"""The scoreboard: every framework's own interchange, judged by the properties of the suite.

Each judgement is a program of about ten lines that needs nothing of this project: the program that is run is the one
that the report shows. truebridge is judged by the same programs, with its own call instead of the framework's.
"""

from __future__ import annotations

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Judge the installed frameworks. Return the exit code."""
    from truebridge_conformance.scoreboard import command

    return command.main(argv)
