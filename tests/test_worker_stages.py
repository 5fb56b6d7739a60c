"""A worker whose stage fails in a way that nobody foresaw ends, and says by what."""

from __future__ import annotations

import asyncio

import pytest

from worker.app import background


async def fail() -> None:
    raise AttributeError("nobody foresaw this")


async def test_a_stage_that_fails_ends_the_worker() -> None:
    stop = asyncio.Event()
    with pytest.raises(AttributeError, match="nobody foresaw this"):
        async with background(fail(), stop):
            await stop.wait()


async def test_a_stage_is_cancelled_behind_the_body() -> None:
    stop, began = asyncio.Event(), asyncio.Event()
    was_cancelled = False

    async def work() -> None:
        nonlocal was_cancelled
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_cancelled = True
            raise

    async with background(work(), stop):
        await began.wait()
        assert not stop.is_set()
    assert was_cancelled
