"""`ops/bench simulate`: counts how many workers one queue server carries at most, and tries a day
of scaling (`scaling_day`).

The costs of our scripts on the server's thread were measured; the workers follow from a cost model
of their device.
"""

import argparse
from typing import Any

from rich.console import Console

from ops.benchmarks.measure import scaling_day
from ops.benchmarks.measure.tables import show
from ops.benchmarks.simulation import queue_load

COLUMNS = {
    "unhurried": ("server's thread\na worker", "{:.1%}"),
    "full": ("… with\nfull calls", "{:.1%}"),
    "workers": ("workers\nat most", "{:.0f}"),
    "goodput": ("good\njobs", "{:.1%}"),
    "hours": ("hours,\n× ideal", "{:.2f}"),
    "most": ("workers\nat most", "{:.0f}"),
    "turns": ("turns", "{:.0f}"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the count has no options."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    results = queue_load.measure()
    results["A day of one queue, workers by tokenmill:queue_workers_wanted"] = {
        **{f"people and files, day {seed}": scaling_day.measure(seed) for seed in range(3)},
        "people alone": scaling_day.measure(files=False),
        "files alone": scaling_day.measure(people=False),
    }
    for title, cases in results.items():
        show(Console(), title, cases, COLUMNS)
    return {"results": results}
