"""The conformance suite of tensor-bridge: which frameworks pass tensors to each other rightly."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Run the suite, or with ``--bench`` the benches. Gives the exit code."""
    if "--bench" in argv:
        from tensor_bridge_conformance import bench

        return bench.main([option for option in argv if option != "--bench"])

    from tensor_bridge_conformance import _conformance, host

    # The runner is native code, which would not see an interrupt that waits for the interpreter.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    script = str(Path(sys.argv[0]).resolve())
    if "--worker" in argv:
        # What a framework prints goes with the errors: the channel to the runner is for messages alone.
        channel = os.dup(1)
        os.dup2(2, 1)
        with os.fdopen(channel, "w", encoding="utf-8", closefd=True) as messages:

            def send(line: str) -> None:
                messages.write(line + "\n")
                messages.flush()

            return int(_conformance.worker(argv, send))
    launch = [sys.executable, script]
    return int(_conformance.main(argv, launch, lambda known: json.dumps(host.describe(json.loads(known)))))
