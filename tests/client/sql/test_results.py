"""A producer reads results, lists and sums from SQL."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from tests.record.support import failed, finished
from tests.support.databases import migrated_sqlite
from tokenmill import Client, ClientClosed, sql
from tokenmill.errors import ConfigurationError, QueueUnavailable
from tokenmill.sql import SqlResults
from tokenmill.sql.engine import open_engine
from tokenmill_schemas import ChoiceResult, FinishReason, JobStatus
from tokenmill_worker.jobs import FinishedJob
from tokenmill_worker.record import ResultStore


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        migrated_sqlite(tmp_path / "t.db")
        if request.param == "sqlite"
        else str(request.getfixturevalue("migrated_postgres_url"))
    )


def _record(url: str, *jobs: FinishedJob, queue: str = "q") -> None:
    async def record() -> None:
        store = ResultStore(url, queue=queue)
        await store.record(jobs)
        await store.close()

    asyncio.run(record())


@pytest.fixture
def results(url: str) -> Any:
    found = SqlResults(url)
    yield found
    found.close()


def test_a_result_is_read_as_it_was_recorded(url: str, results: SqlResults) -> None:
    several = (
        ChoiceResult(text="a", token_ids=(1,)),
        ChoiceResult(index=1, text="b", token_ids=(2,)),
    )
    jobs = [finished("a"), failed("b"), finished("c", choices=several)]
    _record(url, *jobs)
    assert [results.get(job.result.job_id) for job in jobs] == [job.result for job in jobs]
    assert results.get("unknown") is None


def test_threads_of_one_client_open_one_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    class Slow(SqlResults):
        def __init__(self, url: str) -> None:
            opened.append(url)
            time.sleep(0.05)
            super().__init__(url)

    monkeypatch.setattr(sql, "SqlResults", Slow)
    url = migrated_sqlite(tmp_path / "t.db")
    with Client(queue="q", database=url) as client, ThreadPoolExecutor(6) as pool:
        assert list(pool.map(client.look_up, "abcdef")) == [None] * 6
    assert opened == [url]
    with pytest.raises(ClientClosed):
        client.look_up("a")


def test_a_job_is_readable_after_its_payload_was_purged(url: str, results: SqlResults) -> None:
    _record(url, finished("a"))
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(
            sqlalchemy.text("UPDATE jobs SET result = NULL, text = NULL, token_ids = NULL")
        )
    engine.dispose()
    found = results.get("a")
    assert found is not None
    assert (found.status, found.text, found.finish_reason) == (
        JobStatus.SUCCEEDED,
        "",
        FinishReason.STOP,
    )
    assert found.usage == finished("a").result.usage


def test_lists_are_filtered_and_newest_first(url: str, results: SqlResults) -> None:
    _record(
        url,
        *(finished(f"a{n}", finished_ms=1000 + n) for n in range(5)),
        failed("bad", finished_ms=5000),
    )
    _record(url, finished("other", tenant="zeta", finished_ms=9000), queue="second")
    assert [row.job_id for row in results.jobs(queue="q")] == ["bad", "a4", "a3", "a2", "a1", "a0"]
    assert [row.job_id for row in results.jobs(limit=2, offset=1)] == ["bad", "a4"]
    assert [row.job_id for row in results.jobs(tenant="zeta")] == ["other"]
    assert [row.job_id for row in results.jobs(since_ms=1003, until_ms=5000)] == ["a4", "a3"]
    bad = results.jobs(status="failed")[0]
    assert bad.error is not None
    assert (bad.job_id, bad.error.message, bad.completion_tokens) == ("bad", "too long", 0)
    assert results.jobs(batch_id="none") == []


def test_a_list_has_the_metadata_of_its_jobs(url: str, results: SqlResults) -> None:
    _record(
        url,
        finished("a", metadata={"title": "Why is the sky “blue”?"}, finished_ms=2),
        finished("b", finished_ms=1),
    )
    assert [row.metadata for row in results.jobs()] == [
        {"title": "Why is the sky “blue”?"},
        finished("b").result.metadata,
    ]


def test_usage_sums_are_those_of_the_jobs(url: str, results: SqlResults) -> None:
    day = 86_400_000
    _record(
        url,
        *(finished(f"a{n}", finished_ms=day * (20_000 + n % 2)) for n in range(10)),
        failed("bad", finished_ms=0),
    )
    _record(url, finished("z", tenant="zeta", finished_ms=day * 20_000))
    rows = {row.group: row for row in results.usage(by=("tenant", "day"))}
    assert set(rows) == {
        ("acme", "1970-01-01"),
        ("acme", "2024-10-04"),
        ("acme", "2024-10-05"),
        ("zeta", "2024-10-04"),
    }
    row = rows["acme", "2024-10-04"]
    assert (
        row.jobs,
        row.succeeded,
        row.prompt_tokens,
        row.cached_tokens,
        row.completion_tokens,
        row.reasoning_tokens,
    ) == (5, 5, 55, 20, 15, 10)
    assert (row.mean_ttft_ms, row.mean_total_ms) == (20.0, 90.0)
    assert [(row.jobs, row.succeeded) for row in results.usage(by=())] == [(12, 11)]
    assert [row.group for row in results.usage(by=("tenant",), since_day="2024-10-05")] == [
        ("acme",)
    ]
    with pytest.raises(ConfigurationError, match="grouped by prompt"):
        results.usage(by=("prompt",))  # type: ignore[arg-type]


def test_reading_a_missing_sqlite_file_creates_no_file(tmp_path: Path) -> None:
    results = SqlResults(f"sqlite:///{tmp_path}/none.db")
    with pytest.raises(ConfigurationError, match="there is no database at /"):
        results.get("a")
    results.close()
    assert not list(tmp_path.iterdir())


def test_a_database_without_tables_names_the_command(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    results = SqlResults(f"sqlite:///{tmp_path}/empty.db")
    with pytest.raises(ConfigurationError, match="tokenmill db upgrade"):
        results.jobs()
    results.close()


def test_an_unreachable_database_is_an_error_of_one_sentence() -> None:
    results = SqlResults("postgresql://nobody:hunter2@127.0.0.1:1/none")
    with pytest.raises(QueueUnavailable) as caught:
        results.get("a")
    assert "hunter2" not in str(caught.value)
    assert "SELECT" not in str(caught.value)
    results.close()
