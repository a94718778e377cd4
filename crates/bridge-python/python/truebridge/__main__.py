"""``python -m truebridge``: what this package can do here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from . import _core
from .diagnostics.bench import Bench, bench
from .diagnostics.doctor import doctor
from .diagnostics.report import Report
from .errors import BridgeError
from .processes.store import number_of_bytes, store

_COMMANDS: dict[str, Callable[..., Report | Bench | str]] = {
    "doctor": doctor,
    "bench": bench,
    "store": store,
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command, and return its exit status: 1 if it found a problem."""
    parser = argparse.ArgumentParser(prog="python -m truebridge", description="What truebridge can do here.")
    parser.add_argument("--version", action="version", version=_core.__version__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON")
    common.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds for each process (%(default)g)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", parents=[common], help="versions, devices, pairs, and problems with advice")
    measures = commands.add_parser(
        "bench", parents=[common], help="what a conversion costs, compared with the frameworks' own functions"
    )
    measures.add_argument("--seconds", type=float, default=10.0, metavar="S", help="how long to measure (%(default)g)")
    storing = commands.add_parser("store", help="own tensors that processes put under names, beyond their end")
    storing.add_argument("path", help="where to serve names")
    storing.add_argument(
        "--max-bytes", type=number_of_bytes, metavar="N", help="the most bytes, such as 60G, of the host and of devices"
    )
    storing.add_argument(
        "--user", type=int, action="append", default=[], dest="users", metavar="N", help="another user who may connect"
    )
    chosen = vars(parser.parse_args(arguments))
    command, as_json = _COMMANDS[chosen.pop("command")], chosen.pop("json", False)
    try:
        result = command(**chosen)
    except BridgeError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    print(result.as_json() if as_json and not isinstance(result, str) else result)
    return int(isinstance(result, Report) and bool(result.findings))


if __name__ == "__main__":
    sys.exit(main())
