"""Computes figures from rounds: throughput, percentiles, medians, spread, equal tokens."""

import statistics
from array import array
from collections.abc import Callable, Sequence

from ops.benchmarks.measure.protocol import Round
from ops.benchmarks.measure.workload_files import Workload


def percentile(values: Sequence[float], share: float) -> float:
    """Interpolate linearly between the two closest ranks; `share` is in [0, 1]."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def is_reading(workload: Workload) -> bool:
    """Return whether answers are of one token each: the speed is then that of the prompts."""
    return workload.num_output_tokens == len(workload.requests)


def of_round(workload: Workload, measured: Round) -> dict[str, float]:
    """Compute the figures of one round.

    Tokens per second count over the whole wall time, TTFT over all requests, TPOT over the requests
    with two tokens or more.
    """
    num_output = sum(len(tokens) for tokens in measured.tokens)
    tpot = [
        (last - first) / (len(tokens) - 1)
        for first, last, tokens in zip(
            measured.first_s, measured.last_s, measured.tokens, strict=True
        )
        if len(tokens) > 1
    ]
    figures = {
        "output_tok_s": num_output / measured.wall_s,
        "prompt_tok_s": workload.num_prompt_tokens / measured.wall_s,
        "wall_s": measured.wall_s,
        "ttft_p50_ms": 1e3 * percentile(measured.first_s, 0.5),
        "ttft_p99_ms": 1e3 * percentile(measured.first_s, 0.99),
    }
    if tpot:
        figures["tpot_p50_ms"] = 1e3 * percentile(tpot, 0.5)
        figures["tpot_p99_ms"] = 1e3 * percentile(tpot, 0.99)
    if measured.steady_tok_s is not None:
        figures["steady_tok_s"] = measured.steady_tok_s
    if measured.steps:
        figures["steps"] = measured.steps
        figures["tokens_per_step"] = (measured.computed_tokens or 0) / measured.steps
    if measured.batch_sizes:
        figures["batch_mean"] = statistics.fmean(measured.batch_sizes)
        figures["batch_max"] = max(measured.batch_sizes)
        figures["places_used"] = figures["batch_mean"] / figures["batch_max"]
    if measured.cached_tokens is not None:
        figures["cached_tokens"] = measured.cached_tokens
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


def spread(values: Sequence[float]) -> float:
    """Return (largest − smallest) / median."""
    median = statistics.median(values)
    return (max(values) - min(values)) / median if median else 0.0


def equal_requests(ours: Round, theirs: Round) -> tuple[int, int]:
    """Return the number of requests with the same tokens, and the number of all requests."""
    pairs = list(zip(ours.tokens, theirs.tokens, strict=True))
    return sum(a == b for a, b in pairs), len(pairs)


def equal_tokens(ours: Round, theirs: Round) -> float:
    """Return the share of positions that come before the first difference of their request."""
    same = total = 0
    for mine, other in zip(ours.tokens, theirs.tokens, strict=True):
        total += max(len(mine), len(other))
        for a, b in zip(mine, other, strict=False):
            if a != b:
                break
            same += 1
    return same / total if total else 1.0
