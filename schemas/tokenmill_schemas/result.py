"""The states of a job, its error, its usage and its result."""

import math
from enum import StrEnum

import msgspec

from tokenmill_schemas.generation import FinishReason, SamplingParams, TokenLogprob


class JobStatus(StrEnum):
    """The state of a job: `queued → running → succeeded | failed | cancelled | expired`.

    A `dead` job was moved to the dead letters and may be redriven.
    """

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
    """One sentence for the producer, with a code that programs can match."""

    code: str  # e.g. "invalid_request", "context_length_exceeded", "engine_crash"
    message: str
    retryable: bool = False


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens that are billed, and times in milliseconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt's tokens: those whose KV was found in the prefix cache
    completion_tokens: int = 0  # each delivered token once, whatever was recomputed
    queue_ms: int = 0  # created → first claimed
    ttft_ms: int = 0  # created → first token
    total_ms: int = 0  # created → finished
    preemptions: int = 0
    reasoning_tokens: int = 0  # of the completion's tokens: those of thoughts, with their marks


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of call `index` of a choice. The first piece has the id and the name; the `arguments`
    of all pieces together are the call's.

    `token` is the place of its token: in a chunk among the chunk's, in a result among all.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    token: int = 0


class GeneratedCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of an answer. `arguments` is a JSON object, as text. `is_complete=False`: the answer
    was cut before the object ended.
    """

    id: str
    name: str
    arguments: str
    is_complete: bool = True


class ChoiceResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One finished sequence of a job.

    `text_ends[i]` is len(text) after the chunk of token i. From it the chunks of a finished job can
    be rebuilt, one per token, after the log is gone. `reasoning_ends` is the same of the thoughts;
    it ends with their last token.
    """

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    text_ends: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str = ""
    reasoning_ends: tuple[int, ...] = ()
    tool_calls: tuple[GeneratedCall, ...] = ()
    call_deltas: tuple[ToolCallDelta, ...] = ()  # the same calls, piece by piece

    @property
    def total_logprob(self) -> float:
        """The sum of its tokens' log-probabilities; 0 where none were asked for."""
        return math.fsum(entry.logprob for entry in self.logprobs or ())


class ScoredPrompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokens of a prompt, and the log-probability of each of them but the first.

    With `echo`, `text_ends[i]` is the length of the text after token i.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    text_ends: tuple[int, ...] = ()


class JobResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The final state of a job. `choices` is empty if nothing was generated; partial text is
    kept. `params` lacks the stop strings, biases and response format of the request.
    """

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
    params: SamplingParams | None = None  # with which it was drawn; a seed only if it was named
    prompt: ScoredPrompt | None = None  # with `prompt_logprobs`

    @property
    def text(self) -> str:
        return self.choices[0].text if self.choices else ""

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning if self.choices else ""

    @property
    def tool_calls(self) -> tuple[GeneratedCall, ...]:
        return self.choices[0].tool_calls if self.choices else ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids if self.choices else ()

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason if self.choices else None

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs if self.choices else None
