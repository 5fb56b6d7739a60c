"""The end of a response or a batch of the gateway is sent as OpenAI's client reads it."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest
import sqlalchemy as sa

from tests.record.support import failed
from tests.tasks.receiver import Receiver
from tests.tasks.support import SECRET, START_MS, Clock, delivery, messages, record, with_webhook
from tokenmill.sql.webhooks import announce
from tokenmill.webhooks import tenant_secret
from tokenmill_schemas import ChoiceResult, FinishReason, JobStatus
from tokenmill_schemas.tables import tenant_webhooks
from tokenmill_worker.jobs import FinishedJob

ENDS: dict[str, dict[str, Any]] = {
    "completed": {},
    "incomplete": {"choices": (ChoiceResult(text="x", finish_reason=FinishReason.LENGTH),)},
    "cancelled": {"status": JobStatus.CANCELLED},
}


def unwrapped(receiver: Receiver, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr("time.time", clock)  # a message is accepted for five minutes
    client = openai.OpenAI(api_key="none", webhook_secret=tenant_secret(SECRET, "acme"))
    return [client.webhooks.unwrap(seen.body, seen.headers) for seen in receiver.received]


def of_gateway(job_id: str, url: str, **changes: Any) -> FinishedJob:
    job = with_webhook(job_id, url, **changes)
    assert job.request is not None
    request = msgspec.structs.replace(job.request, envelope=b"{}")
    return FinishedJob(job.token, job.result, job.final_chunk, request)


def test_the_end_of_a_response_is_sent_as_openai_s_event(
    url: str, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with Receiver() as receiver:
        ended = [of_gateway(name, receiver.url, **end) for name, end in ENDS.items()]
        dead = failed("failed")
        assert dead.request is not None
        request = msgspec.structs.replace(dead.request, webhook=receiver.url, envelope=b"{}")
        record(url, *ended, FinishedJob(dead.token, dead.result, dead.final_chunk, request))
        with engine.begin() as connection:  # its words are removed, and it has ended all the same
            connection.execute(sa.text("UPDATE jobs SET envelope = NULL"))
        ours = delivery(engine, clock)
        assert {ours.deliver(claim) for claim in ours.claim()} == {"delivered"}
        events = unwrapped(receiver, clock, monkeypatch)
    found = {event.data.id: (event.type, event.created_at, event.object) for event in events}
    assert found == {
        f"resp_{name}": (f"response.{name}", START_MS // 1000, "event")
        for name in (*ENDS, "failed")
    }
    assert len({event.id for event in events}) == 4


def test_the_end_of_a_batch_is_sent_once_where_the_tenant_has_a_url(
    url: str, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with Receiver() as receiver:
        with engine.begin() as connection:
            connection.execute(tenant_webhooks.insert().values(tenant="acme", url=receiver.url))
            for tenant in ("acme", "acme", "other"):
                announce(
                    connection,
                    "batch_1",
                    "batch.completed",
                    queue="q",
                    tenant=tenant,
                    ended_ms=START_MS,
                )
        ours = delivery(engine, clock)
        assert [ours.deliver(claim) for claim in ours.claim()] == ["delivered"]
        (event,) = unwrapped(receiver, clock, monkeypatch)
    assert (event.type, event.data.id) == ("batch.completed", "batch_1")
    assert [row["tenant"] for row in messages(engine)] == ["acme"]
