"""A job as its producer describes it: one struct, sent as MessagePack, to which fields are only
ever added.

A worker ignores fields that it does not know. So that no answer leaves out what was asked for, a
request carries the least version whose workers honour each of its fields (`wire_version`).
"""

from collections.abc import Mapping
from enum import StrEnum
from operator import attrgetter
from typing import Final

import msgspec

from tokenmill_schemas.chat import Message, Tool
from tokenmill_schemas.generation import SamplingParams


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

    The fields from `chat_template_kwargs` to `parallel_tool_calls` belong to chats: they need
    `messages`. With `continuations`, texts or token ids, the answers are given: nothing is drawn,
    and choice i holds continuation i with the log-probability of each of its tokens.
    `add_generation_prompt=None` means: yes, unless the final message is continued. `v` is the
    version that a worker must read at least (`wire_version`). `envelope` and `previous_id` are the
    producer's own: a worker records them with the result, and reads nothing of them.
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
    v: int = 1
    chat_template_kwargs: dict[str, object] = {}
    documents: tuple[dict[str, str], ...] = ()
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"  # auto, none, required, or function:NAME
    parallel_tool_calls: bool = True
    continuations: tuple[str | tuple[int, ...], ...] = ()
    envelope: bytes = b""  # how an HTTP API shows the request
    previous_id: str = ""  # the job whose answer this one goes on from
    session: str = ""  # jobs of one session prefer the worker that had the last of them


SCHEMA_VERSION: Final = 1  # the newest version that this code reads
# fields that version 1 lacks, as `NAME` or `params.NAME`, with the version that added each
ADDED_IN: Final[Mapping[str, int]] = {}
_NEUTRAL: Final = JobRequest(job_id="")


def wire_version(request: JobRequest, added_in: Mapping[str, int] = ADDED_IN) -> int:
    """Return the least version whose workers honour every field of the request."""
    needed = (
        version
        for name, version in added_in.items()
        if attrgetter(name)(request) != attrgetter(name)(_NEUTRAL)
    )
    return max(needed, default=1)
