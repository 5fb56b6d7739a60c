"""How long steps take, and so how much bulk work one may carry beside more urgent work.

A step is taken to last `fixed + each × tokens`: a straight line through the steps seen lately, the older the lighter.
On a device that waits for its weights `each` is nearly nothing, and all of bulk goes along; on a CPU every token
costs, and bulk waits while others are served. It knows no sequences and no clock.
"""

from __future__ import annotations

from typing import Final

BULK: Final = 2  # the class whose work is held back, and whose places are taken
MIN_TOKENS: Final = 4  # a step carries so many of bulk's whatever they cost: it is never starved
SHORT_S: Final = 0.02  # nobody reads faster than steps of this length tell
_KEPT: Final = 0.98  # of a step's weight at the next one
_MIN_WEIGHT: Final = 8.0
_ODD: Final = 4.0  # a step so many times as long as foreseen was disturbed: it counts as that


class Pace:
    """`slowdown`: by which part of its own length bulk work may lengthen a step; None: by any."""

    def __init__(self, slowdown: float | None) -> None:
        self._slowdown = slowdown
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_kept(self) -> bool:
        return self._slowdown is not None

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens has taken so long."""
        if self._slowdown is None or num_tokens <= 0 or seconds <= 0:
            return
        x, y = float(num_tokens), seconds
        line = self._line()
        if line is not None:
            y = min(y, _ODD * (line[0] + line[1] * x))
        self._weight = self._weight * _KEPT + 1.0
        self._x = self._x * _KEPT + x
        self._y = self._y * _KEPT + y
        self._xx = self._xx * _KEPT + x * x
        self._xy = self._xy * _KEPT + x * y

    def room_beside(self, num_tokens: int) -> int | None:
        """How many tokens of bulk may join a step of so many others; None: any number."""
        line = self._line() if self._slowdown is not None else None
        if line is None or self._slowdown is None:
            return None
        fixed, each = line
        alone = fixed + each * num_tokens
        spare = max(alone * (1.0 + self._slowdown), SHORT_S) - alone
        return max(MIN_TOKENS, int(spare / each)) if each * 1e6 > spare else None

    def _line(self) -> tuple[float, float] | None:
        """(fixed, each), neither below nothing; None while all steps seen were of one size, or too few."""
        weight = self._weight
        if weight < _MIN_WEIGHT:
            return None
        x, y = self._x / weight, self._y / weight
        spread = self._xx / weight - x * x
        if spread < 1e-3 * x * x:
            return None
        each = max(0.0, (self._xy / weight - x * y) / spread)
        fixed = y - each * x
        return (fixed, each) if fixed >= 0 else (0.0, y / x)
