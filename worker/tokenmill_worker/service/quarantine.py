"""Decides which jobs may run together after an engine crash: suspects run in ever smaller groups,
until the job that causes the crash runs alone.

A job that was in the engine when it died has a crash count. A job with c crashes may only run in a
batch of at most max_num_seqs / 2^c jobs, so that log2(max_num_seqs) crashes leave it alone. A job
that crashed alone stays alone. Without a suspect among them, any number of jobs may be in the
engine: some wait there, and urgent jobs take the places of others. The module returns the
deliveries that may start now, and calls neither queue nor engine.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from tokenmill_worker.jobs import Delivery

_ANY: Final = sys.maxsize


@dataclass(slots=True)
class Quarantine:
    """Holds suspects back. While it holds any, nothing new should be claimed."""

    max_num_seqs: int = 1
    _held: deque[Delivery] = field(default_factory=deque)
    # Job id → the largest batch that it may be in.
    _running: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def limit(self, delivery: Delivery) -> int:
        """Return the size of the largest batch that this job may be in."""
        if delivery.alone:
            return 1
        return max(1, self.max_num_seqs >> delivery.crashes) if delivery.crashes else _ANY

    def admit(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Return the deliveries of a claim that may start now. While those of an earlier claim are
        held, none starts: a caller whose start fails gives back its own claim only.
        """
        if not self._held:
            return self.release_suspects(deliveries)
        self._held.extend(deliveries)
        return []

    def release_suspects(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Add deliveries to those held. Returns the ones that may start now; the others are held in
        order.
        """
        self._held.extend(deliveries)
        started: list[Delivery] = []
        while self._held and self._fits(self._held[0]):
            delivery = self._held.popleft()
            self._running[delivery.job_id] = self.limit(delivery)
            started.append(delivery)
        return started

    def _fits(self, delivery: Delivery) -> bool:
        size = len(self._running) + 1
        tightest = min(self._running.values(), default=_ANY)
        return size <= min(tightest, self.limit(delivery))

    def ended(self, job_id: str) -> None:
        """Forget a job that has left this worker, whether it ran or was held."""
        if self._running.pop(job_id, None) is None and self._held:
            self._held = deque(delivery for delivery in self._held if delivery.job_id != job_id)

    def clear(self) -> None:
        """Forget all jobs, those held and those that run."""
        self._held.clear()
        self._running.clear()
