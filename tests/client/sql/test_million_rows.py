"""The statements behind lists and sums on a million jobs: each is answered from an index, on both
databases.

Rows are made inside the database, in one statement for each table (of usage, a third as many).
What is asserted is the plan: no table is read from end to end, nothing is sorted to find a page.
Times are not. The short form has a fifth of the rows.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.marks import LONG
from tokenmill.sql.engine import open_engine
from tokenmill.sql.queries import PageToken, job_page, usage_sums
from tokenmill_schemas.tables import jobs, usage, webhooks
from tokenmill_worker.record.migrate import upgrade

DAY_MS = 86_400_000
FIRST_DAY = 20_000
DAYS = 100
MIDDLE_MS = (FIRST_DAY + DAYS // 2) * DAY_MS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Primes spread the values, so that columns are independent. Few rows have payloads left, as after
# a purge of old ones.
_NAMES = {
    "queue": "'q' || (n % 3)",
    "model": "'m' || (n % 7)",
    "tenant": "'t' || (n % 499)",
    "state": "CASE WHEN n % 101 = 0 THEN 'failed' ELSE 'succeeded' END",
}
_JOBS = {
    "id": "'job-' || n", **_NAMES, "priority": "'standard'", "attempts": "1", "worker_id": "'w'",
    "created_ms": "0", "started_ms": "0",
    "batch_id": "CASE WHEN n % 50 = 0 THEN 'batch-' || (n % 1000) END",
}  # fmt: skip
_NUMBERS = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "queue_ms",
    "ttft_ms",
    "total_ms",
    "preemptions",
)


def fill(engine: sa.Engine, rows: int) -> None:
    """Fill the tables without their indexes, then create these, which is quicker."""
    dialect = engine.dialect.name
    spread_ms = DAYS * DAY_MS // rows  # between two jobs' ends
    end = {
        "finished_ms": f"CAST({FIRST_DAY} AS BIGINT) * {DAY_MS} + CAST(n AS BIGINT) * {spread_ms}"
    }
    number_of_day = f"{FIRST_DAY} + n / {rows // DAYS}"
    day = {
        "sqlite": f"date({number_of_day} + 2440587.5)",
        "postgresql": f"to_char(DATE '1970-01-01' + {number_of_day}, 'YYYY-MM-DD')",
    }
    result = f"CASE WHEN n > {rows - 1000} THEN {_blob(dialect)} END"
    values = {
        jobs: {**_JOBS, **end, "result": result},
        usage: {"job_id": "'job-' || n", **_NAMES, **end, "day": day[dialect],
            **dict.fromkeys(_NUMBERS, "n % 10")},
        webhooks: {
            "id": "'msg-' || n", "job_id": "'job-' || n", "queue": "'q'", "tenant": "'t'",
            "event": "'e'", "url": "'u'",
            "host": "'h' || (n % 5)", "attempts": "1", "ended_ms": "n", "due_ms": "n",
            "state": "CASE WHEN n % 10000 = 0 THEN 'pending' ELSE 'delivered' END",
        },
    }  # fmt: skip
    with engine.begin() as connection:
        if dialect == "postgresql":
            connection.exec_driver_sql("SET LOCAL maintenance_work_mem = '256MB'")
        else:
            for pragma in (
                "synchronous = OFF",
                "journal_mode = OFF",
                "temp_store = MEMORY",
                "cache_size = -300000",
            ):
                connection.exec_driver_sql(f"PRAGMA {pragma}")
        for table, columns in values.items():
            indexes = sorted(table.indexes, key=lambda index: str(index.name))
            for index in indexes:
                index.drop(connection)
            names, selected = ", ".join(columns), ", ".join(columns.values())
            number = {jobs: "", usage: " WHERE n % 3 = 0", webhooks: " WHERE n < 100000"}[table]
            insert = f"INSERT INTO {table.name} ({names}) "
            chosen = f"SELECT {selected} FROM s{number}"
            if dialect == "postgresql":
                series = f"WITH s(n) AS (SELECT generate_series(0, {rows - 1})) "
                statement = f"{insert}{series}{chosen}".replace("%", "%%")  # the driver's escape
            else:
                series = (
                    "WITH RECURSIVE s(n) AS "
                    f"(SELECT 0 UNION ALL SELECT n + 1 FROM s WHERE n < {rows - 1}) "
                )
                statement = f"{series}{insert}{chosen}"
            connection.exec_driver_sql(statement)
            for index in indexes:
                index.create(connection)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ANALYZE")


def _blob(dialect: str) -> str:
    return "x'00'" if dialect == "sqlite" else "'\\x00'::bytea"


@pytest.fixture(scope="module")
def rows(rounds: int) -> int:
    return 1_000_000 if rounds >= LONG else 200_000


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]
)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows: int
) -> Iterator[sa.Engine]:
    if request.param == "sqlite":
        folder: Path = tmp_path_factory.mktemp("million")
        url = f"sqlite:///{folder}/t.db"
        server = None
    else:
        server = request.getfixturevalue("postgres")
        url = server.create_database()
    upgrade(url)
    engine = open_engine(url)
    try:
        fill(engine, rows)
        yield engine
    finally:
        engine.dispose()
        if server is not None:
            server.drop_database(url)


def plan(engine: sa.Engine, statement: Any) -> str:
    compiled = statement.compile(engine, compile_kwargs={"literal_binds": True})
    explain = "EXPLAIN QUERY PLAN " if engine.dialect.name == "sqlite" else "EXPLAIN "
    with engine.connect() as connection:
        found = connection.exec_driver_sql(explain + str(compiled)).all()
    return "\n".join(str(row[-1]) for row in found)


def check(engine: sa.Engine, statement: Any) -> str:
    """Check that no table is read from end to end."""
    found = plan(engine, statement)
    assert "Seq Scan" not in found, found
    whole = [
        line
        for line in found.splitlines()
        if line.startswith("SCAN ") and "USING INDEX" not in line
    ]
    assert set(whole) <= {"SCAN page", "SCAN both"}, found  # what has been cut, or summed up
    return found


def is_sorted_before_it_is_cut(engine: sa.Engine, found: str) -> bool:
    if engine.dialect.name == "postgresql":
        return "Sort" in found.partition("Limit")[2]
    return "TEMP B-TREE" in found.partition("SCAN page")[0]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tenant", "t7"),
        ("model", "m3"),
        ("queue", "q1"),
        ("state", "failed"),
        ("batch_id", "batch-50"),
        (None, None),
    ],
)
@pytest.mark.parametrize("is_deep", [False, True])
def test_a_page_of_jobs_is_read_from_an_index(
    engine: sa.Engine, rows: int, column: str | None, value: str | None, is_deep: bool
) -> None:
    middle = f"job-{rows // 2}"
    after = PageToken(MIDDLE_MS, middle) if is_deep else None
    wanted = {column: value} if column else {}
    found = check(engine, job_page(wanted, after=after, limit=50))
    assert not is_sorted_before_it_is_cut(engine, found), found
    # Where every third job is a queue's, walking along all jobs is as good.
    expected = [f"ix_jobs_{column}_finished_ms_id"] if column else []
    expected += ["ix_jobs_finished_ms_id"] if column in (None, "queue", "model") else []
    assert any(index in found for index in expected), found
    with engine.connect() as connection:
        page = connection.execute(job_page(wanted, after=after, limit=50)).mappings().all()
    assert len(page) == 50
    assert after is None or all(
        (row["finished_ms"], row["id"]) < (MIDDLE_MS, middle) for row in page
    )


def test_a_page_between_two_times_is_read_from_an_index(engine: sa.Engine) -> None:
    statement = job_page(
        {"tenant": "t7"}, since_ms=MIDDLE_MS, until_ms=MIDDLE_MS + DAY_MS, limit=50
    )
    assert "ix_jobs_tenant_finished_ms_id" in check(engine, statement)


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        ({"tenant": "t7"}, "ix_usage_tenant_day"),
        ({"model": "m3"}, "ix_usage_"),
        ({}, "ix_usage_day_tenant_model"),
    ],
)
def test_usage_of_some_days_reads_only_these_days(
    engine: sa.Engine, wanted: dict[str, str | None], index: str
) -> None:
    statement = usage_sums(
        ("tenant", "day"), wanted, since_day="2024-11-20", until_day="2024-11-21"
    )
    assert index in check(engine, statement)


def test_usage_of_all_time_reads_two_days_and_the_stored_sums(engine: sa.Engine) -> None:
    """`usage_daily` is small, and read as a whole if that is quicker; the million rows are not."""
    statement = usage_sums(("tenant", "day"), {}, summed_before="2025-01-09")
    found = plan(engine, statement)
    assert "Seq Scan on usage " not in found, found
    assert not re.search(r"SCAN usage$", found, re.MULTILINE), found
    assert "ix_usage_day_tenant_model" in found, found


def test_retention_and_webhook_queries_use_their_indexes(engine: sa.Engine) -> None:
    full = sa.select(jobs.c.id).where(jobs.c.result.is_not(None), jobs.c.finished_ms < MIDDLE_MS)
    assert "ix_jobs_payload" in check(
        engine, full.order_by(jobs.c.finished_ms, jobs.c.id).limit(500)
    )
    old = (
        sa.select(jobs.c.id)
        .where(jobs.c.finished_ms < MIDDLE_MS)
        .order_by(jobs.c.finished_ms, jobs.c.id)
        .limit(500)
    )
    assert "ix_jobs_finished_ms_id" in check(engine, old)
    due = sa.select(webhooks.c.id).where(
        webhooks.c.state.in_(("pending", "sending")), webhooks.c.due_ms <= 50_000
    )
    assert "ix_webhooks_state_due_ms" in check(engine, due)
