"""The scripts against a small model of them: random submits, claims, appends, ends, deaths, cancels, repeats.

The model is plain Python and knows only what users are promised: who may write, what the log holds, which
state everybody sees. Order between waiting jobs is left free; test_claim.py has that.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from schemas.control import WorkerStatus
from schemas.result import JobStatus
from tests.consume.queue import Queue, close_queue, end_of, open_queue, token
from worker.consume.job_stream import JobStream
from worker.jobs import AppendReply, Delivery

pytestmark = pytest.mark.redis
T = TypeVar("T")
WORKERS = ("w1", "w2", "w3")
PICK = st.integers(0, 30)
CLASSES = ("interactive", "standard", "bulk")


@dataclasses.dataclass
class Job:
    state: JobStatus = JobStatus.QUEUED
    holder: str | None = None
    token: int = 0
    length: int = 0
    cancelled: bool = False
    settled: bool = False
    claims: int = 0


class QueueMachine(RuleBasedStateMachine):
    """Old deliveries are kept and used again: every zombie and every repeated call is in here."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.queue: Queue = self.run(open_queue(url))
        self.jobs: dict[str, Job] = {}
        self.seen: list[tuple[str, Delivery]] = []  # (worker, delivery), also outdated ones
        self.workers: dict[str, JobStream] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @initialize()
    def start(self) -> None:
        self.run(self.queue.redis.flushall())
        self.workers = {name: self.queue.worker(name, max_solo_crashes=1000, max_crashes=1000) for name in WORKERS}

    def teardown(self) -> None:
        self.run(self.queue.redis.flushall())
        self.run(close_queue(self.queue))
        self.runner.close()

    # ── what producers do ──

    @rule(priority=st.sampled_from(CLASSES), tenant=st.sampled_from(["", "a", "b"]), count=st.integers(1, 3))
    def submit(self, priority: str, tenant: str, count: int) -> None:
        names = [f"job{len(self.jobs) + i:03}" for i in range(count)]  # the same in every replay
        fields = {"prompt": "x", "priority": priority, "tenant": tenant}
        self.run(self.queue.client.submit_many([{**fields, "job_id": name} for name in names]))
        self.jobs.update((name, Job()) for name in names)

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        name = sorted(self.jobs)[pick % len(self.jobs)]
        job, said = self.jobs[name], self.run(self.queue.client.cancel(name))
        if job.state in (JobStatus.QUEUED, JobStatus.SCHEDULED):
            job.state = JobStatus.CANCELLED
            assert said == "cancelled"
        elif job.state is JobStatus.RUNNING:
            job.cancelled = True
            assert said == "cancelling"
        else:
            assert said == job.state.value

    # ── what workers do ──

    @rule(worker=st.sampled_from(WORKERS), credits=st.integers(0, 4))
    def claim(self, worker: str, credits: int) -> None:
        got = self.run(self.workers[worker].claim(credits))
        assert sum(d.verdict == "run" for d in got) <= credits
        for delivery in got:
            job = self.jobs[delivery.job_id]
            is_back = job.holder == worker  # it forgot the job at a refused append; its heartbeat found it again
            assert job.holder is None or is_back
            assert not job.settled
            assert delivery.token > job.token
            assert len(delivery.log) == job.length
            ended = job.cancelled or job.state is JobStatus.CANCELLED
            assert delivery.verdict == ("cancelled" if ended else "run")
            job.token, job.holder, job.claims = delivery.token, worker, job.claims + (not is_back)
            assert delivery.deliveries == job.claims
            if job.state is JobStatus.QUEUED:
                job.state = JobStatus.RUNNING
            self.seen.append((worker, delivery))

    def pick_seen(self, pick: int) -> tuple[JobStream, Delivery, Job, bool]:
        worker, delivery = self.seen[-1 - pick % len(self.seen)]
        job = self.jobs[delivery.job_id]
        is_holder = job.token == delivery.token and job.holder is not None
        return self.workers[worker], delivery, job, is_holder

    @precondition(lambda self: self.seen)
    @rule(pick=PICK, back=st.integers(-1, 2))
    def append(self, pick: int, back: int) -> None:
        worker, delivery, job, is_holder = self.pick_seen(pick)
        index = max(0, job.length - back)
        ((word, end),) = self.run(worker.append([token(delivery, index)]))
        if not is_holder or job.state is not JobStatus.RUNNING:
            assert word is AppendReply.LOST
        elif index < job.length:
            assert (word, end) == (AppendReply.DUPLICATE, job.length)
        elif index > job.length:
            assert (word, end) == (AppendReply.GAP, job.length)
        else:
            job.length += 1
            assert (word, end) == (AppendReply.CANCELLED if job.cancelled else AppendReply.OK, job.length)

    @precondition(lambda self: self.seen)
    @rule(pick=PICK, status=st.sampled_from([JobStatus.SUCCEEDED, JobStatus.FAILED]))
    def finish(self, pick: int, status: JobStatus) -> None:
        worker, delivery, job, is_holder = self.pick_seen(pick)
        if job.state is JobStatus.CANCELLED:
            status = JobStatus.CANCELLED
        (done,) = self.run(worker.finish([end_of(delivery, job.length, status)]))
        assert done == (is_holder or (job.settled and job.token == delivery.token))
        if is_holder:
            job.state, job.settled, job.holder, job.length = status, True, None, 0

    @precondition(lambda self: self.seen)
    @rule(pick=PICK, crash=st.booleans())
    def release(self, pick: int, crash: bool) -> None:
        worker, delivery, job, is_holder = self.pick_seen(pick)
        (done,) = self.run(worker.release([(delivery.job_id, delivery.token, crash)]))
        assert done == (job.token == delivery.token and not job.settled)
        if is_holder:
            self.give_up(job)

    def give_up(self, job: Job) -> None:
        job.holder = None
        if job.state is JobStatus.RUNNING:
            job.state = JobStatus.QUEUED

    @rule(worker=st.sampled_from(WORKERS))
    def die(self, worker: str) -> None:
        """Its lease runs out, and somebody sweeps. The object lives on, as a zombie."""
        self.run(self.queue.redis.delete(self.queue.keys.worker(worker)))
        other = next(name for name in WORKERS if name != worker)
        self.run(self.workers[other].heartbeat(WorkerStatus(worker_id=other)))
        for job in self.jobs.values():
            if job.holder == worker:
                self.give_up(job)

    @rule(worker=st.sampled_from(WORKERS))
    def beat(self, worker: str) -> None:
        held = self.workers[worker].held
        reply = self.run(self.workers[worker].heartbeat(WorkerStatus(worker_id=worker)))
        mine = {name for name, job in self.jobs.items() if job.holder == worker and held.get(name) == job.token}
        assert set(reply.lost) == held.keys() - mine
        assert set(reply.cancelled) == {name for name in mine if self.jobs[name].cancelled}

    # ── what everybody may rely on ──

    @invariant()
    def counters_agree(self) -> None:
        depth = self.run(self.queue.client.depth())
        assert depth.num_queued == sum(job.state is JobStatus.QUEUED for job in self.jobs.values())
        assert depth.running == sum(job.holder is not None for job in self.jobs.values())

    @invariant()
    def states_agree(self) -> None:
        keys, pipeline = self.queue.keys, self.queue.redis.pipeline(transaction=False)
        for name in self.jobs:
            pipeline.hget(keys.job(name), "state").xlen(keys.log(name))
        replies = self.run(pipeline.execute())
        assert replies == [value for job in self.jobs.values() for value in (job.state.value.encode(), job.length)]


def test_the_scripts_keep_their_promises(redis_url: str) -> None:
    run_state_machine_as_test(
        lambda: QueueMachine(redis_url),  # type: ignore[arg-type]
        settings=settings(
            max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
