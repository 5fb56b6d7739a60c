"""Keeps cancellations from being lost.

The Redis client sends with Python 3.11's `wait_for`, which drops a cancellation that arrives
together with the result; the task would then continue for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reraise_cancellation() -> Iterator[None]:
    """Raise a cancellation that the body swallowed, also in place of an error that the body
    raised.
    """
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
    """Return whether the event is set within this many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return event.is_set()  # it may have been set while the loop was late
    return True


async def end_task(task: asyncio.Task[object] | asyncio.Task[None] | None) -> None:
    """Cancel a task repeatedly until it has ended. Its outcome is ignored."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
