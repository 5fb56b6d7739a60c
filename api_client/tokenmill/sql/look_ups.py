"""Looks results up in threads of their own and with a time limit, for both clients.

No caller, and no thread of an event loop, so waits for a frozen database. A thread ends when no
look-up waits for one, and with the process, also during a look-up.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread
from typing import TYPE_CHECKING, Final

from tokenmill.errors import ClientClosed, QueueUnavailable

if TYPE_CHECKING:
    from tokenmill_schemas.result import JobResult

LIMIT_S: Final = 30.0
_AT_ONCE: Final = 5  # the connections of the pool


class LookUps:
    """Runs `look_up` for one client, in threads that start with the calls."""

    def __init__(self, look_up: Callable[[str], JobResult | None]) -> None:
        self._look_up = look_up
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = Lock()
        self._asked: deque[tuple[str, Future[JobResult | None]]] = deque()
        self._running = 0

    def find(self, job_id: str) -> JobResult | None:
        """Return a job's result, or None. Raises QueueUnavailable after LIMIT_S, and ClientClosed
        after `close`.
        """
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
        """Refuse further look-ups; those that have been asked for end by themselves."""
        self._is_closed = True

    def _ask(self, job_id: str) -> Future[JobResult | None]:
        if self._is_closed:
            raise ClientClosed
        if self._process != os.getpid():  # a fork has no threads, and may have a held lock
            self._begin()
        found: Future[JobResult | None] = Future()
        with self._lock:
            if self._running < _AT_ONCE:
                Thread(target=self._run, name="tokenmill-sql", daemon=True).start()
                self._running += 1
            self._asked.append((job_id, found))
        return found

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._asked:
                    self._running -= 1
                    return
                job_id, found = self._asked.popleft()
            if not found.set_running_or_notify_cancel():
                continue
            try:
                found.set_result(self._look_up(job_id))
            except BaseException as error:
                found.set_exception(error)


def _too_late() -> QueueUnavailable:
    return QueueUnavailable(f"the database does not answer within {LIMIT_S:g} s")
