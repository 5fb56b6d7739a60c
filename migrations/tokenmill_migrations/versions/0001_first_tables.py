"""Adds finished jobs, their usage, and bulk batches with their lines.

Revision: 0001, the first.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def _json() -> sa.JSON:
    return sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def _name(column: str, *, nullable: bool = False) -> "sa.Column[str]":
    return sa.Column(column, sa.String(255), nullable=nullable)


def _state() -> "sa.Column[str]":
    return sa.Column("state", sa.String(16), nullable=False)


def _number(column: str, *, nullable: bool = False) -> "sa.Column[int]":
    return sa.Column(column, sa.BigInteger(), nullable=nullable)


def upgrade() -> None:
    _create_jobs()
    _create_usage()
    _create_batches()
    for table, columns in _INDEXES:
        op.create_index(op.f(f"ix_{table}_{'_'.join(columns)}"), table, columns)


_INDEXES = [
    ("jobs", ["queue", "finished_ms"]),
    ("jobs", ["tenant", "finished_ms"]),
    ("jobs", ["state", "finished_ms"]),
    ("jobs", ["finished_ms"]),
    ("jobs", ["batch_id"]),
    ("usage", ["day", "tenant", "model"]),
    ("usage", ["tenant", "day"]),
    ("batches", ["tenant", "created_ms"]),
    ("batches", ["state", "created_ms"]),
    ("batch_items", ["job_id"]),
    ("batch_items", ["batch_id", "state"]),
]


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        _name("id"),
        _name("queue"),
        _name("model"),
        _name("tenant"),
        sa.Column("priority", sa.String(16), nullable=False),
        _state(),
        sa.Column("finish_reason", sa.String(16)),
        sa.Column("text", sa.Text()),
        sa.Column("token_ids", _json()),
        sa.Column("logprobs", _json()),
        sa.Column("error_code", sa.String(64)),
        sa.Column("error_message", sa.Text()),
        sa.Column("attempts", sa.Integer(), nullable=False),
        _name("worker_id"),
        _number("created_ms"),
        _number("started_ms"),
        _number("finished_ms"),
        sa.Column("prompt_kind", sa.String(16)),
        sa.Column("prompt", _json()),
        sa.Column("params", _json()),
        sa.Column("metadata", _json()),
        _name("batch_id", nullable=True),
        sa.Column("result", sa.LargeBinary()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )


def _create_usage() -> None:
    op.create_table(
        "usage",
        _name("job_id"),
        _name("queue"),
        _name("model"),
        _name("tenant"),
        _state(),
        sa.Column("day", sa.String(10), nullable=False),
        _number("finished_ms"),
        _number("prompt_tokens"),
        _number("cached_tokens"),
        _number("completion_tokens"),
        _number("queue_ms"),
        _number("ttft_ms"),
        _number("total_ms"),
        sa.Column("preemptions", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_usage")),
    )


def _create_batches() -> None:
    op.create_table(
        "batches",
        _name("id"),
        _name("queue"),
        _name("model"),
        _name("tenant"),
        _state(),
        sa.Column("endpoint", sa.String(64), nullable=False),
        *(sa.Column(name, sa.Text()) for name in ("input_file", "output_file", "error_file")),
        sa.Column("errors", _json()),
        sa.Column("metadata", _json()),
        *(
            sa.Column(name, sa.Integer(), nullable=False)
            for name in ("total", "completed", "failed")
        ),
        _number("created_ms"),
        *(_number(name, nullable=True) for name in ("started_ms", "finished_ms", "expires_ms")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_table(
        "batch_items",
        _name("batch_id"),
        sa.Column("line", sa.Integer(), nullable=False),
        _name("custom_id"),
        _name("job_id", nullable=True),
        _state(),
        sa.Column("error_code", sa.String(64)),
        sa.Column("error_message", sa.Text()),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name=op.f("fk_batch_items_batch_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_id", "line", name=op.f("pk_batch_items")),
        sa.UniqueConstraint(
            "batch_id", "custom_id", name=op.f("uq_batch_items_batch_id_custom_id")
        ),
    )


def downgrade() -> None:
    for table in ("batch_items", "batches", "usage", "jobs"):
        op.drop_table(table)
