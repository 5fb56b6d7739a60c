"""The buffer of finished jobs and its groups are bounded by bytes too, not by the number of jobs
alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.record.support import finished
from tests.record.test_finalizer import Rig
from tests.support.large import large_result
from tests.support.waiting import until
from tokenmill_schemas.codec import encode
from tokenmill_worker.record import Finalizer
from tokenmill_worker.record.finalizer import size_of


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def submit(finalizer: Finalizer, count: int, start: int = 0) -> None:
    for number in range(start, start + count):
        await finalizer.submit(finished(f"job-{number}"))


def is_full(finalizer: Finalizer) -> bool:
    return finalizer.is_full


async def test_few_large_results_fill_the_buffer_by_bytes(rig: Rig) -> None:
    """Groups are bounded by bytes as well; a single result may be larger than the bound."""
    large = replace(finished("job-0"), result=large_result("job-0"))
    size = size_of(large)
    assert size > len(encode(large.result))
    rig.store.down = True
    async with rig.running(max_buffered_bytes=3 * size, max_group_bytes=size) as finalizer:
        for number in range(2):
            await finalizer.submit(replace(large, result=large_result(f"job-{number}")))
        assert not is_full(finalizer)
        await finalizer.submit(replace(large, result=large_result("job-2")))
        assert is_full(finalizer)
        await until(lambda: bool(rig.store.groups))
        rig.store.down = False
        await finalizer.drain(60)
        assert finalizer.held_ids == []
        assert finalizer.num_bytes == 0
        assert not is_full(finalizer)
    assert set(rig.store.groups) == {1}
    assert {len(call) for call in rig.redis.calls} == {1}


async def test_small_results_share_a_transaction(rig: Rig) -> None:
    rig.store.gate = asyncio.Event()
    async with rig.running() as finalizer:
        await submit(finalizer, 1)
        await until(lambda: rig.store.groups == [1])
        await submit(finalizer, 200, start=1)
        rig.store.gate.set()
        await finalizer.drain(60)
        assert finalizer.held_ids == []
        assert finalizer.num_bytes == 0
    assert rig.store.groups == [1, 200]


async def test_a_refused_job_that_waits_keeps_its_bytes_counted(rig: Rig) -> None:
    rig.store.refuse = {"job-1"}
    async with rig.running() as finalizer:
        await submit(finalizer, 3)
        await until(lambda: len(finalizer) == 1)
        assert finalizer.num_bytes == size_of(finished("job-1"))
        rig.store.refuse.clear()
        await finalizer.drain(60)
        assert finalizer.held_ids == []
        assert finalizer.num_bytes == 0
