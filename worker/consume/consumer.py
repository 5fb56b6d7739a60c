"""The pull side of the queue: asks for as many jobs as can start soon, and hands on what it gets.

Work is claimed by credit, so the backlog stays in Redis, where another worker can take it. A claim that comes back
short lists this worker as having room, and a job that comes calls one or two of those; the bell, which all hear, is for
what comes back from others. Otherwise it looks once per poll interval, for orphans and delayed jobs call nobody. A ring
is a state and not a moment: that something may wait is known until a claim that had room for it came back short. It
knows no engine: credits come from a callable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from api_client.cancellation import wait_at_most
from worker.errors import RedisUnavailable
from worker.jobs import Delivery

log = logging.getLogger(__name__)

LONGEST_BACKOFF_S = 2.0
SHORTEST_GAP_S = 0.005  # between claims that find nothing: a bell that many hear is answered by few
MAX_AT_ONCE = 32  # jobs of a claim: taking them in keeps the event loop, and who comes meanwhile waits for it


@dataclass(frozen=True, slots=True)
class Credits:
    """`free`: jobs of any class that could start soon. `urgent`: interactive ones beyond, in bulk work's places."""

    free: int = 0
    urgent: int = 0

    def __bool__(self) -> bool:
        return self.free > 0 or self.urgent > 0


@dataclass(slots=True)
class _Waiting:
    """Whether jobs may wait in the queue: `any`, and of these `urgent` ones."""

    any: bool
    urgent: bool

    def note(self, wanted: Credits, num_claimed: int) -> None:
        """A claim gave so many. What there was room for and did not come does not wait. Of the rest nothing is known,
        and nobody will call for it: the queue lists this worker only while it has room (claim.lua).
        """
        self.any = num_claimed >= wanted.free
        self.urgent = num_claimed >= wanted.free + wanted.urgent


class Claims(Protocol):
    """What a consumer needs of the queue; JobStream is one."""

    bell: asyncio.Event

    async def claim(self, credits: int, urgent: int = 0) -> list[Delivery]: ...

    async def release(self, jobs: Iterable[tuple[str, int, bool]]) -> list[bool]: ...

    async def ring_all(self) -> None: ...


class Consumer:
    """`on_claim` hears of every claim that succeeded, also an empty one: the worker's pulse."""

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
        self._found_ended = False  # by the last claim: more may have to be recorded
        self._owed: list[tuple[str, int, bool]] = []
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()

    def ring(self) -> None:
        """Jobs may wait."""
        self._stream.bell.set()

    async def answer(self) -> None:
        """A job came, and this worker was listed for it. Where its room is gone since, others hear of it."""
        self.ring()
        if self._stopping.is_set() or not self._credits():
            with contextlib.suppress(RedisUnavailable):  # they look at their next poll
                await self._stream.ring_all()

    def notice_room(self) -> None:
        """Credits may have risen."""
        if self._is_idle and self._is_due():
            self._stream.bell.set()

    def _is_due(self) -> bool:
        """Is there room for what may wait?"""
        waiting = self._may_wait
        if not (waiting.any or waiting.urgent):  # asked after every step
            return False
        credits = self._credits()
        return (credits.free > 0 and waiting.any) or (credits.urgent > 0 and waiting.urgent)

    async def run(self) -> None:
        """Until stop(). Redis being away is waited out; whatever else goes wrong is logged and survived."""
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
        """No claim begins after this returns."""
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
        self._found_ended = any(delivery.verdict != "run" for delivery in deliveries)
        self._may_wait.note(wanted, sum(delivery.verdict == "run" for delivery in deliveries))
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
        """What could not be taken in; kept until the queue has it."""
        if self._owed:
            await self._stream.release(self._owed)
            self._owed = []

    async def _wait(self) -> None:
        """Until there is room for what may wait, or for the next poll. A worker without a free place does not answer
        the bell, and remembers it.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._poll_s
        while not self._stopping.is_set():
            self._hear()
            if self._is_due():
                return
            if not await wait_at_most(self._stream.bell, until - loop.time()):
                self._may_wait.any = self._may_wait.urgent = True  # what rings no bell
                return

    async def _sleep(self, seconds: float) -> None:
        await wait_at_most(self._stopping, seconds)

    def _note(self, error: Exception, *, first: bool) -> None:
        if first:
            log.warning("jobs cannot be claimed (%s): trying again", error)
        self._on_error(error)
