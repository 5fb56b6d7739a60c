"""Waits for states without events: polls with a deadline that suits a busy machine."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable

LONG_S = 120.0


async def until(
    is_so: Callable[[], bool | Awaitable[bool]], *, timeout_s: float = LONG_S, pause_s: float = 0.01
) -> None:
    """Ask until the answer is true; the question may be a coroutine. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while True:
            answer = is_so()
            if inspect.isawaitable(answer):
                answer = await answer
            if answer:
                return
            await asyncio.sleep(pause_s)
