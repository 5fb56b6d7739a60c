"""Keeps the results of a comparison in the JSON file, and prints them in 80 columns.

Results are written after every turn, and printed after each workload and at the end.
"""

from collections.abc import Callable
from typing import Any

from rich.console import Console

from ops.benchmarks.compare.rounds import Measurement, Turn
from ops.benchmarks.measure.figures import is_reading
from ops.benchmarks.measure.tables import number, show

# Columns of a workload's table, then details of an engine; keys are those of Measurement.results.
COLUMNS = {
    "output_tok_s": ("out\ntok/s", ""),
    "spread": ("±\n", "{:.0%}"),
    "prompt_tok_s": ("in\ntok/s", ""),
    "ttft_p50_ms": ("TTFT\np50 ms", ""),
    "ttft_p99_ms": ("\np99", ""),
    "tpot_p50_ms": ("TPOT\np50 ms", ""),
    "tpot_p99_ms": ("\np99", ""),
    "ratio": ("\nratio", "{:.2f}"),
    "same": ("same\ntokens", ""),
}
DETAILS = {
    "steady_tok_s": "{:,.0f} tok/s while all requests run",
    "steps": "{:,.0f} steps",
    "tokens_per_step": "{:,.1f} tokens a step",
    "batch_mean": "batches of {:.1f}",
    "batch_max": "up to {:.0f}",
    "places_used": "{:.0%} of these places used",
    "cached_tokens": "{:,.0f} tokens from the prefix cache",
    "latency_p50_ms": "added latency p50 {:.1f} ms",
    "latency_p99_ms": "p99 {:.1f} ms",
    "cpu_worker_us": "CPU a token: I/O process {:.0f} µs",
    "cpu_server_us": "Valkey {:.0f} µs",
    "cpu_subscribers_us": "subscribers {:.0f} µs",
}


class Report:
    """Collects and prints the results of a comparison.

    Args:
        keep: replaces the contents of the JSON file by its argument.
        rounds: number of rounds of each workload.
    """

    def __init__(
        self, console: Console, keep: Callable[[dict[str, object]], None], rounds: int
    ) -> None:
        self._console, self._keep, self._num_rounds = console, keep, rounds
        self._measurements: list[Measurement] = []
        self._shown = 0
        self.engines: dict[str, str] = {}

    @property
    def record(self) -> dict[str, object]:
        results = {each.workload.name: each.results() for each in self._measurements}
        rounds = {each.workload.name: each.rounds for each in self._measurements}
        return {"results": results, "rounds": rounds, "engines": self.engines}

    def is_equal(self, exact: Callable[[str], bool]) -> bool:
        """Return whether all engines that must give the same tokens did."""
        return all(
            figures.get("is_equal", True)
            for each in self._measurements
            for name, figures in each.results().items()
            if exact(name)
        )

    def begin(self, measurement: Measurement) -> Callable[[str, Turn], None]:
        """Add a measurement; return the function that `run_rounds` calls after each turn."""
        self._measurements.append(measurement)

        def print_turn(name: str, turn: Turn) -> None:
            # written before printed, so that the file has every printed turn
            self._keep({**self.record, "complete": False})
            line = turn_line(measurement, name, turn, self._num_rounds)
            self._console.print(line, markup=False, soft_wrap=True)

        return print_turn

    def show(self) -> None:
        """Print the workloads that were not printed yet, also unfinished ones."""
        for measurement in self._measurements[self._shown :]:
            if measurement.num_rounds:
                _show(measurement, self._console)
        self._shown = len(self._measurements)

    def close(self) -> None:
        self.show()
        found = [each for each in self._measurements if each.num_rounds]
        if found and len(found[0].names) > 1:
            show_summary(found, self._console)


def turn_line(measurement: Measurement, name: str, turn: Turn, rounds: int) -> str:
    """Format one finished turn as a line."""
    line = (
        f"{measurement.workload.name} {len(measurement.turns[name])}/{rounds}  {name:<13}"
        f"{number(turn.figures['output_tok_s']):>7} tok/s {turn.measured.wall_s:8.1f} s"
    )
    if turn.disturbance is None:
        return line
    return f"{line}   {turn.disturbance}{'  DISTURBED' if turn.disturbance.is_large else ''}"


def _show(measurement: Measurement, console: Console) -> None:
    workload, count, results = measurement.workload, measurement.num_rounds, measurement.results()
    title = (
        f"{workload.name}: {len(workload.requests)} requests, {workload.num_prompt_tokens:,} "
        f"prompt and {workload.num_output_tokens:,} output tokens; medians of {count} "
        f"round{'s' * (count > 1)}"
    )
    if len(results) > 1:
        title += f"\nratio: tok/s of {measurement.names[0]} over this one's, by round"
    show(console, title, results, COLUMNS)
    for name, figures in results.items():
        if said := _details(figures):
            console.print(f"{name}: {'; '.join(said)}", soft_wrap=True, highlight=False)


def _details(figures: dict[str, Any]) -> list[str]:
    """Format what has no column: ratios by round, counts, tokens that differ."""
    said = [text.format(figures[key]) for key, text in DETAILS.items() if key in figures]
    if "ratios" in figures:
        said.insert(0, f"ratio by round {', '.join(f'{ratio:.2f}' for ratio in figures['ratios'])}")
    if not figures.get("is_equal", True):
        said.append(f"{figures['equal_tokens']:.1%} of the tokens come before a first difference")
    return said


def show_summary(measurements: list[Measurement], console: Console) -> None:
    """Print all workloads in one table: our speed, and its ratio to each other engine."""
    ours, *others = measurements[0].names
    cases: dict[str, dict[str, object]] = {}
    for each in measurements:
        results, reads = each.results(), is_reading(each.workload)
        speed: Any = results[ours]["prompt_tok_s" if reads else "output_tok_s"]
        ratios = {name: results[name]["ratio"] for name in others}
        cases[each.workload.name] = {"speed": number(speed) + " in" * reads, **ratios}
    columns = {name: (name, "{:.2f}") for name in others}
    title = f"all: {ours}'s tok/s over each"
    show(console, title, cases, {"speed": (f"{ours}\ntok/s", ""), **columns})
