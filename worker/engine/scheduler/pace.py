"""How long steps take, and so how much bulk work one may carry beside more urgent work.

Steps are remembered by their size, in powers of two: the average tokens and seconds of each size, and straight lines
between these. On a device that waits for its weights the lines are flat, and all of bulk goes along; on a CPU every
token costs, and bulk waits while others are served. It knows no sequences and no clock.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

BULK: Final = 2  # the class whose work is held back, and whose places are taken
MIN_TOKENS: Final = 4  # a step carries so many of bulk's whatever they cost: it is never starved
FIRST_TOKENS: Final = 64  # and so many at most while nothing is known
RECENT_S: Final = 60.0  # so long after more urgent work, bulk makes its steps short: the next may come at any moment
SHORT_S: Final = 0.02  # nobody reads faster than steps of this length tell
ALONE_S: Final = 0.25  # a step of bulk, where not even a shared one can be shorter: who comes first waits for its end
_ALONE: Final = 2.0  # and lately, at most so many times as long as one that it shares with a single token
_NEW: Final = 0.1  # weight of a step beside those of its size before it
_ODD: Final = 4.0  # a step so many times as long as others of its size was disturbed: it counts as that
_FEW: Final = 4  # of a size: too few to tell which is odd
_FURTHER: Final = 4  # times the longest step seen may be tried, where the line so far promises that it is short


class Pace:
    """`slowdown`: by which part of its own length bulk work may lengthen a step; None: by any."""

    def __init__(self, slowdown: float | None) -> None:
        self._slowdown = slowdown
        self._sizes: dict[int, tuple[int, float, float]] = {}  # bits of the tokens → (steps, tokens, seconds)
        self._urgent_at = float("-inf")

    @property
    def is_kept(self) -> bool:
        return self._slowdown is not None

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens has taken so long."""
        if self._slowdown is None or num_tokens <= 0 or seconds <= 0:
            return
        size = num_tokens.bit_length()
        count, tokens, usual = self._sizes.get(size, (0, 0.0, 0.0))
        if count >= _FEW:
            seconds = min(seconds, _ODD * usual)
        part = max(_NEW, 1.0 / (count + 1))
        self._sizes[size] = count + 1, tokens + part * (num_tokens - tokens), usual + part * (seconds - usual)

    def room_at(self, now: float, num_tokens: int) -> int | None:
        """How many tokens of bulk may join a step of so many others, or make one alone; None: any number.

        Who comes while a step runs waits for its end: so steps of bulk alone are bounded from the first one on, and
        short after others were there.
        """
        if num_tokens:
            self._urgent_at = now
            return self.room_beside(num_tokens)
        if self._slowdown is None or not self._sizes:
            return self._unknown
        curve = self._curve()
        shared = (1.0 + self._slowdown) * _seconds_at(curve, 1)
        limit = max(shared, ALONE_S)
        if now - self._urgent_at <= RECENT_S:
            limit = min(limit, max(_ALONE * shared, SHORT_S))
        return max(MIN_TOKENS, int(_tokens_within(curve, limit, 0)))

    def room_beside(self, num_tokens: int) -> int | None:
        """How many tokens of bulk may join a step of so many others; None: any number."""
        if self._slowdown is None or not self._sizes:
            return self._unknown
        curve = self._curve()
        limit = max((1.0 + self._slowdown) * _seconds_at(curve, num_tokens), SHORT_S)
        return max(MIN_TOKENS, int(_tokens_within(curve, limit, num_tokens) - num_tokens))

    @property
    def _unknown(self) -> int | None:
        return None if self._slowdown is None else FIRST_TOKENS

    def _curve(self) -> list[tuple[float, float]]:
        """(tokens, seconds), from nothing on, rising: what disturbs a step makes it longer, so no size is taken to last
        longer than a greater one. Below the smallest steps seen the first line goes on.
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
    """The size of a step, greater than `at_least`, that lasts so many seconds."""
    for (left, low), (right, high) in pairwise(curve):
        if high > limit and right > at_least:
            return left + (limit - low) * (right - left) / (high - low)
    (left, low), (right, high) = curve[-2:]  # all that was seen is short enough
    further = _FURTHER * right
    return further if high <= low else min(further, right + (limit - high) * (right - left) / (high - low))
