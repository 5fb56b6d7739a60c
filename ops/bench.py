"""`python -m ops.bench` runs `ops/bench` without its setup."""

import sys

from ops.benchmarks.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
