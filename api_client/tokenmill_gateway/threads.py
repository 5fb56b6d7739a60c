"""Runs a call of the database in a thread, for a limited time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from tokenmill.errors import QueueUnavailable

LIMIT_S: Final = 30.0
# of their own: no look-up of a host, and no other library, waits behind a frozen database
_THREADS: Final = ThreadPoolExecutor(8, thread_name_prefix="tokenmill-gateway")
T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Return what the call returns. Raises QueueUnavailable after LIMIT_S."""
    try:
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.get_running_loop().run_in_executor(_THREADS, call)
    except TimeoutError:
        words = f"the database does not answer within {LIMIT_S:g} s"
        raise QueueUnavailable(words) from None
