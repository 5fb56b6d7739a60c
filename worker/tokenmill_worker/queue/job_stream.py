"""Calls the queue for a worker: claim, append, finish, release, heartbeat, resign. Each is one
script call.

Every call may be repeated after a lost reply. Server and network errors are raised as
RedisUnavailable, and the caller decides what to do. The stream remembers the ids and fencing tokens
of the jobs that this worker owns, and nothing of their content.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import redis.asyncio

from tokenmill.transport.scripts import Argument, Script, call_async, in_parts
from tokenmill.transport.server_clock import ServerClock
from tokenmill_schemas.codec import encode
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.keys import Keys
from tokenmill_worker.errors import RedisUnavailable
from tokenmill_worker.jobs import (
    AppendFailures,
    AppendReply,
    ChunkAppend,
    Delivery,
    FinishedJob,
    JobObserver,
)
from tokenmill_worker.queue import scripts
from tokenmill_worker.queue.append import AppendBatch, PipelinedConnection
from tokenmill_worker.queue.leases import Lease
from tokenmill_worker.queue.scripts import HeartbeatReply, finish_arguments, translated_errors
from tokenmill_worker.queue.server_check import ServerWatch

log = logging.getLogger(__name__)

MAX_FINISH_BYTES = 4 * 1024 * 1024
# The pause after a claim that left jobs to workers that were woken too, or that have their
# sessions: until then they have claimed theirs, or have no room.
LOOK_AGAIN_S = 0.05
GONE = -1  # the reply of release for a job whose record the server lost


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of the queue, with times in seconds. A limit of 0 keeps the queue's value; any other
    becomes the queue's at `open()`.
    """

    lease_s: float = 10.0
    sweep_s: float = 1.0
    result_ttl_s: int = 3_600
    dead_ttl_s: int = 30 * 86_400
    log_ttl_s: int = 3_600  # of an unfinished job's tokens
    max_solo_crashes: int = 3  # crashes with no other job in the engine, so the job caused them
    max_crashes: int = 50  # crashes, alone or with other jobs
    # deliveries that ended with the worker's disappearance, whatever its cause
    max_deliveries: int = 10
    max_claim_bytes: int = 16 * 1024 * 1024
    bulk_every: int = 8  # while bulk jobs wait, one job in this many is bulk
    queue_limit: int = 0
    max_payload_bytes: int = 0
    idempotency_ttl_s: float = 0.0
    tenant_concurrency: int = 0
    tenant_rate: float = 0.0  # jobs a second
    tenant_burst: int = 0


class JobStream:
    """Makes the calls of one worker. `worker_id` names one process. If two live processes share a
    name, the one that started first has to end.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: Keys,
        worker_id: str,
        options: StreamOptions | None = None,
        *,
        sharded: bool = False,
        clock: ServerClock | None = None,
        observer: JobObserver | None = None,
    ) -> None:
        self.keys = keys
        self.worker_id = worker_id
        self.options = options or StreamOptions()
        self.clock = clock or ServerClock()  # set by the server's with every heartbeat
        self.wake_up = asyncio.Event()
        self.observer = observer or JobObserver()
        self.lease = Lease(self.options.lease_s)
        self.server = ServerWatch(client, keys.meta)
        self._client = client
        # Each script that runs in every step, or with long results, has a connection of its own.
        self._connections = {
            script.name: PipelinedConnection(client) for script in (scripts.APPEND, scripts.FINISH)
        }
        self._head: tuple[Argument, ...] = (keys.base, "SPUBLISH" if sharded else "PUBLISH")
        self._append_batch = AppendBatch()
        self._owned: dict[str, int] = {}  # job id → fencing token
        self._claiming = asyncio.Lock()
        self._claims = 0  # raised before and after each claim
        self._must_redeliver = False

    @property
    def owned(self) -> dict[str, int]:
        """The jobs that this worker owns: job id → fencing token."""
        return dict(self._owned)

    async def open(self) -> None:
        """Check the server, give back what an earlier process of this name left behind, and set the
        queue's limits.
        """
        with translated_errors():
            await self.server.check()
            await self.clock.refresh_async(self._client, self.keys.meta)
        await self._call(scripts.RESIGN, self.worker_id, "orphan")
        options = self.options
        limits: dict[str, float] = {
            "max_queued": options.queue_limit,
            "max_payload": options.max_payload_bytes,
            "idempotency_ms": round(options.idempotency_ttl_s * 1000),
            "concurrency:*": options.tenant_concurrency,
            "rate:*": options.tenant_rate,
            "burst:*": options.tenant_burst,
        }
        given = {name: value for name, value in limits.items() if value}
        given["served"] = 1  # a worker serves this queue, even before its model is loaded
        with translated_errors():
            await self._client.hset(self.keys.meta, mapping=cast("Mapping[Any, Any]", given))

    # ── claiming ──

    async def claim(self, credits: int, urgent: int = 0) -> list[Delivery]:
        """Claim up to `credits` jobs to run, `urgent` interactive ones beyond them, and any number
        that only have to be recorded. Does not wait for jobs to come.
        """
        options = self.options
        if self.lease.is_expired():
            raise RedisUnavailable("the lease has run out, and its jobs are not given up yet")
        async with self._claiming:
            known = list(self._owned) if self._must_redeliver else []
            # If the reply is lost, the next claim fetches its jobs.
            redeliver, self._must_redeliver = self._must_redeliver, True
            self._claims += 1
            reply = await self._call(
                scripts.CLAIM,
                scripts.options(
                    worker=self.worker_id,
                    lease_ms=round(options.lease_s * 1000),
                    sweep_ms=round(options.sweep_s * 1000),
                    credits=credits,
                    urgent_credits=urgent,
                    max_reply_bytes=options.max_claim_bytes,
                    max_solo_crashes=options.max_solo_crashes,
                    max_crashes=options.max_crashes,
                    max_orphaned=options.max_deliveries,
                    log_ttl_s=round(options.log_ttl_s),
                    bulk_every=options.bulk_every,
                    redeliver=int(redeliver),
                ),
                *known,
                attempts=1,
            )
            self._must_redeliver = False
            self._claims += 1
            leaves_some, gone, *items = reply
            self._report_gone(scripts.texts(gone))
            if leaves_some:
                asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self.wake_up.set)
            deliveries = [scripts.read_delivery(item) for item in items]
            self._owned.update((delivery.job_id, delivery.token) for delivery in deliveries)
            return deliveries

    # ── writing, under a fencing token ──

    async def append(self, items: list[ChunkAppend]) -> AppendFailures:
        """Append all chunks in one round trip; see ChunkLog. One call at a time."""
        if self.lease.is_expired():
            return {place: (AppendReply.LOST, item.start) for place, item in enumerate(items)}
        if not items:
            return {}
        try:
            version, packed = self._append_batch.pack(items)
            reply = await self._call(
                scripts.APPEND, round(self.options.log_ttl_s), self.worker_id, version, packed
            )
        except BaseException:
            self._append_batch.reset()
            raise
        failures = self._append_batch.apply_reply(items, reply)
        # The next heartbeat reports jobs that are gone.
        lost = [items[place] for place, (word, _) in failures.items() if word is AppendReply.LOST]
        for item in lost:
            self._forget(item.chunk.job_id, item.token)
        self._count_refused("append", len(lost))
        return failures

    async def finish(self, jobs: list[FinishedJob]) -> list[bool]:
        """Acknowledge jobs whose rows SQL has committed. Returns one flag per job; False if the
        fencing token was outdated, because the job is another worker's now.
        """
        if self.lease.is_expired():
            return [False] * len(jobs)
        done: list[bool] = []
        ttls = (round(self.options.result_ttl_s), round(self.options.dead_ttl_s))
        for part in in_parts(map(finish_arguments, jobs), MAX_FINISH_BYTES):
            arguments = [value for item in part for value in item]
            reply = await self._call(scripts.FINISH, self.worker_id, *ttls, *arguments)
            done += [bool(flag) for flag in reply]
        for job in jobs:
            self._forget(job.result.job_id, job.token)
        self._count_refused("finish", done.count(False))
        return done

    async def release(
        self, jobs: Iterable[tuple[str, int, bool]], *, alone: bool = False
    ) -> list[bool]:
        """Give back jobs, each as (job id, token, crashed?). They are claimable at once, ahead of
        every tenant stream, and keep their logs. `alone`: no other job can have caused the crash.
        """
        crashed = "solo_crash" if alone else "crash"
        return await self._give_back(
            [(job, token, crashed if crash else "handover", 0, "") for job, token, crash in jobs]
        )

    async def retry(self, job_id: str, token: int, delay_ms: int, note: str = "") -> bool:
        """Run the job again after a delay, from where its log ends; the next attempt has a higher
        number.
        """
        return (await self._give_back([(job_id, token, "retry", delay_ms, note)]))[0]

    async def wake_all(self) -> None:
        """Wake every worker, because jobs may wait."""
        await self._call(scripts.RELEASE, self.worker_id)

    async def _give_back(self, jobs: Sequence[tuple[str, int, str, int, str]]) -> list[bool]:
        if not jobs or self.lease.is_expired():
            return [False] * len(jobs)
        arguments = (value for job in jobs for value in job)
        reply = await self._call(scripts.RELEASE, self.worker_id, *arguments)
        for job_id, token, *_ in jobs:
            self._forget(job_id, token)
        gone = [job[0] for job, flag in zip(jobs, reply, strict=True) if flag == GONE]
        self._report_gone(gone)
        given_back = [flag == 1 for flag in reply]
        self._count_refused("release", given_back.count(False) - len(gone))
        return given_back

    # ── staying alive ──

    async def heartbeat(self, status: WorkerStatus) -> HeartbeatReply:
        """Renew the lease. Returns which of this worker's jobs are cancelled, and which are
        another's by now.
        """
        owned, claims, idle = dict(self._owned), self._claims, not self._claiming.locked()
        reply = await self._call(
            scripts.HEARTBEAT,
            scripts.options(
                worker=self.worker_id,
                lease_ms=round(self.options.lease_s * 1000),
                sweep_ms=round(self.options.sweep_s * 1000),
            ),
            encode(status),
            *(value for item in owned.items() for value in item),
        )
        cancelled, lost, unacknowledged, _, before, server_us, no_record = reply
        self.clock.note(int(server_us) * 1_000)
        # Owned jobs that are unknown here come from a claim whose reply was lost. Jobs of a claim
        # under way look the same, so then none counts.
        if unacknowledged and idle and claims == self._claims:
            self._must_redeliver = True
            self.wake_up.set()
        dropped = [
            job_id for job_id in scripts.texts(lost) if self._owned.get(job_id) == owned[job_id]
        ]
        self._report_gone(set(scripts.texts(no_record)).intersection(dropped))
        for job_id in dropped:
            self._forget(job_id, self._owned[job_id])
        is_replaced = scripts.started_ms(before) > status.started_ms
        return HeartbeatReply(tuple(scripts.texts(cancelled)), tuple(dropped), is_replaced)

    async def resign(self) -> int:
        """Give up every job, none as a suspect: at the end of a drain, or after a freeze that
        outlasted the lease.
        """
        self._owned.clear()
        return int(await self._call(scripts.RESIGN, self.worker_id, "handover"))

    def _forget(self, job_id: str, token: int) -> None:
        self._append_batch.forget(job_id)
        if self._owned.get(job_id) == token:
            del self._owned[job_id]

    def _report_gone(self, job_ids: Collection[str]) -> None:
        """Report jobs that the server lost: by FLUSHALL, an eviction, or a replica that lagged."""
        for job_id in job_ids:
            log.error("Job %s is lost by the server, which has no record of it any more", job_id)
        if job_ids:
            self.observer.lost_by_server(len(job_ids))

    def _count_refused(self, call: str, count: int) -> None:
        if count:
            self.observer.refused(call, count)

    async def _call(self, script: Script, *arguments: Argument, attempts: int = 2) -> Any:
        """Call a script. A connection that broke while it was idle costs one more attempt, not an
        error.
        """
        connection = self._connections.get(script.name)
        call = connection.call if connection else partial(call_async, self._client)
        started, attempt, is_done = time.perf_counter(), 0, False
        try:
            while True:
                attempt += 1
                try:
                    with translated_errors():
                        reply = await call(script, self.keys.meta, *self._head, *arguments)
                    is_done = True
                    return reply
                except RedisUnavailable:
                    if attempt == attempts:
                        raise
        finally:
            self.observer.called(script.name, time.perf_counter() - started, attempt, is_done)
