"""Indexes that end in the order of the lists, so that any page of them is one range; one for the purge of payloads.

Revision: 0003, after 0002. On PostgreSQL each is made beside running writers. An attempt that was broken off
leaves an invalid index behind, so each is dropped first.
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
    """The new ones first: no moment is without an index."""
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
    """As PostgreSQL's CONCURRENTLY demands; SQLite knows no such thing, and changes all or nothing."""
    context = op.get_context()
    return context.autocommit_block() if context.dialect.name == "postgresql" else contextlib.nullcontext()
