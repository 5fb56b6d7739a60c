"""Adds the columns of batches in OpenAI's format; lines answered without a job may have no name.

Revision: 0004, after 0003. The new columns may be NULL or have a default. The unique constraint on
a line's name is dropped, because a line that repeats a name is also answered without a job. No
earlier version writes these tables.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_UNIQUE = "uq_batch_items_batch_id_custom_id"
_TIMES = ("finalizing_ms", "cancelling_ms")
_JSON = ("usage", "options")


def upgrade() -> None:
    op.add_column("batches", sa.Column("completion_window", sa.String(16)))
    op.add_column(
        "batches", sa.Column("submitted", sa.Integer(), nullable=False, server_default=sa.text("0"))
    )
    for name in _TIMES:
        op.add_column("batches", sa.Column(name, sa.BigInteger()))
    for name in _JSON:
        op.add_column("batches", sa.Column(name, sa.JSON().with_variant(JSONB(), "postgresql")))
    op.create_index(op.f("ix_batches_created_ms_id"), "batches", ["created_ms", "id"])
    with op.batch_alter_table("batch_items") as table:
        table.drop_constraint(op.f(_UNIQUE), type_="unique")
        table.alter_column(
            "custom_id", existing_type=sa.String(255), type_=sa.Text(), nullable=True
        )
        table.add_column(sa.Column("error_param", sa.String(255)))


def downgrade() -> None:
    """Remove lines that the older tables cannot hold: without a name, or with a repeated one."""
    op.execute("DELETE FROM batch_items WHERE custom_id IS NULL OR length(custom_id) > 255")
    op.execute(
        "DELETE FROM batch_items WHERE EXISTS (SELECT 1 FROM batch_items AS o WHERE o.batch_id = "
        "batch_items.batch_id"
        " AND o.custom_id = batch_items.custom_id AND o.line < batch_items.line)"
    )
    with op.batch_alter_table("batch_items") as table:
        table.drop_column("error_param")
        table.alter_column(
            "custom_id", existing_type=sa.Text(), type_=sa.String(255), nullable=False
        )
        table.create_unique_constraint(op.f(_UNIQUE), ["batch_id", "custom_id"])
    op.drop_index(op.f("ix_batches_created_ms_id"), "batches")
    for name in (*_JSON, *_TIMES, "submitted", "completion_window"):
        op.drop_column("batches", name)
