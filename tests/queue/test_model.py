"""The scripts against a small model of them: random submits, claims, appends, ends, retries,
deaths, cancels, repeats, and a server that comes back without its last moments.

The model is plain Python and knows only what users are promised: who may write, what the log holds,
which state everybody sees. Order between waiting jobs is left free; test_claim.py has that.
"""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.queue.job_model import Job
from tests.queue.queue_machine import LIMIT, LIMITED, PICK, WORKERS, ProducerMachine
from tests.support.queue import appended, end_of, token
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.jobs import AppendReply, ChunkAppend, Delivery
from tokenmill_worker.queue.job_stream import JobStream

pytestmark = pytest.mark.redis


class QueueMachine(ProducerMachine):
    """Adds the workers and the server. Old deliveries are kept and used again: every zombie and
    every repeated call is among them.
    """

    # ── what workers do ──

    @rule(worker=st.sampled_from(WORKERS), credits=st.integers(0, 4))
    def claim(self, worker: str, credits: int) -> None:
        got = self.run(self.workers[worker].claim(credits))
        self.promote()
        assert sum(d.outcome == "run" for d in got) <= credits
        for delivery in got:
            job = self.jobs[delivery.job_id]
            # it forgot the job at a refused append; its heartbeat found it again
            is_back = job.holder == worker
            assert job.holder is None or is_back
            assert not job.settled
            assert delivery.token > job.token
            assert (len(delivery.log), delivery.log_end) == (job.length, job.length)
            assert delivery.attempt == job.attempt
            ended = job.cancelled or job.state is JobStatus.CANCELLED
            assert delivery.outcome == ("cancelled" if ended else "run")
            # out of its stream
            if not job.claims and delivery.outcome == "run" and job.tenant == LIMITED:
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
        """Append the next token of this worker's jobs, owned or lost, perhaps without one."""
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


def test_random_calls_of_the_scripts_agree_with_the_model(redis_url: str) -> None:
    run_state_machine_as_test(
        lambda: QueueMachine(redis_url),  # type: ignore[arg-type]
        settings=settings(
            max_examples=50,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
