"""A cancellation that arrives together with a reply, or with an error, is not forgotten."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tokenmill.transport.repairs import end_task, reraise_cancellation, wait_at_most


async def forgetful() -> str:
    """Swallow a cancellation, as Python 3.11's wait_for does when a result comes with it."""
    try:
        await asyncio.sleep(10)
    except asyncio.CancelledError:
        return "the result"
    raise AssertionError("nobody cancelled")


async def failing() -> str:
    await forgetful()
    raise ConnectionError("the reply never came")


@pytest.mark.parametrize("body", [forgetful, failing])
async def test_a_swallowed_cancellation_is_raised_again(
    body: Callable[[], Awaitable[str]],
) -> None:
    reached = []

    async def work() -> None:
        with reraise_cancellation():
            await body()
        reached.append("the next line")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reached == []


async def test_without_a_cancellation_results_and_errors_pass_unchanged() -> None:
    with reraise_cancellation():
        await asyncio.sleep(0)
    with pytest.raises(ConnectionError), reraise_cancellation():
        raise ConnectionError
    # a time limit cancels too, and takes it back
    with (
        pytest.raises(TimeoutError),
        reraise_cancellation(),
    ):
        async with asyncio.timeout(0.001):
            await asyncio.sleep(10)


async def test_waiting_for_an_event_ends_with_the_event_or_the_timeout() -> None:
    event = asyncio.Event()
    assert not await wait_at_most(event, 0.001)
    asyncio.get_running_loop().call_soon(event.set)
    assert await wait_at_most(event, 30)


async def test_a_cancellation_that_comes_with_the_event_ends_the_wait() -> None:
    event, reached = asyncio.Event(), []

    async def wait() -> None:
        await wait_at_most(event, 30)
        reached.append("the next line")

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    event.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reached == []


async def test_a_task_that_swallows_cancellations_is_cancelled_until_it_ends() -> None:
    swallowed: list[int] = []

    async def stubborn() -> None:
        while len(swallowed) < 2:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                swallowed.append(1)

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end_task(task)
    assert task.done()
    await end_task(task)
    await end_task(None)
