"""How a job stands and what came of it."""

from enum import StrEnum

import msgspec

from schemas.generation import FinishReason, TokenLogprob


class JobStatus(StrEnum):
    """`queued → running → succeeded | failed | cancelled | expired`; `dead` is set aside, may be redriven."""

    SCHEDULED = "scheduled"  # waits for not_before, or for its next attempt
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DEAD = "dead"

    @property
    def is_final(self) -> bool:
        return self not in (JobStatus.SCHEDULED, JobStatus.QUEUED, JobStatus.RUNNING)


class JobError(msgspec.Struct, frozen=True, omit_defaults=True):
    """One clear sentence for the producer, with a code that programs can match."""

    code: str  # e.g. "invalid_request", "context_length_exceeded", "engine_crash"
    message: str
    retryable: bool = False


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is billed (tokens), and how long it took (milliseconds)."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt's tokens: those whose KV was found in the prefix cache
    completion_tokens: int = 0  # each delivered token once, whatever was recomputed
    queue_ms: int = 0  # created → first claimed
    ttft_ms: int = 0  # created → first token
    total_ms: int = 0  # created → finished
    preemptions: int = 0


class ChoiceResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One finished sequence of a job.

    `text_ends[i]` is len(text) after token i's chunk, so that the chunks of a finished job can be told
    again from its result, one per token, after the log is gone.
    """

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    text_ends: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


class JobResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job's final state. `choices` is empty when nothing was generated; partial text is kept."""

    job_id: str
    status: JobStatus
    model: str = ""
    tenant: str = ""
    choices: tuple[ChoiceResult, ...] = ()
    usage: Usage = Usage()
    error: JobError | None = None
    attempt: int = 1
    worker_id: str = ""
    created_ms: int = 0
    started_ms: int = 0
    finished_ms: int = 0
    metadata: dict[str, str] = {}
    v: int = 1
    order: tuple[int, ...] = ()  # read only, from workers before `Chunk.n`; nobody needs it

    @property
    def text(self) -> str:
        return self.choices[0].text if self.choices else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids if self.choices else ()

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason if self.choices else None

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs if self.choices else None
