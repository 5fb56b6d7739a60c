"""Claims as many jobs from the queue as can start soon, and passes them on.

Claims are limited by credits, so the backlog stays in Redis, where another worker can take it. A
claim that returns fewer jobs than it asked for registers this worker as idle. Jobs that are
submitted or become due wake idle workers, one more than there are jobs. Each of these claims its
share, and claims again soon if it left jobs to the others. The queue's wake-up channel reaches all
workers, and announces jobs that other workers gave back or lost. A wake-up may be lost, so the
consumer also claims once per poll interval.

A wake-up sets a flag. The flag stays set until a claim returns fewer jobs than it asked for.
Credits come from a callable, so the consumer depends on no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Container, Iterable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, Protocol

from tokenmill.transport.backoff import Backoff
from tokenmill.transport.repairs import wait_at_most
from tokenmill_worker.contract.events import Capacity
from tokenmill_worker.errors import RedisUnavailable
from tokenmill_worker.jobs import Delivery

# Jobs claimed beyond the free places, so that the next step fills a place that becomes free.
LOOKAHEAD = 4


@dataclass(frozen=True, slots=True)
class Credits:
    """The room for a claim. `free`: jobs of any class that could start soon. `urgent`: further
    interactive jobs, which take the places of bulk work.
    """

    free: int = 0
    urgent: int = 0

    def __bool__(self) -> bool:
        return self.free > 0 or self.urgent > 0


def credits_of(
    capacity: Capacity,
    in_engine: dict[str, None],
    preparing: Collection[str],
    urgent: Container[str],
) -> Credits:
    """Return the room of an engine as its last frame reports it, minus the jobs that this frame
    does not count: those in preparation, and the last ones sent.

    Args:
        capacity: The report of the last frame. It counts the interactive jobs that it knows.
        in_engine: The ids of the requests sent to the engine, in the order of their sending.
        preparing: The ids of the requests that will be sent.
        urgent: The ids of the interactive ones among both.
    """
    num_sent = max(0, len(in_engine) - capacity.running - capacity.waiting)
    uncounted = chain(preparing, islice(reversed(in_engine), num_sent))
    num_uncounted_urgent = sum(request_id in urgent for request_id in uncounted)
    num_uncounted = len(preparing) + num_sent
    free = max(0, capacity.free_sequences + LOOKAHEAD - capacity.waiting - num_uncounted)
    return Credits(free, max(0, capacity.free_urgent - free - num_uncounted_urgent))


@dataclass(slots=True)
class BacklogHint:
    """Flags that say whether the queue may hold jobs of `any` class, and `urgent` ones."""

    any: bool = True
    urgent: bool = True

    def wake(self) -> None:
        """Note that jobs of both kinds may wait."""
        self.any = self.urgent = True

    def note_claim(self, wanted: Credits, num_claimed: int) -> None:
        """Record the size of a claim. If it returned fewer jobs than requested, no such job is
        waiting. If it returned all, more may wait, and no wake-up will come for them: the queue
        registers a worker as idle only while it has room (claim.lua).
        """
        self.any = num_claimed >= wanted.free
        self.urgent = num_claimed >= wanted.free + wanted.urgent

    def is_met_by(self, credits: Credits) -> bool:
        """Return whether there is room for a job that may wait."""
        return (credits.free > 0 and self.any) or (credits.urgent > 0 and self.urgent)


log = logging.getLogger(__name__)

BACKOFF: Final = Backoff(first_s=0.1, longest_s=2.0, spread=(1.0, 1.0))
# The pause after a claim that found nothing: of many workers woken at once, few claim again.
SHORTEST_GAP_S = 0.005
# Jobs per claim: processing them blocks the event loop for all other tasks.
MAX_AT_ONCE = 32


class JobSource(Protocol):
    """The part of the queue that a consumer uses; implemented by JobStream."""

    wake_up: asyncio.Event

    async def claim(self, credits: int, urgent: int = 0) -> list[Delivery]: ...

    async def release(
        self, jobs: Iterable[tuple[str, int, bool]], *, alone: bool
    ) -> list[bool]: ...

    async def wake_all(self) -> None: ...


class Consumer:
    """Claims jobs and passes them to `take`. `on_claim` is called after every successful claim,
    also an empty one, and so shows that the worker is alive.
    """

    def __init__(
        self,
        stream: JobSource,
        credits: Callable[[], Credits],
        take: Callable[[list[Delivery]], Awaitable[None]],
        *,
        poll_s: float = 1.0,
        on_claim: Callable[[int], None] = lambda _count: None,
    ) -> None:
        self._stream = stream
        self._credits = credits
        self._take = take
        self._poll_s = poll_s
        self._on_claim = on_claim
        self._backlog = BacklogHint()
        self._is_idle = False
        self._found_ended = False  # the last claim held ended jobs: more may have to be recorded
        self._to_return: list[tuple[str, int, bool]] = []
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()

    def wake(self) -> None:
        """Wake the consumer: jobs may wait."""
        self._stream.wake_up.set()

    async def answer_wake_up(self) -> None:
        """Handle a wake-up of this worker alone: a job came while it was registered as idle. If it
        has no room any more, wake all workers.
        """
        self.wake()
        if self._stopping.is_set() or not self._credits():
            with contextlib.suppress(RedisUnavailable):  # the others claim at their next poll
                await self._stream.wake_all()

    def notice_room(self) -> None:
        """Wake the consumer if credits have risen enough for a job that may wait."""
        if self._is_idle and self._should_claim():
            self._stream.wake_up.set()

    def _should_claim(self) -> bool:
        """Return whether there is room for a job that may wait."""
        backlog = self._backlog
        if not (backlog.any or backlog.urgent):  # the usual case after a step
            return False
        return backlog.is_met_by(self._credits())

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
                    if failures == 1:
                        log.warning("No jobs can be claimed until Redis answers: %s", error)
                    await self._sleep(BACKOFF.delay_s(failures))
                    continue
                except Exception:
                    failures += 1
                    log.exception(
                        "A claim failed; the next one follows after %g s", BACKOFF.longest_s
                    )
                    await self._sleep(BACKOFF.longest_s)
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
        self._stream.wake_up.set()
        await self._ended.wait()

    async def _claim_once(self) -> int:
        await self._return_jobs()
        self._read_wake_up()
        credits = self._credits()
        wanted = Credits(min(credits.free, MAX_AT_ONCE), min(credits.urgent, MAX_AT_ONCE))
        deliveries = await self._stream.claim(wanted.free, wanted.urgent)
        self._on_claim(len(deliveries))
        num_runnable = sum(delivery.outcome == "run" for delivery in deliveries)
        self._found_ended = num_runnable < len(deliveries)
        self._backlog.note_claim(wanted, num_runnable)
        if not deliveries:
            return 0
        try:
            await self._take(deliveries)
        except RedisUnavailable:  # no job caused it
            self._to_return = [(one.job_id, one.token, False) for one in deliveries]
            raise
        except Exception:
            log.exception(
                "%d claimed jobs could not be started; they return to the queue as suspects",
                len(deliveries),
            )
            self._to_return = [(one.job_id, one.token, True) for one in deliveries]
            await self._return_jobs()
        return len(deliveries)

    def _read_wake_up(self) -> None:
        if self._stream.wake_up.is_set():
            self._stream.wake_up.clear()
            self._backlog.wake()

    async def _return_jobs(self) -> None:
        """Release the jobs that `take` failed on. They stay in `_to_return` until the queue has
        taken them.
        """
        if self._to_return:
            await self._stream.release(self._to_return, alone=len(self._to_return) == 1)
            self._to_return = []

    async def _wait(self) -> None:
        """Wait for room for a job that may wait, or for the next poll. A worker without room keeps
        the wake-up's flag and claims nothing.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._poll_s
        while not self._stopping.is_set():
            self._read_wake_up()
            if self._should_claim():
                return
            if not await wait_at_most(self._stream.wake_up, until - loop.time()):
                self._backlog.wake()  # a wake-up may have been lost
                return

    async def _sleep(self, seconds: float) -> None:
        await wait_at_most(self._stopping, seconds)
