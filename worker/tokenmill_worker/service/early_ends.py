"""Ends jobs in this worker before their answer is complete: cancelled, lost, or given back.

A dead engine's jobs go back to the queue as suspects. After a lost lease, every job is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable

from tokenmill.transport.repairs import wait_at_most
from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.errors import RedisUnavailable
from tokenmill_worker.jobs import Delivery, RetryOrder
from tokenmill_worker.publish.publisher import Publisher
from tokenmill_worker.queue.job_stream import JobStream
from tokenmill_worker.service.owned_jobs import OwnedJobs
from tokenmill_worker.supervisor import EngineSupervisor

log = logging.getLogger(__name__)

HAND_OVER_S = 10.0  # limits the wait for a server that does not answer
RELEASE_RETRY_S = 1.0


class EarlyEnds:
    """Stops jobs in engine and publisher, and gives back those that another worker continues."""

    def __init__(
        self,
        owned: OwnedJobs,
        stream: JobStream,
        publisher: Publisher,
        supervisor: EngineSupervisor,
    ) -> None:
        self._owned = owned
        self._stream = stream
        self._publisher = publisher
        self._supervisor = supervisor
        self.retries: list[RetryOrder] = []  # failed jobs that may run again

    def cancel(self, job_id: str) -> None:
        """Stop generating. The job ends through its last event, with the text that it has. A job
        that is not in the engine yet ends when it would enter.
        """
        delivery = self._owned.get(job_id)
        if delivery is None:
            return
        if delivery.request_id in self._owned.in_engine:
            self.stop_generating(delivery.request_id)
        else:
            self._owned.cancelled.add(delivery.request_id)

    def cancel_all(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            self.cancel(job_id)

    def drop_lost(self, job_ids: Iterable[str]) -> None:
        """Stop jobs that this worker does not own any more, and write nothing more for them."""
        for job_id in job_ids:
            if (delivery := self._owned.get(job_id)) is not None:
                self.drop(delivery)

    def drop_all(self) -> None:
        """Drop every job, because the lease ran out while the process was frozen."""
        for delivery in self._owned:
            self.drop(delivery)

    def drop_replaced(self, deliveries: Iterable[Delivery]) -> None:
        """Drop earlier deliveries of jobs that were claimed again. After an outage longer than the
        lease, the claim may come before the heartbeat that tells which jobs were lost.
        """
        self.drop_lost(delivery.job_id for delivery in deliveries)

    def drop(self, delivery: Delivery) -> None:
        self.stop_generating(delivery.request_id)
        self._publisher.close(delivery.request_id)
        if delivery in self._owned:
            log.warning("Dropped job %s: this worker does not own it any more", delivery.job_id)
            self._owned.leave([delivery], "lost")

    def abandon(self, deliveries: list[Delivery]) -> None:
        """Stop jobs whose start failed; the consumer gives them back."""
        owned = [delivery for delivery in deliveries if delivery in self._owned]
        for delivery in owned:
            self.stop_generating(delivery.request_id)
            self._publisher.close(delivery.request_id)
        self._owned.leave(owned, "crash")

    def stop_generating(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.CANCELLED,
        choice: int | None = None,
    ) -> None:
        if self._supervisor.host is not None:
            self._supervisor.host.cancel(request_id, reason, choice)

    async def retry_failed(self) -> None:
        """Give back failed jobs that may run again. While Redis does not answer they stay owned."""
        with contextlib.suppress(RedisUnavailable):
            while self.retries:
                order = self.retries[0]
                delivery = order.delivery
                if delivery in self._owned:
                    await self._stream.retry(
                        delivery.job_id, delivery.token, order.delay_ms, order.reason
                    )
                    self._owned.leave([delivery], "retry")
                self.retries.pop(0)

    async def release(
        self, deliveries: list[Delivery], *, crash: bool, alone: bool = False
    ) -> None:
        """Give jobs back to the queue with their logs. `alone`: no other job can have caused the
        crash. Raises RedisUnavailable; may be repeated.
        """
        for delivery in deliveries:
            self._publisher.close(delivery.request_id)
        if deliveries:
            await self._stream.release(
                [(d.job_id, d.token, crash) for d in deliveries], alone=alone
            )
        self._owned.leave(deliveries, "crash" if crash else "handed_over")

    async def release_suspects(self) -> None:
        """Give back all jobs after an engine's death; jobs that were in the engine are suspects."""
        suspects, others = self._owned.split_suspects()
        await self._release_patiently(suspects, crash=True)
        await self._release_patiently(others, crash=False)

    async def give_back(self, deliveries: list[Delivery], error: Exception) -> None:
        """Give back jobs that could not be started together; as suspects, unless the queue was
        away.
        """
        is_away = isinstance(error, RedisUnavailable)
        for delivery in deliveries:
            if not is_away:
                log.error(
                    "Job %s could not be started; it returns to the queue as a suspect",
                    delivery.job_id,
                    exc_info=error,
                )
            self.stop_generating(delivery.request_id)
        await self._release_patiently(deliveries, crash=not is_away)

    async def _release_patiently(self, deliveries: list[Delivery], *, crash: bool) -> None:
        """Give back jobs as soon as the queue takes them. Some may leave this worker before that;
        a suspect is alone only if it was from the start.
        """
        alone = len(deliveries) == 1
        while not self._supervisor.stopping.is_set():
            try:
                owned = [delivery for delivery in deliveries if delivery in self._owned]
                await self.release(owned, crash=crash, alone=alone)
                return
            except RedisUnavailable:
                await wait_at_most(self._supervisor.stopping, RELEASE_RETRY_S)

    async def hand_over(self, flush: Callable[[], Awaitable[None]]) -> None:
        """Append all pending chunks, ignore further events, then stop the jobs in the engine. In
        another order the engine's end events would end the jobs.
        """
        if not self._owned:
            return
        log.info("Handing over %d running jobs to other workers", len(self._owned))
        try:
            async with asyncio.timeout(HAND_OVER_S):
                await flush()
                deliveries = list(self._owned)
                for delivery in deliveries:
                    self._publisher.close(delivery.request_id)
                    self.stop_generating(delivery.request_id)
                await self.release(deliveries, crash=False)
        except (RedisUnavailable, TimeoutError) as error:
            log.warning(
                "Redis does not answer; %d jobs stay claimed until this worker's lease expires: %s",
                len(self._owned),
                error,
            )
