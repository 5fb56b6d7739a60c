"""Builds the answer of OpenAI's Responses API from a job's result."""

from __future__ import annotations

from tokenmill.openai.logprobs import chat_logprobs
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.openai import (
    FunctionCallItem,
    IncompleteDetails,
    InputDetails,
    MessageItem,
    OutputText,
    ReasoningDetails,
    ReasoningItem,
    ReasoningText,
    ResponseObject,
    ResponseUsage,
)
from tokenmill_schemas.result import ChoiceResult, JobResult


def response_of(result: JobResult) -> ResponseObject:
    """Return the answer: the first choice of a job that succeeded."""
    choice = result.choices[0] if result.choices else ChoiceResult()
    is_cut = choice.finish_reason is FinishReason.LENGTH
    used, params = result.usage, result.params
    return ResponseObject(
        id=f"resp_{result.job_id}",
        created_at=result.created_ms // 1000,
        completed_at=result.finished_ms // 1000,
        model=result.model,
        output=_output(result.job_id, choice, is_cut),
        usage=ResponseUsage(
            input_tokens=used.prompt_tokens,
            output_tokens=used.completion_tokens,
            total_tokens=used.prompt_tokens + used.completion_tokens,
            input_tokens_details=InputDetails(used.cached_tokens),
            output_tokens_details=ReasoningDetails(used.reasoning_tokens),
        ),
        status="incomplete" if is_cut else "completed",
        incomplete_details=IncompleteDetails() if is_cut else None,
        max_output_tokens=params.max_tokens if params else None,
        temperature=params.temperature if params else None,
        top_p=params.top_p if params else None,
    )


def _output(
    job_id: str, choice: ChoiceResult, is_cut: bool
) -> list[ReasoningItem | MessageItem | FunctionCallItem]:
    """Return thoughts, text and calls as items. A call that was cut is left out: it is no call."""
    items: list[ReasoningItem | MessageItem | FunctionCallItem] = []
    calls = [call for call in choice.tool_calls if call.is_complete]
    if choice.reasoning:
        items.append(ReasoningItem(id=f"rs_{job_id}", content=[ReasoningText(choice.reasoning)]))
    if choice.text or not calls:
        known = chat_logprobs(choice)
        scored = known.content[len(choice.reasoning_ends) :] if known else []
        text = OutputText(text=choice.text, logprobs=scored)
        items.append(
            MessageItem(
                id=f"msg_{job_id}", content=[text], status="incomplete" if is_cut else "completed"
            )
        )
    items += [
        FunctionCallItem(
            id=f"fc_{call.id}", call_id=call.id, name=call.name, arguments=call.arguments
        )
        for call in calls
    ]
    return items
