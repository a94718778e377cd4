"""Run a bench: ``python -m benches --copies``."""

import sys

from benches import main

sys.exit(main(sys.argv[1:]))
