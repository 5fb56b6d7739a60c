"""OpenAI's formats: the bodies of answers and errors, and the endpoints.

Names and nulls are the same as OpenAI's. api_client/tokenmill/openai reads the bodies of requests
and builds these.
"""

from typing import Final, Literal

import msgspec

CHAT_URL: Final = "/v1/chat/completions"
COMPLETIONS_URL: Final = "/v1/completions"
RESPONSES_URL: Final = "/v1/responses"
URLS: Final = (CHAT_URL, COMPLETIONS_URL, RESPONSES_URL)


# ── errors ──


class ErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    """The error inside a response's body, in the form in which the API answers a bad request."""

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorObject


# ── chats and completions ──


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class ReasoningDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class CompletionUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()
    completion_tokens_details: ReasoningDetails | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprobs]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ChatToolCall(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ChatToolCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET  # as vLLM names it


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] = "stop"


class ChatCompletion(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="chat.completion"
):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    system_fingerprint: str | None = None
    service_tier: str | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]  # None: of an echoed prompt's first token
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] = "stop"


class Completion(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="text_completion"
):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
    system_fingerprint: str | None = None


# ── responses ──


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    content: list[ReasoningText]
    summary: list[str] = []
    status: Literal["in_progress", "completed", "incomplete"] = "completed"


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    logprobs: list[TokenLogprobs] = []
    annotations: list[str] = []


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    role: Literal["assistant"] = "assistant"


class FunctionCallItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"] = "completed"


OutputItem = ReasoningItem | MessageItem | FunctionCallItem


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: ReasoningDetails


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="response"):
    """An answer, with what the request asked for. All members are always present, as Open
    Responses requires.
    """

    id: str
    created_at: int
    completed_at: int | None = None
    model: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None
    # of the request
    background: bool = False
    frequency_penalty: float = 0.0
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    presence_penalty: float = 0.0
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, object] | None = None
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float | None = 1.0
    text: dict[str, object] = msgspec.field(
        default_factory=lambda: {"format": {"type": "text"}}  # no form is asked for
    )
    tool_choice: str | dict[str, object] = "auto"
    tools: list[dict[str, object]] = []
    top_logprobs: int = 0
    top_p: float | None = 1.0
    truncation: Literal["disabled"] = "disabled"
