"""Cancellations that cannot get lost. Python 3.11's `wait_for`, which the Redis client uses when it sends, forgets a
cancellation that comes together with the result: the task would go on for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heeding_cancellation() -> Iterator[None]:
    """A cancellation that the body swallowed is raised after it, also in place of the error that it ended with."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0

    def was_swallowed() -> bool:
        return task is not None and task.cancelling() > before

    try:
        yield
    except Exception as error:
        if was_swallowed():
            raise asyncio.CancelledError from error
        raise
    if was_swallowed():
        raise asyncio.CancelledError


async def wait_at_most(event: asyncio.Event, seconds: float) -> bool:
    """Is it set within this time?"""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def end_task(task: asyncio.Task[object] | asyncio.Task[None] | None) -> None:
    """Cancel it until it is over, however often that takes. Its outcome is not looked at."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
