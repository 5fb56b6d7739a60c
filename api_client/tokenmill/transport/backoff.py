"""Computes the pauses between tries of a call that failed."""

from __future__ import annotations

import random
from dataclasses import dataclass

_MAX_EXPONENT = 30  # later pauses are the longest one anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Computes pauses: first × factor^n, at most longest, each multiplied by a random number from
    `spread`. Spread keeps many clients from trying at the same time; (1, 1) is none.
    """

    first_s: float = 0.1
    longest_s: float = 15.0
    factor: float = 2.0
    spread: tuple[float, float] = (0.5, 1.0)

    def delay_s(self, failures: int, asked_s: float = 0.0) -> float:
        """Return the pause after `failures` failures in a row, 1 for the first. `asked_s`: a pause
        that the server asked for, honoured up to the longest.
        """
        exponent = min(max(0, failures - 1), _MAX_EXPONENT)
        planned = min(self.longest_s, self.first_s * self.factor**exponent)
        return max(planned * random.uniform(*self.spread), min(asked_s, self.longest_s))
