"""Serves /metrics, /livez, /readyz and /healthz of `tokenmill tasks`, on a thread beside Celery's
worker.

Celery's consumer resets a watchdog; Redis and SQL are queried every few seconds. A dependency that
is away makes the process unready. /livez fails only for what a restart repairs: beat's thread has
ended, or the consumer stands still although its broker answers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from celery import Celery, bootsteps, signals
from celery.worker import state as worker_state
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tokenmill.sql.driver_errors import sentence_of
from tokenmill_worker.tasks.batches import OpenBatches
from tokenmill_worker.tasks.webhooks.outbox import OutboxBacklog
from tokenmill_worker.telemetry import Check, HealthServer, Watchdog
from tokenmill_worker.telemetry.instruments import (
    PREFIX,
    CallbackCollector,
    MetricSample,
    by_label,
    gauge,
)

log = logging.getLogger(__name__)

POLL_S: Final = 5.0
SILENT_S: Final = 30.0  # the consumer's loop runs at least once a second while it is connected
STUCK_S: Final = 180.0  # longer than Celery needs to replace a broken connection
_RESET_S: Final = 1.0
_SECONDS: Final = (0.005, 0.025, 0.1, 0.5, 2.5, 10, 60, 300)


class TasksHealth:
    """Serves from `start` to `stop`. `beats` says whether beat's thread is alive; `webhooks` and
    `batches` query SQL.
    """

    def __init__(
        self,
        app: Celery,
        webhooks: Callable[[], OutboxBacklog],
        beats: Callable[[], bool],
        *,
        batches: Callable[[], OpenBatches] | None = None,
        every_s: float = POLL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._app = app
        self._webhooks, self._batches = webhooks, batches
        self._open_batches: OpenBatches | None = None
        self._beats = beats
        self._every_s = every_s
        self._clock = clock
        self._consumer = ConsumerWatchdog(clock)
        self._sql_answers = Watchdog("answer from the database", max(SILENT_S, 3 * every_s), clock)
        self._backlog: OutboxBacklog | None = None
        self._problems: dict[str, str | None] = dict.fromkeys(("broker", "sql"), "not asked yet")
        self._broker_ok_since: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._server: HealthServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.registry.register(CallbackCollector(self.samples))
        self.counts = TaskCounts(app, self.registry)
        app.steps["consumer"].add(_watchdog_step(self._consumer))

    def start(self, host: str, port: int) -> int:
        """Start serving and return the port. Raises PortTaken."""
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="watch", daemon=True)
        self._thread.start()
        self.counts.start()
        try:
            return asyncio.run_coroutine_threadsafe(self._open(host, port), loop).result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.counts.stop()
        loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(self._close(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def checks(self) -> list[Check]:
        return [
            Check("broker", lambda: self._problems["broker"]),
            Check("sql", lambda: self._problems["sql"] or self._sql_answers.problem()),
            Check("consumer", self._consumer.problem),
            Check("stuck", self._stuck, vital=True),
            Check("beat", lambda: None if self._beats() else "its thread has ended", vital=True),
            Check(
                "draining",
                lambda: "it is" if worker_state.should_stop is not None else None,
                ready=True,
            ),
        ]

    def samples(self) -> Iterator[MetricSample]:
        up = {name: float(problem is None) for name, problem in self._problems.items()}
        yield by_label(
            "tasks_dependency_up", "1 while `tokenmill tasks` can use it", "dependency", up
        )
        backlog = self._backlog
        if backlog is not None:
            yield by_label(
                "webhooks",
                "Webhook messages in the database that are not delivered",
                "state",
                backlog.counts,
            )
            yield gauge(
                "webhook_overdue_seconds",
                "How long the longest due webhook message has been due",
                backlog.overdue_s,
            )

        if self._open_batches is not None:
            yield by_label(
                "batches",
                "Batches of the gateway that are not over",
                "state",
                self._open_batches.counts,
            )
            yield by_label(
                "batch_lines",
                "Lines of the batches that are not over",
                "outcome",
                self._open_batches.lines,
            )

    def _stuck(self) -> str | None:
        """Return a sentence if the consumer stands still although the broker answers. Silence
        counts from the time at which both were available, so a broker that has just come back is no
        reason.
        """
        since = self._broker_ok_since
        if since is None or worker_state.should_stop is not None:
            return None
        silence_s = self._clock() - max(since, self._consumer.last or since)
        if silence_s <= STUCK_S:
            return None
        return f"the broker answers, and the consumer has stood still for {silence_s:.0f} s"

    async def _open(self, host: str, port: int) -> int:
        self._server = await HealthServer(host, port, self.registry, self.checks()).start()
        polls = (("broker", self._ask_broker), ("sql", self._ask_sql))
        self._tasks = [asyncio.create_task(self._poll(name, ask)) for name, ask in polls]
        return self._server.port

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop()

    async def _poll(self, name: str, ask: Callable[[], None]) -> None:
        while True:
            try:
                await asyncio.to_thread(ask)
                problem = None
            except Exception as error:  # of any kind: /healthz reports it
                problem = sentence_of(error)
            if problem and problem != self._problems[name]:
                log.warning("The tasks cannot use %s: %s", name, problem)
            self._problems[name] = problem
            if name == "broker":
                self._broker_ok_since = None if problem else self._broker_ok_since or self._clock()
            await asyncio.sleep(self._every_s)

    def _ask_broker(self) -> None:
        with self._app.connection_for_read(connect_timeout=5) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)

    def _ask_sql(self) -> None:
        self._backlog = self._webhooks()
        if self._batches is not None:
            self._open_batches = self._batches()
        self._sql_answers.reset()


class ConsumerWatchdog:
    """A watchdog that Celery's consumer resets each second while it is connected to its broker."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.last: float | None = None
        self._clock = clock

    def reset(self) -> None:
        self.last = self._clock()

    def end(self) -> None:
        self.last = None

    def problem(self) -> str | None:
        if self.last is None:
            return "it is not connected to its broker"
        silence_s = self._clock() - self.last
        return f"its loop has not turned for {silence_s:.0f} s" if silence_s > SILENT_S else None


def _watchdog_step(watchdog: ConsumerWatchdog) -> type[Any]:
    """Return the part of Celery's consumer that resets the watchdog. It starts at each connection
    and stops at the connection's end.
    """

    class WatchdogStep(bootsteps.StartStopStep):  # type: ignore[misc]
        requires = ("celery.worker.consumer.tasks:Tasks",)

        def start(self, consumer: Any) -> None:
            watchdog.reset()
            self._timer = consumer.timer.call_repeatedly(_RESET_S, watchdog.reset)

        def stop(self, consumer: Any) -> None:
            self._timer.cancel()
            watchdog.end()

    return WatchdogStep


class TaskCounts:
    """Counts how each task of one application ended, and records its duration and last success,
    from `start` to `stop`. If a task returns a text, the text is its outcome.
    """

    def __init__(self, app: Celery, registry: CollectorRegistry) -> None:
        self._app = app
        self._began: dict[str, float] = {}
        self._runs = Counter(
            f"{PREFIX}task_runs_total",
            "Runs of a task, by how they ended",
            ("task", "outcome"),
            registry=registry,
        )
        self._seconds = Histogram(
            f"{PREFIX}task_seconds",
            "Time of one run",
            ("task",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._succeeded = Gauge(
            f"{PREFIX}task_last_success_timestamp_seconds",
            "Unix time of a periodic task's last success here, or of the process's start",
            ("task",),
            registry=registry,
        )

    def start(self) -> None:
        for name in self._app.conf.beat_schedule:
            self._succeeded.labels(name).set_to_current_time()
            # exists from the start, so that the first failure shows as an increase
            self._runs.labels(name, "failure")
        signals.task_prerun.connect(self._prerun, weak=False)
        signals.task_postrun.connect(self._postrun, weak=False)

    def stop(self) -> None:
        signals.task_prerun.disconnect(self._prerun)
        signals.task_postrun.disconnect(self._postrun)

    def _prerun(self, *, task_id: str, task: Any, **_: Any) -> None:
        if task.app is self._app:
            self._began[task_id] = time.monotonic()

    def _postrun(self, *, task_id: str, task: Any, state: str, retval: Any, **_: Any) -> None:
        began = self._began.pop(task_id, None)
        if began is None:
            return
        self._seconds.labels(task.name).observe(time.monotonic() - began)
        has_word = state == "SUCCESS" and isinstance(retval, str)
        self._runs.labels(task.name, retval if has_word else state.lower()).inc()
        if state == "SUCCESS" and task.name in self._app.conf.beat_schedule:
            self._succeeded.labels(task.name).set_to_current_time()
