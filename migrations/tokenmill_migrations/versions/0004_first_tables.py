"""Adds all tables: jobs, usage and its sums by day, webhooks, and bulk batches with their lines.

Revision: 0004, the first. It makes the tables that revisions 0001 to 0004 made before the first
release, so a database at that 0004 needs no change.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0004"
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
    _create_sums()
    _create_webhooks()
    _create_batches()
    for table, columns in _INDEXES:
        op.create_index(op.f(f"ix_{table}_{'_'.join(columns)}"), table, columns)
    where = sa.text("result IS NOT NULL")  # a purge of payloads empties the index as it goes
    op.create_index(
        "ix_jobs_payload",
        "jobs",
        ["finished_ms", "id"],
        postgresql_where=where,
        sqlite_where=where,
    )


_SUMS = (
    "jobs",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "queue_ms",
    "ttft_ms",
    "total_ms",
    "preemptions",
)
_INDEXES = [
    ("jobs", ["queue", "finished_ms", "id"]),
    ("jobs", ["tenant", "finished_ms", "id"]),
    ("jobs", ["model", "finished_ms", "id"]),
    ("jobs", ["state", "finished_ms", "id"]),
    ("jobs", ["batch_id", "finished_ms", "id"]),
    ("jobs", ["finished_ms", "id"]),
    ("usage", ["day", "tenant", "model"]),
    ("usage", ["tenant", "day"]),
    ("usage", ["model", "day"]),
    ("usage_daily", ["tenant", "day"]),
    ("usage_daily", ["model", "day"]),
    ("webhooks", ["state", "due_ms"]),
    ("webhooks", ["job_id"]),
    ("webhooks", ["tenant", "ended_ms"]),
    ("batches", ["tenant", "created_ms"]),
    ("batches", ["state", "created_ms"]),
    ("batches", ["created_ms", "id"]),
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


def _create_sums() -> None:
    keys = (("day", 10), ("tenant", 255), ("model", 255), ("queue", 255), ("state", 16))
    op.create_table(
        "usage_daily",
        *(sa.Column(name, sa.String(length), nullable=False) for name, length in keys),
        *map(_number, _SUMS),
        sa.PrimaryKeyConstraint(*(name for name, _ in keys), name=op.f("pk_usage_daily")),
    )
    op.create_table(
        "usage_days",
        sa.Column("day", sa.String(10), nullable=False),
        _number("rolled_ms"),
        sa.Column("sealed", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("day", name=op.f("pk_usage_days")),
    )


def _create_webhooks() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(300), nullable=False),
        *map(_name, ("job_id", "queue", "tenant")),
        sa.Column("event", sa.String(32), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        _name("host"),
        _state(),
        sa.Column("attempts", sa.Integer(), nullable=False),
        *map(_number, ("ended_ms", "due_ms")),
        _number("delivered_ms", nullable=True),
        sa.Column("last_status", sa.Integer()),
        sa.Column("last_error", sa.Text()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
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
        sa.Column("completion_window", sa.String(16)),
        sa.Column("submitted", sa.Integer(), nullable=False, server_default=sa.text("0")),
        *(_number(name, nullable=True) for name in ("finalizing_ms", "cancelling_ms")),
        sa.Column("usage", _json()),
        sa.Column("options", _json()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_table(
        "batch_items",
        _name("batch_id"),
        sa.Column("line", sa.Integer(), nullable=False),
        sa.Column("custom_id", sa.Text()),
        _name("job_id", nullable=True),
        _state(),
        sa.Column("error_code", sa.String(64)),
        sa.Column("error_message", sa.Text()),
        sa.Column("error_param", sa.String(255)),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name=op.f("fk_batch_items_batch_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_id", "line", name=op.f("pk_batch_items")),
    )


def downgrade() -> None:
    for table in (
        "batch_items",
        "batches",
        "webhooks",
        "usage_days",
        "usage_daily",
        "usage",
        "jobs",
    ):
        op.drop_table(table)
