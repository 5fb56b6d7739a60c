"""The producers' half of the queue's model, with the invariants; test_model.py adds the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.queue.job_model import Job
from tests.support.queue import Queue, close_queue, open_queue
from tokenmill.errors import IdempotencyConflict
from tokenmill_schemas.job import PRIORITY_ORDER
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.jobs import Delivery
from tokenmill_worker.queue.job_stream import JobStream

T = TypeVar("T")
WORKERS = ("w1", "w2", "w3")
PICK = st.integers(0, 30)
CLASSES = ("interactive", "standard", "bulk")
LIMITED, LIMIT = "b", 2  # this tenant may have so many jobs running
FAR_AWAY = 4_000_000_000


class ProducerMachine(RuleBasedStateMachine):
    """Old deliveries are kept and used again: every zombie and every repeated call is in here."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.queue: Queue = self.run(open_queue(url))
        self.jobs: dict[str, Job] = {}
        self.seen: list[tuple[str, Delivery]] = []  # (worker, delivery), also outdated ones
        self.workers: dict[str, JobStream] = {}
        self.by_key: dict[tuple[str, int], tuple[str, str]] = {}  # (tenant, key) → (job, prompt)
        # (worker, job, token) → the log's end in the last reply
        self.written: dict[tuple[str, str, int], int] = {}
        self.past: Any = None  # (all keys, the jobs, submissions by key) of an earlier moment

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @initialize()
    def start(self) -> None:
        self.run(self.queue.redis.flushall())
        patient = {"max_solo_crashes": 1000, "max_crashes": 1000, "max_deliveries": 1000}
        self.workers = {name: self.queue.worker(name, **patient) for name in WORKERS}
        self.run(self.queue.client.set_limits(LIMITED, concurrency=LIMIT))

    def teardown(self) -> None:
        self.run(self.queue.redis.flushall())
        self.run(close_queue(self.queue))
        self.runner.close()

    # ── what producers do ──

    @rule(
        priority=st.sampled_from(CLASSES),
        tenant=st.sampled_from(["", "a", "b"]),
        count=st.integers(1, 3),
        session=st.sampled_from(["", "s", "t"]),
    )
    def submit(self, priority: str, tenant: str, count: int, session: str) -> None:
        names = [f"job{len(self.jobs) + i:03}" for i in range(count)]  # the same in every replay
        fields = {"prompt": "x", "priority": priority, "tenant": tenant, "session": session}
        self.run(self.queue.client.submit_many([{**fields, "job_id": name} for name in names]))
        self.jobs.update((name, Job(tenant=tenant)) for name in names)

    @rule(
        key=st.integers(0, 3), tenant=st.sampled_from(["", "a"]), prompt=st.sampled_from(["x", "y"])
    )
    def submit_by_key(self, key: int, tenant: str, prompt: str) -> None:
        name, known = f"job{len(self.jobs):03}", self.by_key.get((tenant, key))
        work = self.queue.client.submit(
            job_id=name, prompt=prompt, tenant=tenant, idempotency_key=f"k{key}"
        )
        if known is not None and known[1] != prompt:
            with pytest.raises(IdempotencyConflict):
                self.run(work)
            return
        handle = self.run(work)
        assert (str(handle), handle.is_new) == (
            (name, True) if known is None else (known[0], False)
        )
        if known is None:
            self.by_key[tenant, key] = (name, prompt)
            self.jobs[name] = Job(tenant=tenant)

    @rule()
    def submit_for_later(self) -> None:
        name = f"job{len(self.jobs):03}"
        self.run(self.queue.client.submit(job_id=name, prompt="x", not_before=FAR_AWAY))
        self.jobs[name] = Job(state=JobStatus.SCHEDULED)

    @precondition(lambda self: any(job.state is JobStatus.SCHEDULED for job in self.jobs.values()))
    @rule(pick=PICK)
    def time_comes(self, pick: int) -> None:
        waiting = sorted(
            name for name, job in self.jobs.items() if job.state is JobStatus.SCHEDULED
        )
        name = waiting[pick % len(waiting)]
        self.run(self.queue.redis.zadd(self.queue.keys.delayed, {name: 1}))
        self.jobs[name].due = True

    @rule()
    def time_passes(self) -> None:
        """Make the jobs that are held for workers free for others."""
        for priority in PRIORITY_ORDER:
            name = self.queue.keys.held(priority)
            held = self.run(self.queue.redis.zrange(name, 0, -1))
            if held:
                self.run(self.queue.redis.zadd(name, dict.fromkeys(held, 1)))

    def promote(self) -> None:
        """Make due jobs available, as every sweep does."""
        for job in self.jobs.values():
            if job.state is JobStatus.SCHEDULED and job.due:
                job.state, job.due, job.returned = JobStatus.QUEUED, False, job.attempt > 1

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK, count=st.integers(1, 3))
    def redrive(self, pick: int, count: int) -> None:
        names = sorted(self.jobs)
        chosen = [names[(pick + i) % len(names)] for i in range(count)]
        dead = {name for name in chosen if self.jobs[name].state is JobStatus.DEAD}
        assert set(self.run(self.queue.client.redrive(chosen))) == dead
        for name in dead:
            job = self.jobs[name]
            self.jobs[name] = Job(token=job.token, claims=job.claims, tenant=job.tenant)

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        name = sorted(self.jobs)[pick % len(self.jobs)]
        job, said = self.jobs[name], self.run(self.queue.client.cancel(name))
        if job.state in (JobStatus.QUEUED, JobStatus.SCHEDULED) and not job.returned:
            job.state = JobStatus.CANCELLED
            assert said == "cancelled"
        elif job.state in (JobStatus.RUNNING, JobStatus.QUEUED):
            job.cancelled = True
            assert said == "cancelling"
        else:
            assert said == job.state.value

    # ── invariants ──

    @invariant()
    def counters_agree(self) -> None:
        depth = self.run(self.queue.client.depth())
        scheduled = [job for job in self.jobs.values() if job.state is JobStatus.SCHEDULED]
        num_queued = sum(job.state is JobStatus.QUEUED for job in self.jobs.values())
        assert depth.num_queued == num_queued + sum(job.due for job in scheduled)
        assert depth.scheduled == sum(not job.due for job in scheduled)
        assert depth.running == sum(job.holder is not None for job in self.jobs.values())

    @invariant()
    def states_agree(self) -> None:
        keys, pipeline = self.queue.keys, self.queue.redis.pipeline(transaction=False)
        for name in self.jobs:
            pipeline.hget(keys.job(name), "state").xlen(keys.log(name))
        replies = self.run(pipeline.execute())
        assert replies == [
            value for job in self.jobs.values() for value in (job.state.value.encode(), job.length)
        ]

    @invariant()
    def a_waiting_job_can_be_found(self) -> None:
        """A job that a claim passed over is in the list of its class, and no other job is."""
        keys, held = self.queue.keys, set[bytes]()
        for priority in PRIORITY_ORDER:
            held |= set(self.run(self.queue.redis.zrange(keys.held(priority), 0, -1)))
        pipeline = self.queue.redis.pipeline(transaction=False)
        for name in self.jobs:
            pipeline.hmget(keys.job(name), "held", "state")
        marked = {
            name.encode()
            for name, (holder, state) in zip(self.jobs, self.run(pipeline.execute()), strict=True)
            if holder and state == b"queued"
        }
        assert held == marked

    @invariant()
    def a_key_stands_while_its_job_lives(self) -> None:
        pipeline = self.queue.redis.pipeline(transaction=False)
        for tenant, key in self.by_key:
            pipeline.ttl(self.queue.keys.idempotency(tenant, f"k{key}"))
        lasting = [left_s == -1 for left_s in self.run(pipeline.execute())]
        assert lasting == [not self.jobs[name].settled for name, _ in self.by_key.values()]
