"""Sends the frames of an engine: one for each step, and two a second while it has no work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from tokenmill_worker.contract.events import Capacity, EngineStats, TokenEvent
from tokenmill_worker.contract.messages import Frame, Report

IDLE_REPORT_S: Final = 0.5
STATS_EVERY_S: Final = 0.1


class FrameSender:
    """Makes frames, with the counters ten times a second at most while there is work."""

    def __init__(
        self, emit: Callable[[Report], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._emit = emit
        self._clock = clock
        self._due_s = 0.0  # on `clock`, like the next
        self._stats_due_s = 0.0

    @property
    def is_due(self) -> bool:
        """Return whether no step has been reported for half a second."""
        return self._clock() >= self._due_s

    def send(
        self,
        events: tuple[TokenEvent, ...],
        capacity: Capacity,
        stats: Callable[[], EngineStats],
        *,
        has_work: bool,
        has_stepped: bool = True,
    ) -> None:
        """Send a frame. Without a step, beside work, it is no sign of life."""
        now, its_stats = self._clock(), None
        if has_stepped:
            self._due_s = now + IDLE_REPORT_S
        if now >= self._stats_due_s or not has_work:
            its_stats, self._stats_due_s = stats(), now + STATS_EVERY_S
        ended_s = now if has_stepped else 0.0
        self._emit(Frame(events=events, capacity=capacity, stats=its_stats, ended_s=ended_s))
