"""`ops/bench simulate`: simulates in virtual time what this machine cannot measure.

Engine: the real scheduler on the cost model of an H200, with a bursty trace at its capacity; our
policies beside first come, first served. Memory: the same device with a small cache, and what the
settings of preemption cost. Queue: how many workers one queue server carries, counted from the cost
of our scripts on its thread.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from ops.benchmarks.measure.tables import show
from ops.benchmarks.simulation import costs, queue_load
from ops.benchmarks.simulation.engine import SimulatedEngine, figures
from ops.benchmarks.simulation.load import Arrival, answer_length, arrivals

SECONDS = 60.0  # in which requests arrive, of virtual time
LIMITS: dict[str, object] = {"max_num_seqs": 256, "max_num_batched_tokens": 2_048}
CACHE_TOKENS = 30_000  # of the small cache
COLUMNS = {
    "goodput": ("good/s", "{:.1f}"),
    "ttft_p50_s": ("TTFT s\np50", "{:.2f}"),
    "ttft_p99_s": ("\np99", "{:.2f}"),
    "gap_p99_ms": ("gap ms\np99", "{:,.0f}"),
    "tokens_s": ("tok/s", "{:,.0f}"),
    "preemptions": ("preempted", "{:,.0f}"),
    "recomputed": ("recomputed\ntokens", "{:,.0f}"),
    "unhurried": ("server's thread\na worker", "{:.1%}"),
    "full": ("… with\nfull calls", "{:.1%}"),
    "workers": ("workers\nat most", "{:.0f}"),
}
_FIRST_COME: dict[str, object] = {"policy": "fifo", "max_bypass": 0, "safety_margin": 0.0}
_CHUNKED: dict[str, object] = {
    "long_prefill_token_threshold": 1_024,
    "max_num_partial_prefills": 0,
    "max_long_partial_prefills": 0,
}
# FCFS: first come, first served. Two sizes separate the effect of its large steps from that of its
# order.
POLICIES: dict[str, dict[str, object]] = {
    "fcfs, 8k": {**_FIRST_COME, "max_num_batched_tokens": 8_192},
    "fcfs, 2k": _FIRST_COME,
    "fifo": {"policy": "fifo", **_CHUNKED},
    "priority": {"policy": "priority", **_CHUNKED},
}
PREEMPTION: dict[str, dict[str, object]] = {
    "default": {},
    "margin 0": {"safety_margin": 0.0},
    "margin 0.2": {"safety_margin": 0.2},
    "newest": {"preempt": "newest"},
    "oldest": {"preempt": "oldest"},
}

Results = dict[str, dict[str, dict[str, float]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=("engine", "memory", "queue"), help="default: all")


def run(options: argparse.Namespace) -> dict[str, Any]:
    console, results = Console(), Results()
    parts: dict[str, Callable[[int], Results]] = {
        "engine": _policies,
        "memory": _small_cache,
        "queue": lambda _seed: queue_load.measure(),
    }
    for part in [options.part] if options.part else parts:
        with console.status(part):
            found = parts[part](options.seed)
        for title, cases in found.items():
            show(console, title, cases, COLUMNS)
        results |= found
    return {"results": results}


def _policies(seed: int) -> Results:
    """Compare the policies at the device's capacity.

    Good is a first token within 1 s (interactive) or 5 s (standard) and no gap over 0.2 or 0.5 s.
    """
    limit = capacity(seed)
    title = f"{costs.NAME}, {limit:.1f} requests/s, its capacity"
    return {title: compare(arrivals(limit, SECONDS, seed), POLICIES, SECONDS)}


def capacity(seed: int) -> float:
    """Return the requests per second, first come, first served, when requests always wait."""
    flood = [replace(arrival, at=0.0) for arrival in arrivals(100.0, 20.0, seed)]
    engine = SimulatedEngine({**LIMITS, **POLICIES["fcfs, 8k"]})
    return len(engine.run(flood)) / engine.now


def _small_cache(seed: int) -> Results:
    return {
        f"a cache of {CACHE_TOKENS:,} tokens, {name}": compare(
            trace, PREEMPTION, cache_tokens=CACHE_TOKENS
        )
        for name, trace in short_of_memory(seed).items()
    }


def short_of_memory(seed: int) -> dict[str, list[Arrival]]:
    """Return three traces whose answers outgrow the small cache."""
    source = random.Random(f"memory/{seed}")
    long_beside_short = [
        Arrival(0.06 * number, prompt, 128)
        for number in range(64)
        for prompt in (source.randint(4_000, 7_000), source.randint(64, 256))
    ]
    long_answers = [Arrival(0.0, 128, answer_length(source, 8.0)) for _ in range(128)]
    return {
        "64 long prompts beside 64 short": long_beside_short,
        "128 long answers": long_answers,
        "conversations, 8 requests/s": [replace(one, rank=1) for one in arrivals(8.0, 30.0, seed)],
    }


def compare(
    trace: Sequence[Arrival],
    cases: dict[str, dict[str, object]],
    seconds: float = 0.0,
    cache_tokens: int | None = None,
) -> dict[str, dict[str, float]]:
    """Serve the trace with each case's settings; return figures by case."""
    results = {}
    for name, settings in cases.items():
        engine = SimulatedEngine({**LIMITS, **settings}, cache_tokens)
        found = figures(engine.run(trace), seconds)
        stats = engine.scheduler.stats
        results[name] = found | {
            "preemptions": stats.preemptions,
            "recomputed": stats.recomputed_tokens,
        }
    return results
