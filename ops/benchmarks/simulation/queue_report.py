"""Simulates one queue under 1 to 64 workers; reports how many of them one server carries."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ops.benchmarks.measure.tables import plain_table
from ops.benchmarks.simulation.queue_layer import MIXES, QueueResult, simulate
from ops.benchmarks.simulation.queue_load import CUTTINGS, Cutting, Mix
from ops.benchmarks.simulation.queue_server import ScriptCosts

WORKERS = (1, 2, 4, 8, 16, 32, 64)
KEPT = 0.95  # share of the devices' tokens per second; below it, the server is the limit


def measure(costs: ScriptCosts, console: Console, waiting: Callable[[str], None]) -> dict[str, Any]:
    _show_costs(costs, console)
    rows: list[dict[str, Any]] = []
    limits: dict[str, dict[str, int]] = {}
    for mix in MIXES:
        limits[mix.name] = {}
        for cutting in CUTTINGS:
            waiting(f"one queue, {mix.name}, {cutting.name}")
            results = [simulate(num_workers, mix, cutting, costs) for num_workers in WORKERS]
            rows += [_row(mix, cutting, result) for result in results]
            limits[mix.name][cutting.name] = carried(mix, cutting, costs, results)
        console.print(_title(mix), soft_wrap=True)
        console.print(_table([row for row in rows if row["mix"] == mix.name]))
        for name, limit in limits[mix.name].items():
            console.print(
                _verdict(name, limit, [row for row in rows if row["mix"] == mix.name]),
                soft_wrap=True,
            )
    return {"costs": dataclasses.asdict(costs), "rows": rows, "carried": limits}


def carried(mix: Mix, cutting: Cutting, costs: ScriptCosts, results: Sequence[QueueResult]) -> int:
    """Return the largest number of workers that one server does not slow down.

    It is the largest number tried if none was slowed down.
    """
    low = max((result.num_workers for result in results if result.speed >= KEPT), default=0)
    high = min((result.num_workers for result in results if result.num_workers > low), default=low)
    while high - low > 1:
        middle = (low + high) // 2
        if simulate(middle, mix, cutting, costs).speed >= KEPT:
            low = middle
        else:
            high = middle
    return low


def _row(mix: Mix, cutting: Cutting, result: QueueResult) -> dict[str, Any]:
    return {
        "mix": mix.name,
        "kind": cutting.name,
        "workers": result.num_workers,
        "tokens_s": result.tokens_s,
        "offered_tokens_s": result.offered_tokens_s,
        "speed": result.speed,
        "jobs_s": result.jobs_s,
        "utilisation": result.utilisation,
        "busy": result.busy,
        **result.times_ms(),
    }


def _title(mix: Mix) -> str:
    return (
        f"\n[b]One queue, {mix.name}[/b]: {mix.num_sequences} sequences a worker, "
        f"{mix.prompt_tokens:,} tokens in; "
        "all taken"
    )


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = plain_table()
    table.add_column("answers as")
    headings = (
        "workers",
        "tok/s",
        "kept",
        "server",
        "claim\np50 ms",
        "\np99",
        "token\np50 ms",
        "\np99",
        "beat\np99",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    times = ("claim_p50_ms", "claim_p99_ms", "added_p50_ms", "added_p99_ms", "heartbeat_p99_ms")
    for place, row in enumerate(rows):
        is_first = place == 0 or rows[place - 1]["kind"] != row["kind"]
        if is_first and place:
            table.add_section()
        table.add_row(
            row["kind"] if is_first else "",
            str(row["workers"]),
            _thousands(row["tokens_s"]),
            f"{min(1.0, row['speed']):.0%}",
            f"{min(1.0, row['utilisation']):.0%}",
            *(_milliseconds(row[name]) for name in times),
        )
    return table


def _verdict(name: str, limit: int, rows: Sequence[dict[str, Any]]) -> str:
    last = next(row for row in reversed(rows) if row["kind"] == name)
    total = sum(last["busy"].values()) or 1.0
    shares = ", ".join(
        f"{script} {busy / total:.0%}"
        for script, busy in last["busy"].items()
        if busy / total >= 0.01
    )
    at_least = "at least " if limit == WORKERS[-1] else ""
    return (
        f"{name}: one server carries {at_least}{limit} workers; its time at {WORKERS[-1]}: {shares}"
    )


def _show_costs(costs: ScriptCosts, console: Console) -> None:
    """Print the cost of each script, in microseconds of the server's thread."""
    chunks = ", ".join(
        f"{1e6 * seconds:.1f} (of {tokens})" for tokens, seconds in costs.chunk.items()
    )
    console.print(
        f"\n[b]The queue server's thread[/b], µs: append {1e6 * costs.append:.0f} and per chunk "
        f"{chunks}, a "
        f"job's first {1e6 * costs.opened:.1f}; claim "
        f"{1e6 * costs.claim:.0f} and {1e6 * costs.claimed:.0f} a job; finish "
        f"{1e6 * costs.finish:.0f} and "
        f"{1e6 * costs.finished:.0f} a job; submit {1e6 * costs.submit:.0f}; "
        f"heartbeat {1e6 * costs.heartbeat:.0f} and {1e6 * costs.held:.1f} a job",
        highlight=False,
    )


def _thousands(value: float) -> str:
    return f"{value / 1e3:,.0f}k"


def _milliseconds(value: float) -> str:
    return "" if value != value else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
