"""One row that a database cannot hold never keeps the others waiting."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import Engine, event, exc

from tests.record.support import FakeRedis, counts, finished, rows
from tests.support.waiting import until
from tokenmill.sql.engine import open_engine
from tokenmill.transport.repairs import end_task
from tokenmill_schemas import ChoiceResult, Usage
from tokenmill_schemas.codec import decode_result
from tokenmill_schemas.validation import MAX_NAME_CHARS
from tokenmill_worker.record import ResultStore
from tokenmill_worker.record.finalizer import Finalizer


def _nul(job_id: str) -> Any:
    return finished(
        job_id, choices=(ChoiceResult(text="a\x00b", token_ids=(1,)),), metadata={"k\x00": "v\x00"}
    )


@pytest.mark.postgres
async def test_nul_is_replaced_on_a_database_that_refuses_it(postgres_url: str) -> None:
    from tokenmill_worker.record.migrate import upgrade

    upgrade(postgres_url)
    store = ResultStore(postgres_url, queue="q")
    group = [finished(f"good-{number}") for number in range(20)]
    report = await store.record([*group[:7], _nul("bad"), *group[7:]])
    assert len(report.written) == 21
    assert set(report.sanitised) == {"bad"}
    assert "NUL" in report.sanitised["bad"]
    row = rows(postgres_url, "SELECT text, metadata, result FROM jobs WHERE id = 'bad'")[0]
    assert row["text"] == "a\ufffdb"
    assert row["metadata"] == {"k\ufffd": "v\ufffd"}
    # the producer gets what was generated
    assert decode_result(bytes(row["result"])).text == "a\x00b"
    assert counts(postgres_url) == (21, 21, 21, 21)
    await store.close()


async def test_numbers_beyond_a_column_s_range_are_cut_and_the_result_is_kept(
    store: ResultStore, url: str
) -> None:
    huge = finished(
        "huge", attempt=2**40, usage=Usage(prompt_tokens=2**63, preemptions=2**40, total_ms=2**62)
    )
    report = await store.record([finished("a"), huge, finished("b")])
    assert report.written == {"a", "b", "huge"}
    assert counts(url) == (3, 3, 3, 3)
    assert (
        rows(url, "SELECT prompt_tokens AS n FROM usage WHERE job_id = 'huge'")[0]["n"] == 2**63 - 1
    )


async def test_many_bad_rows_among_good_rows_are_all_recorded(store: ResultStore, url: str) -> None:
    group = [
        _nul(f"job-{number:03d}") if number % 9 == 0 else finished(f"job-{number:03d}")
        for number in range(100)
    ]
    report = await store.record(group)
    assert len(report.written) == 100
    assert counts(url) == (100, 100, 100, 100)


def _refuse(engine: Engine, job_id: str, *, unless_bare: bool) -> None:
    """Make the database refuse one job's row, as a constraint would."""

    @event.listens_for(engine, "before_cursor_execute")
    def refuse(
        _connection: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any
    ) -> None:
        values = [
            str(value)
            for value in (parameters.values() if isinstance(parameters, dict) else parameters)
        ]
        if "INSERT INTO jobs" in statement and job_id in values:
            if unless_bare and not any("Blue light" in value for value in values):
                return
            raise exc.IntegrityError("check constraint", None, Exception("refused"))


async def test_a_row_with_refused_contents_is_recorded_without_them(sqlite_url: str) -> None:
    engine = open_engine(sqlite_url)
    _refuse(engine, "odd", unless_bare=True)
    store = ResultStore(sqlite_url, queue="q", engine=engine)
    report = await store.record([finished("a"), finished("odd"), finished("z")])
    assert report.written == {"a", "odd", "z"}
    row = rows(sqlite_url, "SELECT text, state, result FROM jobs WHERE id = 'odd'")[0]
    assert row["text"] is None
    assert decode_result(row["result"]).text.startswith("Blue light")
    assert counts(sqlite_url) == (3, 3, 3, 3)
    await store.close()


async def test_a_row_refused_in_every_form_is_reported_and_the_others_are_recorded(
    sqlite_url: str,
) -> None:
    engine = open_engine(sqlite_url)
    _refuse(engine, "never", unless_bare=False)
    store = ResultStore(sqlite_url, queue="q", engine=engine)
    report = await store.record(
        [finished(f"job-{number}") for number in range(30)] + [finished("never")]
    )
    assert len(report.written) == 30
    assert set(report.refused) == {"never"}
    assert counts(sqlite_url) == (30, 30, 30, 30)
    await store.close()


async def test_names_of_the_longest_allowed_length_are_recorded(
    url: str, store: ResultStore
) -> None:
    """An id that no column holds could neither be recorded nor dropped."""
    longest = "x" * MAX_NAME_CHARS
    assert (await store.record([finished(longest, tenant=longest, model=longest)])).written == {
        longest
    }
    assert rows(url, "SELECT id, tenant, model FROM jobs") == [
        {"id": longest, "tenant": longest, "model": longest}
    ]


async def test_a_job_that_cannot_be_encoded_as_a_row_is_recorded_as_failed(
    store: ResultStore, url: str
) -> None:
    """Its answer holds what cannot be encoded; then its metadata too."""
    answer = finished("bad", choices=(ChoiceResult(text="\ud800", token_ids=(1,)),))
    worse = finished("worse", metadata={"key": "\ud800"})
    redis = FakeRedis()
    finalizer = Finalizer(store, redis)
    running = asyncio.create_task(finalizer.run())
    for item in (finished("a"), answer, finished("b"), worse):
        await finalizer.submit(item)
    await until(lambda: not len(finalizer))
    await end_task(running)
    found = rows(url, "SELECT id, state, error_code FROM jobs ORDER BY id")
    assert [tuple(row.values()) for row in found] == [
        ("a", "succeeded", None),
        ("b", "succeeded", None),
        ("bad", "failed", "internal_error"),
        ("worse", "failed", "internal_error"),
    ]
    assert counts(url) == (4, 4, 4, 4)
    assert {job_id: job.result.status.value for job_id, job in redis.done.items()} == {
        "a": "succeeded", "b": "succeeded", "bad": "failed", "worse": "failed",
    }  # fmt: skip
