"""Looks results up in threads of their own and with a time limit, for both clients.

No caller, and no thread of an event loop, so waits for a frozen database. The threads end with the
process, also while they wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Final

from tokenmill.errors import QueueUnavailable

if TYPE_CHECKING:
    from tokenmill_schemas.result import JobResult

LIMIT_S: Final = 30.0
_AT_ONCE: Final = 5  # the connections of the pool


class LookUps:
    """Runs `look_up` for one client. Its threads start with the first calls."""

    def __init__(self, look_up: Callable[[str], JobResult | None]) -> None:
        self._look_up = look_up
        self._asked: SimpleQueue[tuple[str, Future[JobResult | None]] | None] = SimpleQueue()
        self._threads: list[Thread] = []

    def find(self, job_id: str) -> JobResult | None:
        """Return a job's result, or None. Raises QueueUnavailable after LIMIT_S."""
        found = self._ask(job_id)
        try:
            return found.result(LIMIT_S)
        except TimeoutError:
            found.cancel()
            raise _too_late() from None

    async def find_async(self, job_id: str) -> JobResult | None:
        """Return the same from an event loop."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._ask(job_id)), LIMIT_S)
        except TimeoutError:
            raise _too_late() from None

    def close(self) -> None:
        """End the threads, each after its present look-up."""
        for _ in self._threads:
            self._asked.put(None)

    def _ask(self, job_id: str) -> Future[JobResult | None]:
        found: Future[JobResult | None] = Future()
        self._asked.put((job_id, found))
        if len(self._threads) < _AT_ONCE:
            thread = Thread(target=self._run, name="tokenmill-sql", daemon=True)
            self._threads.append(thread)
            thread.start()
        return found

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            job_id, found = asked
            if not found.set_running_or_notify_cancel():
                continue
            try:
                found.set_result(self._look_up(job_id))
            except BaseException as error:
                found.set_exception(error)


def _too_late() -> QueueUnavailable:
    return QueueUnavailable(f"the database does not answer within {LIMIT_S:g} s")
