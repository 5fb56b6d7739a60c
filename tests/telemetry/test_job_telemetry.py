"""Tokens are counted some ten times a second, and before each scrape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import count

import msgspec
import pytest

from tests.publish.support import admit, event
from tests.record.support import failed, finished
from tokenmill.operations.submit import estimated_tokens
from tokenmill_schemas.job import Priority
from tokenmill_worker.contract.events import Capacity, EngineStats
from tokenmill_worker.contract.messages import Frame
from tokenmill_worker.telemetry import Metrics
from tokenmill_worker.telemetry.job_telemetry import JobTelemetry

STEP_NS = 10_000_000
ROOM = Capacity(
    free_sequences=1, free_blocks=1, waiting=0, running=1, block_size=16, max_model_len=64
)
STATS = EngineStats(steps=3, busy_s=0.03)


def asked_by_the_engine(observer: JobTelemetry) -> None:
    observer.stepped(Frame(events=(), capacity=ROOM, stats=STATS))


@pytest.mark.parametrize(
    "ask",
    [
        asked_by_the_engine,
        lambda observer: observer.tenants(),
        lambda observer: observer.forget_all_but({"job"}),
        lambda observer: observer.left(["job"], "handed_over"),
    ],
)
async def test_tokens_are_counted_at_the_time_of_their_step(
    ask: Callable[[JobTelemetry], None],
) -> None:
    metrics, clock = Metrics(), count(STEP_NS, STEP_NS)
    observer = JobTelemetry(metrics, None, queue="q", worker_id="w1", clock_ns=lambda: next(clock))
    job = await admit()
    observer.claimed([job.delivery])
    observer.started([job])
    for token in "abc":
        observer.stepped(Frame(events=(event(token),), capacity=ROOM))
    histogram = metrics.inter_token.of("standard")
    assert sum(histogram.counts) == 0, "as long as nobody asks"
    ask(observer)
    assert sum(histogram.counts) == 2
    assert histogram.total == pytest.approx(2 * STEP_NS / 1e9), "not when they were counted"
    assert observer.tokens.total == 3
    ask(observer)
    assert observer.tokens.total == 3, "each once"


async def test_a_heartbeat_has_urgent_jobs_and_the_pace_of_good_ends() -> None:
    observer = JobTelemetry(Metrics(), None, queue="q", worker_id="w1")
    jobs = [await admit(name) for name in ("bulk", "standard")]
    bulk = msgspec.structs.replace(jobs[0].request, priority=Priority.BULK)
    jobs[0] = dataclasses.replace(jobs[0], request=bulk)
    observer.claimed([job.delivery for job in jobs])
    observer.started(jobs)
    assert observer.urgent() == 1
    observer.left(["standard"], "handed_over")
    assert observer.urgent() == 0
    line = finished()
    assert line.request is not None
    observer.recorded([line, failed("bad", "too long")])
    assert observer.ended_tokens.total == estimated_tokens(line.request) > 0


def test_lines_of_batches_are_logged_together(caplog: pytest.LogCaptureFixture) -> None:
    observer = JobTelemetry(Metrics(), None, queue="q", worker_id="w1")
    line = finished()  # its request has a batch
    caplog.set_level("INFO")
    observer.recorded([line])
    observer.recorded([line, line])
    assert caplog.records == []
    observer.log_lines()
    observer.log_lines()
    (record,) = caplog.records
    assert (record.message, record.__dict__["jobs"]) == ("Lines of batches succeeded", 3)
