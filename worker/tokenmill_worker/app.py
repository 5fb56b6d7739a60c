"""Builds the stages of a worker, starts them in order, and ends them in order.

    start:  SQL checked · queue opened · engine loaded · record · lease · control · claim
    end:    claiming stops · running jobs finish or are handed over · results recorded · lease ended

SIGTERM drains; a second signal, or SIGINT, hands over at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

from tokenmill import AsyncClient
from tokenmill.transport.connect import Link, connect_async, parse_url
from tokenmill.transport.repairs import end_task, wait_at_most
from tokenmill.transport.server_clock import ServerClock
from tokenmill_schemas.keys import Keys
from tokenmill_worker.builders import engine_host, input_processor, open_tracing, stream_options
from tokenmill_worker.contract.host import EngineHost
from tokenmill_worker.errors import Unavailable
from tokenmill_worker.jobs import FinishedJob
from tokenmill_worker.publish.publisher import Publisher, PublishLimits
from tokenmill_worker.queue.consumer import Consumer
from tokenmill_worker.queue.job_stream import JobStream
from tokenmill_worker.queue.leases import ControlChannel, LeaseKeeper
from tokenmill_worker.record.finalizer import Finalizer
from tokenmill_worker.record.result_store import ResultStore
from tokenmill_worker.service import Service
from tokenmill_worker.settings import Settings
from tokenmill_worker.telemetry import HealthServer, Metrics, configure_logging
from tokenmill_worker.telemetry.job_telemetry import JobTelemetry
from tokenmill_worker.telemetry.queue_metrics import QueueMetrics, queue_samples
from tokenmill_worker.telemetry.worker_status import StatusReporter, WorkerParts

log = logging.getLogger(__name__)

REDIS_LINK = Link(timeout_s=5.0, connect_timeout_s=5.0)
STARTUP_LIMIT_S = 60.0
RECORD_DRAIN_S = 20.0  # after the drain, finished jobs may be recorded for this long
RESIGN_S = 5.0


def run(settings: Settings) -> int:
    """Serve until a signal; returns the exit status. Raises SettingsError, SchemaOutdated,
    EngineDied.
    """
    context = (
        {"worker": settings.worker_name, "queue": settings.queue_name}
        if settings.log_format == "json"
        else {}
    )
    configure_logging(
        settings.log_level, settings.log_format, with_private=settings.log_prompts, context=context
    )
    return asyncio.run(Worker(settings, has_process=True).serve())


class Worker:
    """Runs one worker. `host_factory` replaces the engine process (tests run the engine in a
    thread). `stream_type` and `store_type` may be types that fail on purpose. `has_process`:
    nothing else runs in this process.
    """

    def __init__(
        self,
        settings: Settings,
        host_factory: Callable[[], EngineHost] | None = None,
        *,
        stream_type: type[JobStream] = JobStream,
        store_type: type[ResultStore] = ResultStore,
        has_process: bool = False,
    ) -> None:
        self.settings = settings
        self._has_process = has_process
        self.ready = asyncio.Event()
        self.health_port: int | None = None  # the port of /metrics, once it is served
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._host_factory = host_factory or partial(
            engine_host, settings, settings.engine_config()
        )
        self.metrics = Metrics(settings.queue_name, settings.model)
        self._tracing = open_tracing(settings)
        clock = ServerClock()
        observer = self._observer = JobTelemetry(
            self.metrics,
            self._tracing,
            queue=settings.queue_name,
            worker_id=settings.worker_name,
            clock_ns=clock.now_ns,
        )
        keys = Keys(settings.queue_name, settings.key_prefix)
        sharded = parse_url(settings.redis_url).is_cluster
        self._redis = connect_async(settings.redis_url, REDIS_LINK)
        self._redis_control = connect_async(settings.redis_url, REDIS_LINK)
        self.stream = stream_type(
            self._redis,
            keys,
            settings.worker_name,
            stream_options(settings),
            sharded=sharded,
            clock=clock,
            observer=observer,
        )
        self._store = store_type(
            settings.database_url, queue=settings.queue_name, with_prompts=settings.record_prompts
        )
        self._finalizer = Finalizer(
            self._store,
            self.stream,
            on_recorded=self._recorded,
        )
        self._publisher = Publisher(
            self.stream,
            worker_id=settings.worker_name,
            model=settings.model,
            limits=PublishLimits(chunk_tokens=settings.chunk_tokens),
            clock=clock,
        )
        self.service = Service(
            stream=self.stream,
            host_factory=self._host_factory,
            processor_factory=partial(input_processor, settings, clock),
            publisher=self._publisher,
            finalizer=self._finalizer,
            on_frame=lambda _frame: self._note_frame(),
            observer=observer,
        )
        self._consumer = Consumer(
            self.stream,
            self.service.credits,
            self.service.take,
            on_claim=self._note_claim,
        )
        self._lease = LeaseKeeper(
            self.stream,
            interval_s=settings.lease_seconds / 3,
            on_cancelled=self.service.ends.cancel_all,
            on_lost=self.service.ends.drop_lost,
            on_expired=self._expired,
        )
        self._control = ControlChannel(
            self._redis_control,
            keys,
            settings.worker_name,
            on_wake_all=self._consumer.wake,
            on_wake_up=self._consumer.answer_wake_up,
            on_cancel=self.service.ends.cancel,
            on_drain=self.drain,
        )
        parts = WorkerParts(
            settings,
            self.service,
            self.stream,
            self._lease,
            self._publisher,
            self._finalizer,
            observer,
        )
        self.reporter = StatusReporter(parts, is_stopping=self._stop.is_set)

    # ── life ──

    def drain(self) -> None:
        """Act as on SIGTERM: the first call drains, the second hands over at once."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def end_now(self) -> None:
        """Act as on SIGINT: hand every job over at once."""
        self._stop.set()
        self._hurry.set()

    async def serve(self) -> int:
        """Serve until drained. Raises errors that make a start pointless: wrong settings, an old
        schema, a broken model.
        """
        loop = asyncio.get_running_loop()
        # Signals cannot be handled outside the main thread, as in tests.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            loop.add_signal_handler(signal.SIGTERM, self.drain)
            loop.add_signal_handler(signal.SIGINT, self.end_now)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._redis.aclose)
            undo.push_async_callback(self._redis_control.aclose)
            undo.push_async_callback(self._store.close)
            if self._tracing is not None:
                undo.push_async_callback(asyncio.to_thread, self._tracing.close)
            await self._serve_metrics(undo)
            if await self._patiently(self._store.check) and await self._patiently(self.stream.open):
                await self._run_stages()
        log.info("Worker stopped")
        return 0

    async def _run_stages(self) -> None:
        engine = asyncio.create_task(self.service.run_engine(), name="engine")
        engine.add_done_callback(lambda _task: self.end_now())  # no owned job can go on
        async with (
            background(self._finalizer.run(), self._stop),
            background(self._lease.run(self.reporter.status), self._stop),
            background(self.stream.server.run(), self._stop),
            background(self._control.run(), self._stop),
        ):
            await _first(self.service.started, self._stop)
            async with background(self._claim(), self._stop):
                await self._stop.wait()
                if self.service.started.is_set():
                    log.info("Shutting down: this worker claims no more jobs")
                await self._consumer.stop()
            await self.service.drain(self.settings.drain_seconds, self._hurry)
            await self.service.stop()
            await self._finalizer.drain(RECORD_DRAIN_S)
        with contextlib.suppress(Unavailable, TimeoutError):  # the lease expires by itself
            async with asyncio.timeout(RESIGN_S):
                await self.stream.resign()
        await engine  # raises the engine's error, if it failed

    async def _claim(self) -> None:
        if self._has_process:
            gc.collect()
            gc.freeze()  # else each full collection scans all loaded objects: 0.2 s without tokens
            gc.set_threshold(10_000, 20, 20)  # else young objects are scanned every few steps
        self.ready.set()
        log.info(
            "Worker ready: claims jobs of queue %s at %s",
            self.settings.queue_name,
            self.settings.public()["redis_url"],
        )
        await self._consumer.run()

    async def _patiently(self, what: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Retry while a dependency is not up yet, for a limited time. Returns False if a signal
        came first.
        """
        deadline, logged = time.monotonic() + STARTUP_LIMIT_S, ""
        while not self._stop.is_set():
            trying, stopped = asyncio.create_task(what()), asyncio.create_task(self._stop.wait())
            await asyncio.wait([trying, stopped], return_when=asyncio.FIRST_COMPLETED)
            await end_task(stopped)
            if not trying.done():
                await end_task(trying)
                return False
            try:
                trying.result()
            except Unavailable as error:
                if error.is_misconfigured or time.monotonic() >= deadline:
                    raise
                if str(error) != logged:
                    log.warning(
                        "Not ready; trying again for %.0f s: %s", deadline - time.monotonic(), error
                    )
                logged = str(error)
                await wait_at_most(self._stop, 1.0)
            else:
                return True
        return False

    # ── reports of the stages ──

    async def _expired(self) -> None:
        self.service.ends.drop_all()
        with contextlib.suppress(Unavailable):
            await self.stream.resign()

    def _recorded(self, finished: list[FinishedJob]) -> None:
        self._observer.recorded(finished)
        for seconds in self._finalizer.stats.take_commit_seconds():
            self.metrics.commit_seconds.of().observe(seconds)

    def _note_claim(self, count: int) -> None:
        self.reporter.claims.reset()
        self.metrics.claims.labels("jobs" if count else "empty").inc()

    def _note_frame(self) -> None:
        self.reporter.steps.reset()
        self._consumer.notice_room()

    # ── metrics and health ──

    async def _serve_metrics(self, undo: contextlib.AsyncExitStack) -> None:
        settings = self.settings
        self.metrics.add_source(self.reporter.samples)
        if settings.metrics_port is None:
            return
        server = HealthServer(
            settings.metrics_host,
            settings.metrics_port,
            self.metrics.registry,
            self.reporter.checks(),
        )
        await server.start()
        self.health_port = server.port
        undo.push_async_callback(server.stop)
        await self._read_queue_metrics(undo)
        log.info(
            "Metrics and health are served on http://%s:%d", settings.metrics_host, server.port
        )

    async def _read_queue_metrics(self, undo: contextlib.AsyncExitStack) -> None:
        client = AsyncClient(
            self.settings.redis_url, queue=self.settings.queue_name, prefix=self.settings.key_prefix
        )
        undo.push_async_callback(client.close)
        queue = QueueMetrics(client, server=self.stream.server)
        self.metrics.add_queue_source(lambda: queue_samples([queue]))
        await undo.enter_async_context(background(queue.run(), self._stop))


async def _first(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()


@contextlib.asynccontextmanager
async def background(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> AsyncIterator[None]:
    """Run work beside the body, which ends at `stop`, then cancel it. Work that ends by itself sets
    `stop`; its error is raised after the body: a worker without one of its stages would own jobs
    and do nothing.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(lambda _task: stop.set())
    try:
        yield
    finally:
        await end_task(task)
        with contextlib.suppress(asyncio.CancelledError):
            task.result()
