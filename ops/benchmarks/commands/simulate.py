"""`ops/bench simulate`: counts how many workers one queue server carries at most.

The costs of our scripts on the server's thread were measured; the workers follow from a cost model
of their device.
"""

import argparse
from typing import Any

from rich.console import Console

from ops.benchmarks.measure.tables import show
from ops.benchmarks.simulation import queue_load

COLUMNS = {
    "unhurried": ("server's thread\na worker", "{:.1%}"),
    "full": ("… with\nfull calls", "{:.1%}"),
    "workers": ("workers\nat most", "{:.0f}"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the count has no options."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    results = queue_load.measure()
    for title, cases in results.items():
        show(Console(), title, cases, COLUMNS)
    return {"results": results}
