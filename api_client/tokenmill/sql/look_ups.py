"""Looks results up from an event loop, in threads of their own and with a time limit.

A frozen database so takes no thread of the event loop, which the application needs for other work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from tokenmill.errors import QueueUnavailable

if TYPE_CHECKING:
    from tokenmill_schemas.result import JobResult

LIMIT_S: Final = 30.0
_AT_ONCE: Final = 5  # the connections of the pool


class LookUps:
    """Runs `look_up` for one client. Its threads start with the first call."""

    def __init__(self, look_up: Callable[[str], JobResult | None]) -> None:
        self._look_up = look_up
        self._threads = ThreadPoolExecutor(_AT_ONCE, "tokenmill-sql")

    async def find(self, job_id: str) -> JobResult | None:
        """Return a job's result, or None. Raises QueueUnavailable after LIMIT_S."""
        loop = asyncio.get_running_loop()
        try:
            found = loop.run_in_executor(self._threads, self._look_up, job_id)
            return await asyncio.wait_for(found, LIMIT_S)
        except TimeoutError:
            words = f"the database does not answer within {LIMIT_S:g} s"
            raise QueueUnavailable(words) from None

    def close(self, *, wait: bool = False) -> None:
        """Start no further look-up; `wait` for those that run."""
        self._threads.shutdown(wait, cancel_futures=True)
