"""A cancellation that arrives together with a reply is not forgotten."""

import asyncio

import pytest

from api_client.scripts import heeding_cancellation


async def forgetful() -> str:
    """What Python 3.11's wait_for does when its result and a cancellation come at once."""
    try:
        await asyncio.sleep(10)
    except asyncio.CancelledError:
        return "the result"
    raise AssertionError("nobody cancelled")


async def test_a_swallowed_cancellation_is_raised_all_the_same() -> None:
    reached = []

    async def work() -> None:
        with heeding_cancellation():
            await forgetful()
        reached.append("the next line")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reached == []


async def test_without_one_nothing_happens() -> None:
    with heeding_cancellation():
        await asyncio.sleep(0)
