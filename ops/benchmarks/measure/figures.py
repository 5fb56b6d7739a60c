"""Computes figures from rounds: throughput, percentiles, medians, equal tokens."""

import itertools
import math
import statistics
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from ops.benchmarks.measure.protocol import Round
from ops.benchmarks.measure.workload_files import Workload


def percentile(values: Sequence[float], share: float) -> float:
    """Interpolate linearly between the two closest ranks; `share` is in [0, 1]."""
    return float(np.quantile(values, share)) if values else math.nan


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


class Arrivals:
    """Counts tokens by the time of their arrival, in little memory."""

    def __init__(self) -> None:
        self._times, self._counts = array("d"), array("l")

    def add(self, now: float, count: int) -> None:
        self._times.append(now)
        self._counts.append(count)

    @property
    def num_tokens(self) -> int:
        return sum(self._counts)

    def longest_pause(self) -> float:
        """Return the longest time between two arrivals, in seconds."""
        return max((b - a for a, b in itertools.pairwise(self._times)), default=0.0)

    def steady_rate(self, first_s: Sequence[float], last_s: Sequence[float]) -> float | None:
        """Return tokens per second from the last request's first token to the first one's last.

        Arguments are the times of each request's first and last token, on the clock of `add`.
        Returns None if a request ended before another one began.
        """
        begin, end = max(first_s), min(last_s)
        if end <= begin:
            return None
        arrivals = zip(self._times, self._counts, strict=True)
        return sum(count for now, count in arrivals if begin < now <= end) / (end - begin)


def alternate(
    cases: Sequence[str], rounds: int, measure: Callable[[str, int], dict[str, float]]
) -> dict[str, list[dict[str, float]]]:
    """Measure each case once a round; the order reverses from round to round.

    Returns the figures of all rounds by case.
    """
    found: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in cases if number % 2 == 0 else reversed(cases):
            found[case].append(measure(case, number))
    return found


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median over the rounds of each figure that all of them have."""
    names = [name for name in rounds[0] if all(name in each for each in rounds)]
    return {name: statistics.median(each[name] for each in rounds) for name in names}
