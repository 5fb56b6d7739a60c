"""Counters of the finalizer, and the times since which SQL or Redis fails."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class FinalizerStats:
    """Counters since the start. `record_down_since` and `acknowledge_down_since` are monotonic
    seconds; None while the step works.
    """

    submitted: int = 0
    recorded: int = 0
    recorded_before: int = 0  # another attempt's row was there: a redelivered job
    sanitised: int = 0  # stored after removing what the database cannot hold
    refused: int = 0  # tries in which the database refused a job that was alone
    acknowledged: int = 0
    lost: int = 0  # recorded, but owned by another worker at the acknowledgement
    groups: int = 0
    record_failures: int = 0
    record_down_since: float | None = None
    acknowledge_down_since: float | None = None
    last_error: str = ""
    # of the transactions since they were last taken
    commit_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=1000))

    def take_commit_seconds(self) -> list[float]:
        taken = list(self.commit_seconds)
        self.commit_seconds.clear()
        return taken
