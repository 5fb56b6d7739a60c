"""Adds the thoughts of an answer, and the number of their tokens.

Revision: 0005, after 0004. Only adds columns that may be NULL or have a default.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_SUMS = ("usage", "usage_daily")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("reasoning", sa.Text()))
    for table in _SUMS:
        op.add_column(
            table,
            sa.Column(
                "reasoning_tokens", sa.BigInteger(), nullable=False, server_default=sa.text("0")
            ),
        )


def downgrade() -> None:
    for table in _SUMS:
        op.drop_column(table, "reasoning_tokens")
    op.drop_column("jobs", "reasoning")
