"""Passes each job of the running worker from stage to stage, and decides what happens when a part
fails.

    consumer ──Delivery──▶ preparation ──AdmittedJob──▶ engine ──Frame──▶ publisher
                                                                              │
                                     finalizer ◀──FinishedJob── checks ◀──────┘

`owned_jobs.py` has the claimed jobs, `early_ends.py` what ends one before its answer is complete.
A job whose content makes a stage raise is set aside: it ends as failed, and the others go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tokenmill_worker.checking import Checks
from tokenmill_worker.contract.host import EngineDied, EngineHost
from tokenmill_worker.contract.messages import Frame, Ready
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.jobs import (
    Delivery,
    FinishedJob,
    JobObserver,
    PublishReport,
    set_aside,
)
from tokenmill_worker.publish.publisher import EVENTS_AT_ONCE, Publisher, split_batches
from tokenmill_worker.queue.consumer import Credits, credits_of
from tokenmill_worker.queue.job_stream import JobStream
from tokenmill_worker.record.finalizer import Finalizer
from tokenmill_worker.service.early_ends import HAND_OVER_S, EarlyEnds
from tokenmill_worker.service.owned_jobs import OwnedJobs
from tokenmill_worker.service.preparation import Entrance, Preparation
from tokenmill_worker.service.quarantine import Quarantine
from tokenmill_worker.supervisor import EngineSupervisor

log = logging.getLogger(__name__)


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
        on_frame: Callable[[Frame], None] = lambda _frame: None,
        observer: JobObserver | None = None,
    ) -> None:
        self.supervisor = EngineSupervisor(host_factory)
        self.health = self.supervisor.health
        self.started = self.supervisor.started
        self._stream = stream
        self._processor_factory = processor_factory
        self._publisher = publisher
        self._finalizer = finalizer
        self._checks = Checks(self._record)
        self._quarantine = Quarantine()
        self._observer = observer or JobObserver()
        self._owned = OwnedJobs(self._quarantine, self._observer)
        self.ends = EarlyEnds(self._owned, stream, publisher, self.supervisor)
        self.entrance = Entrance(
            self._owned,
            self.ends,
            publisher,
            finalizer,
            self.supervisor,
            self._observer,
            self._finish,
        )
        self._preparation = Preparation(self._owned, self.entrance, self.ends.give_back)
        self._on_frame = on_frame

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in the running batch; 1 until an engine is ready."""
        return self._quarantine.max_num_seqs

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
        owned = self._owned
        return credits_of(host.capacity, owned.in_engine, owned.preparing, owned.urgent)

    async def take(self, deliveries: list[Delivery]) -> None:
        """Start the jobs that the consumer claimed, without waiting for those with much to read. On
        an error the consumer gives them back.
        """
        self.ends.drop_replaced(deliveries)
        self._owned.add(deliveries)
        self._observer.claimed(deliveries)
        ended = [delivery for delivery in deliveries if delivery.outcome != "run"]
        runnable = [delivery for delivery in deliveries if delivery.outcome == "run"]
        try:
            await self._preparation.start([*ended, *self._quarantine.admit(runnable)])
        except Exception:
            self.ends.abandon(deliveries)
            raise

    # ── from the engine to the record ──

    async def run_engine(self) -> None:
        """Keep an engine running until stop(). Raises EngineDied if the first one does not load."""
        await self.supervisor.run(
            on_ready=self._prepare,
            on_frame=self._handle_frame,
            on_death=self.ends.release_suspects,
            has_requests=lambda: bool(self._owned.in_engine),
        )

    async def _prepare(self, ready: Ready) -> None:
        """Create the input processor when the first engine is ready."""
        self._quarantine.max_num_seqs = ready.max_num_seqs
        if self.entrance.processor is None:
            try:
                self.entrance.processor = await self._processor_factory(ready)
            except OSError as error:  # files were removed after the engine had read them
                message = f"the tokenizer cannot be loaded: {error}"
                raise EngineDied(message, at_start=True) from error

    async def _handle_frame(self, frame: Frame) -> None:
        """Publish a frame's events, in batches if steps piled up, and act on the results."""
        if frame.events or self._publisher.has_pending:
            at_once = max(EVENTS_AT_ONCE, self.max_num_seqs)  # the events of one step stay together
            batches = split_batches(frame.events, self._owned.urgent, at_once)
            for number, batch in enumerate(batches):
                if number:
                    await asyncio.sleep(0)
                await self._act_on(await self._publisher.handle(batch))
        await self.ends.retry_failed()
        if len(self._quarantine):
            await self._start_suspects(self._quarantine.release_suspects([]))
        self._observer.stepped(frame)
        self._on_frame(frame)

    async def _start_suspects(self, deliveries: list[Delivery]) -> None:
        try:
            await self._preparation.start(deliveries)
        except Exception as error:
            await self.ends.give_back(deliveries, error)

    async def _act_on(self, report: PublishReport) -> None:
        for finished in report.finished:
            await self._finish(finished)
        for cancel in report.cancel:
            self.ends.stop_generating(cancel.request_id, cancel.reason, cancel.choice)
        for delivery in report.lost:
            self.ends.drop(delivery)
        self.ends.retries += report.retry

    async def _finish(self, finished: FinishedJob) -> None:
        """Record a job's end. An answer with a schema is validated first; the job stays owned
        meanwhile.
        """
        try:
            is_checked = self._checks.take(finished)
        except Exception as error:
            log.exception("Job %s fails: its answer could not be checked", finished.job_id)
            finished, is_checked = set_aside(finished, "check the answer of", error), False
        if not is_checked:
            await self._record(finished)
        elif (delivery := self._owned.delivery_of(finished)) is not None:
            self._owned.leave_engine(delivery)

    async def _record(self, finished: FinishedJob) -> None:
        if (delivery := self._owned.delivery_of(finished)) is not None:
            self._owned.forget(delivery)
        await self._finalizer.submit(finished)

    # ── the end ──

    async def drain(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Let jobs end within the grace period, or until `hurry`; then hand the others over."""
        waits = [asyncio.create_task(self._owned.idle.wait()), asyncio.create_task(hurry.wait())]
        await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        self._preparation.close()  # a job that enters now would run here and at another worker
        await self.ends.hand_over(self._flush)

    async def _flush(self) -> None:
        await self._act_on(await self._publisher.flush())

    async def stop(self) -> None:
        """Stop the engine; `run_engine` returns."""
        self.supervisor.stopping.set()
        self._preparation.close()
        await self._checks.close(HAND_OVER_S)
        await self.supervisor.stop()
