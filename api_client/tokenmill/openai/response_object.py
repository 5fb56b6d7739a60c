"""Builds the answer of OpenAI's Responses API from a job's result, and what it repeats of the
request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from tokenmill.openai.pieces import pieces_of
from tokenmill.openai.response_items import GrowingOutput
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.openai import (
    IncompleteDetails,
    InputDetails,
    OutputItem,
    ReasoningDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from tokenmill_schemas.result import ChoiceResult, JobError, JobResult, JobStatus, Usage

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
# members of a request that its response repeats as they came
_REPEATED: Final = (
    "background", "frequency_penalty", "instructions", "max_output_tokens", "max_tool_calls",
    "metadata", "parallel_tool_calls", "presence_penalty", "previous_response_id",
    "prompt_cache_key", "safety_identifier", "store", "temperature", "tool_choice", "top_logprobs",
    "top_p",
)  # fmt: skip
_TOOL: Final[Mapping[str, object]] = {
    "type": "function", "name": "", "description": None, "parameters": None, "strict": True,
}  # fmt: skip
_SCHEMA: Final[Mapping[str, object]] = {"description": None, "strict": False}


def repeated_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a response that repeat its request. Values that are not valid are left
    out, for submit to refuse.
    """
    shown = {name: body[name] for name in _REPEATED if body.get(name) is not None}
    tools, reasoning = body.get("tools"), body.get("reasoning")
    if isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools):
        shown["tools"] = [{**_TOOL, **tool} for tool in tools]
    if isinstance(reasoning, Mapping):
        shown["reasoning"] = {"effort": None, "summary": None, **reasoning}
    text = body.get("text")
    form = text.get("format") if isinstance(text, Mapping) else None
    if isinstance(text, Mapping) and isinstance(form, Mapping):
        extra = _SCHEMA if form.get("type") == "json_schema" else {}
        shown["text"] = {**text, "format": {**extra, **form}}
    return shown


def response_of(result: JobResult, repeated: Mapping[str, Any] | None = None) -> ResponseObject:
    """Return the answer: the first choice of a job that has ended. Without `repeated`, the sampling
    parameters are those of the result.
    """
    choice = result.choices[0] if result.choices else ChoiceResult()
    params = result.params
    if repeated is None:
        repeated = {
            "max_output_tokens": params.max_tokens if params else None,
            "temperature": params.temperature if params else None,
            "top_p": params.top_p if params else None,
        }
    status = status_of(result.status, choice.finish_reason)
    return shown_response(
        result.job_id,
        result.model,
        result.created_ms // 1000,
        status,
        repeated,
        output=_output(result, choice, status),
        completed_at=result.finished_ms // 1000 if status in ("completed", "incomplete") else None,
        usage=result.usage,
        error=result.error,
    )


def shown_response(
    job_id: str,
    model: str,
    created_at: int,
    status: Status,
    repeated: Mapping[str, Any],
    *,
    output: list[OutputItem] | None = None,
    completed_at: int | None = None,
    usage: Usage | None = None,
    error: JobError | None = None,
) -> ResponseObject:
    """Return a response in any state. `error` counts where it failed."""
    known = ResponseObject.__struct_fields__  # a newer gateway may have repeated more
    return ResponseObject(
        **{name: repeated[name] for name in repeated if name in known},
        id=f"resp_{job_id}",
        model=model,
        created_at=created_at,
        completed_at=completed_at,
        status=status,
        output=output or [],
        incomplete_details=IncompleteDetails() if status == "incomplete" else None,
        usage=_usage(usage) if usage is not None else None,
        error=_error(error) if status == "failed" else None,
    )


def status_of(status: JobStatus, reason: FinishReason | None) -> Status:
    """Return the status of a response whose job has ended."""
    if status is JobStatus.SUCCEEDED:
        return "incomplete" if reason is FinishReason.LENGTH else "completed"
    return "cancelled" if status is JobStatus.CANCELLED else "failed"


def _output(result: JobResult, choice: ChoiceResult, status: Status) -> list[OutputItem]:
    output = GrowingOutput(result.job_id)
    for piece in pieces_of(choice):
        for _ in output.add(piece):
            pass
    for _ in output.end(
        is_whole=status == "completed",
        has_whole_calls=choice.finish_reason is FinishReason.TOOL_CALLS,
    ):
        pass
    return output.items()


def _usage(used: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=used.prompt_tokens,
        output_tokens=used.completion_tokens,
        total_tokens=used.prompt_tokens + used.completion_tokens,
        input_tokens_details=InputDetails(used.cached_tokens),
        output_tokens_details=ReasoningDetails(used.reasoning_tokens),
    )


def _error(error: JobError | None) -> ResponseError:
    """Return the error of a failed response: clients know a closed list of codes."""
    if error is None:
        return ResponseError("server_error", "the job ended without an answer")
    is_request = error.code in ("invalid_request", "context_length_exceeded", "model_not_found")
    return ResponseError("invalid_prompt" if is_request else "server_error", error.message)
