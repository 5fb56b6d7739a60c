"""Adds the outbox of webhook messages, and usage summed by day.

Revision: 0002, after 0001. Only adds tables.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

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
    ("usage_daily", ["tenant", "day"]),
    ("usage_daily", ["model", "day"]),
    ("webhooks", ["state", "due_ms"]),
    ("webhooks", ["job_id"]),
    ("webhooks", ["tenant", "ended_ms"]),
]


def upgrade() -> None:
    _create_usage()
    _create_webhooks()
    for table, columns in _INDEXES:
        op.create_index(op.f(f"ix_{table}_{'_'.join(columns)}"), table, columns)


def _create_usage() -> None:
    keys = (("day", 10), ("tenant", 255), ("model", 255), ("queue", 255), ("state", 16))
    op.create_table(
        "usage_daily",
        *(sa.Column(name, sa.String(length), nullable=False) for name, length in keys),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _SUMS),
        sa.PrimaryKeyConstraint(*(name for name, _ in keys), name=op.f("pk_usage_daily")),
    )
    op.create_table(
        "usage_days",
        sa.Column("day", sa.String(10), nullable=False),
        sa.Column("rolled_ms", sa.BigInteger(), nullable=False),
        sa.Column("sealed", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("day", name=op.f("pk_usage_days")),
    )


def _create_webhooks() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(300), nullable=False),
        *(
            sa.Column(name, sa.String(255), nullable=False)
            for name in ("job_id", "queue", "tenant")
        ),
        sa.Column("event", sa.String(32), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("ended_ms", "due_ms")),
        sa.Column("delivered_ms", sa.BigInteger()),
        sa.Column("last_status", sa.Integer()),
        sa.Column("last_error", sa.Text()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
    )


def downgrade() -> None:
    for table in ("webhooks", "usage_days", "usage_daily"):
        op.drop_table(table)
