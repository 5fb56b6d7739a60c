"""One queue and its workers in virtual time.

Claims follow `claim.lua`: classes with their shares, tenants by virtual time, a job of another
worker's session held for HELD_S. A worker computes prompts one after the other, people's first,
decodes all its answers in one step, and its cache forgets what was used longest ago. Left out: the
way to the queue and back, preemption and deaths.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

# of a worker, for 70 billion weights of 8 bits on an H200 by its data sheet: seconds of a prompt's
# token and of a step, sequences, and tokens of its KV cache
PREFILL_S, STEP_S, PLACES, CACHE = 220e-6, 0.025, 64, 360_000
CHUNK_S = 0.1  # of a step with a chunk of a prompt
GOOD_S = 5.0  # to the first token of a person's job
HELD_S, MOST_HELD, MOST_PASSED = 0.5, 32, 32  # as sessions.lua
MOST_CLAIMED = 32
BULK_SHARE = 0.6  # of a worker's cache: bulk starts below it, since people take its place
CHAT, STANDARD, BULK = CLASSES = range(3)
EVERY = {BULK: 10, STANDARD: 4}  # as fair_queue.lua: one claim in this many is of the class
WAKE_UP_S = 0.001


@dataclass(eq=False, slots=True)
class Job:
    """A job. `prefix` names the first `shared` tokens of its prompt; `turns` are those of its chat
    that are left, with this one.
    """

    kind: int
    tenant: int
    prefix: Any
    shared: int
    prompt: int
    answer: int
    due: float = math.inf
    turns: int = 0
    arrived: float = 0.0
    holder: "SimulatedWorker | None" = None  # the worker for which it is held


class Jobs(Protocol):
    """The jobs that a queue gets."""

    def arrivals(self) -> Iterator[tuple[float, list[Job]]]: ...

    def following(self, job: Job) -> tuple[float, Job] | None: ...


@dataclass(eq=False, slots=True)
class SimulatedWorker:
    number: int
    cache: OrderedDict[Any, int] = field(default_factory=OrderedDict)  # by prefix, its tokens
    cached: int = 0
    running: int = 0
    tokens: int = 0  # of its running jobs
    computed: float = 0.0  # when its last prompt is computed
    urgent: float = 0.0  # when its last prompt of a person is
    held: deque[tuple[float, Job]] = field(default_factory=deque)  # since when
    num_held: int = 0  # those of them that have not left

    def has_room(self, share: float = 0.9) -> bool:
        return self.running < PLACES and self.tokens < share * CACHE

    def look_up(self, job: Job) -> int:
        """Return how many tokens of the job's prompt the cache has."""
        found = self.cache.get(job.prefix, 0) if job.shared else 0
        if found:
            self.cache.move_to_end(job.prefix)
        return min(found, job.shared)

    def keep(self, prefix: Any, tokens: int) -> None:
        self.cached += tokens - self.cache.pop(prefix, 0)
        self.cache[prefix] = tokens
        while self.cached > CACHE:
            self.cached -= self.cache.popitem(last=False)[1]


@dataclass(slots=True)
class Calls:
    """Calls of the queue's scripts in an hour, and their items."""

    submitted: int = 0
    claims: int = 0
    claimed: int = 0
    passed: int = 0  # jobs that a claim left to another worker: each costs as much as a claimed one
    appends: float = 0.0
    tokens: int = 0
    finished: int = 0

    def seconds(self, costs: Any) -> float:
        """Return the seconds of the server's thread; `costs` are simulate.ScriptCosts."""
        return float(
            self.submitted * costs.submit
            + self.claims * costs.claim
            + (self.claimed + self.passed) * costs.claimed
            + self.claimed * costs.opened
            + self.appends * costs.append
            + self.tokens * costs.chunk
            + self.finished * (costs.finish + costs.finished)
        )


@dataclass(slots=True)
class QueueDay:
    """The outcome of a day. Hits are tokens of `prompts` that a worker had in its cache."""

    asked: int = 0
    good: int = 0
    light_s: list[float] = field(default_factory=list)  # to the first tokens of people's jobs
    heavy_s: list[float] = field(default_factory=list)  # the same, of the tenant that asks most
    hits: int = 0  # of chats, from their second turn on
    prompts: int = 0
    line_hits: int = 0  # of lines' templates
    line_prompts: int = 0
    computed_s: float = 0.0  # of prompts, all workers
    hours: list[Calls] = field(default_factory=lambda: [Calls() for _ in range(37)])


class Queue:
    """Runs the jobs of a day; `run` may be called once."""

    def __init__(
        self, num_workers: int, num_tenants: int, jobs: Jobs, *, with_sessions: Collection[int]
    ) -> None:
        self._jobs, self._with_sessions = jobs, with_sessions  # classes
        self._workers = [SimulatedWorker(number) for number in range(num_workers)]
        self._rooms = [(0, n) for n in range(num_workers)]  # (running, worker), also outdated ones
        self._waiting: list[dict[int, deque[Job]]] = [{} for _ in CLASSES]  # by tenant
        self._shares: list[list[tuple[float, int]]] = [[] for _ in CLASSES]  # (served, tenant)
        self._served = [[0.0] * num_tenants for _ in CLASSES]
        self._virtual, self._skipped = [0.0 for _ in CLASSES], [0 for _ in CLASSES]
        self._held: deque[tuple[float, Job]] = deque()  # all; those without a holder have left
        self._holders: dict[Any, SimulatedWorker] = {}  # by session
        self._events: list[tuple[float, int, Any]] = []
        self._number = 0
        self._day = QueueDay()

    def run(self, until: float) -> QueueDay:
        """Return the day; what waits at its end is not good."""
        for moment, jobs in self._jobs.arrivals():
            self._at(moment, jobs)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            if now >= until:
                break
            self._calls = self._day.hours[int(now / 3600)]
            if isinstance(event, Job):
                self._claim_soon(event, now)
            elif isinstance(event, list):
                self._arrive(event, now)
            else:
                self._end(now, *event)
        return self._day

    def _at(self, moment: float, event: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (moment, self._number, event))

    # ── the queue ──

    def _arrive(self, jobs: list[Job], now: float) -> None:
        for job in jobs:
            job.arrived = now
            self._calls.submitted += 1
            self._day.asked += 1
            self._enter(job)
        holder = self._holder_of(jobs[0])
        if holder and holder.has_room():
            self._claim(holder, now)
            return
        while (worker := self._emptiest()) and self._claim(worker, now, most=4):
            if len(jobs) == 1:
                break

    def _enter(self, job: Job) -> None:
        tenants = self._waiting[job.kind]
        if not tenants.get(job.tenant):
            tenants[job.tenant] = deque()
            served = max(self._served[job.kind][job.tenant], self._virtual[job.kind])
            heapq.heappush(self._shares[job.kind], (served, job.tenant))
        tenants[job.tenant].append(job)

    def _holder_of(self, job: Job) -> SimulatedWorker | None:
        return self._holders.get(job.prefix) if job.kind in self._with_sessions else None

    def _emptiest(self) -> SimulatedWorker | None:
        """Return a worker with the fewest running jobs; None if no one has room."""
        while self._rooms:
            running, number = self._rooms[0]
            worker = self._workers[number]
            if running == worker.running and worker.has_room():
                return worker
            heapq.heappop(self._rooms)
        return None

    def _claim(self, worker: SimulatedWorker, now: float, most: int = MOST_CLAIMED) -> int:
        """Deliver up to `most` jobs to a worker; return how many."""
        self._calls.claims += 1
        was_idle = worker.running == 0
        started = self._claim_held(worker, now, most)
        passed = 0
        while started < most and worker.has_room():
            found = None
            for kind in self._order(worker):
                while found is None and self._shares[kind]:
                    job = self._next(kind)
                    if passed < MOST_PASSED and self._passes_over(job, worker, now):
                        passed += 1
                    else:
                        found = job
            if found is None:
                break
            for kind in EVERY:
                waits = kind != found.kind and self._shares[kind]
                self._skipped[kind] = self._skipped[kind] + 1 if waits else 0
            self._start(worker, found, now)
            started += 1
        if was_idle and not started:
            started = self._claim_held(worker, now, 1, takes_any=True)
        self._calls.passed += passed
        return started

    def _order(self, worker: SimulatedWorker) -> list[int]:
        """Return the classes in the order of this claim; bulk leaves room for people."""
        late = [
            kind
            for kind, every in EVERY.items()
            if self._shares[kind] and self._skipped[kind] + 1 >= every
        ]
        order = [*late, *CLASSES]
        return order if worker.has_room(BULK_SHARE) else [kind for kind in order if kind != BULK]

    def _next(self, kind: int) -> Job:
        """Take the next job of a class: that of the tenant that was served least."""
        served, tenant = heapq.heappop(self._shares[kind])
        jobs = self._waiting[kind][tenant]
        job = jobs.popleft()
        self._virtual[kind] = max(self._virtual[kind], served)
        self._served[kind][tenant] = served + job.prompt + job.answer
        if jobs:
            heapq.heappush(self._shares[kind], (self._served[kind][tenant], tenant))
        return job

    def _passes_over(self, job: Job, worker: SimulatedWorker, now: float) -> bool:
        holder = self._holder_of(job)
        if holder is None or holder is worker or holder.num_held >= MOST_HELD:
            return False
        job.holder = holder
        holder.num_held += 1
        holder.held.append((now, job))
        self._held.append((now, job))
        self._at(now + (WAKE_UP_S if holder.has_room() else HELD_S), job)
        return True

    def _claim_held(
        self, worker: SimulatedWorker, now: float, most: int, *, takes_any: bool = False
    ) -> int:
        """Deliver held jobs: those held for this worker, and those held long enough."""
        started = 0
        for jobs, is_own in ((worker.held, True), (self._held, takes_any)):
            while jobs and started < most and worker.has_room():
                since, job = jobs[0]
                if job.holder and not is_own and now - since < HELD_S:
                    break
                jobs.popleft()
                if job.holder:
                    job.holder.num_held -= 1
                    job.holder = None
                    self._start(worker, job, now)
                    started += 1
        return started

    def _claim_soon(self, job: Job, now: float) -> None:
        """Let a held job's worker claim if it has room, else any other one that has."""
        if job.holder is None:
            return
        if job.holder.has_room():
            self._claim(job.holder, now)
        elif worker := self._emptiest():
            self._claim(worker, now)

    # ── the workers ──

    def _start(self, worker: SimulatedWorker, job: Job, now: float) -> None:
        hits = worker.look_up(job)
        compute_s = (job.prompt - hits) * PREFILL_S + STEP_S
        if job.kind == BULK:
            first = worker.computed = max(now, worker.computed) + compute_s
        else:
            first = worker.urgent = max(now, worker.urgent) + compute_s
            worker.computed = max(first, worker.computed + compute_s)
        # until those prompts are computed, each answer gets one token of a step with a chunk
        slow_steps = min(job.answer, (first - now) / CHUNK_S)
        ended = first + job.answer * STEP_S + slow_steps * (CHUNK_S - STEP_S)
        tokens = job.prompt + job.answer
        worker.running += 1
        worker.tokens += tokens
        heapq.heappush(self._rooms, (worker.running, worker.number))
        self._calls.claimed += 1
        self._calls.tokens += job.answer
        self._calls.appends += job.answer / worker.running
        self._count(job, hits, first, ended)
        self._day.computed_s += compute_s
        if job.kind != STANDARD:  # those share no prefix
            self._holders[job.prefix] = worker
            worker.keep(job.prefix, tokens if job.kind == CHAT else job.shared)
        self._at(ended, (worker, job))

    def _count(self, job: Job, hits: int, first: float, ended: float) -> None:
        day = self._day
        if job.kind == BULK:
            day.line_hits += hits
            day.line_prompts += job.shared
            day.good += ended <= job.due
            return
        waited = first - job.arrived
        (day.light_s if job.tenant else day.heavy_s).append(waited)
        day.good += waited <= GOOD_S
        day.hits += hits
        day.prompts += job.shared and job.prompt

    def _end(self, now: float, worker: SimulatedWorker, job: Job) -> None:
        worker.running -= 1
        worker.tokens -= job.prompt + job.answer
        heapq.heappush(self._rooms, (worker.running, worker.number))
        self._calls.finished += 1
        if following := self._jobs.following(job):
            after_s, turn = following
            self._at(now + after_s, [turn])
        elif job.kind == CHAT:
            self._holders.pop(job.prefix, None)
        if self._held or any(self._shares):
            self._claim(worker, now)
