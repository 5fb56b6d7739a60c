"""A job with a webhook leaves exactly one message in the outbox, in its result's transaction."""

import msgspec
import pytest
import sqlalchemy as sa

from tests.record.support import failed, finished, rows
from tokenmill.sql.engine import open_engine
from tokenmill_schemas import JobStatus
from tokenmill_worker.errors import StoreUnavailable
from tokenmill_worker.jobs import FinishedJob
from tokenmill_worker.record import ResultStore

HOOK = "https://hooks.example.org:8443/a?b=c"


def with_webhook(job: FinishedJob, url: str | None = HOOK) -> FinishedJob:
    assert job.request is not None
    request = msgspec.structs.replace(job.request, webhook=url)
    return FinishedJob(job.token, job.result, job.final_chunk, request)


async def test_only_a_job_with_a_webhook_url_leaves_a_message(url: str, store: ResultStore) -> None:
    await store.record(
        [with_webhook(finished("a", finished_ms=50)), finished("b"), with_webhook(failed("c"))]
    )
    found = rows(url, "SELECT * FROM webhooks ORDER BY job_id")
    assert [(row["id"], row["event"], row["host"]) for row in found] == [
        ("msg_a_50", "job.succeeded", "hooks.example.org"),
        (found[1]["id"], "job.failed", "hooks.example.org"),
    ]
    first = found[0]
    assert (
        first["url"],
        first["state"],
        first["attempts"],
        first["due_ms"],
        first["tenant"],
        first["queue"],
    ) == (
        HOOK,
        "pending",
        0,
        50,
        "acme",
        "q",
    )


async def test_a_job_that_is_recorded_twice_has_one_message(url: str, store: ResultStore) -> None:
    await store.record([with_webhook(finished("a", finished_ms=50))])
    # another worker, another end
    await store.record([with_webhook(finished("a", token=2, finished_ms=60))])
    assert [row["id"] for row in rows(url, "SELECT id FROM webhooks")] == ["msg_a_50"]


async def test_a_death_that_is_recorded_twice_has_one_message(url: str, store: ResultStore) -> None:
    """The first worker to record it died before it could acknowledge."""
    await store.record([with_webhook(failed("a", status=JobStatus.DEAD, finished_ms=50))])
    await store.record([with_webhook(failed("a", status=JobStatus.DEAD, finished_ms=60))])
    assert [row["id"] for row in rows(url, "SELECT id FROM webhooks")] == ["msg_a_50"]


async def test_a_redriven_job_has_another_message(url: str, store: ResultStore) -> None:
    await store.record([with_webhook(failed("a", status=JobStatus.DEAD, finished_ms=50))])
    await store.record([with_webhook(finished("a", token=2, finished_ms=60))])
    found = rows(url, "SELECT event FROM webhooks ORDER BY ended_ms")
    assert [row["event"] for row in found] == ["job.dead", "job.succeeded"]


async def test_a_result_is_not_recorded_without_its_message(url: str) -> None:
    """The result is not written without the outbox; both are written together later."""
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE webhooks RENAME TO hidden"))
    store = ResultStore(url, queue="q", engine=engine)
    with pytest.raises(StoreUnavailable, match="db upgrade"):
        await store.record([with_webhook(finished("a"))])
    assert rows(url, "SELECT count(*) AS n FROM jobs") == [{"n": 0}]
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE hidden RENAME TO webhooks"))
    assert (await store.record([with_webhook(finished("a"))])).written == {"a"}
    assert rows(url, "SELECT count(*) AS n FROM webhooks") == [{"n": 1}]
    await store.close()


@pytest.mark.parametrize(
    "bad", ["https://", "ftp://a/b", "https://[::1/", "http://a\x00b/", "nonsense"]
)
async def test_a_result_with_an_invalid_webhook_url_is_recorded(
    url: str, store: ResultStore, bad: str
) -> None:
    assert (await store.record([with_webhook(failed("a"), bad)])).written == {"a"}
    assert rows(url, "SELECT * FROM webhooks") == []
