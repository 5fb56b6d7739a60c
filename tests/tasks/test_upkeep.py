"""Sums by day equal their rows however often they are made; old rows are deleted, the sums stay."""

from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa

from tests.record.support import failed, finished, rows
from tests.tasks.support import Clock, record
from tokenmill.sql import SqlResults
from tokenmill_schemas import JobStatus
from tokenmill_schemas.tables import jobs, usage_daily
from tokenmill_worker.tasks.retention import Limits, Removed, Retention
from tokenmill_worker.tasks.usage_rollup import RollUp

DAY_MS = 86_400_000
TODAY = 20_000  # days since 1970


def clock(day: float = TODAY + 0.5) -> Clock:
    return Clock(day * 86_400)


def iso(day: int) -> str:
    return datetime.fromtimestamp(day * 86_400, UTC).date().isoformat()


def at(day: int, number: int = 0) -> int:
    return day * DAY_MS + number


def sums(engine: sa.Engine) -> list[tuple[Any, ...]]:
    statement = (
        "SELECT day, tenant, state, jobs, completion_tokens, ttft_ms FROM usage_daily "
        "ORDER BY 1, 2, 3"
    )
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sa.text(statement))]


def test_daily_sums_equal_their_rows(url: str, engine: sa.Engine) -> None:
    days = (TODAY - 40, TODAY - 1, TODAY)
    jobs = [
        finished(f"a{day}-{n}", finished_ms=at(day, n), tenant=f"t{n % 2}")
        for day in days
        for n in range(4)
    ]
    record(url, *jobs, failed("bad", finished_ms=at(TODAY)))
    assert RollUp(engine, clock()).recent() == [iso(day) for day in days]
    expected = [(iso(day), f"t{n}", "succeeded", 2, 6, 40) for day in days for n in (0, 1)]
    assert sums(engine) == sorted([*expected, (iso(TODAY), "acme", "failed", 1, 0, 0)])


def test_summing_a_day_again_updates_only_changed_sums(url: str, engine: sa.Engine) -> None:
    record(
        url,
        finished("a", finished_ms=at(TODAY)),
        failed("b", status=JobStatus.DEAD, finished_ms=at(TODAY)),
    )
    roll_up = RollUp(engine, clock())
    roll_up.recent()
    before = sums(engine)
    roll_up.recent()
    assert sums(engine) == before
    record(url, finished("b", token=2, finished_ms=at(TODAY, 1)))  # redriven
    roll_up.recent()
    assert sums(engine) == [(iso(TODAY), "acme", "succeeded", 2, 6, 40)]


def test_missed_days_are_summed_in_order(url: str, engine: sa.Engine) -> None:
    RollUp(engine, clock(TODAY - 30)).recent()
    record(url, *(finished(f"a{day}", finished_ms=at(day)) for day in range(TODAY - 30, TODAY + 1)))
    made = RollUp(engine, clock()).recent()
    assert made == [iso(day) for day in range(TODAY - 30, TODAY + 1)]


def test_a_row_recorded_late_is_found_by_reconcile(url: str, engine: sa.Engine) -> None:
    record(url, finished("a", finished_ms=at(TODAY - 20)), finished("b", finished_ms=at(TODAY)))
    roll_up = RollUp(engine, clock())
    roll_up.recent()
    record(url, finished("late", finished_ms=at(TODAY - 20)))
    roll_up.recent()
    assert roll_up.reconcile() == [iso(TODAY - 20)]
    assert roll_up.reconcile() == []
    assert [row[3] for row in sums(engine)] == [2, 1]


def test_a_day_whose_only_row_was_redriven_has_no_sum(url: str, engine: sa.Engine) -> None:
    """The day is found by `reconcile` alone before `recent`'s window, by `recent` inside it."""
    for age in (1, 20):
        died, now = TODAY - age, clock(TODAY - age + 0.5)
        RollUp(engine, now).recent()
        record(url, failed(f"a{age}", status=JobStatus.DEAD, finished_ms=at(died)))
        RollUp(engine, now).recent()
        record(url, finished(f"a{age}", token=2, finished_ms=at(TODAY)))
    roll_up = RollUp(engine, clock())
    assert iso(TODAY - 1) in roll_up.recent()
    assert roll_up.reconcile() == [iso(TODAY - 20)]
    assert roll_up.reconcile() == []
    assert sums(engine) == [(iso(TODAY), "acme", "succeeded", 2, 6, 40)]
    results = SqlResults(url)
    assert [(row.jobs, row.completion_tokens) for row in results.usage(by=("tenant",))] == [(2, 6)]
    results.close()


def test_a_day_with_a_replaced_row_is_summed_again(url: str, engine: sa.Engine) -> None:
    """The day has as many jobs as before."""
    record(url, failed("a", status=JobStatus.DEAD, finished_ms=at(TODAY - 20)))
    roll_up = RollUp(engine, clock())
    roll_up.recent()
    record(
        url,
        finished("a", token=2, finished_ms=at(TODAY)),
        finished("late", finished_ms=at(TODAY - 20)),
    )
    roll_up.recent()
    assert roll_up.reconcile() == [iso(TODAY - 20)]
    assert [row[:5] for row in sums(engine)] == [
        (iso(TODAY - 20), "acme", "succeeded", 1, 3),
        (iso(TODAY), "acme", "succeeded", 1, 3),
    ]


def retention(engine: sa.Engine, **limits: Any) -> Retention:
    return Retention(engine, Limits(batch=3, pause_s=0, **limits), RollUp(engine, clock()), clock())


def test_retention_removes_payloads_before_jobs(url: str, engine: sa.Engine) -> None:
    record(url, *(finished(f"a{n}", finished_ms=at(TODAY - n)) for n in range(20)))
    said = {
        "prompt": "a secret",
        "logprobs": [],
        "error_message": "a secret",
        "metadata": {"a": "secret"},
    }
    with engine.begin() as connection:  # also what these jobs, as recorded, do not have
        connection.execute(sa.update(jobs).values(said))
    emptied = (
        "text",
        "token_ids",
        "logprobs",
        "error_message",
        "prompt",
        "params",
        "metadata",
        "result",
    )
    assert all(row[name] is not None for row in rows(url, "SELECT * FROM jobs") for name in emptied)
    assert retention(engine, payload_days=5, job_days=12).run() == Removed(payloads=7, jobs=8)
    assert retention(engine, payload_days=5, job_days=12).run() == Removed()
    found = rows(url, "SELECT * FROM jobs ORDER BY finished_ms DESC")
    assert [row["id"] for row in found] == [f"a{n}" for n in range(12)]
    assert all(row[name] is None for row in found[5:] for name in emptied)
    assert all(row["text"] and row["result"] for row in found[:5])
    assert {row["tenant"] for row in found} == {"acme"}
    assert rows(url, "SELECT count(*) AS n FROM usage") == [{"n": 20}]
    results = SqlResults(url)
    emptied_job = results.get("a9")
    results.close()
    assert emptied_job is not None
    assert (emptied_job.status, emptied_job.text, emptied_job.usage.completion_tokens) == (
        JobStatus.SUCCEEDED,
        "",
        3,
    )


def test_usage_rows_are_removed_by_whole_days_and_their_sums_stay(
    url: str, engine: sa.Engine
) -> None:
    jobs = [
        finished(f"a{day}-{n}", finished_ms=at(TODAY - day, n))
        for day in range(12)
        for n in range(4)
    ]
    record(url, *jobs)
    # day 10 is still in part within ten days
    assert retention(engine, usage_days=10).run() == Removed(usage=4)
    RollUp(engine, clock()).recent()
    RollUp(engine, clock()).reconcile()
    assert [row[:4] for row in sums(engine)] == [
        (iso(TODAY - day), "acme", "succeeded", 4) for day in reversed(range(12))
    ]
    assert rows(url, "SELECT min(day) AS day, count(*) AS n FROM usage") == [
        {"day": iso(TODAY - 10), "n": 44}
    ]


def test_an_interrupted_removal_does_not_change_the_sums(url: str, engine: sa.Engine) -> None:
    record(url, *(finished(f"a{n}", finished_ms=at(TODAY - 30, n)) for n in range(10)))
    roll_up = RollUp(engine, clock())
    roll_up.seal(iso(TODAY - 30))
    with engine.begin() as connection:
        # and here it dies
        connection.execute(sa.text("DELETE FROM usage WHERE job_id IN ('a1', 'a2')"))
    assert not roll_up.make(iso(TODAY - 30))
    assert iso(TODAY - 30) not in roll_up.recent()
    roll_up.reconcile()
    assert [row[3] for row in sums(engine)] == [10]
    assert retention(engine, usage_days=20).run() == Removed(usage=8)
    assert [row[3] for row in sums(engine)] == [10]


def test_without_retention_settings_no_row_is_removed(url: str, engine: sa.Engine) -> None:
    record(url, finished("old", finished_ms=1))
    assert retention(engine).run() == Removed()
    assert rows(url, "SELECT count(*) AS n FROM jobs WHERE result IS NOT NULL") == [{"n": 1}]


@pytest.mark.parametrize(
    ("state", "goes"), [("delivered", True), ("dead", True), ("pending", False), ("sending", False)]
)
def test_ended_webhooks_are_removed(sqlite_url: str, state: str, goes: bool) -> None:
    from tests.tasks.support import with_webhook
    from tokenmill.sql.engine import open_engine

    record(sqlite_url, with_webhook("a", "http://a/", finished_ms=at(TODAY - 40)))
    engine = open_engine(sqlite_url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE webhooks SET state = :state"), {"state": state})
    assert retention(engine, webhook_days=30).run() == Removed(webhooks=int(goes))
    engine.dispose()


def test_concurrent_roll_ups_leave_one_set_of_sums(url: str, engine: sa.Engine) -> None:
    import threading

    record(url, *(finished(f"a{n}", finished_ms=at(TODAY, n)) for n in range(5)))
    troubles: list[Exception] = []

    def make() -> None:
        try:
            for _ in range(5):
                RollUp(engine, clock()).make(iso(TODAY))
        except Exception as error:
            troubles.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert troubles == []
    with engine.connect() as connection:
        assert connection.execute(sa.select(usage_daily.c.jobs)).scalars().all() == [5]
