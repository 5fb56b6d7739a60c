"""The tables. Times are UTC milliseconds since 1970, as integers; JSON columns are JSONB on PostgreSQL.

`jobs` has one row per finished job, `usage` one row for each of them (kept when payloads are purged), and
`usage_daily` their sums by day; `webhooks` is the outbox of notices; `batches` are bulk files, `batch_items` those
of their lines that were answered without a job. Changes are expand, then contract: see migrations/README.md. It
knows nothing of who writes and reads.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
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
    # a page of a list is one range of one of these: they end in the two columns that the lists are ordered by
    Index(None, "queue", "finished_ms", "id"),
    Index(None, "tenant", "finished_ms", "id"),
    Index(None, "model", "finished_ms", "id"),
    Index(None, "state", "finished_ms", "id"),
    Index(None, "batch_id", "finished_ms", "id"),
    Index(None, "finished_ms", "id"),
)
_HAS_PAYLOAD: Final = text("result IS NOT NULL")  # a purge empties the index as it goes
Index("ix_jobs_payload", jobs.c.finished_ms, jobs.c.id, postgresql_where=_HAS_PAYLOAD, sqlite_where=_HAS_PAYLOAD)

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
    Index(None, "model", "day"),
)

usage_daily: Final = Table(
    "usage_daily",
    metadata,
    Column("day", String(10), primary_key=True),
    Column("tenant", String(255), primary_key=True),
    Column("model", String(255), primary_key=True),
    Column("queue", String(255), primary_key=True),
    Column("state", String(16), primary_key=True),
    *(
        Column(name, BigInteger, nullable=False)  # sums
        for name in (
            "jobs",
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
            "queue_ms",
            "ttft_ms",
            "total_ms",
            "preemptions",
        )
    ),
    Index(None, "tenant", "day"),
    Index(None, "model", "day"),
)

usage_days: Final = Table(
    "usage_days",
    metadata,
    Column("day", String(10), primary_key=True),
    Column("rolled_ms", BigInteger, nullable=False),  # when its sums were last made
    Column("sealed", Boolean, nullable=False),  # its usage rows are being removed: never sum it up again
)

webhooks: Final = Table(
    "webhooks",
    metadata,
    Column("id", String(300), primary_key=True),  # of the message, the same at every try
    Column("job_id", String(255), nullable=False),
    Column("queue", String(255), nullable=False),
    Column("tenant", String(255), nullable=False),
    Column("event", String(32), nullable=False),  # job.succeeded, job.failed, …
    Column("url", Text, nullable=False),
    Column("host", String(255), nullable=False),
    Column("state", String(16), nullable=False),  # pending, sending, delivered, dead, superseded
    Column("attempts", Integer, nullable=False),
    Column("ended_ms", BigInteger, nullable=False),  # finished_ms of the job's end that it tells of
    Column("due_ms", BigInteger, nullable=False),  # pending: next try; sending: when the try counts as lost
    Column("delivered_ms", BigInteger),
    Column("last_status", Integer),
    Column("last_error", Text),
    Index(None, "state", "due_ms"),
    Index(None, "job_id"),
    Index(None, "tenant", "ended_ms"),
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
    Column("completion_window", String(16)),
    Column("submitted", Integer, nullable=False, server_default=text("0")),  # lines handed in, from the first on
    Column("finalizing_ms", BigInteger),
    Column("cancelling_ms", BigInteger),
    Column("usage", _json()),  # tokens, once it is over
    Column("options", _json()),  # how lines become jobs, for whoever continues
    Index(None, "tenant", "created_ms"),
    Index(None, "state", "created_ms"),
    Index(None, "created_ms", "id"),
)

batch_items: Final = Table(
    "batch_items",
    metadata,
    Column("batch_id", String(255), ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    Column("line", Integer, primary_key=True),  # 1 for the file's first
    Column("custom_id", Text),  # as far as the line has one
    Column("job_id", String(255)),
    Column("state", String(16), nullable=False),  # refused: a bad request; invalid: no request at all
    Column("error_code", String(64)),
    Column("error_message", Text),
    Column("error_param", String(255)),
    Index(None, "job_id"),
    Index(None, "batch_id", "state"),
)
