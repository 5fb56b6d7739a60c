"""Upgrades from every revision and downgrades to it, with rows in every table.

No upgrade loses a row.
"""

from typing import Any

import pytest
import sqlalchemy as sa
from alembic.script import ScriptDirectory

from tests.record.support import finished, rows
from tokenmill.sql.engine import open_engine
from tokenmill_worker.record import ResultStore
from tokenmill_worker.record.migrate import configuration, downgrade, upgrade

REVISIONS = [
    script.revision for script in ScriptDirectory.from_config(configuration()).walk_revisions()
][::-1]


def fill(url: str) -> dict[str, dict[str, Any]]:
    """Add a row to each table by the columns of its revision. Returns the rows."""
    engine = open_engine(url)
    written = {}
    with engine.begin() as connection:
        found = sa.MetaData()
        found.reflect(connection)
        for table in found.sorted_tables:
            if table.name != "alembic_version":
                values = {column.name: _value(column) for column in table.columns}
                connection.execute(sa.insert(table).values(values))
                written[table.name] = dict(connection.execute(sa.select(table)).mappings().one())
    engine.dispose()
    return written


def _value(column: Any) -> Any:
    kind = column.type
    if isinstance(kind, sa.LargeBinary):
        return b"\x81\x00"
    if isinstance(kind, sa.Boolean):
        return True
    if isinstance(kind, sa.Integer):
        return 7
    if isinstance(kind, sa.JSON):
        return {"a": [1, None]}
    return (
        "b1"
        if column.name == "batch_id" or (column.table.name == "batches" and column.name == "id")
        else "wörd"
    )


def unchanged(url: str, before: dict[str, dict[str, Any]]) -> None:
    engine = open_engine(url)
    with engine.connect() as connection:
        found = sa.MetaData()
        found.reflect(connection)
        for name, row in before.items():
            now = connection.execute(sa.select(found.tables[name])).mappings().one()
            assert {key: now[key] for key in row} == row, name
    engine.dispose()


@pytest.mark.parametrize("revision", REVISIONS)
def test_rows_of_an_earlier_revision_are_kept_by_the_upgrade(empty_url: str, revision: str) -> None:
    upgrade(empty_url, revision)
    before = fill(empty_url)
    assert before
    assert upgrade(empty_url) == (revision, REVISIONS[-1])
    unchanged(empty_url, before)


async def test_a_downgrade_to_each_revision_and_back_keeps_older_rows(url: str) -> None:
    """The way back loses newer tables and columns, and keeps what the older ones hold."""
    store = ResultStore(url, queue="q")
    await store.record([finished("a"), finished("b")])
    await store.close()
    kept = "SELECT id, tenant, finished_ms, text FROM jobs ORDER BY id"
    before = rows(url, kept)
    for revision in REVISIONS[-2::-1]:
        assert downgrade(url, revision)[1] == revision
        assert rows(url, kept) == before
    assert upgrade(url)[1] == REVISIONS[-1]
    assert rows(url, kept) == before
    assert rows(url, "SELECT count(*) AS n FROM usage") == [{"n": 2}]
