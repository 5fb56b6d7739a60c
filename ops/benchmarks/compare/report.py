"""Prints the results of a comparison in 80 columns: a line for each turn, a table a workload."""

from rich.console import Console

from ops.benchmarks.compare.rounds import Measurement
from ops.benchmarks.measure.tables import number, show

DISTURBED_SHARE = 0.1  # of all cores' time, used by others
# Columns of a workload's table, then details of an engine; keys are those of Measurement.results.
COLUMNS = {
    "output_tok_s": ("out\ntok/s", ""),
    "prompt_tok_s": ("in\ntok/s", ""),
    "ttft_p50_ms": ("first token\np50 ms", ""),
    "ratio": ("\nratio", "{:.2f}"),
    "same": ("same\ntokens", ""),
    "lost": ("kill -9:\nlost", "{:.0f}"),
    "repeated": ("\nrepeated", "{:.0f}"),
}
DETAILS = {
    "steady_tok_s": "{:,.0f} tok/s while all requests run",
    "places": "up to {:.0f} at once",
    "places_used": "{:.0%} of these places used",
    "latency_p50_ms": "added latency p50 {:.1f} ms",
    "latency_p99_ms": "p99 {:.1f} ms",
    "cpu_worker_us": "CPU a token: I/O process {:.0f} µs",
    "cpu_server_us": "Valkey {:.0f} µs",
    "cpu_subscribers_us": "subscribers {:.0f} µs",
}


def turn_line(measurement: Measurement, name: str, rounds: int) -> str:
    """Format an engine's last finished turn as a line."""
    figures = measurement.rounds[name][-1]
    others = figures["others_share"]
    return (
        f"{measurement.workload.name} {len(measurement.rounds[name])}/{rounds}  {name:<15}"
        f"{number(figures['output_tok_s']):>7} tok/s {figures['wall_s']:8.1f} s   "
        f"others {others:.0%}{'  DISTURBED' * (others > DISTURBED_SHARE)}"
    )


def kill_line(measurement: Measurement, name: str, part: str) -> str:
    """Format what readers noticed of a part's death as a line."""
    kill = measurement.kills[name][part]
    return (
        f"{measurement.workload.name}, {name}, kill -9 of the {part}: {kill['lost']:.0f} tokens "
        f"lost, {kill['repeated']:.0f} repeated, {kill['pause_s']:.1f} s without a token"
    )


def show_results(measurement: Measurement, console: Console) -> None:
    """Print the rounds that all engines have finished, if there is one."""
    workload, count, results = measurement.workload, measurement.num_rounds, measurement.results()
    if not count:
        return
    title = (
        f"{workload.name}: {len(workload.requests)} requests, {workload.num_prompt_tokens:,} "
        f"prompt and {workload.num_output_tokens:,} output tokens; medians of {count} "
        f"round{'s' * (count > 1)}"
    )
    if len(results) > 1:
        title += f"\nratio: tok/s of {measurement.names[0]} over this one's, by round"
    show(console, title, results, COLUMNS)
    for name, figures in results.items():
        said = [text.format(figures[key]) for key, text in DETAILS.items() if key in figures]
        if "ratios" in figures:
            ratios = ", ".join(f"{ratio:.2f}" for ratio in figures["ratios"])
            said.insert(0, f"ratio by round {ratios}")
        console.print(f"{name}: {'; '.join(said)}", soft_wrap=True, highlight=False)
