"""What keeps a suite from judging. It says nothing of the package."""

from __future__ import annotations


class JudgeError(RuntimeError):
    """The suite cannot run here. The message says what to do."""


class BadList(JudgeError):
    """The list of expected failures is malformed."""
