"""The tables. Times are UTC milliseconds since 1970, as integers; JSON columns are JSONB on PostgreSQL.

`jobs` has one row per finished job, `usage` one row for each of them (kept when payloads are purged);
`batches` and `batch_items` are bulk files and their lines. Changes are expand, then contract: see
migrations/README.md. It knows nothing of who writes and reads.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects.postgresql import JSONB

metadata: Final = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    }
)


def _json() -> JSON:
    return JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


jobs: Final = Table(
    "jobs",
    metadata,
    Column("id", String(255), primary_key=True),
    Column("queue", String(255), nullable=False),
    Column("model", String(255), nullable=False),
    Column("tenant", String(255), nullable=False, default=""),
    Column("priority", String(16), nullable=False),
    Column("state", String(16), nullable=False),  # a final JobStatus; "dead" may be replaced after a redrive
    Column("finish_reason", String(16)),  # of the first choice, as are text, token_ids and logprobs
    Column("text", Text),
    Column("token_ids", _json()),
    Column("logprobs", _json()),
    Column("error_code", String(64)),
    Column("error_message", Text),
    Column("attempts", Integer, nullable=False),
    Column("worker_id", String(255), nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("started_ms", BigInteger, nullable=False),  # 0: never claimed
    Column("finished_ms", BigInteger, nullable=False),
    Column("prompt_kind", String(16)),  # text, messages, ids; NULL: the request could not be read
    Column("prompt", _json()),  # only where the settings ask for it
    Column("params", _json()),
    Column("metadata", _json()),
    Column("batch_id", String(255)),
    Column("result", LargeBinary),  # the encoded JobResult, all choices; NULL after a purge of payloads
    Index(None, "queue", "finished_ms"),
    Index(None, "tenant", "finished_ms"),
    Index(None, "state", "finished_ms"),
    Index(None, "finished_ms"),
    Index(None, "batch_id"),
)

usage: Final = Table(
    "usage",
    metadata,
    Column("job_id", String(255), primary_key=True),  # no foreign key: usage outlives its job's row
    Column("queue", String(255), nullable=False),
    Column("model", String(255), nullable=False),
    Column("tenant", String(255), nullable=False, default=""),
    Column("state", String(16), nullable=False),
    Column("day", String(10), nullable=False),  # of finished_ms, UTC, ISO
    Column("finished_ms", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("queue_ms", BigInteger, nullable=False),
    Column("ttft_ms", BigInteger, nullable=False),
    Column("total_ms", BigInteger, nullable=False),
    Column("preemptions", Integer, nullable=False),
    Index(None, "day", "tenant", "model"),
    Index(None, "tenant", "day"),
)

batches: Final = Table(
    "batches",
    metadata,
    Column("id", String(255), primary_key=True),
    Column("queue", String(255), nullable=False),
    Column("model", String(255), nullable=False),
    Column("tenant", String(255), nullable=False, default=""),
    Column("state", String(16), nullable=False),  # validating, failed, in_progress, finalizing, completed, …
    Column("endpoint", String(64), nullable=False),
    Column("input_file", Text),
    Column("output_file", Text),
    Column("error_file", Text),
    Column("errors", _json()),
    Column("metadata", _json()),
    Column("total", Integer, nullable=False, default=0),
    Column("completed", Integer, nullable=False, default=0),
    Column("failed", Integer, nullable=False, default=0),
    Column("created_ms", BigInteger, nullable=False),
    Column("started_ms", BigInteger),
    Column("finished_ms", BigInteger),
    Column("expires_ms", BigInteger),
    Index(None, "tenant", "created_ms"),
    Index(None, "state", "created_ms"),
)

batch_items: Final = Table(
    "batch_items",
    metadata,
    Column("batch_id", String(255), ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    Column("line", Integer, primary_key=True),  # 1 for the file's first
    Column("custom_id", String(255), nullable=False),
    Column("job_id", String(255)),  # NULL until submitted
    Column("state", String(16), nullable=False),
    Column("error_code", String(64)),
    Column("error_message", Text),
    UniqueConstraint("batch_id", "custom_id"),
    Index(None, "job_id"),
    Index(None, "batch_id", "state"),
)
