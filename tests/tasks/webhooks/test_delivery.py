"""A webhook message is signed, retried, marked dead, never lost, and sent to no wrong receiver."""

import json
import threading

import pytest
import sqlalchemy as sa

from tests.record.support import failed
from tests.tasks.receiver import Receiver
from tests.tasks.support import SECRET, START_MS, Clock, delivery, messages, record, with_webhook
from tokenmill.webhooks import tenant_secret, verify
from tokenmill_schemas import ChoiceResult, FinishReason, GeneratedCall, JobStatus
from tokenmill_schemas.tables import jobs
from tokenmill_worker.jobs import FinishedJob
from tokenmill_worker.tasks.webhooks.delivery import MAX_TEXT_BYTES
from tokenmill_worker.tasks.webhooks.outbox import LEASE_MS, MAX_OF_TENANT, OutboxLease


def test_a_delivered_webhook_has_a_valid_signature(url: str, engine: sa.Engine) -> None:
    clock = Clock()
    with Receiver() as receiver:
        record(url, with_webhook("a", receiver.url))
        ours = delivery(engine, clock)
        (claim,) = ours.claim()
        assert ours.deliver(claim) == "delivered"
    (seen,) = receiver.received
    event = verify(seen.body, seen.headers, tenant_secret(SECRET, "acme"), now=clock())
    assert (event.type, event.data.job_id, event.data.status) == (
        "job.succeeded",
        "a",
        JobStatus.SUCCEEDED,
    )
    assert event.data.choices is not None
    assert event.data.choices[0].text == "Blue light scatters. ☁"
    assert event.data.usage is not None
    assert event.data.usage.completion_tokens == 3
    assert event.data.metadata == {"user": "42"}
    assert event.timestamp == "2026-11-18T11:06:40.090000Z"
    assert "token_ids" not in json.loads(seen.body)["data"]["choices"][0]
    (row,) = messages(engine)
    assert (row["state"], row["attempts"], row["last_status"]) == ("delivered", 1, 200)
    assert ours.claim() == []


def test_a_failed_delivery_is_retried_and_marked_dead_at_the_limit(
    url: str, engine: sa.Engine
) -> None:
    clock = Clock()
    with Receiver([(500, {}), (404, {}), (503, {})]) as receiver:
        record(url, with_webhook("a", receiver.url))
        ours = delivery(engine, clock)
        pauses = []
        for _ in range(3):
            (claim,) = ours.claim()
            assert ours.deliver(claim) == "failed"
            assert ours.claim() == []  # not before its time
            (row,) = messages(engine)
            pauses.append(row["due_ms"] / 1000 - clock())
            clock.seconds = row["due_ms"] / 1000
        assert len({seen.headers["webhook-id"] for seen in receiver.received}) == 1
        assert len({seen.headers["webhook-timestamp"] for seen in receiver.received}) == 3
        assert ours.claim() == []
    assert 3.7 <= pauses[0] <= 6.3
    assert 15 <= pauses[1] <= 25
    assert (row["state"], row["attempts"], row["last_status"]) == ("dead", 3, 503)
    assert row["last_error"] == "the receiver answered 503"


@pytest.mark.parametrize("gone", [True, False])
def test_an_undeliverable_webhook_is_marked_dead_at_once(
    url: str, engine: sa.Engine, gone: bool
) -> None:
    with Receiver([(410, {})]) as receiver:
        record(url, with_webhook("a", receiver.url))
        ours = delivery(engine, Clock()) if gone else delivery(engine, Clock(), allowed=())
        assert ours.deliver(ours.claim()[0]) == "failed"
        assert len(receiver.received) == gone
    (row,) = messages(engine)
    assert row["state"] == "dead"
    assert ("410" if gone else "TOKENMILL_WEBHOOK_NETWORKS") in row["last_error"]


def test_a_claimed_webhook_that_was_not_begun_is_due_again(url: str, engine: sa.Engine) -> None:
    clock = Clock()
    with Receiver() as receiver:
        record(url, with_webhook("a", receiver.url))
        ours = delivery(engine, clock)
        (lost,) = ours.claim()
        clock.seconds += LEASE_MS / 1000
        (claim,) = ours.claim()
        assert ours.deliver(lost) == "skipped"  # its message comes after all, too late
        assert ours.deliver(claim) == "delivered"
        assert ours.deliver(claim) == "skipped"  # and twice
        assert len(receiver.received) == 1
    assert messages(engine)[0]["attempts"] == 1


def test_a_webhook_interrupted_while_sending_is_sent_again_with_the_same_id(
    url: str, engine: sa.Engine
) -> None:
    clock = Clock()
    with Receiver() as receiver:
        record(url, with_webhook("a", receiver.url))
        ours = delivery(engine, clock)
        begun = ours._outbox.begin(ours.claim()[0], START_MS)
        assert begun is not None
        ours._send(begun)  # and here it dies
        clock.seconds += LEASE_MS / 1000
        assert ours.deliver(ours.claim()[0]) == "delivered"
        assert [seen.headers["webhook-id"] for seen in receiver.received] == [
            f"msg_a_{START_MS}"
        ] * 2
    assert messages(engine)[0]["attempts"] == 2


def test_a_webhook_whose_senders_die_is_marked_dead_at_the_limit(
    url: str, engine: sa.Engine
) -> None:
    clock = Clock()
    record(url, with_webhook("a", "http://localhost:1/"))
    ours = delivery(engine, clock)
    for _ in range(3):
        (claim,) = ours.claim()
        assert ours._outbox.begin(claim, round(clock() * 1000)) is not None
        clock.seconds += LEASE_MS / 1000
    assert ours.claim() == []
    assert (messages(engine)[0]["state"], messages(engine)[0]["last_error"]) == (
        "dead",
        "each process that tried it died",
    )


def test_a_hanging_host_takes_only_its_places(url: str, engine: sa.Engine) -> None:
    hanging = [
        with_webhook(f"a{n}", f"http://hanging.example/{n}", finished_ms=n + 1) for n in range(20)
    ]
    record(url, *hanging, with_webhook("b", "http://quick.example/", finished_ms=100))
    ours = delivery(engine, Clock(), per_host=3)
    assert sorted(claim.id for claim in ours.claim()) == [
        "msg_a0_1",
        "msg_a1_2",
        "msg_a2_3",
        "msg_b_100",
    ]
    assert ours.claim() == []  # while these are on their way


def test_hanging_hosts_of_one_tenant_leave_places_to_others(url: str, engine: sa.Engine) -> None:
    """Eight hosts of one tenant with more messages than there are places; another tenant's message
    comes last.
    """
    hanging = [
        with_webhook(
            f"a{host}-{n}", f"http://host{host}.example/{n}", tenant="a", finished_ms=n + 1
        )
        for host in range(8)
        for n in range(20)
    ]
    record(url, *hanging)
    ours = delivery(engine, Clock())
    assert len(ours.claim()) == MAX_OF_TENANT
    assert ours.claim() == []
    record(url, with_webhook("b", "http://quick.example/", tenant="b", finished_ms=100))
    assert [claim.id for claim in ours.claim()] == ["msg_b_100"]


def test_webhooks_of_tenants_are_claimed_in_turns(url: str, engine: sa.Engine) -> None:
    many = [
        with_webhook(f"a{n}", f"http://host{n}.example/", tenant="a", finished_ms=1)
        for n in range(60)
    ]
    record(
        url,
        *many,
        *(with_webhook(f"b{n}", "http://b.example/", tenant="b", finished_ms=99) for n in range(3)),
    )
    claimed = [claim.id for claim in delivery(engine, Clock()).claim()]
    assert len(claimed) == MAX_OF_TENANT + 3
    assert {name for name in claimed if name.startswith("msg_b")} == {
        f"msg_b{n}_99" for n in range(3)
    }


def test_concurrent_sweeps_claim_different_webhooks(url: str, engine: sa.Engine) -> None:
    record(url, *(with_webhook(f"a{n}", f"http://host{n}.example/") for n in range(40)))
    taken: list[OutboxLease] = []
    sweeps = [
        threading.Thread(target=lambda: taken.extend(delivery(engine, Clock()).claim()))
        for _ in range(4)
    ]
    for sweep in sweeps:
        sweep.start()
    for sweep in sweeps:
        sweep.join()
    assert len(taken) == len({claim.id for claim in taken}) == 40


def test_a_later_end_of_a_job_replaces_its_earlier_webhook(url: str, engine: sa.Engine) -> None:
    with Receiver() as receiver:
        dead = failed("a", status=JobStatus.DEAD)
        assert dead.request is not None
        record(
            url,
            FinishedJob(1, dead.result, dead.final_chunk, with_webhook("a", receiver.url).request),
        )
        record(url, with_webhook("a", receiver.url, token=2, finished_ms=START_MS + 5))
        ours = delivery(engine, Clock(START_MS / 1000 + 1))
        assert sorted(ours.deliver(claim) for claim in ours.claim()) == ["delivered", "skipped"]
        assert [json.loads(seen.body)["type"] for seen in receiver.received] == ["job.succeeded"]
    assert [row["state"] for row in messages(engine)] == ["superseded", "delivered"]


def test_the_body_has_thoughts_and_calls_of_an_answer(url: str, engine: sa.Engine) -> None:
    call = GeneratedCall("c1", "get", '{"a": 1}')
    choice = ChoiceResult(
        text="", reasoning="Hm", tool_calls=(call,), finish_reason=FinishReason.TOOL_CALLS
    )
    with Receiver() as receiver:
        record(url, with_webhook("a", receiver.url, choices=(choice,)))
        record(url, with_webhook("b", receiver.url))
        ours = delivery(engine, Clock())
        assert [ours.deliver(claim) for claim in ours.claim()] == ["delivered"] * 2
        bodies = {
            data["job_id"]: data["choices"][0]
            for data in (json.loads(seen.body)["data"] for seen in receiver.received)
        }
    assert bodies["a"] == {
        "index": 0,
        "text": "",
        "finish_reason": "tool_calls",
        "reasoning": "Hm",
        "tool_calls": [{"id": "c1", "name": "get", "arguments": '{"a": 1}'}],
    }
    assert bodies["b"].keys() == {"index", "text", "finish_reason"}


def test_the_body_leaves_out_long_and_purged_answers(url: str, engine: sa.Engine) -> None:
    long = ChoiceResult(text="x" * (MAX_TEXT_BYTES + 1), finish_reason=FinishReason.LENGTH)
    with Receiver() as receiver:
        record(url, *(with_webhook(name, receiver.url) for name in ("purged", "removed")))
        record(url, with_webhook("long", receiver.url, choices=(long,)))
        with engine.begin() as connection:
            connection.execute(sa.delete(jobs).where(jobs.c.id == "removed"))
            connection.execute(
                sa.update(jobs).where(jobs.c.id == "purged").values(result=None, metadata=sa.null())
            )
        ours = delivery(engine, Clock())
        assert [ours.deliver(claim) for claim in ours.claim()] == ["delivered"] * 3
        data = [verify(seen.body, seen.headers, tenant_secret(SECRET, "acme"), now=Clock()()).data
                for seen in receiver.received]  # fmt: skip
    assert {one.job_id: (one.choices, one.status) for one in data} == dict.fromkeys(
        ("purged", "removed", "long"), (None, JobStatus.SUCCEEDED)
    )


def test_no_webhook_is_sent_without_a_secret(
    url: str, engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    record(url, with_webhook("a", "http://localhost:1/"))
    assert delivery(engine, Clock(), secret="").claim() == []
    assert "1 webhooks wait until TOKENMILL_WEBHOOK_SECRET is set" in caplog.text
    assert messages(engine)[0]["state"] == "pending"
