"""Interactive jobs start and end while bulk work fills the worker."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import until
from tests.support.worker import client_of, database_url, running_worker
from tokenmill_schemas.result import JobStatus
from tokenmill_worker import app
from tokenmill_worker.queue.consumer import Consumer

pytestmark = pytest.mark.redis

PLACES = 4


async def test_interactive_jobs_start_while_bulk_jobs_fill_every_place(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More bulk than places, so that some waits in the engine too; each would take minutes."""
    database = database_url(tmp_path)
    monkeypatch.setattr(app, "Consumer", partial(Consumer, poll_s=60.0))
    full: dict[str, Any] = {
        "max_num_seqs": PLACES,
        "policy": "priority",
        "drain_seconds": 0.0,
    }
    async with client_of(redis_url, database) as client:
        bulk = [
            await client.submit(
                prompt=f"Line {number}", max_tokens=4000, ignore_eos=True, priority="bulk"
            )
            for number in range(4 * PLACES)
        ]
        async with running_worker(
            redis_url, database, model="synthetic?step_ms=30", **full
        ) as worker:
            await until(
                lambda: len(worker.service._owned) >= PLACES and not worker.service.credits().free
            )
            for number in range(2 * PLACES):
                urgent = await client.submit(
                    prompt=f"Question {number}", max_tokens=4, priority="interactive"
                )
                result = await client.result(urgent, timeout=60)
                assert result.status is JobStatus.SUCCEEDED
            states = [(await client.status(job)).status for job in bulk]
    assert set(states) == {JobStatus.RUNNING, JobStatus.QUEUED}
