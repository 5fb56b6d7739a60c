"""Adds what an HTTP API shows of a request, the job that it goes on from, and the keys of the API.

Revision: 0006, after 0005. Only adds a table, and columns that may be NULL.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("envelope", sa.LargeBinary()))
    op.add_column("jobs", sa.Column("previous_id", sa.String(255)))
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("tenant", sa.String(255), nullable=False),
        sa.Column("label", sa.String(255), nullable=False),
        sa.Column("models", sa.JSON().with_variant(JSONB(), "postgresql"), nullable=False),
        sa.Column("priority", sa.String(16), nullable=False),
        sa.Column("permission", sa.String(16), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger()),
        sa.Column("revoked_ms", sa.BigInteger()),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
    )
    op.create_index("ix_api_keys_tenant_created_ms", "api_keys", ["tenant", "created_ms"])


def downgrade() -> None:
    op.drop_table("api_keys")
    op.drop_column("jobs", "previous_id")
    op.drop_column("jobs", "envelope")
