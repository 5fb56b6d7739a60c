"""Adds indexes that end in the sort order of the lists, and one for the purge of payloads.

Any page of a list is then one range of an index.

Revision: 0003, after 0002. On PostgreSQL each index is built while other connections write. An
interrupted attempt leaves an invalid index behind, so each index is dropped before it is created.
"""

import contextlib

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_NEW = [
    ("jobs", ["queue", "finished_ms", "id"]),
    ("jobs", ["tenant", "finished_ms", "id"]),
    ("jobs", ["model", "finished_ms", "id"]),
    ("jobs", ["state", "finished_ms", "id"]),
    ("jobs", ["batch_id", "finished_ms", "id"]),
    ("jobs", ["finished_ms", "id"]),
    ("usage", ["model", "day"]),
]
_OLD = [
    ("jobs", ["queue", "finished_ms"]),
    ("jobs", ["tenant", "finished_ms"]),
    ("jobs", ["state", "finished_ms"]),
    ("jobs", ["finished_ms"]),
    ("jobs", ["batch_id"]),
]
_PAYLOAD = "ix_jobs_payload"


def upgrade() -> None:
    _change(_NEW, _OLD)
    where = sa.text("result IS NOT NULL")
    with _outside_a_transaction():
        _drop(_PAYLOAD, "jobs")
        op.create_index(
            _PAYLOAD,
            "jobs",
            ["finished_ms", "id"],
            postgresql_where=where,
            sqlite_where=where,
            postgresql_concurrently=True,
        )


def downgrade() -> None:
    with _outside_a_transaction():
        _drop(_PAYLOAD, "jobs")
    _change(_OLD, _NEW)


def _change(new: list[tuple[str, list[str]]], old: list[tuple[str, list[str]]]) -> None:
    """Create the new indexes before the old ones are dropped: an index exists at any time."""
    with _outside_a_transaction():
        for table, columns in new:
            _drop(_index(table, columns), table)
            op.create_index(_index(table, columns), table, columns, postgresql_concurrently=True)
        for table, columns in old:
            _drop(_index(table, columns), table)


def _index(table: str, columns: list[str]) -> str:
    return str(op.f(f"ix_{table}_{'_'.join(columns)}"))


def _drop(name: str, table: str) -> None:
    op.drop_index(name, table, if_exists=True, postgresql_concurrently=True)


def _outside_a_transaction() -> contextlib.AbstractContextManager[object]:
    """Leave the transaction on PostgreSQL, because CREATE INDEX CONCURRENTLY cannot run inside one.

    SQLite has no such statement and keeps all changes in one transaction.
    """
    context = op.get_context()
    return (
        context.autocommit_block()
        if context.dialect.name == "postgresql"
        else contextlib.nullcontext()
    )
