"""What comes of a step's events besides their chunks: orders for others, which the publisher does not know."""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.generation import FinishReason
from worker.jobs import Delivery, Finished


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """The engine must stop this choice (None: every choice) of the request."""

    request_id: str
    reason: FinishReason
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class RetryOrder:
    """The job failed in a way that may not happen again: it goes on, from where its log ends, after a pause."""

    delivery: Delivery
    delay_ms: int
    reason: str


@dataclass(slots=True)
class PublishReport:
    """What came of one call: jobs at their end, what the engine must stop, jobs that are another worker's now."""

    retry: list[RetryOrder] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    cancel: list[CancelOrder] = field(default_factory=list)
    lost: list[Delivery] = field(default_factory=list)
