"""Compares scheduling policies on one simulated engine under bursty load, and prints the table."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from ops.benchmarks.measure.figures import percentile
from ops.benchmarks.measure.tables import plain_table
from ops.benchmarks.simulation.costs import CostModel
from ops.benchmarks.simulation.engine_run import Outcome, SimulatedEngine
from ops.benchmarks.simulation.trace import arrivals

TTFT_LIMIT_S = {0: 1.0, 1: 5.0, 2: float("inf")}  # by class: interactive, standard, bulk
GAP_LIMIT_S = {0: 0.2, 1: 0.5, 2: float("inf")}  # longest silence within an answer
LOADS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)

_FIRST_COME: dict[str, object] = {"policy": "fifo", "max_bypass": 0, "safety_margin": 0.0}
_CHUNKED: dict[str, object] = {
    "max_num_batched_tokens": 2_048,
    "long_prefill_token_threshold": 1_024,
    "max_num_partial_prefills": 0,
    "max_long_partial_prefills": 0,
}
# FCFS: first come, first served. Two sizes separate the effect of its large steps from that of its
# order.
POLICIES: dict[str, dict[str, object]] = {
    "fcfs, 8k": {**_FIRST_COME, "max_num_batched_tokens": 8_192},
    "fcfs, 2k": {**_FIRST_COME, "max_num_batched_tokens": 2_048},
    "fifo": {"policy": "fifo", **_CHUNKED},
    "priority": {"policy": "priority", **_CHUNKED},
}
Rows = list[dict[str, Any]]


def capacity(costs: CostModel, max_num_seqs: int, seed: int) -> float:
    """Return the requests per second, first come, first served, when requests always wait."""
    flood = [replace(arrival, at=0.0) for arrival in arrivals(100.0, 20.0, seed)]
    engine = SimulatedEngine(costs, {**POLICIES["fcfs, 8k"], "max_num_seqs": max_num_seqs})
    outcomes = engine.run(flood, until=float("inf"))
    return len(outcomes) / engine.now


def measure(
    loads: Sequence[float],
    seconds: float,
    max_num_seqs: int,
    seed: int,
    console: Console,
    told: Callable[[str, dict[str, Any]], None],
) -> dict[str, Any]:
    """Simulate all loads and policies.

    `told` receives the name of the next run and the results so far.
    """
    costs = CostModel()
    limit = capacity(costs, max_num_seqs, seed)
    console.print(
        f"[b]{costs.device.name}, {costs.model.name}[/b]: {limit:.1f} requests/s at capacity, "
        "room for "
        f"{costs.num_cache_tokens:,} tokens; good is a first token within {TTFT_LIMIT_S[0]:g} s "
        "(interactive) or "
        f"{TTFT_LIMIT_S[1]:g} s (standard) and no gap over {GAP_LIMIT_S[0]:g} or "
        f"{GAP_LIMIT_S[1]:g} s; bulk: done",
        highlight=False,
    )
    rows: Rows = []
    for load in loads:
        trace = arrivals(load * limit, seconds, seed)
        for name, settings in POLICIES.items():
            told(f"load {load:g}, {name}", {"capacity": limit, "rows": rows})
            engine = SimulatedEngine(costs, {**settings, "max_num_seqs": max_num_seqs})
            outcomes = engine.run(trace, until=seconds * 1.5)
            rows.append({"load": load, "policy": name, **figures(outcomes, seconds)})
    console.print(_table(rows))
    return {"capacity": limit, "rows": rows}


def figures(outcomes: Sequence[Outcome], seconds: float) -> dict[str, float]:
    """Compute the figures of one run; a missing answer has an infinite time to first token."""
    interactive = [outcome for outcome in outcomes if outcome.arrival.rank == 0]
    ttft = [float("inf") if outcome.ttft_s is None else outcome.ttft_s for outcome in interactive]
    tpot = [outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None]
    gaps = [outcome.longest_gap_s for outcome in interactive if outcome.num_tokens > 1]
    end = max([seconds, *(outcome.last_at or 0.0 for outcome in outcomes)])
    return {
        "goodput": sum(is_good(outcome) for outcome in outcomes) / seconds,
        "offered": len(outcomes) / seconds,
        "ttft_p50_s": percentile(ttft, 0.5),
        "ttft_p99_s": percentile(ttft, 0.99),
        "tpot_p50_ms": 1e3 * percentile(tpot, 0.5),
        "tpot_p99_ms": 1e3 * percentile(tpot, 0.99),
        "gap_p99_ms": 1e3 * percentile(gaps, 0.99),
        "tokens_s": sum(outcome.num_tokens for outcome in outcomes) / end,
        "bulk_done": sum(o.is_complete for o in outcomes if o.arrival.rank == 2)
        / max(1, sum(o.arrival.rank == 2 for o in outcomes)),
    }


def is_good(outcome: Outcome) -> bool:
    rank = outcome.arrival.rank
    return (
        outcome.is_complete
        and outcome.ttft_s is not None
        and outcome.ttft_s <= TTFT_LIMIT_S[rank]
        and outcome.longest_gap_s <= GAP_LIMIT_S[rank]
    )


def _table(rows: Rows) -> Table:
    """Format the results; times to the first token and gaps are those of interactive requests."""
    table = plain_table()
    headings = (
        "good/s",
        "of",
        "TTFT s\np50",
        "\np99",
        "TPOT ms\np50",
        "\np99",
        "gap ms\np99",
        "tok/s",
        "bulk\ndone",
    )
    table.add_column("load", justify="right", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for place, row in enumerate(rows):
        is_first = place == 0 or rows[place - 1]["load"] != row["load"]
        if is_first and place:
            table.add_section()
        table.add_row(
            f"{row['load']:g}" if is_first else "",
            row["policy"],
            f"{row['goodput']:.1f}",
            f"{row['offered']:.1f}",
            f"{row['ttft_p50_s']:.2f}",
            f"{row['ttft_p99_s']:.2f}",
            f"{row['tpot_p50_ms']:.1f}",
            f"{row['tpot_p99_ms']:.1f}",
            f"{row['gap_p99_ms']:.0f}",
            f"{row['tokens_s']:,.0f}",
            f"{row['bulk_done']:.0%}",
        )
    return table
