"""Tests that a worker that freezes in an open transaction does not block the others for ever."""

import pytest
import sqlalchemy as sa

from tests.record.support import counts, finished
from tokenmill.sql.engine import (
    IDLE_TIMEOUT_S,
    STATEMENT_TIMEOUT_S,
    open_engine,
)
from tokenmill_worker.record import ResultStore
from tokenmill_worker.record.migrate import upgrade
from tokenmill_worker.record.rows import JobRecord
from tokenmill_worker.record.sql_errors import ErrorKind, error_kind

pytestmark = pytest.mark.postgres
SHOW = sa.text("SHOW idle_in_transaction_session_timeout")


async def test_a_frozen_transaction_ends_and_frees_the_job_for_others(postgres_url: str) -> None:
    upgrade(postgres_url)
    engine = open_engine(postgres_url, idle_timeout_s=1.0)
    frozen = ResultStore(postgres_url, queue="q", engine=engine)
    other = ResultStore(postgres_url, queue="q")
    job = finished("a")
    connection = engine.connect()
    transaction = connection.begin()
    connection.execute(frozen._insert_jobs, [JobRecord.of(job, queue="q").job])
    report = await other.record([job])  # waits for the lock, ten seconds at most
    assert report.written == {"a"}
    with pytest.raises(sa.exc.DBAPIError) as caught:
        transaction.commit()
    connection.close()
    assert error_kind(caught.value) is ErrorKind.LATER  # the frozen worker tries again, and
    assert set((await frozen.record([job])).existing) == {"a"}  # finds the row
    assert counts(postgres_url) == (1, 1, 1, 1)
    await frozen.close()
    await other.close()


@pytest.mark.parametrize("is_producer", [False, True])
def test_every_transaction_has_a_limit_a_little_above_that_of_a_statement(
    postgres_url: str, is_producer: bool
) -> None:
    assert STATEMENT_TIMEOUT_S < IDLE_TIMEOUT_S <= STATEMENT_TIMEOUT_S + 10
    engine = open_engine(postgres_url, is_producer=is_producer)
    for _ in range(2):
        with engine.begin() as connection:
            assert connection.scalar(SHOW) == f"{IDLE_TIMEOUT_S}s"
    engine.dispose()
