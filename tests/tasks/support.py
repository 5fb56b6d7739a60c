"""Recorded jobs with webhooks, and a clock that is set by hand."""

import asyncio
import ipaddress
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa

from tests.record.support import finished
from tokenmill.transport.backoff import Backoff
from tokenmill_schemas.tables import webhooks
from tokenmill_worker.jobs import FinishedJob
from tokenmill_worker.record import ResultStore
from tokenmill_worker.tasks.webhooks.delivery import WebhookDelivery
from tokenmill_worker.tasks.webhooks.http_sender import Sender
from tokenmill_worker.tasks.webhooks.outbox import Outbox

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
LOCAL = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
START_MS = 1_795_000_000_090  # when the jobs of tests.record.support end


@dataclass
class Clock:
    seconds: float = START_MS / 1000

    def __call__(self) -> float:
        return self.seconds


def with_webhook(job_id: str, hook: str, **changes: Any) -> FinishedJob:
    job = finished(job_id, **changes)
    assert job.request is not None
    request = msgspec.structs.replace(job.request, webhook=hook)
    return FinishedJob(job.token, job.result, job.final_chunk, request)


def record(url: str, *jobs: FinishedJob) -> None:
    async def write() -> None:
        store = ResultStore(url, queue="q")
        report = await store.record(jobs)
        assert report.written == {job.result.job_id for job in jobs}
        await store.close()

    asyncio.run(write())


def delivery(
    engine: sa.Engine,
    clock: Clock,
    *,
    max_attempts: int = 3,
    per_host: int = 8,
    secret: str = SECRET,
    timeout_s: float = 30,
    allowed: Any = LOCAL,
) -> WebhookDelivery:
    box = Outbox(engine, max_attempts=max_attempts, per_host=per_host)
    return WebhookDelivery(
        box,
        Sender(timeout_s, allowed),
        secret,
        Backoff(first_s=5.0, longest_s=100.0, factor=4.0, spread=(0.75, 1.25)),
        clock,
    )


def messages(engine: sa.Engine) -> list[dict[str, Any]]:
    with engine.connect() as connection:
        return [
            dict(row)
            for row in connection.execute(
                sa.select(webhooks).order_by(webhooks.c.ended_ms)
            ).mappings()
        ]
