"""Builds the answer of each endpoint of OpenAI's API from the result of a job that succeeded."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import UNSET

from tokenmill.openai.logprobs import chat_logprobs, text_logprobs
from tokenmill.openai.response_object import response_of
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.openai import (
    CHAT_URL,
    RESPONSES_URL,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    ChatToolCall,
    Completion,
    CompletionChoice,
    CompletionUsage,
    PromptDetails,
    ReasoningDetails,
    ResponseObject,
)
from tokenmill_schemas.result import ChoiceResult, JobResult, ScoredPrompt, Usage

_REASONS: Final[dict[FinishReason | None, Literal["stop", "length"]]] = {
    FinishReason.LENGTH: "length"
}


def answer_of(result: JobResult, url: str | None) -> ChatCompletion | Completion | ResponseObject:
    """Return the answer of an endpoint; without a known one, that of completions."""
    if url == RESPONSES_URL:
        return response_of(result)
    usage, created = usage_of(result.usage), result.created_ms // 1000
    if url == CHAT_URL:
        return ChatCompletion(
            id=f"chatcmpl-{result.job_id}",
            created=created,
            model=result.model,
            choices=[_chat_choice(choice) for choice in result.choices],
            usage=usage,
        )
    return Completion(
        id=f"cmpl-{result.job_id}",
        created=created,
        model=result.model,
        choices=[_text_choice(choice, result.prompt) for choice in result.choices],
        usage=usage,
    )


def usage_of(used: Usage) -> CompletionUsage:
    thoughts = ReasoningDetails(used.reasoning_tokens) if used.reasoning_tokens else UNSET
    return CompletionUsage(
        prompt_tokens=used.prompt_tokens,
        completion_tokens=used.completion_tokens,
        total_tokens=used.prompt_tokens + used.completion_tokens,
        prompt_tokens_details=PromptDetails(used.cached_tokens),
        completion_tokens_details=thoughts,
    )


def _chat_choice(choice: ChoiceResult) -> ChatChoice:
    return ChatChoice(
        index=choice.index,
        message=_message(choice),
        logprobs=chat_logprobs(choice),
        finish_reason="tool_calls"
        if choice.finish_reason is FinishReason.TOOL_CALLS
        else _REASONS.get(choice.finish_reason, "stop"),
    )


def _message(choice: ChoiceResult) -> ChatMessage:
    """Return the answer as a message. A call that was cut is left out: it is no call yet."""
    calls = [
        ChatToolCall(call.id, CalledFunction(call.name, call.arguments))
        for call in choice.tool_calls
        if call.is_complete
    ]
    return ChatMessage(
        choice.text or (None if calls else ""),
        tool_calls=calls or UNSET,
        reasoning_content=choice.reasoning or UNSET,
    )


def _text_choice(choice: ChoiceResult, prompt: ScoredPrompt | None) -> CompletionChoice:
    return CompletionChoice(
        index=choice.index,
        text=choice.text,
        logprobs=text_logprobs(choice, prompt),
        finish_reason=_REASONS.get(choice.finish_reason, "stop"),
    )
