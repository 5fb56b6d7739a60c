"""Reads the queue's numbers from Redis every few seconds, and exports them as metrics: in each
worker, and in the exporter.

The numbers are the same wherever they are read, so a query takes the `max` over instances. The
exporter exists because without workers no worker reports: autoscaling from zero, and an alert about
missing workers, must not depend on them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from tokenmill import AsyncClient, ConfigurationError, TokenmillError
from tokenmill.operations.overview import QueueState
from tokenmill.operations.scaling import WorkersWanted, workers_wanted
from tokenmill_worker.queue.server_check import ServerWatch
from tokenmill_worker.telemetry.instruments import MetricSample

log = logging.getLogger(__name__)

INTERVAL_S = 5.0

Values = dict[tuple[str, ...], float | None]


class QueueMetrics:
    """Reads one queue at intervals. `state` is None until the first read, and while reads fail.
    `server` looks at the server of the queue; somebody else runs it.
    """

    def __init__(
        self,
        client: AsyncClient,
        interval_s: float = INTERVAL_S,
        *,
        server: ServerWatch | None = None,
    ) -> None:
        self.queue = client.queue
        self.server = server
        self.state: QueueState | None = None
        self.wanted: WorkersWanted | None = None  # the last answer
        self._client = client
        self._interval_s = interval_s
        self._failing = False

    async def run(self) -> None:
        """Read the queue until cancelled. Raises ConfigurationError if Redis refuses the first
        read, as with a wrong password: only a person can repair that.
        """
        while True:
            await self.read()
            await asyncio.sleep(self._interval_s)

    async def read(self) -> None:
        try:
            self.state = await self._client.overview()
            self.wanted = workers_wanted(self.state, self.wanted)
            self._failing = False
        except TokenmillError as error:
            is_first = self.state is None and not self._failing
            if is_first and isinstance(error, ConfigurationError):
                raise
            if not self._failing:
                log.warning(
                    "Queue %s cannot be read from Redis; its metrics are left out: %s",
                    self.queue,
                    error,
                )
            self.state, self._failing = None, True
        except Exception:  # of any kind: no numbers are better than outdated ones
            if not self._failing:
                log.exception(
                    "Queue %s cannot be read from Redis; its metrics are left out", self.queue
                )
            self.state, self._failing = None, True

    def problem(self) -> str | None:
        if self.state is None:
            return f"the queue {self.queue} cannot be read from Redis"
        return self.server.problem if self.server is not None else None


def queue_samples(queues: Sequence[QueueMetrics]) -> Iterator[MetricSample]:
    """Yield one metric for all queues, with the queue as a label."""
    states = {one.queue: one.state for one in queues}
    known = {queue: state for queue, state in states.items() if state is not None}
    up: Values = {(queue,): float(state is not None) for queue, state in states.items()}
    yield MetricSample("queue_up", "1 while the queue can be read from Redis", up, ("queue",))
    yield from _memory(queues)
    yield from _by_class(known)
    for name, words, of in _NUMBERS:
        yield MetricSample(
            name, words, {(queue,): float(of(state)) for queue, state in known.items()}, ("queue",)
        )
    for name, words, of in _COUNTERS:
        values: Values = {(queue,): float(of(state)) for queue, state in known.items()}
        yield MetricSample(name, words, values, ("queue",), is_counter=True)
    wanted: Values = {
        (one.queue,): one.wanted.workers for one in queues if one.state and one.wanted
    }
    words = "Workers that the queue needs to end its jobs within their deadlines"
    yield MetricSample("queue_workers_wanted", words, wanted, ("queue",))
    ended: Values = {
        (q, status): float(n) for q, state in known.items() for status, n in state.finished.items()
    }
    yield MetricSample(
        "queue_finished",
        "Jobs of the queue that ended, by status",
        ended,
        ("queue", "status"),
        is_counter=True,
    )


def _memory(queues: Sequence[QueueMetrics]) -> Iterator[MetricSample]:
    known = {
        queue.queue: queue.server.memory for queue in queues if queue.server and queue.server.memory
    }
    words = ("Memory that the queue's server uses", "Its limit: maxmemory, or the machine's memory")
    for place, name in enumerate(("redis_memory_bytes", "redis_memory_limit_bytes")):
        values: Values = {(queue,): float(memory[place]) for queue, memory in known.items()}
        yield MetricSample(name, words[place], values, ("queue",))


def _by_class(known: Mapping[str, QueueState]) -> Iterator[MetricSample]:
    jobs: Values = {}
    tokens: Values = {}
    ages: Values = {}
    for queue, state in known.items():
        for name, one in state.classes.items():
            jobs[queue, name] = one.waiting
            tokens[queue, name] = one.waiting_tokens
            ages[queue, name] = one.oldest_ms / 1000
    labels = ("queue", "priority")
    yield MetricSample(
        "queue_jobs", "Jobs that wait to be claimed, due ones included", jobs, labels
    )
    yield MetricSample("queue_tokens", "Estimated tokens of the waiting jobs", tokens, labels)
    yield MetricSample(
        "queue_oldest_seconds", "Time that the oldest waiting job has waited", ages, labels
    )


_Number = tuple[str, str, Callable[[QueueState], float]]
_NUMBERS: tuple[_Number, ...] = (
    ("queue_running_jobs", "Jobs that workers own", lambda state: state.running),
    (
        "queue_scheduled_jobs",
        "Jobs that wait for their time or their next attempt",
        lambda state: state.scheduled,
    ),
    (
        "queue_unrecorded_jobs",
        "Jobs that ended while they waited and are not recorded yet",
        lambda state: state.unrecorded,
    ),
    ("queue_dead_jobs", "Dead letters", lambda state: state.dead),
    ("queue_workers", "Workers with a valid lease", lambda state: len(state.workers)),
    (
        "queue_workers_starting",
        "Those of them that load their model",
        lambda state: sum(not worker.model for worker in state.workers),
    ),
)
_COUNTERS: tuple[_Number, ...] = (
    ("queue_submitted", "Jobs accepted", lambda state: state.submitted),
    (
        "queue_entries_dropped",
        "Stream entries that were not jobs",
        lambda state: state.entries_dropped,
    ),
)
