"""Keeps and prints the figures of engines that take turns; compares the first with each other."""

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ops.benchmarks.measure.figures import medians, percentile
from ops.benchmarks.measure.protocol import Round
from ops.benchmarks.measure.tables import number, show
from ops.benchmarks.measure.workloads import Workload

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


def of_round(workload: Workload, measured: Round) -> dict[str, float]:
    """Compute the figures of one round.

    Tokens per second count over the whole wall time, the time to the first token over all requests.
    """
    num_output = sum(len(tokens) for tokens in measured.tokens)
    figures = {
        "output_tok_s": num_output / measured.wall_s,
        "prompt_tok_s": workload.num_prompt_tokens / measured.wall_s,
        "wall_s": measured.wall_s,
        "ttft_p50_ms": 1e3 * percentile(measured.first_s, 0.5),
    }
    if measured.steady_tok_s is not None:
        figures["steady_tok_s"] = measured.steady_tok_s
    if measured.batch_sizes:
        mean, largest = statistics.fmean(measured.batch_sizes), max(measured.batch_sizes)
        figures["places"] = largest
        figures["places_used"] = mean / largest
    if measured.latency_s:
        figures["latency_p50_ms"] = 1e3 * percentile(measured.latency_s, 0.5)
        figures["latency_p99_ms"] = 1e3 * percentile(measured.latency_s, 0.99)
    for part, seconds in measured.cpu_s.items():
        figures[f"cpu_{part}_us"] = 1e6 * seconds / num_output
    return figures


class Measurement:
    """Finished turns of each engine on one workload; `rounds` has their figures, by engine.

    `kills` has what readers noticed of the death of each part, by engine and part.
    """

    def __init__(self, workload: Workload, names: Sequence[str]) -> None:
        self.workload, self.names = workload, tuple(names)
        self.rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        self.kills: dict[str, dict[str, dict[str, float]]] = {name: {} for name in names}
        self._answers: dict[str, list[list[list[int]]]] = {name: [] for name in names}

    @property
    def num_rounds(self) -> int:
        """Number of rounds that all engines have finished."""
        return min(map(len, self.rounds.values()))

    def add(self, name: str, measured: Round) -> None:
        """Keep an engine's turn."""
        self.rounds[name].append(of_round(self.workload, measured))
        self._answers[name].append(measured.tokens)

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the figures of each engine over the rounds that all engines have finished."""
        if not self.num_rounds:
            return {}
        found: dict[str, dict[str, Any]] = {
            name: {**medians(self.rounds[name][: self.num_rounds])} for name in self.names
        }
        for name, kills in self.kills.items():
            if kills:
                for figure in ("lost", "repeated"):
                    found[name][figure] = sum(kill[figure] for kill in kills.values())
                found[name]["kills"] = kills
        for name in self.names[1:]:
            ratios = self._ratios(name, "output_tok_s")
            found[name] |= {"ratio": statistics.median(ratios), "ratios": ratios}
            if steady := self._ratios(name, "steady_tok_s"):
                found[name]["steady_ratio"] = statistics.median(steady)
            equal, count = self._num_equal(name), len(self.workload.requests)
            found[name] |= {"same": f"{equal}/{count}", "is_equal": equal == count}
        return found

    def _ratios(self, name: str, figure: str) -> list[float]:
        """Return the first engine's figure over this one's by round: it drifts less than both.

        Rounds in which one of them has no such figure are left out.
        """
        pairs = zip(self.rounds[self.names[0]], self.rounds[name], strict=False)
        return [
            mine[figure] / theirs[figure]
            for mine, theirs in pairs
            if figure in mine and figure in theirs
        ]

    def _num_equal(self, name: str) -> int:
        """Count the requests with the first engine's tokens, in the round with the fewest."""
        rounds = zip(self._answers[self.names[0]], self._answers[name], strict=False)
        return min(sum(a == b for a, b in zip(*both, strict=True)) for both in rounds)

    def turn_line(self, name: str, rounds: int) -> str:
        """Format an engine's last finished turn as a line."""
        figures = self.rounds[name][-1]
        return (
            f"{self.workload.name} {len(self.rounds[name])}/{rounds}  {name:<15}"
            f"{number(figures['output_tok_s']):>7} tok/s {figures['wall_s']:8.1f} s"
        )

    def kill_line(self, name: str, part: str) -> str:
        """Format what readers noticed of a part's death as a line."""
        kill = self.kills[name][part]
        return (
            f"{self.workload.name}, {name}, kill -9 of the {part}: {kill['lost']:.0f} tokens "
            f"lost, {kill['repeated']:.0f} repeated, {kill['pause_s']:.1f} s without a token"
        )

    def show(self, console: Console) -> None:
        """Print the rounds that all engines have finished, if there is one, in 80 columns."""
        workload, count, results = self.workload, self.num_rounds, self.results()
        if not count:
            return
        title = (
            f"{workload.name}: {len(workload.requests)} requests, {workload.num_prompt_tokens:,} "
            f"prompt and {workload.num_output_tokens:,} output tokens; medians of {count} "
            f"round{'s' * (count > 1)}"
        )
        if len(results) > 1:
            title += f"\nratio: tok/s of {self.names[0]} over this one's, by round"
        show(console, title, results, COLUMNS)
        for name, figures in results.items():
            said = [text.format(figures[key]) for key, text in DETAILS.items() if key in figures]
            if "ratios" in figures:
                ratios = ", ".join(f"{ratio:.2f}" for ratio in figures["ratios"])
                said.insert(0, f"ratio by round {ratios}")
            console.print(f"{name}: {'; '.join(said)}", soft_wrap=True, highlight=False)
