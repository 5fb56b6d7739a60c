"""A webhook's password, query values and fragment appear only where the request is sent from."""

from __future__ import annotations

import logging

import pytest
import sqlalchemy as sa

from tests.tasks.receiver import Receiver
from tests.tasks.support import Clock, delivery, record, with_webhook
from tokenmill.sql.engine import open_engine
from tokenmill.sql.webhooks import SqlWebhooks
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.tables import webhooks
from tokenmill_schemas.validation import problems
from tokenmill_schemas.webhook import redacted_url

LONG = "https://h/?t=T0PSECRET" + "x" * 4_000
SECRETS = ("S3CRET", "T0PSECRET", "FRAGMENT")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://example.com/hook", "https://example.com/hook"),
        ("https://u:S3CRET@example.com:8443/hook", "https://example.com:8443/hook"),
        (
            "https://S3CRET@example.com/a?token=T0PSECRET&x=T0PSECRET#FRAGMENT",
            "https://example.com/a?token=***&x=***",
        ),
        ("https://example.com/a?T0PSECRET", "https://example.com/a?***"),
        ("https://u:S3CRET@x@[::1]:80/a", "https://[::1]:80/a"),
        ("https://u:S3CRET/S3CRET@example.com/a", "https://***"),
        ("https://u:1/S3CRET@example.com/a", "https://***"),
        ("https://u:S3CRET?S3CRET@example.com/a", "https://***?***"),
        ("u:S3CRET@example.com", "example.com"),
        ("http://[::1", "http://***"),
        ("", ""),
    ],
)
def test_a_shown_url_has_no_password_query_values_or_fragment(url: str, shown: str) -> None:
    assert redacted_url(url) == shown


def test_a_failed_delivery_logs_no_secret(
    sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No secret stands in the log, in `last_error` or in the command line's list."""
    caplog.set_level(logging.DEBUG)
    record(
        sqlite_url,
        with_webhook("a", "http://user:S3CRET@127.0.0.1:9/hook?token=T0PSECRET#FRAGMENT"),
    )
    engine = open_engine(sqlite_url)
    ours = delivery(engine, Clock())
    assert [ours.deliver(claim) for claim in ours.claim()] == ["failed"]
    with engine.connect() as connection:
        error = connection.scalar(sa.select(webhooks.c.last_error))
    engine.dispose()
    listed = SqlWebhooks(sqlite_url)
    (row,) = listed.list()
    listed.close()
    assert row.url == "http://127.0.0.1:9/hook?token=***"
    assert row.url in str(error)
    said = [record.getMessage() for record in caplog.records]
    assert any("127.0.0.1:9/hook" in line for line in said)
    assert not any(secret in text for secret in SECRETS for text in (*said, str(error), repr(row)))


def test_a_delivered_webhook_keeps_no_secret_in_sql(sqlite_url: str) -> None:
    engine = open_engine(sqlite_url)
    with Receiver() as receiver:
        record(
            sqlite_url,
            with_webhook("a", receiver.url.replace("://", "://user:S3CRET@") + "&token=T0PSECRET"),
        )
        ours = delivery(engine, Clock())
        assert [ours.deliver(claim) for claim in ours.claim()] == ["delivered"]
        assert len(receiver.received) == 1
    with engine.connect() as connection:
        assert connection.scalar(sa.select(webhooks.c.url)) == receiver.url.replace(
            "a=b", "a=***&token=***"
        )
    engine.dispose()


@pytest.mark.parametrize(
    "url", ["ftp://u:S3CRET@host/?t=T0PSECRET", "http://u:S3CRET@ho st/", LONG]
)
def test_the_error_of_a_refused_webhook_hides_its_secrets(url: str) -> None:
    (problem,) = problems(JobRequest(job_id="a", prompt="x", webhook=url))
    assert problem.startswith("webhook must be")
    assert not any(secret in problem for secret in SECRETS)


@pytest.mark.parametrize(
    "url", ["http://u:S3CRET/@127.0.0.1/", "http://u@127.0.0.1:T0PSECRET/", "http://u:S3CRET@[::1/"]
)
def test_an_invalid_url_is_logged_without_its_secret(sqlite_url: str, url: str) -> None:
    engine = open_engine(sqlite_url)
    record(sqlite_url, with_webhook("a", "http://127.0.0.1:9/"))
    with engine.begin() as connection:
        connection.execute(sa.update(webhooks).values(url=url))
    ours = delivery(engine, Clock())
    assert [ours.deliver(claim) for claim in ours.claim()] == ["failed"]
    with engine.connect() as connection:
        error = str(connection.scalar(sa.select(webhooks.c.last_error)))
    engine.dispose()
    assert not any(secret in error for secret in SECRETS), error
