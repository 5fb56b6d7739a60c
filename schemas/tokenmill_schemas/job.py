"""A job as its producer describes it: one struct, sent as MessagePack, to which fields are only
ever added.
"""

from enum import StrEnum
from typing import Final, Literal

import msgspec

from tokenmill_schemas.generation import SamplingParams

SCHEMA_VERSION = 2  # of requests: the newest version that this code reads


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


class TextPart(msgspec.Struct, frozen=True):
    """One part of a message's content."""

    text: str
    type: Literal["text"] = "text"


class FunctionCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """The function that an assistant called. `arguments` is a JSON object, as text."""

    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of an assistant's message."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class ToolFunction(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call. `parameters` is the JSON schema of its arguments; None:
    it takes none. `strict`: refuse a schema that cannot be enforced; else enforce what can.
    """

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool = False


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    function: ToolFunction
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a chat.

    `content` is a text, or several parts of text. An assistant's message may have `tool_calls` and
    `reasoning` (its thoughts); then `content` may be missing. `tool_call_id` names the call that a
    tool's message answers.
    """

    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: str | tuple[TextPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        """The content as one text: its parts are joined without a separator."""
        if isinstance(self.content, tuple):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @property
    def num_chars(self) -> int:
        """The characters of the content, the thoughts and the calls."""
        calls = sum(len(c.function.name) + len(c.function.arguments) for c in self.tool_calls)
        return len(self.text) + len(self.reasoning or "") + calls

    @property
    def is_plain(self) -> bool:
        """Does the message have only a role and a text, as in version 1?"""
        return (
            isinstance(self.content, str)
            and self.role != "developer"
            and (self.name, self.tool_call_id, self.reasoning) == (None, None, None)
            and not self.tool_calls
        )


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

    The fields after `v` belong to chats: they need `messages`.
    `add_generation_prompt=None` means: yes, unless the final message is continued. `v` is the
    version that a worker must read at least. Workers of version 1 ignore a number there, so version
    2 is written as text: they refuse such a request with a sentence, where they would otherwise
    leave out what they do not know.
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
    v: int | str = 1
    chat_template_kwargs: dict[str, object] = {}
    documents: tuple[dict[str, str], ...] = ()
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"  # auto, none, required, or function:NAME
    parallel_tool_calls: bool = True


_NEW_FIELDS: Final = ("chat_template_kwargs", "documents", "continue_final_message", "tools")
_NEW_PARAMS: Final = ("logprobs_mode", "thinking_budget")


def wire_version(request: JobRequest) -> int | str:
    """Return the least version whose workers honour every field of the request."""
    is_first = (
        not any(getattr(request, name) for name in _NEW_FIELDS)
        and request.add_generation_prompt is None
        and all(getattr(request.params, name) is None for name in _NEW_PARAMS)
        and all(message.is_plain for message in request.messages or ())
    )
    return 1 if is_first else str(SCHEMA_VERSION)
