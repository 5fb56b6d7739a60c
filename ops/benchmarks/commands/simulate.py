"""`ops/bench simulate`: simulates in virtual time what this machine cannot measure.

Engine: the real scheduler on the cost model of an H200, with a bursty trace at loads around its
capacity; our policies beside first come, first served. Memory: the same device with a small cache,
what the settings of preemption cost, orders of eviction, and the sequences that a model with two
kinds of layers holds. Queue: how many workers one queue server carries, counted from the cost of
our scripts on its thread, which is measured just before.
"""

import argparse
from dataclasses import asdict
from typing import Any

from rich.console import Console

from ops.benchmarks.measure.tables import show
from ops.benchmarks.simulation import (
    calibration,
    engine,
    eviction,
    memory,
    mixed_layers,
    queue_load,
)
from ops.benchmarks.simulation.costs import CostModel

ENGINE_COLUMNS = {
    "goodput": ("good/s", "{:.1f}"),
    "offered": ("of", "{:.1f}"),
    "ttft_p50_s": ("TTFT s\np50", "{:.2f}"),
    "ttft_p99_s": ("\np99", "{:.2f}"),
    "gap_p99_ms": ("gap ms\np99", "{:,.0f}"),
    "tokens_s": ("tok/s", "{:,.0f}"),
    "bulk_done": ("bulk\ndone", "{:.0%}"),
    "preemptions": ("preempted", "{:,.0f}"),
    "recomputed": ("recomputed\ntokens", "{:,.0f}"),
    "found": ("found in\nthe cache", "{:.0%}"),
    "computed": ("computed\ntokens", "{:,.0f}"),
    "held": ("held on\naverage", "{:.0f}"),
    "held_most": ("\nat most", "{:.0f}"),
    "steps": ("steps", "{:,.0f}"),
}
QUEUE_COLUMNS = {
    "unhurried": ("server's thread\na worker", "{:.1%}"),
    "full": ("… with\nfull calls", "{:.1%}"),
    "workers": ("workers\nat most", "{:.0f}"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load", type=float, action="append", default=[], help="share of capacity; repeatable"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of virtual time")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=("all", "engine", "memory", "queue"), default="all")
    parser.add_argument(
        "--stored-costs",
        action="store_true",
        help="of the queue's scripts: those in calibration.py, not measured now",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    console = Console()
    found: dict[str, Any] = {"results": {}}
    if arguments.part in ("all", "engine"):
        found["capacity"] = _engine(arguments, console, found["results"])
    if arguments.part in ("all", "memory"):
        _memory(arguments, console, found["results"])
    if arguments.part in ("all", "queue"):
        found["costs"] = _queue(arguments, console, found["results"])
    return found


def _engine(arguments: argparse.Namespace, console: Console, results: dict[str, Any]) -> float:
    costs, seed, most = CostModel(), arguments.seed, arguments.max_num_seqs
    with console.status("the engine at its capacity") as status:
        limit = engine.capacity(costs, most, seed)
        loads = arguments.load or engine.LOADS
        results |= engine.measure(limit, loads, arguments.seconds, most, seed, status.update)
    console.print(
        f"{costs.name}: {limit:.1f} requests/s at capacity, room for "
        f"{costs.num_cache_tokens:,} tokens; good is a first token within 1 s (interactive) or 5 s "
        "(standard) and no gap over 0.2 or 0.5 s; bulk: done",
        highlight=False,
    )
    for load, cases in results.items():
        show(console, load, cases, ENGINE_COLUMNS)
    return limit


def _memory(arguments: argparse.Namespace, console: Console, results: dict[str, Any]) -> None:
    with console.status("a small cache") as status:
        found = memory.measure(arguments.max_num_seqs, arguments.seed, status.update)
        found |= eviction.measure(arguments.seed, status.update)
        title = f"Gemma 3 27B, {mixed_layers.CACHE_GIB} GiB of keys and values: sequences"
        found[title] = mixed_layers.measure(arguments.seed, status.update)
    console.print(f"\na cache of {memory.CACHE_TOKENS:,} tokens", highlight=False)
    for name, cases in found.items():
        show(console, name, cases, ENGINE_COLUMNS)
    results |= found


def _queue(
    arguments: argparse.Namespace, console: Console, results: dict[str, Any]
) -> dict[str, float]:
    with console.status("what the scripts cost"):
        costs = calibration.STORED if arguments.stored_costs else calibration.calibrate()
    found = queue_load.measure(costs)
    said = ", ".join(f"{name} {1e6 * seconds:.2g}" for name, seconds in asdict(costs).items())
    console.print(f"\nµs of the queue server's thread: {said}", highlight=False)
    for name, cases in found.items():
        show(console, f"One queue server, {name}", cases, QUEUE_COLUMNS)
    results |= found
    return asdict(costs)
