"""A job as its producer describes it: one struct, MessagePack on the wire, append-only fields."""

from enum import StrEnum
from typing import Literal

import msgspec

from schemas.generation import SamplingParams

SCHEMA_VERSION = 1


class Priority(StrEnum):
    """Three classes; `bulk` fills the slack, is never starved, and is the first to be preempted."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BULK = "bulk"

    @property
    def rank(self) -> int:
        """0 for the most urgent class."""
        return PRIORITY_ORDER.index(self)


PRIORITY_ORDER = (Priority.INTERACTIVE, Priority.STANDARD, Priority.BULK)


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How often a retryable failure may run again, and how long it waits: backoff_ms × 2^(n−1), capped."""

    max_attempts: int = 3
    backoff_ms: int = 1_000
    max_backoff_ms: int = 60_000


class JobRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything a worker needs to answer one job.

    Exactly one of `prompt` (text), `messages` (chat) and `prompt_ids` (token ids) is set.
    Times are Unix milliseconds. `stream=False` writes log checkpoints instead of a chunk per token.
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
