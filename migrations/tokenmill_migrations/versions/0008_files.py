"""Adds the files of the API, and when a task goes on with a batch.

Revision: 0008, after 0007. Only adds a table, and a column that may be NULL.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batches", sa.Column("due_ms", sa.BigInteger()))
    op.create_index("ix_batches_due_ms", "batches", ["due_ms"])
    op.create_table(
        "files",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(255), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("lines", sa.BigInteger(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger()),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
    )
    op.create_index("ix_files_tenant_created_ms_id", "files", ["tenant", "created_ms", "id"])
    op.create_index("ix_files_state_created_ms", "files", ["state", "created_ms"])
    op.create_index("ix_files_expires_ms", "files", ["expires_ms"])


def downgrade() -> None:
    op.drop_table("files")
    op.drop_index("ix_batches_due_ms", "batches")
    op.drop_column("batches", "due_ms")
