"""Converts the body of an OpenAI request (chat, response or completion) to the fields of a job, as
far as a queue supports it.

A parameter that would change the answer and is not supported is rejected by its name. Labels that
change nothing (user, metadata, …) are ignored. Parameters that OpenAI's API does not have are
rejected as unknown, except for the sampling parameters that vLLM adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tokenmill.openai.form_values import FormError, present, shown
from tokenmill.openai.parameters import (
    LABELS,
    SAMPLING,
    SESSION,
    VLLM_NEUTRAL,
    refuse_effect,
    require,
    unrecognized,
)
from tokenmill.openai.responses_body import NEUTRAL, PASSED, TAKEN, chat_of
from tokenmill_schemas.openai import COMPLETIONS_URL, RESPONSES_URL
from tokenmill_schemas.validation import MAX_NAME_CHARS

_SAME: Final = (*SAMPLING, "n", "response_format")
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
    body = present(body)
    if url == RESPONSES_URL:
        body = chat_of(body)
    is_chat = url != COMPLETIONS_URL
    _check_names(body, is_chat)
    fields: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    fields["model"] = _model(body)
    fields |= _session(body)
    fields |= _chat(body) if is_chat else _completion(body)
    return fields


def parameters_of(url: str) -> tuple[frozenset[str], Mapping[str, tuple[object, ...]]]:
    """Return the parameters of an endpoint that may have any value, and the others that may stand
    in a body, each with its values that have no effect.
    """
    if url == RESPONSES_URL:
        passed = {name: values for name, values in _NEUTRAL.items() if name in PASSED}
        return TAKEN, {**NEUTRAL, **passed}
    is_chat = url != COMPLETIONS_URL
    neutral = _CHAT_NEUTRAL if is_chat else _NEUTRAL
    other = _COMPLETION_ONLY if is_chat else _CHAT_ONLY
    return _KNOWN - other - neutral.keys(), neutral


def _check_names(body: Mapping[str, Any], is_chat: bool) -> None:
    other = _COMPLETION_ONLY if is_chat else _CHAT_ONLY
    neutral = _CHAT_NEUTRAL if is_chat else _NEUTRAL
    for name, value in body.items():
        if name in neutral:
            refuse_effect(name, value, neutral[name])
        elif name in other or name not in _KNOWN:
            raise unrecognized(name)


_KNOWN: Final = (
    frozenset(_SAME) | LABELS | _CHAT_ONLY | _COMPLETION_ONLY
    | {SESSION, "model", "max_tokens", "logprobs"}
)  # fmt: skip


def _model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise FormError("you must provide a model parameter", "model", "missing_required_parameter")
    return model


def _session(body: Mapping[str, Any]) -> dict[str, str]:
    name = body.get(SESSION, "")
    if not isinstance(name, str) or len(name) > MAX_NAME_CHARS:
        raise FormError(f"{SESSION} must be a text of at most {MAX_NAME_CHARS} characters", SESSION)
    return {"session": name} if name else {}


def _chat(body: Mapping[str, Any]) -> dict[str, Any]:
    require(body, "messages")
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
    _check_count("top_logprobs", top, 20)
    if top and not wanted:
        raise FormError("top_logprobs needs logprobs to be true", "top_logprobs")
    return {"logprobs": wanted, "top_logprobs": top} if wanted else {}


def _completion(body: Mapping[str, Any]) -> dict[str, Any]:
    require(body, "prompt")
    fields: dict[str, Any] = {
        "max_tokens": body.get("max_tokens", _COMPLETION_TOKENS),
        "prompt": body["prompt"],
        "echo": body.get("echo", False),
    }
    if body.get("best_of", 1) not in (1, body.get("n", 1)):
        words = "'best_of' other than n is not supported here"
        raise FormError(words, "best_of", "unsupported_parameter")
    logprobs = body.get("logprobs")
    if logprobs is not None:
        _check_count("logprobs", logprobs, 5)
        fields["logprobs"] = logprobs or True
    return fields


def _check_count(name: str, value: object, most: int) -> None:
    if type(value) is not int or not 0 <= value <= most:
        raise FormError(f"{name} must be an integer from 0 to {most}", name)
