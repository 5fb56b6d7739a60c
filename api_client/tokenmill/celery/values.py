"""Converts between Celery and jobs: arguments of a call to fields of a job, and a job's result to
JSON values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill_schemas.result import JobResult, JobStatus


class GenerationFailed(TokenmillError):
    """The job ended without an answer."""

    def __init__(self, job_id: str, status: str, reason: str = "") -> None:
        super().__init__(job_id, status, reason)
        self.job_id = job_id
        self.status = status
        self.reason = reason

    def __str__(self) -> str:
        return f"job {self.job_id} {self.status}" + (f": {self.reason}" if self.reason else "")


def value_of(result: JobResult, returns: str) -> Any:
    """Return the JSON value of a result. Raises GenerationFailed."""
    if result.status is not JobStatus.SUCCEEDED:
        raise GenerationFailed(
            result.job_id, result.status.value, result.error.message if result.error else ""
        )
    if returns == "text":
        return result.text
    return {
        "job_id": result.job_id,
        "model": result.model,
        "text": result.text,
        "reasoning": result.reasoning,
        "tool_calls": msgspec.to_builtins(result.tool_calls),
        "finish_reason": result.finish_reason.value if result.finish_reason else None,
        "choices": [
            {
                "index": one.index,
                "text": one.text,
                "reasoning": one.reasoning,
                "tool_calls": msgspec.to_builtins(one.tool_calls),
                "finish_reason": one.finish_reason and one.finish_reason.value,
                **({} if one.logprobs is None else {"total_logprob": one.total_logprob}),
            }
            for one in result.choices
        ],
        "usage": {name: getattr(result.usage, name) for name in result.usage.__struct_fields__},
        "metadata": dict(result.metadata),
    }


def fields_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, chat: bool = False
) -> dict[str, Any]:
    """Return the arguments of `Client.submit` for the arguments of a task. Raises InvalidRequest.

    The only positional argument is a prompt, messages, or the value of a task before this one: a
    text, a result, or a list of either. `template` is a text in which {text} is replaced by it.
    `chat`: send the text as a user's message.
    """
    fields = {name: value for name, value in kwargs.items() if name != "template"}
    template = kwargs.get("template")
    if len(args) > 1:
        raise InvalidRequest([f"a generation has one positional argument, not {len(args)}"])
    if not args:
        return fields
    given = args[0]
    if _is_chat(given) and template is None:
        return {**fields, "messages": given}
    text = _text(given)
    text = text if template is None else str(template).replace("{text}", text)
    return {
        **fields,
        **({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}),
    }


def _is_chat(given: Any) -> bool:
    return (
        isinstance(given, list | tuple) and bool(given) and all(_is_message(item) for item in given)
    )


def _is_message(item: Any) -> bool:
    return (isinstance(item, Mapping) and "role" in item) or (
        isinstance(item, msgspec.Struct) and hasattr(item, "role")
    )


def _text(given: Any) -> str:
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping) and isinstance(given.get("text"), str):
        return str(given["text"])
    if isinstance(given, list | tuple) and given:
        return "\n\n".join(_text(item) for item in given)
    raise InvalidRequest(
        [f"neither a prompt, nor messages, nor what a generation gave: {type(given).__name__}"]
    )
