"""Claims as many jobs from the queue as can start soon, and passes them on.

Claims are limited by credits, so the backlog stays in Redis, where another worker can take it. A
claim that returns fewer jobs than it asked for registers this worker as idle. A submitted job calls
one or two idle workers. The wake-up channel (`bell`) reaches all workers, and announces jobs that
other workers gave back. Orphans and delayed jobs are announced by nothing, so the consumer also
claims once per poll interval.

A wake-up sets a flag. The flag stays set until a claim returns fewer jobs than it asked for.
Credits come from a callable, so the consumer depends on no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from tokenmill.transport.cancellation import wait_at_most
from tokenmill_worker.errors import RedisUnavailable
from tokenmill_worker.jobs import Delivery

log = logging.getLogger(__name__)

LONGEST_BACKOFF_S = 2.0
# after a claim that found nothing: of many workers woken at once, few claim again
SHORTEST_GAP_S = 0.005
MAX_AT_ONCE = 32  # jobs per claim: admitting them blocks the event loop for all other tasks


@dataclass(frozen=True, slots=True)
class Credits:
    """The room for a claim. `free`: jobs of any class that could start soon. `urgent`: further
    interactive jobs, which take the places of bulk work.
    """

    free: int = 0
    urgent: int = 0

    def __bool__(self) -> bool:
        return self.free > 0 or self.urgent > 0


@dataclass(slots=True)
class _Waiting:
    """Flags that say whether the queue may hold jobs of `any` class, and `urgent` ones."""

    any: bool
    urgent: bool

    def note(self, wanted: Credits, num_claimed: int) -> None:
        """Record the size of a claim. If it returned fewer jobs than requested, no such job is
        waiting. If it returned all, more may wait, and no call will come for them: the queue
        registers a worker as idle only while it has room (claim.lua).
        """
        self.any = num_claimed >= wanted.free
        self.urgent = num_claimed >= wanted.free + wanted.urgent


class Claims(Protocol):
    """The part of the queue that a consumer uses; implemented by JobStream."""

    bell: asyncio.Event

    async def claim(self, credits: int, urgent: int = 0) -> list[Delivery]: ...

    async def release(self, jobs: Iterable[tuple[str, int, bool]]) -> list[bool]: ...

    async def ring_all(self) -> None: ...


class Consumer:
    """Claims jobs and passes them to `take`. `on_claim` is called after every successful claim,
    also an empty one, and so shows that the worker is alive.
    """

    def __init__(
        self,
        stream: Claims,
        credits: Callable[[], Credits],
        take: Callable[[list[Delivery]], Awaitable[None]],
        *,
        poll_s: float = 1.0,
        on_claim: Callable[[int], None] = lambda _count: None,
        on_error: Callable[[Exception], None] = lambda _error: None,
    ) -> None:
        self._stream = stream
        self._credits = credits
        self._take = take
        self._poll_s = poll_s
        self._on_claim = on_claim
        self._on_error = on_error
        self._may_wait = _Waiting(True, True)
        self._is_idle = False
        self._found_ended = False  # the last claim held ended jobs: more may have to be recorded
        self._owed: list[tuple[str, int, bool]] = []
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()

    def ring(self) -> None:
        """Wake the consumer: jobs may wait."""
        self._stream.bell.set()

    async def answer(self) -> None:
        """Handle a call: a job came while this worker was registered as idle. If it has no room any
        more, wake all workers.
        """
        self.ring()
        if self._stopping.is_set() or not self._credits():
            with contextlib.suppress(RedisUnavailable):  # the others claim at their next poll
                await self._stream.ring_all()

    def notice_room(self) -> None:
        """Wake the consumer if credits have risen enough for a job that may wait."""
        if self._is_idle and self._is_due():
            self._stream.bell.set()

    def _is_due(self) -> bool:
        """Is there room for a job that may wait?"""
        waiting = self._may_wait
        if not (waiting.any or waiting.urgent):  # the usual case after a step
            return False
        credits = self._credits()
        return (credits.free > 0 and waiting.any) or (credits.urgent > 0 and waiting.urgent)

    async def run(self) -> None:
        """Claim until `stop()`. Retries while Redis is away; logs any other error and continues."""
        failures = 0
        self._ended.clear()
        try:
            while not self._stopping.is_set():
                try:
                    num_found = await self._claim_once()
                    failures = 0
                except RedisUnavailable as error:
                    failures += 1
                    self._note(error, first=failures == 1)
                    await self._sleep(min(LONGEST_BACKOFF_S, 0.05 * 2.0 ** min(failures, 10)))
                    continue
                except Exception as error:
                    failures += 1
                    log.exception("a claim failed")
                    self._on_error(error)
                    await self._sleep(LONGEST_BACKOFF_S)
                    continue
                if self._found_ended and self._credits():
                    continue
                if not num_found:
                    await self._sleep(SHORTEST_GAP_S)
                self._is_idle = True
                await self._wait()
                self._is_idle = False
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Stop claiming. No claim begins after this returns."""
        self._stopping.set()
        self._stream.bell.set()
        await self._ended.wait()

    async def _claim_once(self) -> int:
        await self._give_back()
        self._hear()
        credits = self._credits()
        wanted = Credits(min(credits.free, MAX_AT_ONCE), min(credits.urgent, MAX_AT_ONCE))
        deliveries = await self._stream.claim(wanted.free, wanted.urgent)
        self._on_claim(len(deliveries))
        self._found_ended = any(delivery.outcome != "run" for delivery in deliveries)
        self._may_wait.note(wanted, sum(delivery.outcome == "run" for delivery in deliveries))
        if not deliveries:
            return 0
        try:
            await self._take(deliveries)
        except Exception as error:
            log.exception("claimed jobs could not be taken in: giving them back as suspects")
            self._on_error(error)
            self._owed = [(delivery.job_id, delivery.token, True) for delivery in deliveries]
            await self._give_back()
        return len(deliveries)

    def _hear(self) -> None:
        if self._stream.bell.is_set():
            self._stream.bell.clear()
            self._may_wait.any = self._may_wait.urgent = True

    async def _give_back(self) -> None:
        """Release the jobs that `take` failed on. They stay in `_owed` until the queue has taken
        them.
        """
        if self._owed:
            await self._stream.release(self._owed)
            self._owed = []

    async def _wait(self) -> None:
        """Wait for room for a job that may wait, or for the next poll. A worker without room keeps
        the wake-up's flag and claims nothing.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._poll_s
        while not self._stopping.is_set():
            self._hear()
            if self._is_due():
                return
            if not await wait_at_most(self._stream.bell, until - loop.time()):
                # orphans and delayed jobs send no wake-up
                self._may_wait.any = self._may_wait.urgent = True
                return

    async def _sleep(self, seconds: float) -> None:
        await wait_at_most(self._stopping, seconds)

    def _note(self, error: Exception, *, first: bool) -> None:
        if first:
            log.warning("jobs cannot be claimed (%s): trying again", error)
        self._on_error(error)
