"""The scripts against a small model of them: random submits, claims, appends, ends, retries, deaths, cancels, repeats,
and a server that comes back without its last moments.

The model is plain Python and knows only what users are promised: who may write, what the log holds, which
state everybody sees. Order between waiting jobs is left free; test_claim.py has that.
"""

from __future__ import annotations

import asyncio
import copy
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

from tests.consume.job_model import Job
from tests.consume.queue import Queue, appended, close_queue, end_of, open_queue, token
from tokenmill.errors import IdempotencyConflict
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.consume.job_stream import JobStream
from tokenmill_worker.jobs import AppendReply, ChunkAppend, Delivery

pytestmark = pytest.mark.redis
T = TypeVar("T")
WORKERS = ("w1", "w2", "w3")
PICK = st.integers(0, 30)
CLASSES = ("interactive", "standard", "bulk")
LIMITED, LIMIT = "b", 2  # this tenant may have so many jobs running
FAR_AWAY = 4_000_000_000


class QueueMachine(RuleBasedStateMachine):
    """Old deliveries are kept and used again: every zombie and every repeated call is in here."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.queue: Queue = self.run(open_queue(url))
        self.jobs: dict[str, Job] = {}
        self.seen: list[tuple[str, Delivery]] = []  # (worker, delivery), also outdated ones
        self.workers: dict[str, JobStream] = {}
        self.by_key: dict[tuple[str, int], tuple[str, str]] = {}  # (tenant, key) → (job, prompt)
        self.written: dict[
            tuple[str, str, int], int
        ] = {}  # (worker, job, token) → the log's end in the last reply
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
    )
    def submit(self, priority: str, tenant: str, count: int) -> None:
        names = [f"job{len(self.jobs) + i:03}" for i in range(count)]  # the same in every replay
        fields = {"prompt": "x", "priority": priority, "tenant": tenant}
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

    # ── what workers do ──

    @rule(worker=st.sampled_from(WORKERS), credits=st.integers(0, 4))
    def claim(self, worker: str, credits: int) -> None:
        got = self.run(self.workers[worker].claim(credits))
        self.promote()
        assert sum(d.outcome == "run" for d in got) <= credits
        for delivery in got:
            job = self.jobs[delivery.job_id]
            is_back = (
                job.holder == worker
            )  # it forgot the job at a refused append; its heartbeat found it again
            assert job.holder is None or is_back
            assert not job.settled
            assert delivery.token > job.token
            assert (len(delivery.log), delivery.log_end) == (job.length, job.length)
            assert delivery.attempt == job.attempt
            ended = job.cancelled or job.state is JobStatus.CANCELLED
            assert delivery.outcome == ("cancelled" if ended else "run")
            if (
                not job.claims and delivery.outcome == "run" and job.tenant == LIMITED
            ):  # out of its stream
                assert (
                    sum(
                        other.holder is not None
                        for other in self.jobs.values()
                        if other.tenant == LIMITED
                    )
                    < LIMIT
                )
            job.returned = False
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
        worker, delivery, job, _ = self.pick_seen(pick)
        index = max(0, job.length - back)
        if index in job.ends:
            return
        ((word, end),) = self.run(appended(worker, [token(delivery, index)]))
        self.check_append(worker.worker_id, delivery, index, word, end)

    def check_append(
        self, worker: str, delivery: Delivery, index: int, word: AppendReply, end: int
    ) -> None:
        job = self.jobs.get(delivery.job_id) or Job()
        assert (word, end) == job.append(delivery.token, worker, index, end)
        self.written[worker, delivery.job_id, delivery.token] = end
        if word is AppendReply.LOST:
            del self.written[worker, delivery.job_id, delivery.token]

    @precondition(lambda self: self.written)
    @rule(worker=st.sampled_from(WORKERS), left_out=PICK)
    def step(self, worker: str, left_out: int) -> None:
        """Append the next token of this worker's jobs, owned or lost, perhaps without one of them."""
        mine = [
            d
            for name, d in self.seen
            if name == worker and (name, d.job_id, d.token) in self.written
        ]
        chosen = [d for place, d in enumerate(mine) if place != left_out]
        if not chosen:
            return
        items = [token(d, self.written[worker, d.job_id, d.token]) for d in chosen]
        for delivery, item, reply in zip(
            chosen, items, self.run(appended(self.workers[worker], items)), strict=True
        ):
            self.check_append(worker, delivery, item.chunk.index, *reply)

    @precondition(lambda self: self.written)
    @rule(left_out=st.integers(0, 3))
    def steps(self, left_out: int) -> None:
        for worker in WORKERS:
            self.step(worker, left_out)

    @precondition(lambda self: self.jobs)
    @rule(worker=st.sampled_from(WORKERS))
    def work(self, worker: str) -> None:
        """Claim up to 4 jobs and append two tokens to each, as a worker does most of the time."""
        self.claim(worker, 4)
        for delivery in [d for name, d in self.seen[-4:] if name == worker]:
            job = self.jobs[delivery.job_id]
            ((word, end),) = self.run(appended(self.workers[worker], [token(delivery, job.length)]))
            self.check_append(worker, delivery, job.length, word, end)
        self.step(worker, -1)

    @precondition(lambda self: self.seen)
    @rule(pick=PICK)
    def append_end(self, pick: int) -> None:
        """A chunk without a token: its entry counts as one."""
        worker, delivery, job, is_holder = self.pick_seen(pick)
        if not job.length:
            return
        chunk = Chunk(
            job_id=delivery.job_id, index=job.length, choice=1, finish_reason=FinishReason.STOP, n=2
        )
        ends = [ChunkAppend(delivery.token, chunk, job.length)] * 2
        (first, again) = self.run(appended(worker, ends))
        if not is_holder or job.state is not JobStatus.RUNNING:
            assert first[0] is again[0] is AppendReply.LOST
        else:
            job.length, job.ends = job.length + 1, job.ends | {job.length}
            assert first[0] is (AppendReply.CANCELLED if job.cancelled else AppendReply.OK)
            assert again == (AppendReply.DUPLICATE, job.length)
        self.written[worker.worker_id, delivery.job_id, delivery.token] = again[1]

    @precondition(lambda self: self.seen)
    @rule(pick=PICK, status=st.sampled_from([JobStatus.SUCCEEDED, JobStatus.FAILED]))
    def finish(self, pick: int, status: JobStatus) -> None:
        worker, delivery, job, is_holder = self.pick_seen(pick)
        if job.state is JobStatus.CANCELLED:
            status = JobStatus.CANCELLED
        (done,) = self.run(worker.finish([end_of(delivery, job.length, status)]))
        assert done == (is_holder or (job.settled and job.token == delivery.token))
        if is_holder:
            job.state, job.settled, job.holder, job.length, job.ends = (
                status,
                True,
                None,
                0,
                frozenset(),
            )

    @precondition(lambda self: self.seen)
    @rule(pick=PICK, crash=st.booleans())
    def release(self, pick: int, crash: bool) -> None:
        worker, delivery, job, is_holder = self.pick_seen(pick)
        (done,) = self.run(worker.release([(delivery.job_id, delivery.token, crash)]))
        assert done == (job.token == delivery.token and not job.settled)
        if is_holder:
            job.give_up()

    @precondition(lambda self: self.seen)
    @rule(pick=PICK, how=st.sampled_from(["now", "later"]))
    def fail(self, pick: int, how: str) -> None:
        """Fail a job: it is retried, now or later."""
        worker, delivery, job, is_holder = self.pick_seen(pick)
        done = self.run(
            worker.retry(delivery.job_id, delivery.token, 0 if how == "now" else 10**9, "why")
        )
        assert done == (job.token == delivery.token and not job.settled)
        if is_holder:
            was_running = job.state is JobStatus.RUNNING
            job.give_up()
            if was_running:
                job.state, job.due, job.returned = JobStatus.SCHEDULED, how == "now", False
                job.attempt += 1

    @rule(worker=st.sampled_from(WORKERS))
    def die(self, worker: str) -> None:
        """Let the lease run out and sweep. The object lives on, as a zombie."""
        self.run(self.queue.redis.delete(self.queue.keys.worker(worker)))
        other = next(name for name in WORKERS if name != worker)
        self.run(self.workers[other].heartbeat(WorkerStatus(worker_id=other)))
        self.promote()
        for job in self.jobs.values():
            if job.holder == worker:
                job.give_up()

    @rule(worker=st.sampled_from(WORKERS))
    def beat(self, worker: str) -> None:
        held = self.workers[worker].owned
        reply = self.run(self.workers[worker].heartbeat(WorkerStatus(worker_id=worker)))
        self.promote()
        mine = {
            name
            for name, job in self.jobs.items()
            if job.holder == worker and held.get(name) == job.token
        }
        assert set(reply.lost) == held.keys() - mine
        assert set(reply.cancelled) == {name for name in mine if self.jobs[name].cancelled}

    # ── what the server does ──

    @rule()
    def look_back(self) -> None:
        """Save a moment to which the server may come back."""
        self.past = (self.run(self.queue.everything()), copy.deepcopy(self.jobs), dict(self.by_key))

    @precondition(lambda self: self.past is not None)
    @rule()
    def lose_last_moments(self) -> None:
        """Lose them on the server only; workers and clients keep their claims, tokens and ends."""
        held, self.jobs, self.by_key = copy.deepcopy(self.past)
        self.run(self.queue.go_back(held))
        self.seen = [
            (worker, delivery) for worker, delivery in self.seen if delivery.job_id in self.jobs
        ]
        self.steps(-1)

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
    def a_key_stands_while_its_job_lives(self) -> None:
        pipeline = self.queue.redis.pipeline(transaction=False)
        for tenant, key in self.by_key:
            pipeline.ttl(self.queue.keys.idempotency(tenant, f"k{key}"))
        lasting = [left_s == -1 for left_s in self.run(pipeline.execute())]
        assert lasting == [not self.jobs[name].settled for name, _ in self.by_key.values()]


def test_the_scripts_keep_their_promises(redis_url: str) -> None:
    run_state_machine_as_test(
        lambda: QueueMachine(redis_url),  # type: ignore[arg-type]
        settings=settings(
            max_examples=100,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
