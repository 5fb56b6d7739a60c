"""Passes each job of the running worker from stage to stage, and decides what happens when a part
fails.

    consumer ──Delivery──▶ input processor ──AdmittedJob──▶ engine ──Frame──▶ publisher
                                                                                  │
                                         finalizer ◀──FinishedJob── checks ◀──────┘

The service owns the list of claimed jobs; each stage does its own work. A dead engine is replaced,
and its jobs go back to the queue as suspects. After a lost lease, every job is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from tokenmill.transport.cancellation import wait_at_most
from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.checking import Checks
from tokenmill_worker.consume.credits import Credits
from tokenmill_worker.consume.input_processor import InputProcessor
from tokenmill_worker.consume.job_stream import JobStream
from tokenmill_worker.consume.quarantine import Quarantine
from tokenmill_worker.engine.process.host import EngineDied, EngineHost
from tokenmill_worker.engine.process.messages import Frame, Ready
from tokenmill_worker.errors import RedisUnavailable
from tokenmill_worker.jobs import (
    AdmittedJob,
    Delivery,
    FinishedJob,
    JobObserver,
    NullObserver,
    PublishReport,
    RetryOrder,
)
from tokenmill_worker.publish.fair_batches import EVENTS_AT_ONCE, split_batches
from tokenmill_worker.publish.publisher import Publisher
from tokenmill_worker.record.finalizer import Finalizer
from tokenmill_worker.supervisor import EngineSupervisor

log = logging.getLogger(__name__)

# Jobs claimed beyond the free places, so that the next step fills a place that becomes free.
LOOKAHEAD = 4
HAND_OVER_S = 10.0  # limits the wait for a server that does not answer
RELEASE_RETRY_S = 1.0


class Service:
    """Owns the jobs of one worker, from the claim to the record."""

    def __init__(
        self,
        *,
        stream: JobStream,
        host_factory: Callable[[], EngineHost],
        processor_factory: Callable[[Ready], Awaitable[InputProcessor]],
        publisher: Publisher,
        finalizer: Finalizer,
        max_num_seqs: int,
        on_frame: Callable[[Frame], None] = lambda _frame: None,
        observer: JobObserver | None = None,
    ) -> None:
        self.supervisor = EngineSupervisor(
            host_factory,
            on_ready=self._prepare,
            on_frame=self._handle_frame,
            on_death=self._release_suspects,
            has_requests=lambda: bool(self._in_engine),
        )
        self.health = self.supervisor.health
        self.started = self.supervisor.started
        self._stream = stream
        self._processor_factory = processor_factory
        self._publisher = publisher
        self._finalizer = finalizer
        self._checks = Checks(self._record)
        self._quarantine = Quarantine(max_num_seqs)
        # The events of one step are never split.
        self._events_at_once = max(EVENTS_AT_ONCE, max_num_seqs)
        self._owned: dict[str, Delivery] = {}  # claimed, and not yet finished or given back
        self._in_engine: set[str] = set()  # request ids
        self._urgent: set[str] = set()  # the request ids of the most urgent class
        self._retries: list[RetryOrder] = []
        self._processor: InputProcessor | None = None
        self._on_frame = on_frame
        self._observer = observer or NullObserver()
        self._idle = asyncio.Event()
        self._idle.set()

    # ── from the claim to the engine ──

    def credits(self) -> Credits:
        """Return how many more jobs could start soon: none if a buffer is full, suspects wait, or
        no engine is ready.
        """
        host = self.supervisor.host
        if (
            not self.health.engine_ready
            or host is None
            or len(self._quarantine)
            or self._finalizer.is_full
            or self._publisher.is_full
            or self._checks.is_full
        ):
            return Credits()
        capacity = host.capacity
        # Requests that were sent, and that no frame has counted yet.
        in_flight = max(0, len(self._in_engine) - capacity.running - capacity.waiting)
        free = max(0, capacity.free_sequences + LOOKAHEAD - capacity.waiting - in_flight)
        urgent = max(0, capacity.free_urgent - free - min(in_flight, len(self._urgent)))
        return Credits(free, urgent)

    async def take(self, deliveries: list[Delivery]) -> None:
        """Start the jobs that the consumer claimed. On an error the consumer gives them back."""
        for delivery in deliveries:
            self._owned[delivery.job_id] = delivery
        self._observer.claimed(deliveries)
        self._idle.clear()
        ended = [delivery for delivery in deliveries if delivery.outcome != "run"]
        runnable = [delivery for delivery in deliveries if delivery.outcome == "run"]
        try:
            await self._start([*ended, *self._quarantine.release_suspects(runnable)])
        except Exception:
            owned = [delivery for delivery in deliveries if self._is_owned(delivery)]
            for delivery in owned:
                self._stop_generating(delivery.request_id)
                self._publisher.close(delivery.request_id)
            self._leave(owned, "crash")
            raise

    async def _start(self, deliveries: list[Delivery]) -> None:
        """Process all jobs together, and submit those that can run to the engine."""
        processor = self._processor
        if processor is None or self.supervisor.host is None:
            raise RuntimeError("jobs were claimed before the engine was there")
        outcomes = await asyncio.gather(*(processor.process(delivery) for delivery in deliveries))
        admitted: list[AdmittedJob] = []
        for outcome in await self._finalizer.skip_recorded(outcomes):
            if isinstance(outcome, FinishedJob):
                await self._finish(outcome)
            elif self._is_owned(outcome.delivery):
                admitted.append(outcome)
        if not self.health.engine_ready:  # the engine died meanwhile and never had these jobs
            await self._release([job.delivery for job in admitted], crash=False)
            return
        for job in admitted:
            self._publisher.open(job)
            self._in_engine.add(job.request_id)
            if not job.generation.priority:
                self._urgent.add(job.request_id)
        if admitted:
            self._observer.started(admitted)
            self.supervisor.host.submit(job.generation for job in admitted)

    # ── from the engine to the record ──

    async def run_engine(self) -> None:
        """Keep an engine running until stop(). Raises EngineDied if the first one does not load."""
        await self.supervisor.run()

    async def _prepare(self, ready: Ready) -> None:
        """Create the input processor when the first engine is ready."""
        if self._processor is None:
            try:
                self._processor = await self._processor_factory(ready)
            except OSError as error:  # files were removed after the engine had read them
                message = f"the tokenizer cannot be loaded: {error}"
                raise EngineDied(message, at_start=True) from error

    async def _handle_frame(self, frame: Frame) -> None:
        """Publish a frame's events, in batches if steps piled up, and act on the results."""
        if frame.events or self._publisher.has_pending:
            batches = split_batches(frame.events, self._urgent, self._events_at_once)
            for number, batch in enumerate(batches):
                if number:
                    await asyncio.sleep(0)
                await self._act_on(await self._publisher.handle(batch))
        if self._retries:
            await self._retry_failed()
        if len(self._quarantine):
            await self._start(self._quarantine.release_suspects([]))
        self._observer.stepped(frame)
        self._on_frame(frame)

    async def _act_on(self, report: PublishReport) -> None:
        for finished in report.finished:
            await self._finish(finished)
        for cancel in report.cancel:
            self._stop_generating(cancel.request_id, cancel.reason, cancel.choice)
        for delivery in report.lost:
            self._drop(delivery)
        self._retries += report.retry

    async def _finish(self, finished: FinishedJob) -> None:
        """Record a job's end. An answer with a schema is validated first; the job stays owned
        meanwhile.
        """
        if not self._checks.take(finished):
            await self._record(finished)
        elif (delivery := self._owned_by(finished)) is not None:
            self._leave_engine(delivery)

    async def _record(self, finished: FinishedJob) -> None:
        if (delivery := self._owned_by(finished)) is not None:
            self._forget(delivery)
        await self._finalizer.submit(finished)

    async def _retry_failed(self) -> None:
        """Give back failed jobs that may run again. While Redis does not answer they stay owned."""
        with contextlib.suppress(RedisUnavailable):
            while self._retries:
                order = self._retries[0]
                delivery = order.delivery
                if self._is_owned(delivery):
                    await self._stream.retry(
                        delivery.job_id, delivery.token, order.delay_ms, order.reason
                    )
                    self._leave([delivery], "retry")
                self._retries.pop(0)

    # ── owned jobs ──

    def _is_owned(self, delivery: Delivery) -> bool:
        """Is this delivery still owned: not lost, not given back, and not replaced by a later
        claim?
        """
        return self._owned.get(delivery.job_id) is delivery

    def _owned_by(self, finished: FinishedJob) -> Delivery | None:
        """Return the owned delivery that a finished job comes from; None if there is none."""
        delivery = self._owned.get(finished.result.job_id)
        return delivery if delivery is not None and delivery.token == finished.token else None

    def _forget(self, delivery: Delivery) -> None:
        if not self._is_owned(delivery):
            return
        del self._owned[delivery.job_id]
        self._leave_engine(delivery)
        if not self._owned:
            self._idle.set()

    def _leave_engine(self, delivery: Delivery) -> None:
        self._in_engine.discard(delivery.request_id)
        self._urgent.discard(delivery.request_id)
        self._quarantine.ended(delivery.job_id)

    def _leave(self, deliveries: Sequence[Delivery], reason: str) -> None:
        """Forget jobs that another worker may continue."""
        for delivery in deliveries:
            self._forget(delivery)
        self._observer.left([delivery.job_id for delivery in deliveries], reason)

    # ── ends that come from outside ──

    def cancel(self, job_id: str) -> None:
        """Stop generating. The job ends through its last event, with the text that it has."""
        if (delivery := self._owned.get(job_id)) is not None:
            self._stop_generating(delivery.request_id)

    def cancel_all(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            self.cancel(job_id)

    def drop(self, job_ids: Iterable[str]) -> None:
        """Stop jobs that another worker owns now, and write nothing more for them."""
        for job_id in job_ids:
            if (delivery := self._owned.get(job_id)) is not None:
                self._drop(delivery)

    def drop_all(self) -> None:
        """Drop every job, because the lease ran out while the process was frozen."""
        self.drop(list(self._owned))

    def _drop(self, delivery: Delivery) -> None:
        self._stop_generating(delivery.request_id)
        self._publisher.close(delivery.request_id)
        if self._is_owned(delivery):
            log.warning("dropped job %s: another worker owns it now", delivery.job_id)
            self._leave([delivery], "lost")

    def _stop_generating(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.CANCELLED,
        choice: int | None = None,
    ) -> None:
        if self.supervisor.host is not None:
            self.supervisor.host.cancel(request_id, reason, choice)

    async def _release_suspects(self) -> None:
        """Give back all jobs after an engine's death; jobs that were in the engine are suspects."""
        self._quarantine.clear()
        suspects = [d for d in self._owned.values() if d.request_id in self._in_engine]
        others = [d for d in self._owned.values() if d.request_id not in self._in_engine]
        while not self.supervisor.stopping.is_set():
            try:
                await self._release(suspects, crash=True)
                await self._release(others, crash=False)
                return
            except RedisUnavailable:
                await wait_at_most(self.supervisor.stopping, RELEASE_RETRY_S)

    async def _release(self, deliveries: list[Delivery], *, crash: bool) -> None:
        """Give jobs back to the queue with their logs. Raises RedisUnavailable; may be repeated."""
        for delivery in deliveries:
            self._publisher.close(delivery.request_id)
        if deliveries:
            await self._stream.release([(d.job_id, d.token, crash) for d in deliveries])
        self._leave(deliveries, "crash" if crash else "handed_over")

    # ── the end ──

    async def drain(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Let jobs end within the grace period, or until `hurry`; then hand the others over."""
        waits = [asyncio.create_task(self._idle.wait()), asyncio.create_task(hurry.wait())]
        await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        await self._hand_over()

    async def _hand_over(self) -> None:
        """Append all pending chunks, ignore further events, then stop the jobs in the engine. In
        another order the engine's end events would end the jobs.
        """
        if not self._owned:
            return
        log.info("handing over %d running jobs", len(self._owned))
        try:
            async with asyncio.timeout(HAND_OVER_S):
                await self._act_on(await self._publisher.flush())
                deliveries = list(self._owned.values())
                for delivery in deliveries:
                    self._publisher.close(delivery.request_id)
                    self._stop_generating(delivery.request_id)
                await self._release(deliveries, crash=False)
        except (RedisUnavailable, TimeoutError) as error:
            log.warning(
                "Redis does not answer; %d jobs stay claimed until this worker's lease expires: %s",
                len(self._owned),
                error,
            )

    async def stop(self) -> None:
        """Stop the engine; `run_engine` returns."""
        self.supervisor.stopping.set()
        await self._checks.close(HAND_OVER_S)
        await self.supervisor.stop()
