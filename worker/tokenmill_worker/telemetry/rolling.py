"""Numbers of the recent past, for people: rates over ten seconds, percentiles over a minute or 512
values.

Prometheus covers longer times.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

RATE_WINDOW_S: Final = 10.0
VALUES_WINDOW_S: Final = 60.0


@dataclass(slots=True)
class RollingRate:
    """The recent growth per second of a total that only grows."""

    clock: Callable[[], float] = time.monotonic
    total: float = 0.0
    _points: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, total: float) -> None:
        """Record the total as it is now. A point is kept about every tenth of a second."""
        self.total = total
        now = self.clock()
        if not self._points or now - self._points[-1][0] >= 0.1:
            self._points.append((now, total))
            while len(self._points) > 2 and now - self._points[1][0] >= RATE_WINDOW_S:
                self._points.popleft()

    @property
    def per_s(self) -> float:
        if not self._points:
            return 0.0
        now = self.clock()
        while len(self._points) > 1 and now - self._points[0][0] > RATE_WINDOW_S:
            self._points.popleft()
        then, total = self._points[0]
        elapsed = now - then
        if elapsed > RATE_WINDOW_S:  # nothing was added for longer than the window
            return 0.0 if total == self.total else (self.total - total) / elapsed
        return (self.total - total) / elapsed if elapsed > 0 else 0.0


@dataclass(slots=True)
class RollingPercentiles:
    """The latest values of the last minute."""

    clock: Callable[[], float] = time.monotonic
    _values: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=512))

    def add(self, value: float) -> None:
        self._values.append((self.clock(), value))

    def percentiles(self, *ranks: float) -> tuple[float | None, ...]:
        """Return percentiles by nearest rank; None for each if there are no values."""
        since = self.clock() - VALUES_WINDOW_S
        while self._values and self._values[0][0] < since:
            self._values.popleft()
        ordered = sorted(value for _, value in self._values)
        if not ordered:
            return (None,) * len(ranks)
        return tuple(ordered[min(len(ordered) - 1, int(rank * len(ordered)))] for rank in ranks)
