from collections.abc import AsyncIterator

import pytest

from tests.support.queue import Queue, close_queue, open_queue


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[Queue]:
    opened = await open_queue(redis_url)
    yield opened
    await close_queue(opened)
