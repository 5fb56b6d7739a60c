"""Converts the body of an OpenAI request (chat, response or completion) to the fields of a job, as
far as a queue supports it.

A parameter that would change the answer and is not supported is rejected by its name. Labels that
change nothing (user, metadata, …) are ignored. Parameters that OpenAI's API does not have are
rejected as unknown, except for the sampling parameters that vLLM adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tokenmill.openai.form_values import FormError, shown
from tokenmill.openai.responses_body import SAMPLING, VLLM_NEUTRAL, chat_of
from tokenmill_schemas.openai import COMPLETIONS_URL, RESPONSES_URL

_SAME: Final = (*SAMPLING, "n", "response_format")
_LABELS: Final = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
})  # fmt: skip
# parameter → the values that have no effect
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "stream": (False,),
    "stream_options": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "suffix": ("",),
    **VLLM_NEUTRAL,
}
_CHAT_NEUTRAL: Final = {**_NEUTRAL, "echo": (False,), "best_of": (1,)}
# tools, and what vLLM adds for the chat template
_TEMPLATE: Final = (
    "chat_template_kwargs", "documents", "continue_final_message", "add_generation_prompt",
    "tools", "tool_choice", "parallel_tool_calls",
)  # fmt: skip
_CHAT_ONLY: Final = frozenset({
    "messages", "max_completion_tokens", "top_logprobs", "reasoning_effort", *_TEMPLATE,
})  # fmt: skip
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
_COMPLETION_ONLY: Final = frozenset({"prompt", "best_of", "echo"})
_COMPLETION_TOKENS: Final = 16  # OpenAI's default length of a completion


def fields_of(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `submit`, which validates their values. Raises FormError."""
    body = {name: value for name, value in body.items() if value is not None}
    if url == RESPONSES_URL:
        body = chat_of(body)
    is_chat = url != COMPLETIONS_URL
    _check_names(body, is_chat)
    fields: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    fields["model"] = _model(body)
    fields |= _chat(body) if is_chat else _completion(body)
    return fields


def _check_names(body: Mapping[str, Any], is_chat: bool) -> None:
    other = _COMPLETION_ONLY if is_chat else _CHAT_ONLY
    neutral = _CHAT_NEUTRAL if is_chat else _NEUTRAL
    for name, value in body.items():
        if name in neutral:
            if value not in neutral[name]:
                raise FormError(f"{name!r} is not supported here", name, "unsupported_parameter")
        elif name in other or name not in _KNOWN:
            raise FormError(
                f"Unrecognized request argument supplied: {name[:64]}",
                name[:64],
                "unknown_parameter",
            )


_KNOWN: Final = (
    frozenset(_SAME) | _LABELS | _CHAT_ONLY | _COMPLETION_ONLY
    | {"model", "max_tokens", "logprobs"}
)  # fmt: skip


def _model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise FormError("you must provide a model parameter", "model", "missing_required_parameter")
    return model


def _chat(body: Mapping[str, Any]) -> dict[str, Any]:
    if "messages" not in body:
        raise FormError(
            "Missing required parameter: 'messages'.", "messages", "missing_required_parameter"
        )
    lengths = {name: body[name] for name in ("max_tokens", "max_completion_tokens") if name in body}
    template = {name: body[name] for name in _TEMPLATE if name in body} | _effort(body)
    return {"messages": body["messages"], **template, **lengths, **_chat_logprobs(body)}


def _effort(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the effort as the variable of the chat template that vLLM gives it; "none" is none."""
    effort, variables = body.get("reasoning_effort", "none"), body.get("chat_template_kwargs", {})
    if effort not in _EFFORTS:
        raise FormError(
            f"reasoning_effort must be one of {', '.join(_EFFORTS)}, not {shown(effort)}",
            "reasoning_effort",
        )
    if effort == "none" or not isinstance(variables, Mapping):
        return {}
    return {"chat_template_kwargs": {"reasoning_effort": effort, **variables}}


def _chat_logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    wanted, top = body.get("logprobs", False), body.get("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise FormError("logprobs must be true or false", "logprobs")
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= 20:
        raise FormError("top_logprobs must be an integer from 0 to 20", "top_logprobs")
    if top and not wanted:
        raise FormError("top_logprobs needs logprobs to be true", "top_logprobs")
    return {"logprobs": wanted, "top_logprobs": top} if wanted else {}


def _completion(body: Mapping[str, Any]) -> dict[str, Any]:
    if "prompt" not in body:
        raise FormError(
            "Missing required parameter: 'prompt'.", "prompt", "missing_required_parameter"
        )
    fields: dict[str, Any] = {
        "max_tokens": body.get("max_tokens", _COMPLETION_TOKENS),
        "prompt": body["prompt"],
        "echo": body.get("echo", False),
    }
    if body.get("best_of", 1) not in (1, body.get("n", 1)):
        raise FormError(
            "'best_of' other than n is not supported here", "best_of", "unsupported_parameter"
        )
    logprobs = body.get("logprobs")
    if logprobs is not None:
        if isinstance(logprobs, bool) or not isinstance(logprobs, int) or not 0 <= logprobs <= 5:
            raise FormError("logprobs must be an integer from 0 to 5", "logprobs")
        fields["logprobs"] = logprobs or True
    return fields
