"""The running worker: passes each job from stage to stage, and decides what happens when a part fails.

    consumer ──Delivery──▶ admission ──▶ engine ──frames──▶ publisher ──Finished──▶ finalizer

The service owns the list of claimed jobs and nothing else; each stage does its own work. A lost engine is restarted and
its jobs go back to the queue as suspects. A lost lease drops every job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tokenmill.transport.cancellation import wait_at_most
from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.checking import Checks
from tokenmill_worker.consume.consumer import Credits
from tokenmill_worker.consume.input_processor import InputProcessor
from tokenmill_worker.consume.job_stream import JobStream
from tokenmill_worker.consume.quarantine import Quarantine
from tokenmill_worker.engine.process.host import EngineDied, EngineHost
from tokenmill_worker.engine.process.messages import Frame, Ready
from tokenmill_worker.engine.types import EngineStats
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
from tokenmill_worker.publish.fair_batches import EVENTS_AT_ONCE, in_turn
from tokenmill_worker.publish.publisher import Publisher
from tokenmill_worker.record.finalizer import Finalizer
from tokenmill_worker.telemetry.logs import log_progress

log = logging.getLogger(__name__)

# jobs claimed beyond the free places, so that the next step fills a place that becomes free
LOOKAHEAD = 4
HAND_OVER_S = 10.0  # limits the wait for a server that does not answer
RESTART_PAUSE_S = (0.0, 1.0, 5.0, 15.0, 30.0)


@dataclass(slots=True)
class Health:
    """The state that /healthz and the metrics read."""

    engine_ready: bool = False
    engine_restarts: int = 0
    stats: EngineStats = field(default_factory=EngineStats)


class Service:
    """The jobs of one worker, from the claim to the record."""

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
        self.health = Health()
        self._stream = stream
        self._host_factory = host_factory
        self._processor_factory = processor_factory
        self._publisher = publisher
        self._finalizer = finalizer
        self._checks = Checks(self._record)
        self._quarantine = Quarantine(max_num_seqs)
        self._events_at_once = max(
            EVENTS_AT_ONCE, max_num_seqs
        )  # the events of one step are never split
        self._held: dict[
            str, Delivery
        ] = {}  # owned jobs: claimed, and not yet finished or given back
        self._in_engine: set[str] = set()  # request ids
        self._deaths = 0  # consecutive deaths of engines
        self._urgent: set[str] = set()  # the request ids of the most urgent class
        self._retries: list[RetryOrder] = []
        self._host: EngineHost | None = None
        self._processor: InputProcessor | None = None
        self._on_frame = on_frame
        self._observer = observer or NullObserver()
        self.started = asyncio.Event()  # the engine has been ready once: jobs may be claimed
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    # ── claiming ──

    @property
    def num_held(self) -> int:
        return len(self._held)

    def credits(self) -> Credits:
        """Return how many more jobs could start soon: none if a buffer is full, suspects wait, or no engine is up."""
        if (
            not self.health.engine_ready
            or self._host is None
            or len(self._quarantine)
            or self._finalizer.is_full
            or self._publisher.is_full
            or self._checks.is_full
        ):
            return Credits()
        capacity = self._host.capacity
        in_flight = max(
            0, len(self._in_engine) - capacity.running - capacity.waiting
        )  # sent, not yet in a frame
        free = max(0, capacity.free_sequences + LOOKAHEAD - capacity.waiting - in_flight)
        return Credits(
            free, max(0, capacity.free_urgent - free - min(in_flight, len(self._urgent)))
        )

    async def take(self, deliveries: list[Delivery]) -> None:
        """Start the jobs that the consumer claimed."""
        for delivery in deliveries:
            self._held[delivery.job_id] = delivery
        self._observer.claimed(deliveries)
        self._idle.clear()
        ended = [
            delivery for delivery in deliveries if delivery.outcome != "run"
        ]  # they only have to be recorded
        try:
            await self._start(
                [
                    *ended,
                    *self._quarantine.release_suspects(
                        [d for d in deliveries if d.outcome == "run"]
                    ),
                ]
            )
        except Exception:  # the consumer gives them back to the queue
            held = [delivery for delivery in deliveries if self._is_held(delivery)]
            for delivery in held:
                self._stop_generating(delivery.request_id)
                self._publisher.close(delivery.request_id)
            self._leave(held, "crash")
            raise

    async def _start(self, deliveries: list[Delivery]) -> None:
        """Admit all jobs together and submit those that can run. A bad job gets an answer."""
        if self._processor is None or self._host is None:
            raise RuntimeError("jobs were claimed before the engine was there")
        admitted: list[AdmittedJob] = []
        outcomes = await asyncio.gather(
            *(self._processor.process(delivery) for delivery in deliveries)
        )
        for outcome in await self._finalizer.skip_recorded(outcomes):
            if isinstance(outcome, FinishedJob):
                await self._finish(outcome)
            elif self._is_held(outcome.delivery):
                admitted.append(outcome)
        if (
            not self.health.engine_ready
        ):  # the engine died during admission; these jobs never reached it
            await self._release([job.delivery for job in admitted], crash=False)
            return
        for job in admitted:
            self._publisher.open(job)
            self._in_engine.add(job.request_id)
            if not job.generation.priority:
                self._urgent.add(job.request_id)
        if admitted:
            self._observer.started(admitted)
            self._host.submit(job.generation for job in admitted)

    async def _finish(self, finished: FinishedJob) -> None:
        """Record a job's end. An answer with a schema is validated first; the job stays owned meanwhile."""
        if not self._checks.take(finished):
            await self._record(finished)
        elif (
            delivery := self._held.get(finished.result.job_id)
        ) is not None and delivery.token == finished.token:
            self._leave_engine(delivery)

    async def _record(self, finished: FinishedJob) -> None:
        delivery = self._held.get(finished.result.job_id)
        if delivery is not None and delivery.token == finished.token:
            self._forget(delivery)
        await self._finalizer.submit(finished)

    def _is_held(self, delivery: Delivery) -> bool:
        """Is this delivery still owned: not lost, not given back, and not replaced by a later claim?"""
        return self._held.get(delivery.job_id) is delivery

    def _forget(self, delivery: Delivery) -> None:
        if not self._is_held(delivery):
            return
        del self._held[delivery.job_id]
        self._leave_engine(delivery)
        if not self._held:
            self._idle.set()

    def _leave_engine(self, delivery: Delivery) -> None:
        self._in_engine.discard(delivery.request_id)
        self._urgent.discard(delivery.request_id)
        self._quarantine.ended(delivery.job_id)

    # ── frames ──

    async def run_engine(self) -> None:
        """Keep an engine running until stop(); replace one that dies or hangs. Raises EngineDied if none loads."""
        while not self._stopping.is_set():
            try:
                await self._start_engine()
                await self._pump()
            except EngineDied as death:
                self.health.engine_ready = False
                if (
                    self._in_engine and not death.any_step
                ):  # the suspects soon run in smaller groups
                    self._deaths = min(self._deaths, 1)
                self.health.stats = EngineStats()
                if self._host is not None:
                    await self._host.kill()
                if self._stopping.is_set():  # it was stopped while it started
                    return
                if death.at_start and not self.health.engine_restarts:
                    raise
                log.error("engine died: %s", death)
                await self._give_back_suspects()
                await wait_at_most(
                    self._stopping, RESTART_PAUSE_S[min(self._deaths, len(RESTART_PAUSE_S) - 1)]
                )
                self._deaths += 1
                self.health.engine_restarts += 1

    async def _start_engine(self) -> None:
        self._host = self._host_factory()
        ready = await self._host.start(log_progress)
        if self._processor is None:
            try:
                self._processor = await self._processor_factory(ready)
            except (
                OSError
            ) as error:  # files are unreadable, or were removed after the engine read them
                raise EngineDied(
                    f"the tokenizer cannot be loaded: {error}", at_start=True
                ) from error
        log.info("engine ready: %s", ready.description)
        self.health.engine_ready = True
        self.started.set()

    async def _pump(self) -> None:
        assert self._host is not None
        async for frame in self._host.frames():
            self.health.stats = frame.stats or self.health.stats
            if self._deaths > 1 and any(event.token_ids for event in frame.events):
                self._deaths = 1
            if frame.events or self._publisher.has_pending:
                for number, part in enumerate(
                    in_turn(frame.events, self._urgent, self._events_at_once)
                ):
                    if number:
                        await asyncio.sleep(0)
                    await self._act_on(await self._publisher.handle(part))
            if self._retries:
                await self._give_back_retries()
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

    async def _give_back_retries(self) -> None:
        """Give back failed jobs that may run again. While Redis is away they stay owned."""
        with contextlib.suppress(RedisUnavailable):
            while self._retries:
                order = self._retries[0]
                delivery = order.delivery
                if self._is_held(delivery):
                    await self._stream.retry(
                        delivery.job_id, delivery.token, order.delay_ms, order.reason
                    )
                    self._leave([delivery], "retry")
                self._retries.pop(0)

    # ── ends that come from outside ──

    def cancel(self, job_id: str) -> None:
        """Stop generating. The job ends through its last event, with the text that it has."""
        if (delivery := self._held.get(job_id)) is not None:
            self._stop_generating(delivery.request_id)

    def cancel_all(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            self.cancel(job_id)

    def drop(self, job_ids: Iterable[str]) -> None:
        """Stop jobs that another worker owns now, and write nothing more for them."""
        for job_id in job_ids:
            if (delivery := self._held.get(job_id)) is not None:
                self._drop(delivery)

    def _drop(self, delivery: Delivery) -> None:
        self._stop_generating(delivery.request_id)
        self._publisher.close(delivery.request_id)
        if self._is_held(delivery):
            log.warning("job %s is held by another worker now: dropped", delivery.job_id)
            self._leave([delivery], "lost")

    def _stop_generating(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.CANCELLED,
        choice: int | None = None,
    ) -> None:
        if self._host is not None:
            self._host.cancel(request_id, reason, choice)

    def _leave(self, deliveries: Sequence[Delivery], reason: str) -> None:
        """Forget jobs that another worker may continue."""
        for delivery in deliveries:
            self._forget(delivery)
        self._observer.left([delivery.job_id for delivery in deliveries], reason)

    def drop_all(self) -> None:
        """Drop every job, because the lease ran out while the process was frozen."""
        self.drop(list(self._held))

    async def _give_back_suspects(self) -> None:
        """Give back all jobs after an engine's death; jobs that were in the engine are suspects."""
        self._quarantine.clear()
        suspects = [d for d in self._held.values() if d.request_id in self._in_engine]
        innocents = [d for d in self._held.values() if d.request_id not in self._in_engine]
        while not self._stopping.is_set():
            try:
                await self._release(suspects, crash=True)
                await self._release(innocents, crash=False)
                return
            except RedisUnavailable:
                await wait_at_most(self._stopping, 1.0)

    async def _release(self, deliveries: list[Delivery], *, crash: bool) -> None:
        """Give jobs back to the queue with their logs. Raises RedisUnavailable; may be repeated."""
        for delivery in deliveries:
            self._publisher.close(delivery.request_id)
        if deliveries:
            await self._stream.release([(d.job_id, d.token, crash) for d in deliveries])
        self._leave(deliveries, "crash" if crash else "handed_over")

    # ── the end ──

    async def drain(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Let running jobs end within the grace period (or until `hurry`); hand the rest over as they are."""
        waits = [asyncio.create_task(self._idle.wait()), asyncio.create_task(hurry.wait())]
        await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        await self._hand_over()

    async def _hand_over(self) -> None:
        """Append all pending chunks, ignore further events, then stop the jobs in the engine. In another order the
        engine's end events would end the jobs."""
        if not self._held:
            return
        log.info("handing over %d running jobs", len(self._held))
        try:
            async with asyncio.timeout(HAND_OVER_S):
                await self._act_on(await self._publisher.flush())
                deliveries = list(self._held.values())
                for delivery in deliveries:
                    self._publisher.close(delivery.request_id)
                    self._stop_generating(delivery.request_id)
                await self._release(deliveries, crash=False)
        except (RedisUnavailable, TimeoutError) as error:
            log.warning(
                "the jobs are free when the lease has run out, for Redis does not answer: %s", error
            )

    async def stop(self) -> None:
        """Stop the engine; `run_engine` returns."""
        self._stopping.set()
        await self._checks.close(HAND_OVER_S)
        if self._host is not None:
            await self._host.stop()
