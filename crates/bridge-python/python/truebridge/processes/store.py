"""``python -m truebridge store``: a store of tensors in its own process."""

from __future__ import annotations

import argparse
import contextlib
import resource
import signal
from fractions import Fraction

from .names import serve
from .tickets import configure

#: What a number of bytes may end with.
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def number_of_bytes(text: str) -> int:
    """Read a number of bytes, such as ``60G``: the units count in powers of 1,024."""
    number = text.upper().removesuffix("B").removesuffix("I")
    unit = number.lstrip("0123456789.")
    try:
        return int(Fraction(number.removesuffix(unit)) * _UNITS[unit])
    except (KeyError, OverflowError, ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a number of bytes: write one such as 60G") from error


def store(path: str, max_bytes: int | None, users: list[int]) -> str:
    """Keep what processes put under names, until this process gets a signal to end."""
    ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    # Threads inherit this: the signals wait for the call below.
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    # What is kept takes descriptors.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    configure(users=users)
    with serve(path, persistent=True, max_bytes=max_bytes):
        limit = "no limit" if max_bytes is None else f"at most {max_bytes:,} bytes"
        with contextlib.suppress(OSError):
            print(f"stores names at {path}: {limit}", flush=True)
        signal.sigwait(ends)
    return f"ends at {path}: processes that use its tensors hand them to the next store there"
