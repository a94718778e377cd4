"""Judges the frameworks' own interchange, and truebridge next to it, from the folder that this file lies in."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit("Python 3.10 or later is needed")

from truebridge_conformance.scoreboard import main

sys.exit(main(sys.argv[1:]))
