"""Measures how long steps take, and limits the bulk work that shares a step with more urgent work.

Steps are grouped by size, in powers of two. Each group keeps average tokens and seconds; straight
lines connect the groups. On a device limited by reading its weights the lines are flat, so all bulk
tokens fit. On a CPU every token costs time, so bulk work waits while other sequences are served.
The caller supplies the time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

MIN_TOKENS: Final = 4  # bulk tokens of every step, whatever they cost, so that bulk never starves
FIRST_TOKENS: Final = 64  # most bulk tokens of a step while no step was measured
RECENT_S: Final = 60.0  # bulk steps stay short for so long after urgent work: more may arrive
SHORT_S: Final = 0.02  # steps this short stream tokens faster than anyone reads
# limit of a bulk step, unless a shared step takes longer; new arrivals wait for its end
ALONE_S: Final = 0.25
# for RECENT_S: a bulk step lasts at most this many times a step shared with one token
_ALONE: Final = 2.0
_NEW: Final = 0.1  # weight of a new step in the average of its size
_ODD: Final = 4.0  # steps longer than this many times their size's average are cut to it: disturbed
_FEW: Final = 4  # steps of a size before outliers are cut
# a step may be this many times the largest seen, if the line predicts it is short
_FURTHER: Final = 4


class StepTimeModel:
    """Step times by size, and the bulk tokens that they allow.

    `slowdown` is the part of its own length by which bulk work may lengthen a step; None: no limit.
    """

    def __init__(self, slowdown: float | None) -> None:
        self._slowdown = slowdown
        # bits of the tokens → (steps, tokens, seconds)
        self._sizes: dict[int, tuple[int, float, float]] = {}
        self._urgent_at = float("-inf")

    @property
    def limits_bulk(self) -> bool:
        return self._slowdown is not None

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record that a step of `num_tokens` tokens took `seconds`."""
        if self._slowdown is None or num_tokens <= 0 or seconds <= 0:
            return
        size = num_tokens.bit_length()
        count, tokens, usual = self._sizes.get(size, (0, 0.0, 0.0))
        if count >= _FEW:
            seconds = min(seconds, _ODD * usual)
        part = max(_NEW, 1.0 / (count + 1))
        self._sizes[size] = (
            count + 1,
            tokens + part * (num_tokens - tokens),
            usual + part * (seconds - usual),
        )

    def bulk_token_budget(self, now: float, num_tokens: int) -> int | None:
        """Return how many bulk tokens a step may carry beside `num_tokens` others; None: no limit.

        A sequence that arrives during a step waits for its end. A step of bulk work alone
        (`num_tokens` 0) is therefore limited from the start, and more tightly for RECENT_S after
        more urgent work was scheduled.
        """
        if num_tokens:
            self._urgent_at = now
            return self.shared_bulk_budget(num_tokens)
        if self._slowdown is None or not self._sizes:
            return self._unknown
        curve = self._curve()
        shared = (1.0 + self._slowdown) * _seconds_at(curve, 1)
        limit = max(shared, ALONE_S)
        if now - self._urgent_at <= RECENT_S:
            limit = min(limit, max(_ALONE * shared, SHORT_S))
        return max(MIN_TOKENS, int(_tokens_within(curve, limit, 0)))

    def shared_bulk_budget(self, num_tokens: int) -> int | None:
        """Return how many bulk tokens may join a step of `num_tokens` others; None: no limit."""
        if self._slowdown is None or not self._sizes:
            return self._unknown
        curve = self._curve()
        limit = max((1.0 + self._slowdown) * _seconds_at(curve, num_tokens), SHORT_S)
        return max(MIN_TOKENS, int(_tokens_within(curve, limit, num_tokens) - num_tokens))

    @property
    def _unknown(self) -> int | None:
        return None if self._slowdown is None else FIRST_TOKENS

    def _curve(self) -> list[tuple[float, float]]:
        """Return points (tokens, seconds), rising, starting at 0 tokens.

        Disturbances only make steps longer, so no size counts as slower than a larger one. Below
        the smallest size seen, the first line is extended.
        """
        curve: list[tuple[float, float]] = []
        for size in sorted(self._sizes, reverse=True):
            _, tokens, seconds = self._sizes[size]
            curve.append((tokens, min(seconds, curve[-1][1]) if curve else seconds))
        curve.reverse()
        if len(curve) == 1:
            return [(0.0, 0.0), *curve]
        (left, low), (right, high) = curve[:2]
        return [(0.0, max(0.0, low - left * (high - low) / (right - left))), *curve]


def _seconds_at(curve: list[tuple[float, float]], num_tokens: int) -> float:
    for (left, low), (right, high) in pairwise(curve):
        if num_tokens <= right:
            return low + (high - low) * (num_tokens - left) / (right - left)
    (left, low), (right, high) = curve[-2:]
    return high + (high - low) * (num_tokens - right) / (right - left)


def _tokens_within(curve: list[tuple[float, float]], limit: float, at_least: int) -> float:
    """Return the size of a step, greater than `at_least`, that takes `limit` seconds."""
    for (left, low), (right, high) in pairwise(curve):
        if high > limit and right > at_least:
            return left + (limit - low) * (right - left) / (high - low)
    (left, low), (right, high) = curve[-2:]  # every size seen is short enough
    further = _FURTHER * right
    return (
        further
        if high <= low
        else min(further, right + (limit - high) * (right - left) / (high - low))
    )
