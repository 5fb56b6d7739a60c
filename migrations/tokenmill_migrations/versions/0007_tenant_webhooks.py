"""Adds where the ends of a tenant's background responses and batches are sent.

Revision: 0007, after 0006. Only adds a table.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tenant_webhooks",
        sa.Column("tenant", sa.String(255), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name="pk_tenant_webhooks"),
    )


def downgrade() -> None:
    op.drop_table("tenant_webhooks")
