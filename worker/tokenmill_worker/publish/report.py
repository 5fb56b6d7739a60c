"""The results of a step's events besides their chunks: what the engine, the queue and the finalizer
have to do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.jobs import Delivery, Finished


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """Orders the engine to stop this choice (None: every choice) of the request."""

    request_id: str
    reason: FinishReason
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class RetryOrder:
    """Orders the queue to run the job again after a pause, from where its log ends. The job failed
    in a way that may not recur.
    """

    delivery: Delivery
    delay_ms: int
    reason: str


@dataclass(slots=True)
class PublishReport:
    """The results of one call: jobs to retry, jobs that ended, choices that the engine must stop,
    and jobs that are another worker's now.
    """

    retry: list[RetryOrder] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    cancel: list[CancelOrder] = field(default_factory=list)
    lost: list[Delivery] = field(default_factory=list)
