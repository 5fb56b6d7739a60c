"""A job as its producer describes it: one struct, sent as MessagePack, to which fields are only
ever added.
"""

from enum import StrEnum
from typing import Literal

import msgspec

from tokenmill_schemas.generation import SamplingParams

SCHEMA_VERSION = 1


class Priority(StrEnum):
    """Three classes of jobs. `bulk` uses the capacity that the others leave; it is never starved
    and is preempted first.
    """

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BULK = "bulk"

    @property
    def rank(self) -> int:
        """The class as a number: 0 is the most urgent."""
        return PRIORITY_ORDER.index(self)


PRIORITY_ORDER = (Priority.INTERACTIVE, Priority.STANDARD, Priority.BULK)


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits for running a job again after a retryable failure.

    A job runs at most `max_attempts` times, the first included. After attempt n it waits for
    backoff_ms × 2^(n−1), at most `max_backoff_ms`.
    """

    max_attempts: int = 3
    backoff_ms: int = 1_000
    max_backoff_ms: int = 60_000


class JobRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a worker needs to run one job.

    Exactly one of `prompt` (text), `messages` (chat) and `prompt_ids` (token ids) is set. Times are
    Unix milliseconds. With `stream=False` the worker writes checkpoints to the job's log instead of
    one chunk per token.
    """

    job_id: str
    model: str = ""  # empty: whatever model the queue serves
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    params: SamplingParams = SamplingParams()
    stream: bool = True
    priority: Priority = Priority.STANDARD
    tenant: str = ""
    idempotency_key: str | None = None
    created_ms: int = 0
    deadline_ms: int | None = None
    not_before_ms: int | None = None
    retry: RetryPolicy = RetryPolicy()
    metadata: dict[str, str] = {}
    webhook: str | None = None
    traceparent: str | None = None
    batch_id: str | None = None
    v: int = SCHEMA_VERSION
