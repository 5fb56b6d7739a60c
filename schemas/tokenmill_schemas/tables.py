"""The tables. Times are UTC milliseconds since 1970, as integers; JSON columns are JSONB on
PostgreSQL.

`jobs` has one row per finished job. `usage` has one row for each of them (kept when payloads are
purged), and `usage_daily` their sums by day. `webhooks` is the outbox of webhook messages.
`batches` are bulk files; `batch_items` are those of their lines that were answered without a job.
`api_keys` are those of the gateway; `tenant_webhooks` are the URLs to which it has ends sent.
`files` are what clients of the gateway uploaded and its batches answered.
Changes first expand, then contract: see migrations/README.md.
"""

from __future__ import annotations

from typing import Any, Final

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


def _name(name: str, size: int = 255, **more: Any) -> Column[str]:
    return Column(name, String(size), nullable=False, **more)


def _owner_columns() -> tuple[Column[str], ...]:
    """Return the columns of the queue, the model and the tenant."""
    return _name("queue"), _name("model"), _name("tenant", default="")


def _number(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


def _added_number(name: str) -> Column[int]:
    """Return a column that earlier versions do not write."""
    return Column(name, BigInteger, nullable=False, server_default=text("0"))


_COUNTED: Final = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "queue_ms",
    "ttft_ms",
    "total_ms",
)
_SUMMED: Final = ("jobs", *_COUNTED, "preemptions")


jobs: Final = Table(
    "jobs",
    metadata,
    Column("id", String(255), primary_key=True),
    *_owner_columns(),
    _name("priority", 16),
    _name("state", 16),  # a final JobStatus; "dead" may be replaced after a redrive
    Column("finish_reason", String(16)),  # of the first choice, as are text, token_ids and logprobs
    Column("text", Text),
    Column("token_ids", _json()),
    Column("logprobs", _json()),
    Column("error_code", String(64)),
    Column("error_message", Text),
    Column("attempts", Integer, nullable=False),
    _name("worker_id"),
    _number("created_ms"),
    _number("started_ms"),  # 0: never claimed
    _number("finished_ms"),
    Column("prompt_kind", String(16)),  # text, messages, ids; NULL: the request could not be read
    Column("prompt", _json()),  # only where the settings ask for it
    Column("params", _json()),
    Column("metadata", _json()),
    Column("batch_id", String(255)),
    # the encoded JobResult, all choices; NULL after a purge of payloads
    Column("result", LargeBinary),
    Column("reasoning", Text),  # the thoughts of the first choice; NULL: none
    Column("envelope", LargeBinary),  # of the request, as its producer wrote it
    Column("previous_id", String(255)),  # the job whose answer it goes on from
    # a page of a list is one range of one of these: they end in the two columns that the lists are
    # ordered by
    Index(None, "queue", "finished_ms", "id"),
    Index(None, "tenant", "finished_ms", "id"),
    Index(None, "model", "finished_ms", "id"),
    Index(None, "state", "finished_ms", "id"),
    Index(None, "batch_id", "finished_ms", "id"),
    Index(None, "finished_ms", "id"),
)
_HAS_PAYLOAD: Final = text("result IS NOT NULL")  # a purge empties the index as it goes
Index(
    "ix_jobs_payload",
    jobs.c.finished_ms,
    jobs.c.id,
    postgresql_where=_HAS_PAYLOAD,
    sqlite_where=_HAS_PAYLOAD,
)

usage: Final = Table(
    "usage",
    metadata,
    Column("job_id", String(255), primary_key=True),  # no foreign key: usage outlives its job's row
    *_owner_columns(),
    _name("state", 16),
    _name("day", 10),  # of finished_ms, UTC, ISO
    _number("finished_ms"),
    *map(_number, _COUNTED),
    Column("preemptions", Integer, nullable=False),
    _added_number("reasoning_tokens"),
    Index(None, "day", "tenant", "model"),
    Index(None, "tenant", "day"),
    Index(None, "model", "day"),
)

usage_daily: Final = Table(
    "usage_daily",
    metadata,
    _name("day", 10, primary_key=True),
    *(_name(name, primary_key=True) for name in ("tenant", "model", "queue")),
    _name("state", 16, primary_key=True),
    *map(_number, _SUMMED),
    _added_number("reasoning_tokens"),
    Index(None, "tenant", "day"),
    Index(None, "model", "day"),
)

usage_days: Final = Table(
    "usage_days",
    metadata,
    Column("day", String(10), primary_key=True),
    _number("rolled_ms"),  # when its sums were last made
    # its usage rows are being removed: never sum it again
    Column("sealed", Boolean, nullable=False),
)

webhooks: Final = Table(
    "webhooks",
    metadata,
    Column("id", String(300), primary_key=True),  # the message's id, the same at every try
    _name("job_id"),
    _name("queue"),
    _name("tenant"),
    _name("event", 32),  # job.succeeded, job.failed, …, response.completed, batch.completed, …
    Column("url", Text, nullable=False),
    _name("host"),
    _name("state", 16),  # pending, sending, delivered, dead, superseded
    Column("attempts", Integer, nullable=False),
    _number("ended_ms"),  # finished_ms of the job's end that the message reports
    _number("due_ms"),  # pending: next try; sending: when the try counts as lost
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
    *_owner_columns(),
    _name("state", 16),  # validating, failed, in_progress, finalizing, completed, …
    _name("endpoint", 64),
    Column("input_file", Text),
    Column("output_file", Text),
    Column("error_file", Text),
    Column("errors", _json()),
    Column("metadata", _json()),
    Column("total", Integer, nullable=False, default=0),
    Column("completed", Integer, nullable=False, default=0),
    Column("failed", Integer, nullable=False, default=0),
    _number("created_ms"),
    Column("started_ms", BigInteger),
    Column("finished_ms", BigInteger),
    Column("expires_ms", BigInteger),
    Column("completion_window", String(16)),
    # lines submitted, counted from the first
    Column("submitted", Integer, nullable=False, server_default=text("0")),
    Column("finalizing_ms", BigInteger),
    Column("cancelling_ms", BigInteger),
    Column("usage", _json()),  # tokens, once it is over
    Column("options", _json()),  # how lines become jobs, needed to resume the import
    # of the gateway's batches: when a task goes on with it; NULL: none does
    Column("due_ms", BigInteger),
    Index(None, "due_ms"),
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
    _name("state", 16),  # refused: a bad request; invalid: no request at all
    Column("error_code", String(64)),
    Column("error_message", Text),
    Column("error_param", String(255)),
    Index(None, "job_id"),
    Index(None, "batch_id", "state"),
)

api_keys: Final = Table(
    "api_keys",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("hash", LargeBinary, nullable=False),  # HMAC of the whole key
    _name("tenant"),
    _name("label", default=""),
    Column("models", _json(), nullable=False),  # that it may use; empty: all
    _name("priority", 16),  # of requests that name no tier
    _name("permission", 16),  # all, read
    _number("created_ms"),
    Column("expires_ms", BigInteger),
    Column("revoked_ms", BigInteger),
    Index(None, "tenant", "created_ms"),
)

tenant_webhooks: Final = Table(
    "tenant_webhooks",
    metadata,
    _name("tenant", primary_key=True),
    Column("url", Text, nullable=False),
)

files: Final = Table(
    "files",
    metadata,
    Column("id", String(64), primary_key=True),  # also of its object in the store
    _name("tenant"),
    _name("state", 16),  # uploading, ready, deleted: its object is removed, then its row
    _name("purpose", 32),
    _name("name"),
    _number("bytes"),
    _number("lines"),
    _number("created_ms"),
    Column("expires_ms", BigInteger),
    Index(None, "tenant", "created_ms", "id"),
    Index(None, "state", "created_ms"),
    Index(None, "expires_ms"),
)
