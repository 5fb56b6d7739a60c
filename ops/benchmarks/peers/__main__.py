"""Process of one measured engine: `python -m ops.benchmarks.peers MODULE:CLASS`."""

import importlib
import sys

from ops.benchmarks.measure.protocol import serve

module, _, name = sys.argv[1].partition(":")
serve(lambda options: getattr(importlib.import_module(module), name)(options))
