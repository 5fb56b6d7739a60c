"""The claimed jobs of one worker that are neither finished nor given back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from tokenmill_worker.jobs import AdmittedJob, Delivery, FinishedJob, JobObserver
from tokenmill_worker.service.quarantine import Quarantine


class OwnedJobs:
    """Knows which jobs this worker owns, and which of them are in the engine. Sets, and the keys
    of `in_engine`, are request ids.
    """

    def __init__(self, quarantine: Quarantine, observer: JobObserver) -> None:
        self._quarantine = quarantine
        self._observer = observer
        self._deliveries: dict[str, Delivery] = {}  # by job id
        self.preparing: set[str] = set()  # processed beside the event loop
        self.in_engine: dict[str, None] = {}  # in the order in which they entered
        self.urgent: set[str] = set()  # those of the most urgent class in either of them
        self.cancelled: set[str] = set()  # cancelled before they were in the engine
        self.idle = asyncio.Event()  # set while no job is owned
        self.idle.set()

    def __len__(self) -> int:
        return len(self._deliveries)

    def __iter__(self) -> Iterator[Delivery]:
        return iter(list(self._deliveries.values()))

    def __contains__(self, delivery: Delivery) -> bool:
        """Is this delivery still owned: not lost, not given back, and not replaced by a later
        claim?
        """
        return self._deliveries.get(delivery.job_id) is delivery

    def get(self, job_id: str) -> Delivery | None:
        return self._deliveries.get(job_id)

    def delivery_of(self, finished: FinishedJob) -> Delivery | None:
        """Return the owned delivery that a finished job comes from; None if there is none."""
        delivery = self._deliveries.get(finished.result.job_id)
        return delivery if delivery is not None and delivery.token == finished.token else None

    def add(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self._deliveries[delivery.job_id] = delivery
        self.idle.clear()

    def prepare(self, delivery: Delivery, *, is_urgent: bool) -> None:
        """Note that a job is processed beside the event loop. It counts like one in the engine."""
        self.preparing.add(delivery.request_id)
        if is_urgent:
            self.urgent.add(delivery.request_id)

    def enter_engine(self, job: AdmittedJob) -> None:
        self.preparing.discard(job.request_id)
        self.in_engine[job.request_id] = None
        if not job.generation.priority:
            self.urgent.add(job.request_id)

    def leave_engine(self, delivery: Delivery) -> None:
        self.in_engine.pop(delivery.request_id, None)
        for requests in (self.preparing, self.urgent, self.cancelled):
            requests.discard(delivery.request_id)
        self._quarantine.ended(delivery.job_id)

    def forget(self, delivery: Delivery) -> None:
        if delivery not in self:
            return
        del self._deliveries[delivery.job_id]
        self.leave_engine(delivery)
        if not self._deliveries:
            self.idle.set()

    def leave(self, deliveries: Sequence[Delivery], reason: str) -> None:
        """Forget jobs that another worker may continue."""
        for delivery in deliveries:
            self.forget(delivery)
        self._observer.left([delivery.job_id for delivery in deliveries], reason)

    def split_suspects(self) -> tuple[list[Delivery], list[Delivery]]:
        """Return the jobs that were in the engine, which may have killed it, and all others. The
        quarantine forgets them all.
        """
        self._quarantine.clear()
        suspects = [d for d in self if d.request_id in self.in_engine]
        return suspects, [d for d in self if d.request_id not in self.in_engine]
