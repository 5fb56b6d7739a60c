"""Crashes alone and with others: only those alone condemn a job soon."""

import pytest

from tests.support.queue import Queue

pytestmark = pytest.mark.redis


async def test_a_crash_of_several_jobs_suspects_all_and_ends_none(queue: Queue) -> None:
    await queue.client.submit_many([{"prompt": "x"}] * 2)
    worker = queue.worker(max_solo_crashes=1, max_crashes=4)
    for crashes in range(4):
        got = await worker.claim(2)
        assert {(d.crashes, d.outcome) for d in got} == {(crashes, "run")}
        await worker.release([(d.job_id, d.token, True) for d in got])
    assert {(d.crashes, d.outcome) for d in await worker.claim(2)} == {(4, "dead")}


async def test_a_suspect_counts_as_alone_only_if_its_release_marks_it_alone(
    queue: Queue,
) -> None:
    job = await queue.submit()
    worker = queue.worker(max_solo_crashes=1)
    for crashes, alone in enumerate([False, False, True]):
        (delivery,) = await worker.claim(1)
        assert (delivery.crashes, delivery.outcome, delivery.alone) == (crashes, "run", False)
        await worker.release([(job, delivery.token, True)], alone=alone)
    (delivery,) = await worker.claim(1)
    assert (delivery.outcome, delivery.alone) == ("dead", True)
