"""`ops/bench simulate`: simulates in virtual time what this machine cannot measure.

Engine: the real scheduler on the cost model of an H200, with a bursty trace at loads around its
capacity; our policies beside first come, first served. Queue: one queue server under 1 to 64
workers, with the cost of our scripts on the real server's thread, measured just before.
"""

import argparse
from typing import Any

from rich.console import Console

from ops.benchmarks.simulation import calibration, engine_report, queue_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load", type=float, action="append", default=[], help="share of capacity; repeatable"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of virtual time")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=("all", "engine", "queue"), default="all")
    parser.add_argument(
        "--stored-costs",
        action="store_true",
        help="of the queue's scripts: those in calibration.py, not measured now",
    )


def run(arguments: argparse.Namespace) -> dict[str, object]:
    console = Console()
    results: dict[str, object] = {}
    if arguments.part in ("all", "engine"):
        with console.status("the engine at its capacity") as status:

            def told(what: str, so_far: dict[str, Any]) -> None:
                status.update(what)
                arguments.keep({"engine": so_far, "complete": False})

            results["engine"] = engine_report.measure(
                arguments.load or engine_report.LOADS,
                arguments.seconds,
                arguments.max_num_seqs,
                arguments.seed,
                console,
                told,
            )
    if arguments.part in ("all", "queue"):
        with console.status("what the scripts cost") as status:
            costs = calibration.STORED if arguments.stored_costs else calibration.calibrate()
            results["queue"] = queue_report.measure(costs, console, status.update)
    return results
