"""Computes percentiles, medians and rates."""

import itertools
import math
import statistics
from array import array
from collections.abc import Sequence

import numpy as np


def percentile(values: Sequence[float], share: float) -> float:
    """Interpolate linearly between the two closest ranks; `share` is in [0, 1]."""
    return float(np.quantile(values, share)) if values else math.nan


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


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median over the rounds of each figure that all of them have."""
    names = [name for name in rounds[0] if all(name in each for each in rounds)]
    return {name: statistics.median(each[name] for each in rounds) for name in names}
