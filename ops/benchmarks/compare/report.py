"""Prints a comparison as tables of 80 columns, and makes the record for its JSON.

There is a table per workload and one over all.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ops.benchmarks.compare.rounds import Measurement, Turn
from ops.benchmarks.measure.figures import STAGES, equal_requests, equal_tokens, summary
from ops.benchmarks.measure.goals import GOALS, ROUNDED_GOALS
from ops.benchmarks.measure.tables import plain_table

# Columns of a workload's table, then details of an engine; keys are those of figures.of_round.
COLUMNS = {
    "output_tok_s": "out\ntok/s",
    "spread": "±\n",
    "prompt_tok_s": "in\ntok/s",
    "ttft_p50_ms": "TTFT\np50 ms",
    "ttft_p99_ms": "\np99",
    "tpot_p50_ms": "TPOT\np50 ms",
    "tpot_p99_ms": "\np99",
}
DETAILS = {
    "steps": "{:,.0f} steps",
    "tokens_per_step": "{:,.1f} tokens a step",
    "batch_mean": "batches of {:.1f}",
    "batch_max": "up to {:.0f}",
    "cached_tokens": "{:,.0f} tokens from the prefix cache",
    "latency_p50_ms": "added latency p50 {:.1f} ms",
    "latency_p99_ms": "p99 {:.1f} ms",
    **{
        key: text
        for name, words in STAGES.items()
        for key, text in (
            (f"stage_{name}_p50_ms", f"{words} {{:.2f}}"),
            (f"stage_{name}_p99_ms", "p99 {:.1f}"),
        )
    },
    "calls_per_step": "{:.2f} scripts a step",
    "script_ms": "of {:.2f} ms in the server",
    "cpu_worker_us": "CPU a token: I/O process {:.0f} µs",
    "cpu_server_us": "Valkey {:.0f} µs",
    "cpu_subscribers_us": "subscribers {:.0f} µs",
}


def turn_line(measurement: Measurement, name: str, turn: Turn, rounds: int) -> str:
    """Format one finished turn as a line."""
    number = len(measurement.turns[name])
    speed = _number(turn.figures["output_tok_s"])
    line = (
        f"{measurement.workload.name} {number}/{rounds}  {name:<13}{speed:>7} tok/s "
        f"{turn.measured.wall_s:8.1f} s"
    )
    if turn.disturbance is None:
        return line
    return f"{line}   {turn.disturbance}{'  DISTURBED' if turn.disturbance.is_large else ''}"


def record(measurement: Measurement) -> dict[str, Any]:
    """Return a measurement for the JSON; it may be unfinished."""
    workload = measurement.workload
    comparisons = {
        name: _comparison(measurement, name) for name in measurement.peers if measurement.num_rounds
    }
    compared = [found for name, found in comparisons.items() if name not in measurement.floors]
    return {
        "workload": workload.name,
        "requests": len(workload.requests),
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
        "quantization": measurement.quantization,
        "rounds": {
            name: [turn.figures for turn in turns] for name, turns in measurement.turns.items()
        },
        "summary": {
            name: summary(measurement.figures(name))
            for name in measurement.names
            if measurement.num_rounds
        },
        "comparisons": comparisons,
        "equal": all(found["equal_requests"] == found["requests"] for found in compared),
    }


def _comparison(measurement: Measurement, name: str) -> dict[str, Any]:
    ratios = measurement.ratios(name)
    found: dict[str, Any] = {"ratio": statistics.median(ratios), "ratios": ratios}
    if name not in measurement.floors:
        pairs = measurement.pairs(name)
        equal = min(equal_requests(ours, theirs)[0] for ours, theirs in pairs)
        share = min(equal_tokens(ours, theirs) for ours, theirs in pairs)
        found |= {
            "equal_requests": equal,
            "requests": len(measurement.workload.requests),
            "equal_tokens": share,
        }
    return found


# ── printed tables ──


def show(result: dict[str, Any], console: Console) -> None:
    """Print one workload from its record."""
    names = list(result["summary"])
    num_rounds = min(len(rounds) for rounds in result["rounds"].values())
    console.print(
        f"\n[b]{result['workload']}[/b]: {result['requests']} requests, "
        f"{result['prompt_tokens']:,} prompt and "
        f"{result['output_tokens']:,} output tokens; medians of {num_rounds} "
        f"round{'s' * (num_rounds > 1)}"
    )
    ours, *others = names
    if others:
        console.print(f"ratio: tok/s of {ours} over this one's, median of the rounds' ratios")
    table = plain_table()
    table.add_column("", no_wrap=True)
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    if others:
        table.add_column("\nratio", justify="right", no_wrap=True)
        table.add_column("same\ntokens", justify="right", no_wrap=True)
    for name in names:
        comparison = result["comparisons"].get(name, {})
        table.add_row(
            name,
            *_cells(result["summary"][name]),
            *(_comparison_cells(comparison) if others else ()),
        )
    console.print(table)
    for line in _lines(result):
        console.print(line, soft_wrap=True)


def _cells(figures: dict[str, dict[str, float]]) -> list[str]:
    spread = f"{figures['output_tok_s']['spread']:.0%}"
    return [
        spread if key == "spread" else _number(figures[key]["median"]) if key in figures else ""
        for key in COLUMNS
    ]


def _comparison_cells(comparison: dict[str, Any]) -> tuple[str, str]:
    if not comparison:
        return "", ""
    same = (
        f"{comparison['equal_requests']}/{comparison['requests']}"
        if "requests" in comparison
        else ""
    )
    return f"{comparison['ratio']:.2f}", same


def _lines(result: dict[str, Any]) -> list[str]:
    """Format what has no column: an engine's ratios by round, its details, tokens that differ."""
    lines = []
    for name, figures in result["summary"].items():
        found = result["comparisons"].get(name, {})
        said = [
            text.format(figures[key]["median"]) for key, text in DETAILS.items() if key in figures
        ]
        if found:
            said.insert(
                0, f"ratio by round {', '.join(f'{ratio:.2f}' for ratio in found['ratios'])}"
            )
        if found.get("equal_requests") != found.get("requests"):
            said.append(f"{found['equal_tokens']:.1%} of the tokens come before a first difference")
        if said:
            lines.append(f"{name}: {'; '.join(said)}")
    return lines


def show_summary(results: Sequence[dict[str, Any]], console: Console) -> None:
    """Print all workloads in one table: our speed, and its ratio to each other engine and goal."""
    ours, *others = results[0]["summary"]
    if not others:
        return
    table = plain_table()
    table.add_column("", no_wrap=True)
    table.add_column(f"{ours}\ntok/s", justify="right", no_wrap=True)
    for name in others:
        table.add_column(name.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for result in results:
        is_reading = (
            result["output_tokens"] == result["requests"]
        )  # one token each: the speed is that of the prompts
        speed = result["summary"][ours]["prompt_tok_s" if is_reading else "output_tok_s"]["median"]
        cells = [
            _with_goal(result["comparisons"][name]["ratio"], _goal(result, name)) for name in others
        ]
        table.add_row(result["workload"], _number(speed) + (" in" if is_reading else ""), *cells)
    goals = any(_goal(result, name) for result in results for name in others)
    console.print(f"\n[b]all[/b]: {ours}'s tok/s over each{'; ≥ or < the goal' if goals else ''}")
    console.print(table)


def _goal(result: dict[str, Any], other: str) -> float | None:
    rounded = ROUNDED_GOALS.get((result.get("quantization", ""), result["workload"], other))
    return rounded or GOALS.get((result["workload"], other))


def _with_goal(ratio: float, goal: float | None) -> str:
    if goal is None:
        return f"{ratio:.2f}"
    return (
        f"[green]{ratio:.2f} ≥ {goal:g}[/green]"
        if ratio >= goal
        else f"[yellow]{ratio:.2f} < {goal:g}[/yellow]"
    )


def _number(value: float) -> str:
    if value >= 100_000:
        return f"{value / 1e3:,.0f}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
