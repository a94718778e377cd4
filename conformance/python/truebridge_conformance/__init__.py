"""The conformance suite of truebridge: which frameworks exchange tensors correctly."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

__all__ = ["main"]

# adapters: begin
# TensorFlow reads these when it is loaded, whichever module imports it: to log less, to allocate GPU memory as it is
# needed, and to keep its symbols out of the global scope, where libraries of other frameworks would find its stubs.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
sys.modules.setdefault("tensorflow.python.pywrap_dlopen_global_flags", None)  # type: ignore[arg-type]
# adapters: end


def main(argv: list[str]) -> int:
    """Run the suite. Return the exit code."""
    from truebridge_conformance import _conformance, host

    # The runner is native code: an interrupt would wait until it returns to the interpreter.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    script = str(Path(sys.argv[0]).resolve())
    if "--remote" in argv:
        # As below, and a framework that reads the standard input finds none.
        requests, answers = os.dup(0), os.dup(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        return _conformance.remote(argv, requests, answers)
    if "--worker" in argv:
        # What a framework prints is redirected to stderr: the channel to the runner carries messages only.
        channel = os.dup(1)
        os.dup2(2, 1)
        with os.fdopen(channel, "w", encoding="utf-8", closefd=True) as messages:

            def send(line: str) -> None:
                messages.write(line + "\n")
                messages.flush()

            return _conformance.worker(argv, send)
    launch = [sys.executable, script]
    return _conformance.main(argv, launch, lambda: json.dumps(host.describe()))
