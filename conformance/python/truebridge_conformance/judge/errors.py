"""What keeps a suite from judging. None of these says anything of the package."""

from __future__ import annotations


class JudgeError(RuntimeError):
    """The suite cannot run here. The message says what to do."""


class NotACheckout(JudgeError):
    """The folder has none of the suite's test files."""


class NotInstalled(JudgeError):
    """The framework, or something else that the tests import, is missing."""


class NoDevice(JudgeError):
    """The suite needs a CUDA device."""


class BadList(JudgeError):
    """The list of expected failures is malformed."""


class DidNotRun(JudgeError):
    """The test runner ended without a single result."""


class DidNotBuild(JudgeError):
    """The extension module of the suite's tests could not be built."""
