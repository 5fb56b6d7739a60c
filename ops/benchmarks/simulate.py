"""`ops/bench simulate`: what cannot be measured here, in virtual time.

Engine: the real scheduler on the cost model of an H200, a bursty trace, loads around its capacity; our
policies beside first come, first served. Queue: one queue server under 1 to 64 workers, with script costs
measured on the real server just before.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from ops.benchmarks.figures import percentile
from ops.benchmarks.simulation import calibration, queue_layer
from ops.benchmarks.simulation.costs import CostModel
from ops.benchmarks.simulation.engine_run import Outcome, SimulatedEngine
from ops.benchmarks.simulation.queue_layer import Load, ScriptCosts
from ops.benchmarks.simulation.trace import arrivals

TTFT_LIMIT_S = {0: 1.0, 1: 5.0, 2: float("inf")}  # by class: interactive, standard, bulk
GAP_LIMIT_S = {0: 0.2, 1: 0.5, 2: float("inf")}  # the longest silence within an answer
WORKERS = (1, 2, 4, 8, 16, 32, 64)

POLICIES: dict[str, dict[str, object]] = {
    "first come": {"policy": "fifo", "max_bypass": 0, "max_num_batched_tokens": 8_192, "safety_margin": 0.0},
    "fifo": {"policy": "fifo", "max_num_batched_tokens": 2_048, "long_prefill_token_threshold": 1_024},
    "priority": {"policy": "priority", "max_num_batched_tokens": 2_048, "long_prefill_token_threshold": 1_024},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", type=float, action="append", default=[], help="share of capacity; repeatable")
    parser.add_argument("--seconds", type=float, default=120.0, help="of virtual time")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=("all", "engine", "queue"), default="all")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    console = Console()
    results: dict[str, object] = {}
    if arguments.part in ("all", "engine"):
        with console.status("the engine under load") as status:
            results["engine"] = _engine(arguments, console, status.update)
    if arguments.part in ("all", "queue"):
        results["queue"] = _queue(arguments.max_num_seqs, console)
    return results


# ── the engine under load ──


def capacity(costs: CostModel, max_num_seqs: int, seed: int) -> float:
    """Requests a second of the same mix when there are always enough, first come, first served."""
    flood = [replace(arrival, at=0.0) for arrival in arrivals(100.0, 20.0, seed)]
    engine = SimulatedEngine(costs, {**POLICIES["first come"], "max_num_seqs": max_num_seqs})
    outcomes = engine.run(flood, until=float("inf"))
    return len(outcomes) / engine.now


def _engine(arguments: argparse.Namespace, console: Console, waiting: Any) -> dict[str, object]:
    costs = CostModel()
    limit = capacity(costs, arguments.max_num_seqs, arguments.seed)
    console.print(
        f"{costs.device.name}, {costs.model.name}: {limit:.1f} requests/s at capacity, room for "
        f"{costs.num_cache_tokens:,} tokens; good: first token within {TTFT_LIMIT_S[0]:g} s (interactive) or "
        f"{TTFT_LIMIT_S[1]:g} s (standard), no gap over {GAP_LIMIT_S[0]:g} or {GAP_LIMIT_S[1]:g} s"
    )
    rows = []
    for load in arguments.load or [0.5, 0.8, 1.0, 1.2]:
        trace = arrivals(load * limit, arguments.seconds, arguments.seed)
        for name, settings in POLICIES.items():
            waiting(f"load {load:g}, {name}")
            engine = SimulatedEngine(costs, {**settings, "max_num_seqs": arguments.max_num_seqs})
            outcomes = engine.run(trace, until=arguments.seconds * 1.5)
            rows.append({"load": load, "policy": name, **figures(outcomes, arguments.seconds)})
    console.print(_engine_table(rows))
    return {"capacity": limit, "rows": rows}


def figures(outcomes: Sequence[Outcome], seconds: float) -> dict[str, float]:
    """An answer that never came counts with an infinite time to its first token."""
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


def _engine_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="requests/s within their limits, by load (share of capacity) and policy", title_justify="left")
    titles = ("load", "policy", "good/s", "offered/s", "TTFT p50 s", "TTFT p99 s", "TPOT p50 ms", "TPOT p99 ms")
    for title in (*titles, "gap p99 ms", "tokens/s", "bulk done"):
        table.add_column(title, justify="left" if title == "policy" else "right")
    for row in rows:
        table.add_row(
            f"{row['load']:g}",
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


# ── the queue under workers ──


def _queue(num_sequences: int, console: Console) -> dict[str, object]:
    costs = calibration.calibrate()
    step_s = CostModel().seconds(num_sequences, num_sequences * 1_200, num_sequences * 1_200)
    console.print(
        f"the queue server's thread: {1e6 * costs.append_call:.0f} µs per append, {1e6 * costs.append_chunk:.1f} µs "
        f"per chunk, {1e6 * costs.job:.0f} µs per job; workers: {num_sequences} sequences, {1e3 * step_s:.1f} ms a step"
    )
    kinds = {"a chunk per token": 1.0, "chunks of 8 tokens": 8.0, "checkpoints of 32": 32.0}
    table = Table(title="one queue server: use of its thread, speed kept, added ms p50/p99", title_justify="left")
    table.add_column("workers", justify="right")
    for kind in kinds:
        table.add_column(kind, justify="right")
    rows = []
    for num_workers in WORKERS:
        cells = []
        for kind, tokens in kinds.items():
            result = queue_layer.simulate(num_workers, Load(step_s, num_sequences, 180.0, tokens), costs)
            p50, p99 = (1e3 * percentile(result.added_s, share) for share in (0.5, 0.99))
            cells.append(f"{result.utilisation:.0%}  {result.speed:.0%}  {p50:.1f}/{p99:.1f}")
            rows.append(_queue_row(kind, result, p50, p99))
        table.add_row(str(num_workers), *cells)
    console.print(table)
    return {"costs": _costs(costs), "rows": rows}


def _queue_row(kind: str, result: queue_layer.QueueResult, p50: float, p99: float) -> dict[str, object]:
    return {
        "kind": kind,
        "workers": result.num_workers,
        "utilisation": result.utilisation,
        "speed": result.speed,
        "added_p50_ms": p50,
        "added_p99_ms": p99,
    }


def _costs(costs: ScriptCosts) -> dict[str, float]:
    return {"append_call_s": costs.append_call, "append_chunk_s": costs.append_chunk, "job_s": costs.job}
