"""Submits the drawn jobs, through the client and as raw arguments of the submit script, at a steady
rate; keeps what was accepted and what was refused, and reads some of the answers as they come.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from tests.chaos.checker import Received
from tests.chaos.clients import listen
from tests.fuzz.jobs.cases import Case
from tokenmill import AsyncClient
from tokenmill.errors import IdempotencyConflict, InvalidRequest, JobNotFound, QueueRefusal
from tokenmill.transport.scripts import SUBMIT, call_async

AT_ONCE: Final = 16
MOST_WAITING: Final = 300  # jobs that are submitted and have not ended
LISTENED: Final = 10  # one job in so many has a subscriber
_CLASSES: Final = ("interactive", "standard", "bulk")


@dataclass(slots=True)
class Submitted:
    """The ends of all submits. `findings` are errors that no documentation names."""

    cases: dict[str, Case] = field(default_factory=dict)  # by job id
    received: dict[str, Received] = field(default_factory=dict)
    by_way: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)


class FuzzProducer:
    """Submits each case once. Rate: jobs per second, over a whole run."""

    def __init__(self, url: str, queue: str, database: str, rate: float) -> None:
        self.submitted = Submitted()
        self._client = AsyncClient(url, queue=queue, database=database)
        self._redis = redis.asyncio.Redis.from_url(url)
        self._rate = rate
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()
        await self._redis.aclose()

    async def submit_all(self, cases: list[Case]) -> None:
        """Submit the cases in order, never faster than the rate and with the number that waits
        bounded.
        """
        started = time.monotonic()
        for first in range(0, len(cases), AT_ONCE):
            await asyncio.gather(*map(self._submit, cases[first : first + AT_ONCE]))
            while await self.num_waiting() > MOST_WAITING:  # noqa: ASYNC110 - it is the server's
                await asyncio.sleep(0.05)
            ahead_s = (first + AT_ONCE) / self._rate - (time.monotonic() - started)
            await asyncio.sleep(max(0.0, ahead_s))

    async def num_waiting(self) -> int:
        """Return the number of jobs that are queued or running, by the queue's own counters."""
        names = ["running", *(f"queued:{name}" for name in _CLASSES)]
        found: Any = await self._redis.hmget(self._client.keys.meta, names)
        return sum(int(value or 0) for value in found)

    async def _submit(self, case: Case) -> None:
        submitted = self.submitted
        try:
            job = await (self._submit_raw(case) if case.is_raw else self._submit_by_client(case))
        except InvalidRequest:
            submitted.refused["client" if not case.is_raw else "script"] += 1
            return
        except (IdempotencyConflict, QueueRefusal, ResponseError) as error:
            submitted.refused[type(error).__name__] += 1
            return
        except Exception as error:
            submitted.findings.append(f"submit raised {type(error).__name__}: {error}\n  {case}")
            return
        if job in submitted.cases:
            submitted.by_way["known"] += 1
            return
        submitted.by_way["raw" if case.is_raw else "client"] += 1
        submitted.cases[job] = case
        if case.cancel_after_s is not None:
            self._start(self.cancel(job, case.cancel_after_s))
        elif case.number % LISTENED == 0:
            submitted.received[job] = Received()
            self._start(self._listen(job))

    async def _submit_by_client(self, case: Case) -> str:
        return str(await self._client.submit(**case.client_arguments()))

    async def _submit_raw(self, case: Case) -> str:
        """Raises InvalidRequest with the script's word if it refuses the job."""
        key, base, publish = self._client.script_head
        sent = case.script_arguments()
        reply = await call_async(self._redis, SUBMIT, key, base, publish, 0, 0, *sent)
        if reply[0] != b"ok":
            raise InvalidRequest([repr(reply)])
        return str(reply[1].decode())

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self, job: str, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        try:
            await self._client.cancel(job)
        except JobNotFound:
            return  # it ended, and its result's time is over
        except Exception as error:
            words = f"cancel raised {type(error).__name__}: {error}"
            self.submitted.findings.append(f"{words}\n  {self.submitted.cases[job]}")
            return
        self.submitted.cancelled.add(job)

    async def _listen(self, job: str) -> None:
        try:
            await listen(self._client, job, self.submitted.received[job])
        except Exception as error:
            words = f"stream raised {type(error).__name__}: {error}"
            self.submitted.findings.append(f"{words}\n  {self.submitted.cases[job]}")

    async def wait_for_readers(self, timeout_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def states(self, jobs: list[str]) -> dict[str, str]:
        """Return the state of each job in Redis, and its number of deliveries."""
        found = {}
        for job in jobs:
            try:
                values: Any = await self._redis.hmget(
                    self._client.keys.job(job), ["state", "deliveries"]
                )
            except RedisError as error:
                values = [str(error).encode(), b""]
            found[job] = " ".join((value or b"-").decode("utf-8", "replace") for value in values)
        return found
